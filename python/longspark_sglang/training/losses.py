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

import torch

from longspark_sglang.config import ConfigError
from longspark_sglang.drafter.parts import wide_dtype

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


def slot_losses(
    mixture: Mapping[str, float],
    logits: torch.Tensor,
    target_logits: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """The weighted mixture per slot.

    Args:
        mixture: name -> weight.
        logits, target_logits: [..., V] of drafter and target.
        labels: [...] int64.
    Returns:
        [...] float32 (float64 for float64 logits).
    """
    log_q = logits.to(wide_dtype(logits)).log_softmax(-1)
    log_p = target_logits.to(log_q.dtype).log_softmax(-1)
    total = log_q.new_zeros(labels.shape)
    for name, weight in mixture.items():
        total = total + weight * LOSSES[name](log_q, log_p, labels)
    return total
