"""Query/key norm and rotary embedding in one step, as the in-tree block drafts call it."""

from __future__ import annotations

import torch


def table_qk_norm_rope_(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_q_heads: int,
    num_k_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """RMSNorm each query and key head of qkv [T, (Hq + 2 Hkv) d], then rotate it, in place.

    positions [T]; weights [d]; cos_sin_cache [positions, d], cosines in the first half. Computed in
    float32 and rounded to qkv's dtype after the norm and after the rotation. Halves are rotated
    against each other (not neighbours), value columns are left alone.

    Stands in for kernels.ops.attention.table_qk_norm_rope.table_qk_norm_rope_, a Triton kernel that
    bfloat16 DFLASH and DSPARK drafts launch whatever the device is.
    """
    tokens, heads = qkv.shape[0], num_q_heads + num_k_heads
    x = qkv[:, : heads * head_dim].view(tokens, heads, head_dim)
    weight = torch.cat(
        [
            q_weight.float().expand(num_q_heads, head_dim),
            k_weight.float().expand(num_k_heads, head_dim),
        ]
    )
    normed = x.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps) * weight
    left, right = normed.to(qkv.dtype).float().chunk(2, dim=-1)
    cos, sin = cos_sin_cache[positions.long()].float()[:, None].chunk(2, dim=-1)
    x.copy_(torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1))
