"""The block's initial residual stream: anchor and mask tokens, slot by slot, joined with c."""

from __future__ import annotations

import torch
from torch import nn

from longspark_sglang.config import LongSparkConfig
from longspark_sglang.drafter.parts import RMSNorm, TwoLayerMLP


class BlockInputs(nn.Module):
    """x_j = RMSNorm(MLP(concat(E[token_j] + P_j, c))) (LongSpark spec, section 3.2)."""

    def __init__(self, config: LongSparkConfig) -> None:
        super().__init__()
        h = config.hidden_size
        self.mask_token = config.mask_token
        self.position_embedding = nn.Embedding(config.num_draft_tokens, h)
        self.proj = TwoLayerMLP(2 * h, h)
        self.norm = RMSNorm(h, config.qwen_rms_norm_eps)

    def forward(
        self, anchor: torch.Tensor, c: torch.Tensor, embed_tokens: torch.Tensor
    ) -> torch.Tensor:
        """anchor [B] int64, c [B, h], the target's embedding [V, h] -> [B, K, h]."""
        slot = self.position_embedding.weight
        tokens = torch.full((len(anchor), len(slot)), self.mask_token, device=anchor.device)
        tokens[:, 0] = anchor
        embedded = embed_tokens[tokens].to(slot.dtype) + slot
        joined = torch.cat((embedded, c[:, None].expand_as(embedded)), dim=-1)
        return self.norm(self.proj(joined))
