"""The LongSpark drafter in plain PyTorch: the readable model, for training, tests and comparison.

Serving runs the same mathematics on SGLang's parallel layers and this package's operators. Module
and parameter names are the checkpoint's.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from longspark_sglang import checkpoint
from longspark_sglang.config import LongSparkConfig, LongSparkError
from longspark_sglang.drafter.block_inputs import BlockInputs
from longspark_sglang.drafter.boundary import BoundaryEncoder
from longspark_sglang.drafter.layer import DrafterLayer
from longspark_sglang.drafter.markov import MarkovHead
from longspark_sglang.drafter.rope import Rope
from longspark_sglang.drafter.summary import SummaryQueries, equicorrelated_bank

_INIT_STD = 0.02


class InputError(LongSparkError):
    """Arguments of a proposal that do not fit each other; each reason names one."""


@dataclass(frozen=True)
class TargetParts:
    """What the drafter borrows of the frozen target.

    Attributes:
        embed_tokens: [V, h], embedding table.
        norm_weight, norm_eps: final RMSNorm, weight [h].
        lm_head: [V, h]; the embedding table itself where the target ties them.
        rope: the target's rotary frequencies.
        vocab_limit: number of real token ids where the vocabulary is padded; None = V.
    """

    embed_tokens: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    lm_head: torch.Tensor
    rope: Rope
    vocab_limit: int | None = None

    @classmethod
    def from_hf(cls, hf_model: Any, vocab_limit: int | None = None) -> TargetParts:
        """Of a transformers causal language model; the tensors are shared, not copied.

        Raises InputError when its final norm is no plain RMSNorm, ConfigError when the model does
        not rotate as its config says.
        """
        norm = hf_model.get_decoder().norm
        eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))
        parts = cls(
            embed_tokens=hf_model.get_input_embeddings().weight.detach(),
            norm_weight=norm.weight.detach(),
            norm_eps=eps,
            lm_head=hf_model.get_output_embeddings().weight.detach(),
            rope=Rope.of_hf_model(hf_model),
            vocab_limit=vocab_limit,
        )
        # Some models scale by 1 + weight, some subtract a mean: the class names do not tell.
        probe = torch.linspace(-1, 2, norm.weight.numel(), device=norm.weight.device)
        probe = probe.to(norm.weight.dtype)
        ours = F.rms_norm(probe, (len(probe),), parts.norm_weight, eps)
        if not torch.allclose(ours, norm(probe), rtol=2e-2, atol=2e-2):
            raise InputError(
                "this target cannot be borrowed from",
                [f"its final norm ({type(norm).__name__}) is not RMSNorm times a weight"],
            )
        return parts


@dataclass(frozen=True)
class Proposal:
    """One round's drafts.

    Attributes:
        draft_tokens: [B, K] int64.
        base_logits: [B, K, V], head outputs before the Markov correction.
        draft_logprob: [B, K] float32, natural log of the probability each token was drawn with
            (0 where greedy).
        hidden: [B, K, h], last layer's residual stream, before the target's final norm.
    """

    draft_tokens: torch.Tensor
    base_logits: torch.Tensor
    draft_logprob: torch.Tensor
    hidden: torch.Tensor


class LongSparkDrafter(nn.Module):
    """The drafter (LongSpark spec, section 3): boundary, block inputs, L layers, Markov head."""

    def __init__(self, config: LongSparkConfig) -> None:
        super().__init__()
        self.config = config
        self.draft_state_encoder = BoundaryEncoder(config)
        self.parallel_shifted_input = BlockInputs(config)
        self.parallel_qwen_layers = nn.ModuleList(
            DrafterLayer(config) for _ in range(config.num_layers)
        )
        self.global16_raw256_reference = SummaryQueries(config)
        self.parallel_markov_head = MarkovHead(config)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Random start: queries with standard deviation 1/sqrt(d), as released; others 0.02.

        Norm weights are left at 1. In the fixed-query mode the queries become the fixed bank.
        """
        queries = self.summary_queries
        for name, parameter in self.named_parameters():
            if not name.endswith("norm.weight") and parameter is not queries:
                parameter.normal_(std=_INIT_STD, generator=generator)
        if self.config.global_query_mode == "learned":
            queries.normal_(std=self.config.head_dim**-0.5, generator=generator)
        else:
            queries.copy_(equicorrelated_bank(self.config))

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | PathLike[str],
        dtype: torch.dtype = torch.bfloat16,
        revision: str | None = None,
    ) -> LongSparkDrafter:
        """Read a drafter folder or hub id; ConfigError or CheckpointError give the reasons."""
        config = LongSparkConfig.from_pretrained(path_or_hub_id, revision)
        state = checkpoint.load_state(path_or_hub_id, config, dtype, revision)
        with torch.device("meta"):
            drafter = cls(config)
        drafter.load_state_dict(state, assign=True)
        return drafter

    @property
    def summary_queries(self) -> torch.Tensor:
        """G [L, Hq, R, d]: the summary is written with these queries and read under these keys."""
        return self.global16_raw256_reference.weight

    def boundary_vector(self, boundary: torch.Tensor) -> torch.Tensor:
        """boundary [B, L, h] of the last committed position -> c [B, h] (section 3.1)."""
        return self.draft_state_encoder(boundary)

    def block_inputs(
        self, anchor: torch.Tensor, c: torch.Tensor, embed_tokens: torch.Tensor
    ) -> torch.Tensor:
        """anchor [B], c [B, h], target embedding [V, h] -> x [B, K, h] (section 3.2)."""
        return self.parallel_shifted_input(anchor, c, embed_tokens)

    def decode_block(
        self,
        x: torch.Tensor,
        summary_value: torch.Tensor,
        window_key: torch.Tensor,
        window_value: torch.Tensor,
        window_lens: torch.Tensor,
        positions: torch.Tensor,
        rope: Rope,
    ) -> torch.Tensor:
        """All layers (sections 3.3, 3.4). x [B, K, h] -> [B, K, h]; the rest as `propose`."""
        slots = torch.arange(x.size(1), device=x.device)
        cos, sin = rope.tables(positions[:, None] + slots, x.dtype)
        for i, layer in enumerate(self.parallel_qwen_layers):
            x = layer(
                x,
                self.summary_queries[i],
                summary_value[:, i],
                window_key[:, i],
                window_value[:, i],
                window_lens,
                cos,
                sin,
            )
        return x

    def base_logits(self, hidden: torch.Tensor, target: TargetParts) -> torch.Tensor:
        """The target's final norm and head (section 3.5). [..., h] -> [..., V], hidden's dtype."""
        weight = target.norm_weight.to(hidden.dtype)
        # PyTorch's own operator here, not our RMSNorm: the release rounds this one norm otherwise.
        normed = F.rms_norm(hidden, (hidden.size(-1),), weight, target.norm_eps)
        return F.linear(normed, target.lm_head.to(hidden.dtype))

    @torch.no_grad()
    def propose(
        self,
        anchor: torch.Tensor,
        boundary: torch.Tensor,
        summary_value: torch.Tensor,
        window_key: torch.Tensor,
        window_value: torch.Tensor,
        window_lens: torch.Tensor,
        positions: torch.Tensor,
        target: TargetParts,
        temperature: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """One proposal: K draft tokens per request.

        All views describe the committed rows 0..position-1; the anchor is the token after them.

        Args:
            anchor: [B] int64.
            boundary: [B, L, h], boundary vectors of the last committed row.
            summary_value: [B, L, Hq, R, d] float32, summary of all committed rows.
            window_key, window_value: [B, L, W', Hkv, d], the last committed rows of the tapped
                layers as cached, in any order; W' at most the config's window.
            window_lens: [B] integers, used rows of the window (0..W').
            positions: [B] int64, the anchor's position = number of committed rows.
            target: what is borrowed of the target.
            temperature: [B] float32, 0 = greedy; None = all greedy.
            generator: source of the draws at temperature > 0.
        Raises:
            InputError: listing every argument whose shape does not fit.
        """
        self._check(
            anchor=(anchor, "B"),
            boundary=(boundary, "B L h"),
            summary_value=(summary_value, "B L Hq R d"),
            window_key=(window_key, "B L W Hkv d"),
            window_value=(window_value, "B L W Hkv d"),
            window_lens=(window_lens, "B"),
            positions=(positions, "B"),
            **({} if temperature is None else {"temperature": (temperature, "B")}),
            **{
                "target.embed_tokens": (target.embed_tokens, "V h"),
                "target.norm_weight": (target.norm_weight, "h"),
                "target.lm_head": (target.lm_head, "V h"),
            },
        )
        c = self.boundary_vector(boundary)
        x = self.block_inputs(anchor, c, target.embed_tokens)
        hidden = self.decode_block(
            x, summary_value, window_key, window_value, window_lens, positions, target.rope
        )
        logits = self.base_logits(hidden, target)
        seed = torch.zeros_like(anchor)
        if temperature is not None:
            seed.random_(-(2**63), 2**63 - 1, generator=generator)
        tokens, logprob = self.parallel_markov_head.draft(
            logits,
            anchor,
            positions,
            temperature,
            seed,
            target.vocab_limit or self.config.vocab_size,
        )
        return Proposal(tokens, logits, logprob, hidden)

    def _check(self, **arguments: tuple[torch.Tensor, str]) -> None:
        """Every argument against the shape it should have; B and W are free but common to all."""
        config = self.config
        sizes = {
            "L": config.num_layers,
            "h": config.hidden_size,
            "Hq": config.num_attention_heads,
            "Hkv": config.num_key_value_heads,
            "R": config.summary_slots,
            "d": config.head_dim,
            "V": config.vocab_size,
        }
        reasons = []
        for name, (tensor, letters) in arguments.items():
            names = letters.split()
            fits = tensor.dim() == len(names) and all(
                sizes.setdefault(letter, size) == size
                for letter, size in zip(names, tensor.shape, strict=True)
            )
            if not fits:
                wanted = ", ".join(f"{x}={sizes[x]}" if x in sizes else x for x in names)
                reasons.append(f"{name} has shape {list(tensor.shape)}, it should be [{wanted}]")
        if sizes.get("W", 0) > config.window:
            reasons.append(f"the window has {sizes['W']} rows, the drafter's is {config.window}")
        if reasons:
            raise InputError("this proposal cannot be made", reasons)
