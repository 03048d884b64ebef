"""A drafter, a target's head and their state, as large as a round needs and no larger."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from longspark_sglang.checkpoint import expected_tensors
from longspark_sglang.config import LongSparkConfig
from longspark_sglang.serving.drafter_runner import DrafterRunner
from longspark_sglang.serving.summary_store import SummaryStore
from longspark_sglang.serving.taps import BoundaryTaps
from sglang.srt.runtime_context import get_parallel
from torch import nn

HIDDEN, HEADS, KV_HEADS, DIM, VOCAB, LAYERS = 64, 4, 2, 64, 300, 4
POOL, MAX_LEN = 600, 60
TARGET = dict(
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
    vocab_size=VOCAB,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    intermediate_size=96,
)


def one_rank() -> contextlib.AbstractContextManager[Any]:
    """SGLang's parallel layers outside a server."""
    return get_parallel().override(
        tp_size=1, tp_rank=0, attn_tp_size=1, attn_tp_rank=0, tp_group=None, attn_tp_group=None
    )


@contextlib.contextmanager
def products_row_by_row() -> Any:
    """F.linear with the same bits for a row whatever rows stand beside it.

    BLAS picks another summation order for another number of rows, which is no fault of padding.
    """

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: None = None) -> torch.Tensor:
        return (x.double() @ weight.double().T).to(x.dtype)

    usual, F.linear = F.linear, linear
    try:
        yield
    finally:
        F.linear = usual


class Layer(nn.Module):
    """What the drafter borrows of a decoder layer: its RoPE table."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.rotary_emb = nn.Module()
        self.self_attn.rotary_emb.cos_sin_cache = table

    def forward(self, hidden: torch.Tensor, capture_output: Any = None) -> torch.Tensor:
        return hidden


class Head(nn.Module):
    """SGLang's logits processor, one rank."""

    do_tensor_parallel_all_gather = False

    def _compute_lm_head(self, hidden: torch.Tensor, lm_head: nn.Linear) -> torch.Tensor:
        return lm_head(hidden)


class Target(nn.Module):
    """Embedding, norm, head and RoPE table, with a vocabulary padded by SGLang."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        angle = torch.arange(512)[:, None] * 10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
        table = torch.cat((angle.cos(), angle.sin()), dim=-1).to(device)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(table) for _ in range(LAYERS))
        self.model.embed_tokens = nn.Embedding(VOCAB + 4, HIDDEN, device=device, dtype=dtype)
        self.model.norm = nn.RMSNorm(HIDDEN, device=device, dtype=dtype)
        self.lm_head = nn.Linear(HIDDEN, VOCAB + 4, bias=False, device=device, dtype=dtype)
        self.logits_processor = Head()


class ToyRound:
    """Everything a round touches on the device: `rows` request rows with state, row 0 unused.

    Equal arguments make equal bits.
    """

    def __init__(
        self, rows: int = 12, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(3)
        self.rows, self.device, self.dtype = rows, device, dtype
        self.config = LongSparkConfig.for_target(
            TARGET,
            mask_token_id=VOCAB - 1,
            num_layers=3,
            markov_rank=8,
            intermediate_size=40,
            summary_slots=16,
            num_draft_tokens=7,
        )
        state = {
            name: torch.randn(shape) / shape[-1] ** 0.5
            for name, shape in expected_tensors(self.config).items()
        }
        self.target = Target(device, dtype).requires_grad_(False)
        with one_rank():
            self.drafter = DrafterRunner(
                self.config, state, self.target, dtype, device, 0, 1, VOCAB, 7
            )
        self.width = 8
        self.store = SummaryStore(self.drafter.queries, rows, HIDDEN, dtype)
        for tensor in (self.store.value, self.store.lse, self.store.boundary):
            tensor.copy_(torch.randn(tensor.shape))
        self.taps = BoundaryTaps(self.target, self.config.tapped_layers)
        self.taps.allocate(rows * self.width, HIDDEN, dtype, device)
        size = (POOL, KV_HEADS, DIM)
        layers = range(self.config.num_layers)
        self.key_pools = [torch.randn(size).to(device, dtype) for _ in layers]
        self.value_pools = [torch.randn(size).to(device, dtype) for _ in layers]
        table = torch.randperm(POOL)[: rows * MAX_LEN % POOL or None]
        self.req_to_token = table[torch.randint(len(table), (rows, MAX_LEN))].int().to(device)

    @property
    def pools(self) -> dict[str, list[torch.Tensor]]:
        return {"key_pools": self.key_pools, "value_pools": self.value_pools}

    def inputs(self, batch: int, seed: int) -> SimpleNamespace:
        """A round's inputs: requests on rows 1 .. batch, greedy and sampling in turns."""
        g = torch.Generator().manual_seed(seed)
        width = self.width

        def integers(high: int, *size: int) -> torch.Tensor:
            return torch.randint(high, size, generator=g).to(self.device)

        def uniform(*size: int) -> torch.Tensor:
            return torch.rand(size, generator=g).to(self.device)

        seq_lens = integers(MAX_LEN - width, batch) + 1
        self.taps.buffer.copy_(torch.randn(self.taps.buffer.shape, generator=g))
        greedy = (torch.arange(batch) % 2 == 0).to(self.device)
        return SimpleNamespace(
            propose=dict(
                anchors=integers(VOCAB, batch),
                rows=torch.arange(1, batch + 1, device=self.device),
                seq_lens=seq_lens,
                temperature=torch.where(greedy, 0.0, 0.8),
                seed=integers(2**40, batch),
                positions=seq_lens,
            ),
            block_rows=integers(POOL, batch, width),
            limit=integers(width, batch).int(),
            point_mass=greedy,
            tokens=integers(VOCAB, batch, width),
            probs=torch.randn(batch, width, VOCAB, generator=g).mul(3).softmax(-1).to(self.device),
            uniforms=uniform(batch, width - 1),
            uniform_final=uniform(batch),
        )
