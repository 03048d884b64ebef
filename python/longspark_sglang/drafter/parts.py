"""The two small modules that several rooms of the drafter share."""

from __future__ import annotations

import torch
from torch import nn


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which norms, scores and softmaxes are computed: float32, or float64 for float64.

    The second case exists so that the whole drafter can be run in float64 against an oracle.
    """
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, with the rounding the drafters were trained with.

    x / rms(x) is computed wide, rounded to x's dtype, and only then multiplied by the weight
    (LongSpark spec, section 3). ``torch.nn.RMSNorm`` multiplies before it rounds.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size], same dtype."""
        wide = x.to(wide_dtype(x))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class TwoLayerMLP(nn.Module):
    """W2 . SiLU(W1 . x), without biases; ``net`` gives the checkpoint's tensor names."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(inputs, size, bias=False), nn.SiLU(), nn.Linear(size, size, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., size]."""
        return self.net(x)
