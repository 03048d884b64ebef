"""The drafter's forward pass for many anchors of one sequence, with gradients.

The same modules as in serving, so the same logits; only the way to the summaries differs: one scan
over the sequence yields the summary at every anchor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from longspark_sglang.drafter import (
    LongSparkDrafter,
    TargetParts,
    TargetViews,
)
from longspark_sglang.drafter.parts import wide_dtype
from longspark_sglang.training.anchors import window_rows

# Rows scored at a time in the backward scan: bounds its memory.
CHUNK_ROWS = 512
# Up to this many windows' worth of rows, anchors score the common stretch and mask it; a longer
# stretch would cost each anchor more than a copy of its own window.
SHARED_WINDOWS = 4


@dataclass(frozen=True)
class SequenceViews:
    """What the drafter and the losses read of the target, for one sequence of T tokens.

    Attributes:
        boundary: [T, L, h].
        key, value: [L, T, Hkv, d].
        hidden: [T, h], final states after the final norm.
    """

    boundary: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    hidden: torch.Tensor

    @classmethod
    def of(cls, views: TargetViews, index: int = 0) -> SequenceViews:
        """One sequence of a batch."""
        return cls(views.boundary[index], views.key[index], views.value[index], views.hidden[index])


class _PrefixSummaries(torch.autograd.Function):
    """Summaries of the prefixes 0..p-1 for ascending anchors p, in O(T) time.

    Autograd through the scan would keep the scores of all rows. Backward recomputes them instead,
    from the saved outputs, as FlashAttention's does (arXiv 2205.14135): with the weights
    P_ai = exp(score_i - lse_a), D_a = <dvalue_a, value_a>,

        dscore_i = sum over anchors a > i of P_ai (<dvalue_a, V_i> - D_a).

    lse_a only grows with a, so the sum over anchors is carried from the last anchor back to the
    first, relative to the nearest one; no exponent is ever positive. Besides the outputs nothing is
    kept, and the memory does not depend on T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        anchors: tuple[int, ...],
    ) -> torch.Tensor:
        layers, heads, slots, dim = queries.shape
        dtype, scale = wide_dtype(keys), 1 / math.sqrt(dim)
        with torch.autocast(queries.device.type, enabled=False):
            query = queries.to(dtype).reshape(layers, keys.size(2), -1, dim) * scale
            state_value = torch.zeros_like(query)
            state_lse = query.new_full(query.shape[:-1], -math.inf)
            values_so_far, lses = [], []
            for begin, end in pairwise((0, *anchors)):
                for some in _chunks(begin, end):
                    rows, read = _per_head(keys, some, dtype), _per_head(values, some, dtype)
                    scores = query @ rows.transpose(-1, -2)
                    lse = torch.logaddexp(state_lse, scores.logsumexp(-1))
                    state_value = state_value * (state_lse - lse).exp()[..., None]
                    state_value = state_value + (scores - lse[..., None]).exp() @ read
                    state_lse = lse
                values_so_far.append(state_value)
                lses.append(state_lse)
            shape = (len(anchors), layers, heads, slots)
            value = torch.stack(values_so_far).view(*shape, dim)
            lse = torch.stack(lses).view(shape)
        ctx.save_for_backward(queries, keys, values, value, lse)
        ctx.anchors = anchors
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        queries, keys, values, value, lse = ctx.saved_tensors
        layers, heads, slots, dim = queries.shape
        kv_heads = keys.size(2)
        dtype, scale = value.dtype, 1 / math.sqrt(dim)

        def grouped(x: torch.Tensor) -> torch.Tensor:
            """[L, Hq, R, ...] -> [L, Hkv, g * R, ...]."""
            return x.reshape(layers, kv_heads, heads // kv_heads * slots, *x.shape[3:])

        with torch.autocast(queries.device.type, enabled=False):
            query = grouped(queries.to(dtype))
            to_query = torch.zeros_like(query)
            # Sums over the anchors behind, relative to lse of the nearest.
            d_value = torch.zeros_like(query)
            d_total = torch.zeros_like(query[..., 0])
            nearest = None
            edges = list(pairwise((0, *ctx.anchors)))
            for a in reversed(range(len(edges))):
                here = grouped(lse[a])
                if nearest is not None:
                    decay = (here - nearest).exp()
                    d_value, d_total = d_value * decay[..., None], d_total * decay
                nearest = here
                own = grouped(gradient[a].to(dtype))
                d_value = d_value + own
                d_total = d_total + (own * grouped(value[a])).sum(-1)
                for some in _chunks(*edges[a]):
                    rows, read = _per_head(keys, some, dtype), _per_head(values, some, dtype)
                    weight = (query @ rows.transpose(-1, -2) * scale - here[..., None]).exp()
                    d_score = weight * (d_value @ read.transpose(-1, -2) - d_total[..., None])
                    to_query = to_query + d_score @ rows * scale
        return to_query.reshape(queries.shape).to(queries.dtype), None, None, None


def _chunks(begin: int, end: int) -> Iterator[slice]:
    for at in range(begin, end, CHUNK_ROWS):
        yield slice(at, min(at + CHUNK_ROWS, end))


def _per_head(rows: torch.Tensor, some: slice, dtype: torch.dtype) -> torch.Tensor:
    """[L, T, Hkv, d] -> [L, Hkv, n, d]."""
    return rows[:, some].to(dtype).transpose(1, 2)


def prefix_summaries(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """Summary of rows 0..p-1 at each anchor p; differentiable in the queries only.

    Args:
        queries: [L, Hq, R, d].
        keys, values: [L, T, Hkv, d] of the frozen target.
        anchors: [A] int64, ascending, each at least 1.
    Returns:
        [A, L, Hq, R, d] float32 (float64 for float64 rows).
    Raises:
        ValueError: anchors out of order or range.
    """
    places = tuple(anchors.tolist())
    if list(places) != sorted(places) or (places and not 1 <= places[0] <= places[-1]):
        raise ValueError(f"anchors must ascend from 1 or more: {places}")
    if places and places[-1] > keys.size(1):
        raise ValueError(f"anchor {places[-1]} lies beyond the {keys.size(1)} rows")
    if not places:
        return queries.new_zeros((0, *queries.shape), dtype=wide_dtype(keys))
    return _PrefixSummaries.apply(queries, keys, values, places)


def base_logits_at(
    drafter: LongSparkDrafter,
    views: SequenceViews,
    input_ids: torch.Tensor,
    anchors: torch.Tensor,
    summary_value: torch.Tensor,
    target: TargetParts,
    without: Collection[str] = (),
) -> torch.Tensor:
    """Head outputs before the Markov term, as `LongSparkDrafter.propose` has them, [A, K, V].

    The arguments are those of `hidden_at`.
    """
    hidden = hidden_at(drafter, views, input_ids, anchors, summary_value, target, without)
    return drafter.base_logits(hidden, target)


def hidden_at(
    drafter: LongSparkDrafter,
    views: SequenceViews,
    input_ids: torch.Tensor,
    anchors: torch.Tensor,
    summary_value: torch.Tensor,
    target: TargetParts,
    without: Collection[str] = (),
) -> torch.Tensor:
    """The last layer's residual stream, before the target's final norm and head.

    Args:
        views: of the whole sequence; only rows before each anchor are read.
        input_ids: [T] int64.
        anchors: [A] int64, each at least 1.
        summary_value: [A, L, Hq, R, d], of `prefix_summaries` at these anchors.
        without: views among "window", "summary" and "boundary" to take away ("markov" is not
            part of this function).
    Returns:
        [A, K, h].
    """
    window_key, window_value, lens = _windows(drafter, views, anchors, "window" not in without)
    c = drafter.boundary_vector(views.boundary[anchors - 1])
    if "boundary" in without:
        c = torch.zeros_like(c)
    x = drafter.block_inputs(input_ids[anchors], c, target.embed_tokens)
    if "summary" not in without:
        return drafter.decode_block(
            x, summary_value, window_key, window_value, lens, anchors, target.rope
        )

    slots = torch.arange(x.size(1), device=x.device)
    cos, sin = target.rope.tables(anchors[:, None] + slots, x.dtype)
    for i, layer in enumerate(drafter.parallel_qwen_layers):
        none_key = drafter.summary_queries[i][:, :0]
        none_value = summary_value[:, i, :, :0]
        x = layer(x, none_key, none_value, window_key[:, i], window_value[:, i], lens, cos, sin)
    return x


def _windows(
    drafter: LongSparkDrafter, views: SequenceViews, anchors: torch.Tensor, used: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Windows as the layers take them: rows shared by all anchors and a mask, or one copy each."""
    window = drafter.config.window if used else 0
    low = max(0, int(anchors.min()) - window) if len(anchors) else 0
    high = int(anchors.max()) if len(anchors) and used else low
    if high - low > SHARED_WINDOWS * window:
        rows, lens = window_rows(anchors, window)
        return views.key[:, rows].transpose(0, 1), views.value[:, rows].transpose(0, 1), lens
    row = torch.arange(low, high, device=anchors.device)
    visible = (row < anchors[:, None]) & (row >= anchors[:, None] - window)
    # [T, L, Hkv, d]: layers are the second dimension, as in a batch of windows.
    return views.key[:, low:high].transpose(0, 1), views.value[:, low:high].transpose(0, 1), visible


def corrected_logits(
    drafter: LongSparkDrafter,
    base_logits: torch.Tensor,
    prev: torch.Tensor,
    without: Collection[str] = (),
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Base logits [A, K, V] plus the Markov term of the known previous tokens prev [A, K].

    ``tokens`` [N] int64: the base logits are those of these token ids only, [A, K, N].
    """
    if "markov" in without:
        return base_logits
    head = drafter.parallel_markov_head
    if tokens is None:
        return head(base_logits, prev)
    term = F.linear(head.markov_w1(prev), head.markov_w2.weight[tokens])
    return base_logits + term.to(base_logits.dtype)


def target_logits_at(
    views: SequenceViews, anchors: torch.Tensor, slots: int, target: TargetParts
) -> torch.Tensor:
    """The target's logits for the tokens p+1 .. p+K, [A, K, V]; rows beyond the end repeat it."""
    logits, rows = distinct_target_logits_at(views, anchors, slots, target)
    return logits[rows]


def distinct_target_logits_at(
    views: SequenceViews, anchors: torch.Tensor, slots: int, target: TargetParts
) -> tuple[torch.Tensor, torch.Tensor]:
    """`target_logits_at` without repetitions: logits [U, V] and rows [A, K], the row of each slot.

    Slots of neighbouring anchors lie at the same positions.
    """
    position = anchors[:, None] + torch.arange(slots, device=anchors.device)
    position = position.clamp(max=len(views.hidden) - 1)
    distinct, rows = position.unique(return_inverse=True)
    hidden = views.hidden[distinct]
    return F.linear(hidden, target.lm_head.to(hidden.dtype)), rows
