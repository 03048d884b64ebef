"""Losses by their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from longspark_sglang.config import ConfigError
from longspark_sglang.training.config import DEFAULT_LOSS
from longspark_sglang.training.losses import (
    LOSSES,
    parse_mixture,
    slot_losses,
    slot_weights,
)


def test_each_loss_by_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    q_logits, p_logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 6, 3, 3, 1])
    for row in range(5):
        q, p = q_logits[row].softmax(-1).tolist(), p_logits[row].softmax(-1).tolist()
        both = list(zip(p, q, strict=True))
        wanted = {
            "ce": -math.log(q[labels[row]]),
            "kl": sum(a * math.log(a / b) for a, b in both),
            "rkl": sum(b * math.log(b / a) for a, b in both),
            "tv": 1 - sum(min(a, b) for a, b in both),
            "l1": sum(abs(a - b) for a, b in both),
        }
        assert wanted.keys() == LOSSES.keys()
        for name, value in wanted.items():
            found = slot_losses({name: 1.0}, q_logits, p_logits, labels)[row].item()
            assert math.isclose(found, value, rel_tol=1e-10), name
        mixed = slot_losses({"ce": 0.1, "l1": 0.9}, q_logits, p_logits, labels)[row].item()
        assert math.isclose(mixed, 0.1 * wanted["ce"] + 0.9 * wanted["l1"], rel_tol=1e-10)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradients_are_those_of_the_definitions(name: str) -> None:
    """Closed forms against autograd, with slots that share rows of the target, past one chunk."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 2, 7, generator=generator, dtype=torch.float64).requires_grad_()
    wanted = torch.randn(9, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(7, (20, 2), generator=generator)
    rows = torch.randint(9, (20, 2), generator=generator)
    weights = torch.rand(20, 2, generator=generator, dtype=torch.float64)
    mixture = {name: 0.7, "ce": 0.2}
    log_p = wanted.log_softmax(-1)[rows]
    plain = sum(w * LOSSES[n](logits.log_softmax(-1), log_p, labels) for n, w in mixture.items())
    found = slot_losses(mixture, logits, wanted, labels, rows)
    assert torch.allclose(found, plain, atol=1e-12)
    by_hand, by_autograd = (
        torch.autograd.grad((losses * weights).sum(), logits)[0] for losses in (found, plain)
    )
    assert torch.allclose(by_hand, by_autograd, atol=1e-12)


def test_half_precision_logits_are_compared_in_float32() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(1)).bfloat16()
    labels = torch.tensor([0, 1, 2])
    found = slot_losses({"kl": 1.0}, logits, logits, labels)
    assert found.dtype == torch.float32 and found.abs().max() < 1e-6


def test_mixtures() -> None:
    assert parse_mixture(DEFAULT_LOSS) == {"ce": 0.1, "l1": 0.9}
    assert parse_mixture("kl") == {"kl": 1.0}
    assert parse_mixture(" .5 * ce + 2*tv ") == {"ce": 0.5, "tv": 2.0}


@pytest.mark.parametrize("text", ["", "0*ce", "mse", "ce+ce", "x*ce", "-1*ce", "ce+", "1e3*ce"])
def test_bad_mixtures_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        parse_mixture(text)


def test_all_faults_of_a_mixture_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_mixture("mse+2*ce+ce+!")
    assert len(caught.value.reasons) == 3


def test_position_decay() -> None:
    weights = slot_weights(7, 4.0)
    assert weights[0] == 1
    assert math.isclose(weights[4].item(), math.exp(-1), rel_tol=1e-6)
    assert (weights.diff() < 0).all()
