"""One drafter layer: block attention over summary, window and block, then the gated MLP."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from longspark_sglang.config import LongSparkConfig
from longspark_sglang.drafter.parts import RMSNorm, wide_dtype
from longspark_sglang.drafter.rope import rotate


def attend(
    query: torch.Tensor,
    summary_key: torch.Tensor,
    summary_value: torch.Tensor,
    window_key: torch.Tensor,
    window_value: torch.Tensor,
    window_lens: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
) -> torch.Tensor:
    """One softmax over R summary rows, the used window rows and the K block rows, without a mask.

    The scale is 1 / sqrt(d) for all three groups (LongSpark spec, section 3.4). Scores, softmax and
    sums are float32; the summary's values are rounded to the query's dtype when read.

    Args:
        query: [B, K, Hq, d], normed and rotated.
        summary_key: [Hq, R, d], per query head, neither normed nor rotated.
        summary_value: [B, Hq, R, d] float32.
        window_key, window_value: [B, W', Hkv, d], rows exactly as the target cached them, in any
            order; rows from window_lens[b] on are not read.
        window_lens: [B] integers, 0..W'.
        block_key, block_value: [B, K, Hkv, d].
    Returns:
        [B, K, Hq, d] in the query's dtype.
    """
    batch, slots, heads, dim = query.shape
    kv_heads = block_key.size(2)
    dtype = wide_dtype(query)
    used = torch.arange(window_key.size(1), device=query.device) < window_lens[:, None]
    # Unused rows may hold anything, and 0 * NaN must reach neither the sum nor a gradient.
    window_key = torch.where(used[..., None, None], window_key.to(query.dtype), 0.0)
    window_value = torch.where(used[..., None, None], window_value.to(query.dtype), 0.0)
    row_key = torch.cat((window_key, block_key), dim=1).to(dtype)
    row_value = torch.cat((window_value, block_value), dim=1).to(dtype)
    hidden = torch.cat((~used, used.new_zeros(batch, slots)), dim=1)  # [B, W' + K]

    # [B, Hkv, g * K, d]: heads of one K/V head side by side, so that rows are not repeated.
    grouped = query.to(dtype).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    row_scores = grouped @ row_key.permute(0, 2, 3, 1)
    row_scores = row_scores.masked_fill(hidden[:, None, None], -math.inf)
    per_head = query.to(dtype).transpose(1, 2)  # [B, Hq, K, d]
    summary_scores = per_head @ summary_key.to(dtype).transpose(-1, -2)
    row_scores = row_scores.reshape(batch, heads, slots, -1)
    scores = torch.cat((summary_scores, row_scores), dim=-1) / math.sqrt(dim)
    weights = scores.softmax(dim=-1)

    summary_weights, row_weights = weights.split((summary_key.size(1), row_key.size(1)), dim=-1)
    from_summary = summary_weights @ summary_value.to(query.dtype).to(dtype)
    row_weights = row_weights.reshape(batch, kv_heads, -1, row_key.size(1))
    from_rows = (row_weights @ row_value.transpose(1, 2)).view(batch, heads, slots, dim)
    return (from_summary + from_rows).transpose(1, 2).to(query.dtype)


def attend_shared(
    query: torch.Tensor,
    summary_key: torch.Tensor,
    summary_value: torch.Tensor,
    row_key: torch.Tensor,
    row_value: torch.Tensor,
    visible: torch.Tensor,
    block_key: torch.Tensor,
    block_value: torch.Tensor,
) -> torch.Tensor:
    """:func:`attend` for blocks whose windows are parts of one common stretch of rows.

    In training many anchors share a sequence: scoring all of its rows for each of them and masking
    costs less than copying every window out of it.

    Args:
        row_key, row_value: [T, Hkv, d], rows exactly as the target cached them, all finite.
        visible: [B, T] bool, the rows of each block's window.
        query, summary_key, summary_value, block_key, block_value: as `attend`.
    Returns:
        [B, K, Hq, d] in the query's dtype.
    """
    batch, slots, heads, dim = query.shape
    kv_heads, dtype = row_key.size(1), wide_dtype(query)
    row_key, row_value = (x.to(query.dtype).to(dtype).transpose(0, 1) for x in (row_key, row_value))
    per_head = query.to(dtype).permute(2, 0, 1, 3)  # [Hq, B, K, d]
    # [Hkv, g * B * K, d]: everything that reads one K/V head, in one matrix product.
    grouped = per_head.reshape(kv_heads, -1, dim)
    row_scores = grouped @ row_key.transpose(1, 2)
    row_scores = row_scores.view(heads, batch, slots, row_key.size(1))
    row_scores = row_scores.masked_fill(~visible[:, None], -math.inf)
    summary_scores = per_head.flatten(1, 2) @ summary_key.to(dtype).transpose(1, 2)
    in_block = grouped.view(kv_heads, -1, batch, slots, dim).permute(2, 0, 1, 3, 4).flatten(2, 3)
    block_scores = in_block @ block_key.to(dtype).permute(0, 2, 3, 1)  # [B, Hkv, g * K, K]
    block_scores = block_scores.view(batch, heads, slots, slots).transpose(0, 1)
    scores = (summary_scores.view(heads, batch, slots, -1), row_scores, block_scores)
    weights = (torch.cat(scores, dim=-1) / math.sqrt(dim)).softmax(dim=-1)

    sizes = (summary_key.size(1), row_key.size(1), slots)
    summary_weights, row_weights, block_weights = weights.split(sizes, dim=-1)
    from_summary = summary_weights.transpose(0, 1) @ summary_value.to(query.dtype).to(dtype)
    from_rows = row_weights.reshape(*grouped.shape[:2], sizes[1]) @ row_value
    block_weights = block_weights.transpose(0, 1).reshape(batch, kv_heads, -1, slots)
    from_block = block_weights @ block_value.to(dtype).transpose(1, 2)
    attended = from_summary + from_block.view(batch, heads, slots, dim)
    attended = attended.transpose(0, 1) + from_rows.view(heads, batch, slots, dim)
    return attended.permute(1, 2, 0, 3).to(query.dtype)


class BlockAttention(nn.Module):
    """Projections, per-head norms and rope around :func:`attend`."""

    def __init__(self, config: LongSparkConfig) -> None:
        super().__init__()
        h, self.head_dim = config.hidden_size, config.head_dim
        query_size = config.num_attention_heads * self.head_dim
        row_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(h, query_size, bias=False)
        self.k_proj = nn.Linear(h, row_size, bias=False)
        self.v_proj = nn.Linear(h, row_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.qwen_rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.qwen_rms_norm_eps)
        self.o_proj = nn.Linear(query_size, h, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        summary_key: torch.Tensor,
        summary_value: torch.Tensor,
        window_key: torch.Tensor,
        window_value: torch.Tensor,
        window_lens: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """x [B, K, h] -> [B, K, h]; cos, sin [B, K, d/2] in x's dtype, the rest as `attend`.

        Windows without a batch dimension, [T, Hkv, d], are shared by all blocks: `window_lens` is
        then the mask ``visible`` of `attend_shared`.
        """
        query = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        key = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        shared = window_key.dim() == 3
        attended = (attend_shared if shared else attend)(
            rotate(self.q_norm(query), cos, sin),
            summary_key,
            summary_value,
            window_key,
            window_value,
            window_lens,
            rotate(self.k_norm(key), cos, sin),
            value,
        )
        return self.o_proj(attended.flatten(2))


class GatedMLP(nn.Module):
    """Wdown . (SiLU(Wgate . x) * (Wup . x)), without biases."""

    def __init__(self, config: LongSparkConfig) -> None:
        super().__init__()
        h, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(h, inner, bias=False)
        self.up_proj = nn.Linear(h, inner, bias=False)
        self.down_proj = nn.Linear(inner, h, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., h] -> [..., h]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """Pre-norm residual layer; its block rows live for this one call, nothing persists."""

    def __init__(self, config: LongSparkConfig) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.qwen_rms_norm_eps
        self.input_layernorm = RMSNorm(h, eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(h, eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: torch.Tensor, *views: torch.Tensor) -> torch.Tensor:
        """x [B, K, h] -> [B, K, h]; ``views`` as :meth:`BlockAttention.forward` takes them."""
        x = x + self.self_attn(self.input_layernorm(x), *views)
        return x + self.mlp(self.post_attention_layernorm(x))
