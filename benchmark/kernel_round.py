"""One round of drafting and committing, as serving does it on a GPU, from the operators alone."""

from __future__ import annotations

import kernel_cases as cases
import torch
from longspark_sglang import ops


class Round:
    """The device work of one round in static buffers: propose and commit, for `padded` requests.

    Entries from `batch` on are padding as serving makes it: no window, no rows to commit, the
    sacrificial state row (0), and whatever garbage is left in their inputs.
    """

    def __init__(self, shape: cases.Shape, batch: int, padded: int, device: str, seed: int = 5):
        self.shape, self.batch, self.padded, self.device = shape, batch, padded, device
        context = shape.window + 40
        self.cache = cases.Cache(shape, padded, context, device, memory=2**28, seed=seed)
        self.markov = cases.MarkovInputs.make(shape, device)
        c, s = self.cache, shape
        self.state_value = c.normal(padded + 1, s.layers, s.heads, s.slots, s.dim)
        self.state_lse = c.normal(padded + 1, s.layers, s.heads, s.slots) + 8
        self.queries = c.normal(s.layers, s.heads, s.slots, s.dim, dtype=s.dtype)
        self.base_logits = torch.zeros(padded, s.block, s.vocab, dtype=s.dtype, device=device)
        self.target_probs = torch.zeros(padded, s.block + 1, s.vocab, device=device)
        self.query = torch.zeros(
            s.layers, padded, s.block, s.heads, s.dim, dtype=s.dtype, device=device
        )
        self.block = torch.zeros(
            2, s.layers, padded, s.block, s.kv_heads, s.dim, dtype=s.dtype, device=device
        )
        self.slots = torch.arange(1, padded + 1, device=device)
        self.anchors = torch.zeros(padded, dtype=torch.int64, device=device)
        self.temperature = torch.ones(padded, device=device)
        self.seed = torch.arange(padded, device=device)
        self.uniforms = torch.zeros(padded, s.block, device=device)
        self.uniform_final = torch.zeros(padded, device=device)
        self.limit = torch.full((padded,), s.block, dtype=torch.int32, device=device)
        self.new_rows = torch.zeros(padded, s.block + 1, dtype=torch.int32, device=device)
        self.is_real = torch.arange(padded, device=device) < batch
        self.slots[batch:] = 0
        self.cache.seq_lens[batch:] = 0
        self.fill(seed)

    def fill(self, seed: int) -> None:
        """New inputs in the same buffers; padding becomes NaN."""
        g = torch.Generator(self.device).manual_seed(seed)
        for buffer in (self.query, self.block, self.base_logits):
            buffer.copy_(torch.randn(buffer.shape, generator=g, device=self.device))
        logits = torch.randn(self.target_probs.shape, generator=g, device=self.device)
        self.target_probs.copy_(torch.softmax(logits, dim=-1))
        for buffer in (self.uniforms, self.uniform_final):
            buffer.copy_(torch.rand(buffer.shape, generator=g, device=self.device))
        high = self.shape.vocab
        self.anchors.copy_(torch.randint(0, high, (self.padded,), generator=g, device=self.device))
        rows = torch.randint(
            1, self.cache.rows, self.new_rows.shape, generator=g, device=self.device
        )
        self.new_rows.copy_(rows)
        pad = slice(self.batch, None)
        self.query[:, pad] = torch.nan
        self.block[:, :, pad] = torch.nan
        self.base_logits[pad] = torch.nan
        self.target_probs[pad] = torch.nan
        self.state_value[0], self.state_lse[0] = torch.nan, torch.nan
        for pool in (*self.cache.keys, *self.cache.values):
            pool[0] = torch.nan  # the row that padded tables name

    def propose(self, backend: str) -> dict[str, torch.Tensor]:
        s, c = self.shape, self.cache
        rows, lens = ops.window_index(
            c.req_to_token, c.req_rows, c.seq_lens, s.window, backend=backend
        )
        hidden = [
            ops.block_attention(
                self.query[layer],
                self.queries[layer],
                self.state_value[:, layer],
                self.slots,
                c.keys[layer],
                c.values[layer],
                rows,
                lens,
                self.block[0, layer],
                self.block[1, layer],
                s.dim**-0.5,
                backend=backend,
            )
            for layer in range(s.layers)
        ]
        prev, tokens, logqs = self.anchors, [], []
        for slot in range(s.block):
            prev, logq = ops.draft_sample(
                self.base_logits[:, slot],
                prev,
                self.markov.markov_w1,
                self.markov.markov_w2,
                self.temperature,
                self.seed,
                c.seq_lens + slot,
                s.vocab,
                backend=backend,
            )
            tokens.append(prev)
            logqs.append(logq)
        return {
            "hidden": torch.stack(hidden, dim=1),
            "tokens": torch.stack(tokens, dim=1),
            "logq": torch.stack(logqs, dim=1),
        }

    def commit(self, proposal: dict[str, torch.Tensor], backend: str) -> dict[str, torch.Tensor]:
        accepted, token = ops.accept_chain(
            self.target_probs,
            proposal["tokens"],
            proposal["logq"],
            self.base_logits,
            self.anchors,
            self.markov.markov_w1,
            self.markov.markov_w2,
            self.temperature,
            self.temperature <= 0,
            self.uniforms,
            self.uniform_final,
            self.limit,
            self.shape.vocab,
            backend=backend,
        )
        counts = torch.where(self.is_real, accepted + 1, 0).int()
        ops.summary_merge(
            self.queries,
            self.cache.keys,
            self.cache.values,
            self.new_rows,
            counts,
            self.state_value,
            self.state_lse,
            self.slots,
            self.shape.dim**-0.5,
            backend=backend,
        )
        return {"accepted": accepted, "token": token}

    def real(self, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of what concerns real requests, results and state."""
        copies = {name: value[: self.batch].clone() for name, value in results.items()}
        copies["state_value"] = self.state_value[1:].clone()
        copies["state_lse"] = self.state_lse[1:].clone()
        return copies


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors aren't the same bits (NaN in the same place counts as the same)."""
    return [
        name
        for name in a
        if not torch.equal(a[name].nan_to_num(nan=7e7), b[name].nan_to_num(nan=7e7))
    ]
