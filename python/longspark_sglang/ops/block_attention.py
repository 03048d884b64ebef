"""Attention of the drafter's block: one softmax over summary, window and block rows.

LongSpark spec, section 3.4: the K queries of a request see R summary slots (keys per *query* head,
no rotation), the last lens[b] committed rows of the tapped layer exactly as the target cached them,
and the block's own K rows, all without a mask.
"""

import torch

from . import dispatch
from .checks import FLOATS, Checker
from .pools import pool_rows


def block_attention(
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
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend from the block's queries over [summary | window | block].

    Args:
        query: [B, K, Hq, d], bf16, fp16 or fp32.
        summary_key: [Hq, R, d], the learned queries of this layer, the query's dtype.
        summary_value: [S, Hq, R, d] float32, this layer's part of the summary state (any stride
            between state rows); rounded to the query's dtype when read.
        slots: [B] int64, state row of each request.
        key_pool, value_pool: the tapped layer's pools, [N, Hkv, d] or [pages, P, Hkv, d], the
            query's dtype.
        rows: [B, W] int32, row ids of the window; entries from lens[b] on are ignored.
        lens: [B] int32, 0..W.
        block_key, block_value: [B, K, Hkv, d], the query's dtype.
        scale: factor on all scores, 1 / sqrt(d).
    Returns:
        [B, K, Hq, d] in the query's dtype, computed in fp32.
    Raises:
        ArgumentError: shapes, dtypes or devices that don't fit.
    """
    check = Checker("block_attention", query.device)
    check.tensor("query", query, "B K Hq d", FLOATS)
    check.tensor("summary_key", summary_key, "Hq R d", query.dtype)
    check.tensor("summary_value", summary_value, "S Hq R d", torch.float32)
    check.tensor("slots", slots, "B", torch.int64)
    check.pool("key_pool", key_pool, query.dtype)
    check.pool("value_pool", value_pool, query.dtype)
    check.tensor("rows", rows, "B W", torch.int32)
    check.tensor("lens", lens, "B", torch.int32)
    check.tensor("block_key", block_key, "B K Hkv d", query.dtype)
    check.tensor("block_value", block_value, "B K Hkv d", query.dtype)
    check.heads()
    check.finish()
    run = dispatch.resolve("block_attention", query.device, backend)
    return run(
        query,
        summary_key,
        summary_value,
        slots,
        key_pool,
        value_pool,
        rows,
        lens,
        block_key,
        block_value,
        scale,
    )


@dispatch.reference("block_attention")
def block_attention_reference(
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
    batch, block, heads, dim = query.shape
    kv_heads = block_key.size(2)
    group = heads // kv_heads
    if query.numel() == 0:
        return torch.empty_like(query)
    used = torch.arange(rows.size(1), device=rows.device) < lens[:, None]  # [B, W]
    rows = torch.where(used, rows, 0)

    # [B, Hkv, g, K, d]: group heads with their KV head, so that GQA is a broadcast, not a copy.
    grouped = query.float().view(batch, block, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    key = torch.cat([pool_rows(key_pool, rows), block_key], dim=1).float()
    value = torch.cat([pool_rows(value_pool, rows), block_value], dim=1).float()
    visible = torch.cat([used, used.new_ones(batch, block)], dim=1)  # [B, W + K]
    # An unused entry may point at a row that was never written; 0 * NaN must not reach the sum.
    value = torch.where(visible[:, :, None, None], value, 0.0)
    key = key.permute(0, 2, 3, 1).unsqueeze(2)  # [B, Hkv, 1, d, W + K]
    value = value.permute(0, 2, 1, 3).unsqueeze(2)  # [B, Hkv, 1, W + K, d]

    slot_key = summary_key.float().view(kv_heads, group, -1, dim)  # [Hkv, g, R, d]
    slot_value = summary_value[slots].to(query.dtype).float()
    slot_value = slot_value.view(batch, kv_heads, group, -1, dim)

    row_score = torch.where(visible[:, None, None, None, :], grouped @ key, float("-inf"))
    slot_score = grouped @ slot_key.transpose(-1, -2)
    probability = torch.softmax(torch.cat([slot_score, row_score], dim=-1) * scale, dim=-1)
    slot_weight, row_weight = probability.split([slot_key.size(-2), key.size(-1)], dim=-1)
    out = slot_weight @ slot_value + row_weight @ value
    return out.permute(0, 3, 1, 2, 4).reshape(query.shape).to(query.dtype)
