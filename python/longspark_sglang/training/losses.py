"""Losses between the drafter's and the target's distribution, by name, and their mixtures.

With target distribution p, drafter distribution q and the label y, per slot:

* ce: -ln q(y)
* kl: sum p ln(p / q)
* rkl: sum q ln(q / p)
* tv: half the sum of |p - q| = 1 - the probability that a sampled draft is accepted
* l1: the sum of |p - q| = 2 tv

Slot j counts exp(-j / gamma): a later draft matters only if all before it were accepted. The
default, 0.1 ce + 0.9 l1 with gamma 4, is DSpark's recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from longspark_sglang.config import ConfigError
from longspark_sglang.drafter.parts import wide_dtype

# Their logits and a few arrays of the same size stay in a core's cache.
_SLOTS_AT_A_TIME = 16

_Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _ce(log_q: torch.Tensor, log_p: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -log_q.gather(-1, labels[..., None])[..., 0]


def _kl(log_q: torch.Tensor, log_p: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _rkl(log_q: torch.Tensor, log_p: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def _l1(log_q: torch.Tensor, log_p: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (log_p.exp() - log_q.exp()).abs().sum(-1)


def _tv(log_q: torch.Tensor, log_p: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return 0.5 * _l1(log_q, log_p, labels)


# The definitions; `slot_losses` computes the same in one pass.
LOSSES: dict[str, _Loss] = {"ce": _ce, "kl": _kl, "rkl": _rkl, "tv": _tv, "l1": _l1}


def parse_mixture(text: str) -> dict[str, float]:
    """ "0.1*ce+0.9*l1" -> {"ce": 0.1, "l1": 0.9}; a bare name has weight 1.

    ConfigError lists every part that is not a weight and a known name.
    """
    mixture: dict[str, float] = {}
    reasons = []
    for part in text.replace(" ", "").split("+"):
        match = re.fullmatch(r"(?:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\*)?([a-z0-9]+)", part)
        if match is None:
            reasons.append(f"{part!r} is no weight*name")
        elif match[2] not in LOSSES:
            reasons.append(f"{match[2]!r} is no loss: use {', '.join(LOSSES)}")
        elif match[2] in mixture:
            reasons.append(f"{match[2]!r} is named twice: add its weights")
        else:
            mixture[match[2]] = float(match[1] or 1)
    if not reasons and not any(mixture.values()):
        reasons.append("all weights are zero")
    if reasons:
        raise ConfigError(f"loss {text!r} cannot be used", reasons)
    return mixture


def slot_weights(slots: int, gamma: float, device: torch.device | None = None) -> torch.Tensor:
    """exp(-j / gamma) of the slots j = 0..K-1, [K] float32."""
    return (-torch.arange(slots, device=device).float() / gamma).exp()


class _SlotLosses(torch.autograd.Function):
    """The mixture and its derivative by the logits, in one visit of each slot's vocabulary.

    Autograd through the definitions above would pass over [slots, V] in memory some thirty times.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target_logits: torch.Tensor,
        labels: torch.Tensor,
        rows: torch.Tensor,
        mixture: Mapping[str, float],
    ) -> torch.Tensor:
        dtype = wide_dtype(logits)
        log_p = target_logits.to(dtype).log_softmax(-1)
        p = log_p.exp()
        losses = logits.new_zeros(len(logits), dtype=dtype)
        slope = torch.empty_like(logits)  # of each loss by its slot's logits
        for begin in range(0, len(logits), _SLOTS_AT_A_TIME):
            some = slice(begin, begin + _SLOTS_AT_A_TIME)
            log_q = logits[some].to(dtype).log_softmax(-1)
            q, wanted, label = log_q.exp(), p[rows[some]], labels[some, None]
            d_slope = torch.zeros_like(q)
            for name, weight in mixture.items():
                if name == "ce":
                    losses[some] -= weight * log_q.gather(-1, label)[:, 0]
                    d_slope.add_(q, alpha=weight)
                    d_slope.scatter_add_(-1, label, torch.full_like(q[:, :1], -weight))
                elif name == "kl":
                    losses[some] += weight * (wanted * (log_p[rows[some]] - log_q)).sum(-1)
                    d_slope.add_(q - wanted, alpha=weight)
                else:
                    if name == "rkl":
                        by_q = log_q - log_p[rows[some]]
                        losses[some] += weight * (q * by_q).sum(-1)
                    else:
                        by_q = q - wanted
                        half = 0.5 * weight if name == "tv" else weight
                        losses[some] += half * by_q.abs().sum(-1)
                        by_q, weight = by_q.sign_(), half
                    by_q.sub_((q * by_q).sum(-1, keepdim=True)).mul_(q)
                    d_slope.add_(by_q, alpha=weight)
            slope[some] = d_slope
        ctx.save_for_backward(slope)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slope,) = ctx.saved_tensors
        return slope * gradients[0][:, None].to(slope.dtype), None, None, None, None


def slot_losses(
    mixture: Mapping[str, float],
    logits: torch.Tensor,
    target_logits: torch.Tensor,
    labels: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted mixture per slot.

    Args:
        mixture: name -> weight.
        logits, target_logits: [..., V] of drafter and target.
        labels: [...] int64.
        rows: [...] int64, each slot's row of ``target_logits``, which is then [U, V].
    Differentiable in ``logits`` only.
    Returns:
        [...] float32 (float64 for float64 logits).
    """
    size = logits.size(-1)
    if rows is None:
        rows = torch.arange(labels.numel(), device=labels.device)
    losses: torch.Tensor = _SlotLosses.apply(
        logits.reshape(-1, size),
        target_logits.reshape(-1, size),
        labels.flatten(),
        rows.flatten(),
        mixture,
    )
    return losses.view(labels.shape)
