"""Attention of a batch of requests over a paged KV pool, in plain torch."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

COMPILED = "longspark_sglang.ops.paged_attention"

# Rows per tile. Score tiles are at most QUERY_TILE * group x KEY_TILE per KV head, whatever the
# length of the prompt and of the prefix.
QUERY_TILE = 128
KEY_TILE = 512


def paged_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    req_rows: torch.Tensor,
    kv_lens: torch.Tensor,
    query_indptr: torch.Tensor,
    scale: float,
    causal: bool = True,
    window: int = -1,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Softmax attention of ragged query rows over each request's rows in the pool.

    query [T, Hq, d]; key_pool [N, Hkv, d]; value_pool [N, Hkv, dv], strided views are fine; Hq is a
    multiple of Hkv. req_to_token [rows, width] integer: cell (r, p) = pool row of position p.
    req_rows [B]: the table row of each request; kv_lens [B]: its number of positions, the new ones
    included. query_indptr [B+1]: request b owns query rows indptr[b] .. indptr[b+1]-1, which sit at
    its last positions. `window` >= 0 lets a position see itself and that many before it;
    `softcap` > 0 bounds a score s to softcap * tanh(s / softcap). Returns [T, Hq, dv] in the
    query's dtype; rows past indptr[-1] (padding) are zero.

    Scores, softmax and accumulation are float32. Keys are read tile by tile with a running softmax,
    so no copy of a prefix and no [queries, prefix] matrix ever exists.
    """
    out = query.new_zeros(query.shape[0], query.shape[1], value_pool.shape[-1])
    starts = query_indptr.tolist()
    for b, (row, kv_len) in enumerate(zip(req_rows.tolist(), kv_lens.tolist(), strict=True)):
        start, end = starts[b], starts[b + 1]
        slots = req_to_token[row, :kv_len]
        for first in range(start, end, QUERY_TILE):
            last = min(first + QUERY_TILE, end)
            out[first:last] = _attend_tile(
                query[first:last],
                key_pool,
                value_pool,
                slots,
                kv_len - (end - first),
                scale,
                causal,
                window,
                softcap,
            )
    return out


def fastest() -> Callable[..., torch.Tensor]:
    """The compiled operator of longspark-sglang where that is installed with one, else our own.

    Same signature. LONGSPARK_CPU_ATTENTION=torch keeps the torch code, to compare the two.
    """
    chosen = paged_attention
    wanted = os.environ.get("LONGSPARK_CPU_ATTENTION", "auto") != "torch"
    if (
        wanted
        and importlib.util.find_spec("longspark_sglang")
        and importlib.util.find_spec(COMPILED)
    ):
        operator = importlib.import_module(COMPILED).paged_attention
        # Without the extension it would be a reference written for clarity, not for a server.
        if importlib.import_module("longspark_sglang.ops.dispatch").load_extension() and hasattr(
            torch.ops.longspark, "paged_attention"
        ):
            chosen = operator
    logger.info("CPU attention: %s.%s", chosen.__module__, chosen.__name__)
    return chosen


def _attend_tile(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slots: torch.Tensor,
    position: int,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """One tile of consecutive query rows, the first at `position`, over `slots` [kv_len]."""
    rows, num_heads, _ = query.shape
    num_kv_heads = key_pool.shape[1]
    group = num_heads // num_kv_heads
    # [Hkv, rows * group, d]: all query heads that read one KV head form one matrix.
    tile = query.reshape(rows, num_kv_heads, group, -1).transpose(0, 1)
    tile = tile.reshape(num_kv_heads, rows * group, -1).float() * scale

    first_key = max(0, position - window) if window >= 0 else 0
    last_key = position + rows if causal else slots.numel()
    top = tile.new_full((num_kv_heads, rows * group, 1), -torch.inf)
    mass = torch.zeros_like(top)
    value = tile.new_zeros(num_kv_heads, rows * group, value_pool.shape[-1])

    for low in range(first_key, last_key, KEY_TILE):
        high = min(low + KEY_TILE, last_key)
        index = slots[low:high]
        scores = tile @ key_pool[index].float().permute(1, 2, 0)
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = _hidden_keys(position, rows, low, high, causal, window)
        if hidden is not None:
            scores.masked_fill_(hidden.repeat_interleave(group, dim=0), -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        # A row that has seen no key yet keeps top = -inf; exp(-inf - -inf) would be NaN.
        shift = new_top.clamp_min(torch.finfo(torch.float32).min)
        weight = scores.sub_(shift).exp_()
        decay = (top - shift).exp()
        mass = mass * decay + weight.sum(-1, keepdim=True)
        value = value * decay + weight @ value_pool[index].float().transpose(0, 1)
        top = new_top

    result = (value / mass).view(num_kv_heads, rows, group, -1).transpose(0, 1)
    return result.reshape(rows, num_heads, -1).to(query.dtype)


def _hidden_keys(
    position: int, rows: int, low: int, high: int, causal: bool, window: int
) -> torch.Tensor | None:
    """[rows, high-low] bool, True where a key is not visible; None if every key is to every row."""
    cuts_future = causal and high - 1 > position
    cuts_past = window >= 0 and low < position + rows - 1 - window
    if not cuts_future and not cuts_past:
        return None
    query_position = torch.arange(position, position + rows)[:, None]
    key_position = torch.arange(low, high)
    hidden = torch.zeros(rows, high - low, dtype=torch.bool)
    if cuts_future:
        hidden |= key_position > query_position
    if cuts_past:
        hidden |= key_position < query_position - window
    return hidden
