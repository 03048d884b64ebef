"""Top-k and top-p on probability rows [B, V], for the in-tree algorithms' verify step."""

from __future__ import annotations

import torch


def top_k_renorm_prob(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Keep the top_ks[b] most likely tokens of each row (exactly that many) and renormalise.

    Stands in for kernels.ops.sampling.renorm.top_k_renorm_prob, which is None off the GPU.
    """
    ordered, order = probs.sort(dim=-1, descending=True)
    rank = torch.arange(probs.shape[-1])
    return _scatter(ordered.masked_fill(rank >= top_ks.view(-1, 1), 0.0), order)


def top_p_renorm_prob(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Keep the most likely tokens up to the one that reaches mass top_ps[b], and renormalise.

    Stands in for kernels.ops.sampling.renorm.top_p_renorm_prob, which is None off the GPU. Same cut
    as the sampler without speculation: a token stays while the mass *before* it is at most top_p.
    """
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return _scatter(ordered.masked_fill(before > top_ps.view(-1, 1), 0.0), order)


def _scatter(ordered: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    ordered = ordered / ordered.sum(-1, keepdim=True)
    return torch.zeros_like(ordered).scatter_(-1, order, ordered)
