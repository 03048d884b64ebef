"""Inputs at serving size for the operators, what else computes the same, and the bytes to move.

Everything here runs on any device, so that what is measured on a GPU can be checked without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from longspark_sglang import ops


@dataclass(frozen=True)
class Shape:
    """A drafter's sizes; the defaults are those of the Qwen3-8B drafter."""

    layers: int = 5
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    slots: int = 16
    window: int = 256
    block: int = 7
    rank: int = 256
    vocab: int = 151936
    dtype: torch.dtype = torch.bfloat16

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one K or V pool."""
        return self.kv_heads * self.dim * self.dtype.itemsize

    @property
    def state_values(self) -> int:
        """Floats of one request's summary values."""
        return self.layers * self.heads * self.slots * self.dim


@dataclass
class Case:
    """One thing to time.

    Attributes:
        op: operator name.
        arguments: of the public function in `longspark_sglang.ops`.
        floor_bytes: bytes that have to be read from and written to memory, each once.
        others: name -> function without arguments that computes the same in another way.
        uncapturable: names of those that read from the device, so no CUDA graph can hold them.
    """

    op: str
    arguments: dict[str, Any]
    floor_bytes: int
    others: dict[str, Callable[[], Any]] = field(default_factory=dict)
    uncapturable: tuple[str, ...] = ()

    def run(self, backend: str = "auto") -> Any:
        return getattr(ops, self.op)(**self.arguments, backend=backend)


class Cache:
    """K/V pools of the tapped layers, page size 1: `context` rows of each of `batch` requests.

    The row ids of a request are scattered over the whole pool, as after hours of serving. Where
    batch * context rows wouldn't fit into `memory` bytes, the pools are smaller and requests share
    rows: what an operator reads of them (window, commit) stays as scattered and as large.

    `pools` are those of another Cache: a server's pools don't grow with what is in them.
    """

    def __init__(
        self,
        shape: Shape,
        batch: int,
        context: int,
        device: str,
        memory: int,
        seed: int = 1,
        pools: Cache | None = None,
    ):
        g = torch.Generator(device).manual_seed(seed)
        row_bytes = 2 * shape.layers * shape.row_bytes
        self.rows = max(2 * shape.window, min(batch * context, memory // row_bytes)) + 1
        if pools is not None:
            self.rows = pools.rows
        size = (self.rows, shape.kv_heads, shape.dim)

        def random_pools() -> list[torch.Tensor]:
            return [
                torch.randn(size, generator=g, device=device, dtype=torch.float32).to(shape.dtype)
                if device == "cpu"
                else torch.randn(size, generator=g, device=device, dtype=shape.dtype)
                for _ in range(shape.layers)
            ]

        if pools is not None:
            self.keys, self.values = pools.keys, pools.values
        else:
            self.keys, self.values = random_pools(), random_pools()
        self.req_to_token = torch.randint(
            1, self.rows, (batch + 1, context + 16), generator=g, device=device, dtype=torch.int32
        )
        self.req_rows = torch.arange(1, batch + 1, device=device)
        self.seq_lens = torch.full((batch,), context, dtype=torch.int64, device=device)
        self.generator, self.device = g, device

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(size, generator=self.generator, device=self.device).to(dtype)


def window_gather_case(shape: Shape, cache: Cache) -> Case:
    rows, lens = ops.window_index(
        cache.req_to_token, cache.req_rows, cache.seq_lens, shape.window, backend="reference"
    )
    batch = len(lens)
    size = (shape.layers, batch, shape.window, shape.kv_heads, shape.dim)
    out = [torch.zeros(size, dtype=shape.dtype, device=cache.device) for _ in range(2)]
    used = int(lens.sum())
    indices = rows.long()

    def by_indexing() -> None:
        for layer in range(shape.layers):
            torch.index_select(
                cache.keys[layer], 0, indices.view(-1), out=out[0][layer].view(-1, *size[3:])
            )
            torch.index_select(
                cache.values[layer], 0, indices.view(-1), out=out[1][layer].view(-1, *size[3:])
            )

    return Case(
        "window_gather",
        dict(
            key_pools=cache.keys,
            value_pools=cache.values,
            rows=rows,
            lens=lens,
            seq_lens=cache.seq_lens,
            out_key=out[0],
            out_value=out[1],
        ),
        floor_bytes=2 * 2 * shape.layers * used * shape.row_bytes,
        others={"torch index_select": by_indexing},
    )


def _state(shape: Shape, batch: int, cache: Cache) -> dict[str, torch.Tensor]:
    size = (batch + 1, shape.layers, shape.heads, shape.slots)
    return dict(
        state_value=cache.normal(*size, shape.dim),
        state_lse=cache.normal(*size) + 8.0,
        slots=torch.arange(1, batch + 1, device=cache.device),
    )


def summary_merge_case(shape: Shape, cache: Cache, rows_each: int = 8) -> Case:
    """The commit after a verification in which every draft was accepted."""
    batch = len(cache.seq_lens)
    columns = torch.arange(rows_each, device=cache.device)
    rows = cache.req_to_token[
        cache.req_rows[:, None], cache.seq_lens[:, None] - rows_each + columns
    ]
    queries = cache.normal(shape.layers, shape.heads, shape.slots, shape.dim, dtype=shape.dtype)
    case = Case(
        "summary_merge",
        dict(
            queries=queries,
            key_pools=cache.keys,
            value_pools=cache.values,
            rows=rows.contiguous(),
            counts=torch.full((batch,), rows_each, dtype=torch.int32, device=cache.device),
            **_state(shape, batch, cache),
            scale=shape.dim**-0.5,
        ),
        floor_bytes=batch
        * (
            2 * 4 * shape.state_values * (shape.dim + 1) // shape.dim
            + 2 * shape.layers * rows_each * shape.row_bytes
        )
        + queries.nbytes,
    )
    case.others["plain torch"] = lambda: case.run("reference")
    return case


def summary_merge_bulk_case(shape: Shape, cache: Cache, rows_each: int) -> Case:
    """A prefill chunk of `rows_each` rows of every request."""
    batch = len(cache.seq_lens)
    rows = cache.req_to_token[1:, :rows_each].reshape(-1).contiguous()
    queries = cache.normal(shape.layers, shape.heads, shape.slots, shape.dim, dtype=shape.dtype)
    case = Case(
        "summary_merge_bulk",
        dict(
            queries=queries,
            key_pools=cache.keys,
            value_pools=cache.values,
            rows=rows,
            indptr=torch.arange(batch + 1, device=cache.device, dtype=torch.int32) * rows_each,
            **_state(shape, batch, cache),
            scale=shape.dim**-0.5,
        ),
        floor_bytes=2 * shape.layers * len(rows) * shape.row_bytes
        + batch * 2 * 4 * shape.state_values,
    )
    case.uncapturable = ("plain torch",)
    case.others["plain torch"] = lambda: case.run("reference")
    return case


def block_attention_case(shape: Shape, cache: Cache, layer: int = 0) -> Case:
    """One drafter layer of one proposal."""
    batch = len(cache.seq_lens)
    rows, lens = ops.window_index(
        cache.req_to_token, cache.req_rows, cache.seq_lens, shape.window, backend="reference"
    )
    state = _state(shape, batch, cache)
    arguments = dict(
        query=cache.normal(batch, shape.block, shape.heads, shape.dim, dtype=shape.dtype),
        summary_key=cache.normal(shape.heads, shape.slots, shape.dim, dtype=shape.dtype),
        summary_value=state["state_value"][:, layer],
        slots=state["slots"],
        key_pool=cache.keys[layer],
        value_pool=cache.values[layer],
        rows=rows,
        lens=lens,
        block_key=cache.normal(batch, shape.block, shape.kv_heads, shape.dim, dtype=shape.dtype),
        block_value=cache.normal(batch, shape.block, shape.kv_heads, shape.dim, dtype=shape.dtype),
        scale=shape.dim**-0.5,
    )
    query = arguments["query"]
    floor = (
        2 * int(lens.sum()) * shape.row_bytes
        + batch * 4 * shape.heads * shape.slots * shape.dim
        + 2 * query.nbytes
        + 2 * batch * shape.block * shape.row_bytes
        + arguments["summary_key"].nbytes
    )
    case = Case("block_attention", arguments, floor)
    case.others["plain torch"] = lambda: case.run("reference")
    if int(lens.min()) == shape.window:  # else SDPA would need a mask
        case.others["gather + SDPA"] = lambda: block_attention_by_sdpa(**arguments)
    return case


def block_attention_by_sdpa(
    query: torch.Tensor,
    summary_key: torch.Tensor,
    summary_value: torch.Tensor,
    slots: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The same from torch's own pieces, for full windows only.

    Gather, repeat the KV heads (the summary has its own keys per query head), concatenate,
    scaled_dot_product_attention.
    """
    group = query.size(2) // block_key.size(2)
    index = rows.long()
    key = torch.cat([key_pool[index], block_key], dim=1).repeat_interleave(group, dim=2)
    value = torch.cat([value_pool[index], block_value], dim=1).repeat_interleave(group, dim=2)
    stored = summary_value[slots].to(query.dtype)
    key = torch.cat([summary_key.expand(len(query), -1, -1, -1), key.transpose(1, 2)], dim=2)
    value = torch.cat([stored, value.transpose(1, 2)], dim=2)
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), key, value, scale=scale
    )
    return out.transpose(1, 2)


@dataclass
class MarkovInputs:
    """What the vocabulary-sized operators share; W1 and W2 once for all batch sizes."""

    markov_w1: torch.Tensor
    markov_w2: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, device: str) -> MarkovInputs:
        g = torch.Generator(device).manual_seed(2)
        size = (shape.vocab, shape.rank)
        w1 = torch.randn(size, generator=g, device=device) / math.sqrt(shape.rank)
        w2 = torch.randn(size, generator=g, device=device)
        return cls(w1.to(shape.dtype), w2.to(shape.dtype))


def markov_step_case(shape: Shape, markov: MarkovInputs, batch: int, device: str) -> Case:
    g = torch.Generator(device).manual_seed(3)
    base = torch.randn(batch, shape.vocab, generator=g, device=device).to(shape.dtype)
    prev = torch.randint(0, shape.vocab, (batch,), generator=g, device=device)
    case = Case(
        "markov_step",
        dict(base_logits=base, prev=prev, **vars(markov)),
        floor_bytes=markov.markov_w2.nbytes + base.nbytes + 4 * base.numel(),
    )
    case.others["plain torch"] = lambda: case.run("reference")
    return case


def draft_sample_case(
    shape: Shape, markov: MarkovInputs, batch: int, temperature: float, device: str
) -> Case:
    g = torch.Generator(device).manual_seed(3)
    base = torch.randn(batch, shape.vocab, generator=g, device=device).to(shape.dtype)
    case = Case(
        "draft_sample",
        dict(
            base_logits=base,
            prev=torch.randint(0, shape.vocab, (batch,), generator=g, device=device),
            **vars(markov),
            temperature=torch.full((batch,), temperature, device=device),
            seed=torch.arange(batch, device=device),
            position=torch.arange(batch, device=device) + 1000,
            vocab_limit=shape.vocab,
        ),
        floor_bytes=markov.markov_w2.nbytes + base.nbytes,
    )
    case.others["plain torch"] = lambda: case.run("reference")
    return case


def accept_chain_case(shape: Shape, markov: MarkovInputs, batch: int, device: str) -> Case:
    """Sampling; every request rejects somewhere, so every one needs its draft distribution."""
    g = torch.Generator(device).manual_seed(4)
    vocab, block = shape.vocab, shape.block
    probs = torch.softmax(torch.randn(batch, block + 1, vocab, generator=g, device=device), dim=-1)
    base = torch.randn(batch, block, vocab, generator=g, device=device).to(shape.dtype)
    case = Case(
        "accept_chain",
        dict(
            target_probs=probs,
            draft_tokens=torch.randint(0, vocab, (batch, block), generator=g, device=device),
            draft_logq=torch.zeros(batch, block, device=device),
            base_logits=base,
            anchors=torch.randint(0, vocab, (batch,), generator=g, device=device),
            **vars(markov),
            temperature=torch.ones(batch, device=device),
            point_mass=torch.zeros(batch, dtype=torch.bool, device=device),
            uniforms=torch.full((batch, block), 0.5, device=device),
            uniform_final=torch.rand(batch, generator=g, device=device),
            limit=torch.full((batch,), block, dtype=torch.int32, device=device),
            vocab_limit=vocab,
        ),
        # One row of logits and of probabilities per request, and W2.
        floor_bytes=markov.markov_w2.nbytes + batch * vocab * (4 + shape.dtype.itemsize),
    )
    case.others["plain torch"] = lambda: case.run("reference")
    return case
