"""The summary: an online softmax over every committed row, merged in place as rows are committed.

For tapped layer l, query head n (KV head n // g) and slot s the state holds, over the rows i seen,
    score_i = scale * <queries[l, n, s], K_i>,   lse = ln sum_i exp(score_i),
    value = sum_i exp(score_i - lse) * V_i
(LongSpark spec, section 4). The logarithm is natural. The empty state is value 0, lse -inf.
Dot products and state are fp32 whatever the dtype of queries and pools. Merging the same rows in
any split gives the same state up to rounding.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from . import dispatch
from .checks import FLOATS, Checker
from .pools import pool_rows

# Rows the plain-torch bulk merge holds at a time: bounds its memory, whatever the prompt's length.
BULK_ROWS = 1024


def _check(
    op: str,
    queries: torch.Tensor,
    key_pools: Sequence[torch.Tensor],
    value_pools: Sequence[torch.Tensor],
    state_value: torch.Tensor,
    state_lse: torch.Tensor,
    slots: torch.Tensor,
) -> Checker:
    check = Checker(op, queries.device)
    check.tensor("queries", queries, "L Hq R d", FLOATS)
    check.pools(key_pools, value_pools, queries.dtype)
    check.tensor("state_value", state_value, "S L Hq R d", torch.float32)
    check.tensor("state_lse", state_lse, "S L Hq R", torch.float32)
    check.tensor("slots", slots, "B", torch.int64)
    check.heads()
    return check


def summary_merge(
    queries: torch.Tensor,
    key_pools: Sequence[torch.Tensor],
    value_pools: Sequence[torch.Tensor],
    rows: torch.Tensor,
    counts: torch.Tensor,
    state_value: torch.Tensor,
    state_lse: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    *,
    backend: str = "auto",
) -> None:
    """Merge a few new rows per request (the commit after a verification).

    Args:
        queries: [L, Hq, R, d], the learned summary queries, bf16, fp16 or fp32.
        key_pools, value_pools: L pools, [N, Hkv, d] or [pages, P, Hkv, d], the queries' dtype.
        rows: [B, C] int32, row ids of the new rows; entries from counts[b] on are ignored.
        counts: [B] int32, 0..C; 0 leaves the request's state untouched.
        state_value: [S, L, Hq, R, d] float32, changed in place.
        state_lse: [S, L, Hq, R] float32 (natural log), changed in place.
        slots: [B] int64, state row of each request, each at most once (except among requests
            with counts 0: padding may share one row).
        scale: factor on the scores, 1 / sqrt(d).
    Raises:
        ArgumentError: shapes, dtypes or devices that don't fit.
    """
    check = _check("summary_merge", queries, key_pools, value_pools, state_value, state_lse, slots)
    check.tensor("rows", rows, "B C", torch.int32)
    check.tensor("counts", counts, "B", torch.int32)
    check.finish()
    run = dispatch.resolve("summary_merge", queries.device, backend)
    run(queries, key_pools, value_pools, rows, counts, state_value, state_lse, slots, scale)


def summary_merge_bulk(
    queries: torch.Tensor,
    key_pools: Sequence[torch.Tensor],
    value_pools: Sequence[torch.Tensor],
    rows: torch.Tensor,
    indptr: torch.Tensor,
    state_value: torch.Tensor,
    state_lse: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    *,
    backend: str = "auto",
) -> None:
    """Merge many rows per request (a prefill chunk); memory doesn't grow with their number.

    Args:
        rows: [N] int32, row ids of all requests, one request after the other.
        indptr: [B+1] int32 or int64; request b owns rows[indptr[b] : indptr[b + 1]].
        The rest as `summary_merge`.
    Raises:
        ArgumentError: shapes, dtypes or devices that don't fit.
    """
    check = _check(
        "summary_merge_bulk", queries, key_pools, value_pools, state_value, state_lse, slots
    )
    check.tensor("rows", rows, "rows", torch.int32)
    check.tensor("indptr", indptr, "B+1", (torch.int32, torch.int64))
    check.finish()
    run = dispatch.resolve("summary_merge_bulk", queries.device, backend)
    run(queries, key_pools, value_pools, rows, indptr, state_value, state_lse, slots, scale)


def _merge_layer(
    queries: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    used: torch.Tensor,
    state_value: torch.Tensor,
    state_lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New (value, lse) of one layer.

    Args:
        queries: [Hq, R, d]; key, value: [B, C, Hkv, d]; used: [B, C] bool;
        state_value: [B, Hq, R, d] and state_lse: [B, Hq, R], float32.
    """
    batch, _, kv_heads, dim = key.shape
    heads, slots, _ = queries.shape
    grouped = queries.float().view(kv_heads, heads // kv_heads * slots, dim)
    key = key.float().permute(0, 2, 3, 1)
    # An unused entry may point at a row that was never written; 0 * NaN must not reach the sum.
    value = torch.where(used[:, :, None, None], value.float(), 0.0).permute(0, 2, 1, 3)
    score = (grouped @ key) * scale  # [B, Hkv, g * R, C]
    score = torch.where(used[:, None, None, :], score, float("-inf"))

    old_lse = state_lse.reshape(batch, kv_heads, -1)
    old_value = state_value.reshape(batch, kv_heads, -1, dim)
    top = torch.maximum(old_lse, score.amax(dim=-1))
    safe_top = torch.where(top.isinf(), 0.0, top)  # -inf - -inf: nothing old and nothing new
    old_weight = (old_lse - safe_top).exp()
    weight = (score - safe_top[..., None]).exp()
    total = old_weight + weight.sum(dim=-1)
    new_lse = total.log() + safe_top
    denominator = torch.where(total > 0, total, 1.0)[..., None]
    new_value = (old_weight[..., None] * old_value + weight @ value) / denominator
    return new_value.view(state_value.shape), new_lse.view(state_lse.shape)


@dispatch.reference("summary_merge")
def summary_merge_reference(
    queries: torch.Tensor,
    key_pools: Sequence[torch.Tensor],
    value_pools: Sequence[torch.Tensor],
    rows: torch.Tensor,
    counts: torch.Tensor,
    state_value: torch.Tensor,
    state_lse: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> None:
    batch, columns = rows.shape
    if batch == 0 or columns == 0:
        return
    used = torch.arange(columns, device=rows.device) < counts[:, None]
    rows = torch.where(used, rows, 0)
    any_used = (counts > 0)[:, None, None]
    for layer, (key_pool, value_pool) in enumerate(zip(key_pools, value_pools, strict=True)):
        old_value, old_lse = state_value[slots, layer], state_lse[slots, layer]
        key, value = pool_rows(key_pool, rows), pool_rows(value_pool, rows)
        new_value, new_lse = _merge_layer(
            queries[layer], key, value, used, old_value, old_lse, scale
        )
        state_value[slots, layer] = torch.where(any_used[..., None], new_value, old_value)
        state_lse[slots, layer] = torch.where(any_used, new_lse, old_lse)


@dispatch.reference("summary_merge_bulk")
def summary_merge_bulk_reference(
    queries: torch.Tensor,
    key_pools: Sequence[torch.Tensor],
    value_pools: Sequence[torch.Tensor],
    rows: torch.Tensor,
    indptr: torch.Tensor,
    state_value: torch.Tensor,
    state_lse: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> None:
    # The host has to know the ragged lengths to cut pieces of bounded size: one read per call, in
    # prefill, where the plan is made on the host anyway.
    bounds = indptr.tolist()
    everything = torch.ones(1, BULK_ROWS, dtype=torch.bool, device=rows.device)
    for request, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        slot = slots[request : request + 1]
        for layer, (key_pool, value_pool) in enumerate(zip(key_pools, value_pools, strict=True)):
            layer_value, layer_lse = state_value[slot, layer], state_lse[slot, layer]
            for start in range(begin, end, BULK_ROWS):
                piece = rows[start : min(start + BULK_ROWS, end)].unsqueeze(0)
                layer_value, layer_lse = _merge_layer(
                    queries[layer],
                    pool_rows(key_pool, piece),
                    pool_rows(value_pool, piece),
                    everything[:, : piece.size(1)],
                    layer_value,
                    layer_lse,
                    scale,
                )
            state_value[slot, layer] = layer_value
            state_lse[slot, layer] = layer_lse
