"""Attention of ragged query rows over a paged K/V pool, without copying the prefix.

For platforms without an attention kernel of their own: prefill, decode and target-verify of a plain
decoder on the CPU. There is no CUDA implementation, SGLang has better ones.
"""

import math

import torch

from . import dispatch
from .checks import FLOATS, Checker
from .pools import pool_rows

# Query rows whose scores the plain-torch version holds at a time, per request.
QUERY_TILE = 256


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
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend from the last positions of each request over all of its rows.

    Query row i of request b sits at position kv_lens[b] - n_b + i, n_b being its number of query
    rows. The keys and values of the query rows themselves must be in the pools already.

    The compiled version splits work by key position only: the bits of a row are the same in a
    decode of one row, a verify of eight and a prefill, in any batch, on any number of threads.

    Args:
        query: [T, Hq, d], bf16, fp16 or fp32; the requests' rows one after the other.
        key_pool, value_pool: [N, Hkv, d] and [N, Hkv, dv], or [pages, P, Hkv, d] and
            [pages, P, Hkv, dv], the query's dtype; Hq is a multiple of Hkv.
        req_to_token: [requests, width] int32, row id of each position of each request row.
        req_rows: [B] int64, the request row of each batch entry.
        kv_lens: [B] int64, number of positions, the new ones included; at most `width`.
        query_indptr: [B+1] int64; request b owns query rows query_indptr[b] to
            query_indptr[b+1] - 1.
        scale: factor on the scores, greater than 0.
        causal: a row sees no later position.
        window: if >= 0, a row sees only positions at most this far before its own.
        softcap: if > 0, scores s become softcap * tanh(s / softcap).
    Returns:
        [T, Hq, dv] in the query's dtype, computed in fp32 (bf16 softmax weights where the CPU
        multiplies bf16). Rows that no request owns are 0.
    Raises:
        ArgumentError: shapes, dtypes or devices that don't fit.
    """
    check = Checker("paged_attention", query.device)
    check.tensor("query", query, "T Hq d", FLOATS)
    paged = key_pool.dim() == 4
    check.tensor("key_pool", key_pool, "pages P Hkv d" if paged else "N Hkv d", query.dtype)
    check.tensor("value_pool", value_pool, "pages P Hkv dv" if paged else "N Hkv dv", query.dtype)
    check.tensor("req_to_token", req_to_token, "requests width", torch.int32)
    check.tensor("req_rows", req_rows, "B", torch.int64)
    check.tensor("kv_lens", kv_lens, "B", torch.int64)
    check.tensor("query_indptr", query_indptr, "B+1", torch.int64)
    check.heads()
    check.condition(scale > 0, f"scale must be greater than 0, not {scale}")
    check.condition(softcap >= 0, f"softcap must be at least 0 (0: none), not {softcap}")
    check.finish()
    run = dispatch.resolve("paged_attention", query.device, backend)
    return run(
        query,
        key_pool,
        value_pool,
        req_to_token,
        req_rows,
        kv_lens,
        query_indptr,
        scale,
        causal,
        window,
        softcap,
    )


@dispatch.reference("paged_attention")
def paged_attention_reference(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    req_to_token: torch.Tensor,
    req_rows: torch.Tensor,
    kv_lens: torch.Tensor,
    query_indptr: torch.Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> torch.Tensor:
    out = query.new_zeros(*query.shape[:2], value_pool.size(-1))
    kv_heads = key_pool.size(-2)
    bounds = query_indptr.tolist()
    for b, (row, kv_len) in enumerate(zip(req_rows.tolist(), kv_lens.tolist(), strict=True)):
        begin, end = bounds[b], bounds[b + 1]
        if begin == end:
            continue
        ids = req_to_token[row, :kv_len]
        key = pool_rows(key_pool, ids).float().permute(1, 2, 0).unsqueeze(1)  # [Hkv, 1, d, n]
        value = pool_rows(value_pool, ids).float().transpose(0, 1).unsqueeze(1)  # [Hkv, 1, n, dv]
        position = torch.arange(kv_len, device=query.device)
        for first in range(begin, end, QUERY_TILE):
            rows = slice(first, min(first + QUERY_TILE, end))
            own = position[kv_len - end + rows.start : kv_len - end + rows.stop, None]
            # [Hkv, g, rows, d]
            part = query[rows].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
            score = (part @ key) * scale
            if softcap > 0:
                score = softcap * torch.tanh(score / softcap)
            if causal:
                score = score.masked_fill(position > own, -math.inf)
            if window >= 0:
                score = score.masked_fill(position < own - window, -math.inf)
            weighted = torch.softmax(score, dim=-1) @ value
            out[rows] = weighted.permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
    return out
