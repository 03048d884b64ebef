"""The law of what is emitted, against an exact enumeration (user case 8).

20,000 requests with the same parameters decode in one batch until each has three tokens. The law of
three tokens is enumerated (laws.py).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from laws import EOS, RULES, assert_follows, next_law, three_token_law
from toy_serving import Batch, Toy, make_request, make_requests

VOCAB, DRAFTS, ANCHOR, SAMPLES = 50, 3, 7, 20_000


def toy_law(toy: Toy, rules: dict[str, Any]) -> np.ndarray:
    """[V, V, V] probabilities of the three tokens after the anchor (itself a generated token)."""
    table = toy.table.numpy()
    return three_token_law(lambda tokens: table[(ANCHOR, *tokens)[-1]], rules, (ANCHOR,))


def sample(toy: Toy, rules: dict[str, Any], seed: int) -> tuple[np.ndarray, float]:
    """[SAMPLES, 3] tokens and how often a round's first draft was accepted."""
    batch, sampler = Batch(make_requests(SAMPLES, **rules), VOCAB), toy.sampler(seed=seed)
    anchors = toy.prefill(sampler, batch, ANCHOR)
    emitted = torch.full((SAMPLES, 3 + DRAFTS + 1), -1)
    done = torch.zeros(SAMPLES, dtype=torch.int64)
    accepted: list[float] = []
    while int(done.min()) < 3:
        decision = toy.round(sampler, batch, anchors)
        accepted.append((decision.accepted > 0).float().mean().item())
        # Later tokens of a round overwrite the leftovers of the one before.
        at = done.clamp(max=3)[:, None] + torch.arange(DRAFTS + 1)
        emitted.scatter_(1, at, decision.tokens.view(SAMPLES, -1))
        done += decision.accept_lens
        anchors = decision.next_token
    return emitted[:, :3].numpy(), sum(accepted) / len(accepted)


ALL_RULES = RULES | {
    "filters": {"temperature": 1.3, "top_k": 8, "top_p": 0.8, "min_p": 0.05},
    "everything": {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.2,
        "min_new_tokens": 3,
        "stop_token_ids": [2],
        "logit_bias": {"4": 2.0, "9": -1.5, str(EOS): 4.0},
    },
}
DRAFTERS = {"good": 0.2, "bad": 8.0}


@pytest.mark.parametrize(("drafter", "name"), itertools.product(DRAFTERS, ALL_RULES))
def test_three_token_law(drafter: str, name: str) -> None:
    toy = Toy(VOCAB, DRAFTS, noise=DRAFTERS[drafter], seed=1, fast=True)
    tokens, accepted = sample(toy, ALL_RULES[name], seed=11)
    assert accepted > 0.4 if drafter == "good" else accepted < 0.3
    assert_follows(tokens, toy_law(toy, ALL_RULES[name]))


def test_the_check_notices_a_wrong_law() -> None:
    """Samples of a slightly different law fail the check that the others pass."""
    toy = Toy(VOCAB, DRAFTS, noise=0.2, seed=1, fast=True)
    tokens, _ = sample(toy, {"temperature": 1.0}, seed=11)
    for wrong in ({"temperature": 1.1}, {"logit_bias": {"20": 0.3}}, {"frequency_penalty": 0.5}):
        with pytest.raises(AssertionError, match="chi-square"):
            assert_follows(tokens, toy_law(toy, wrong))
    with pytest.raises(AssertionError, match="probability 0"):
        assert_follows(tokens, toy_law(toy, {"top_k": 45}))


def test_neighbours_do_not_change_a_law() -> None:
    """One batch holds every kind of request; each kind follows its own law."""
    toy = Toy(VOCAB, DRAFTS, noise=0.5, seed=2)
    kinds = [*ALL_RULES.values(), {"temperature": 0.0}]
    each = 2_000
    reqs = [make_request(row, **kinds[row % len(kinds)]) for row in range(each * len(kinds))]
    batch, sampler = Batch(reqs, VOCAB), toy.sampler(seed=5)
    anchors = toy.prefill(sampler, batch, ANCHOR)
    tokens = toy.round(sampler, batch, anchors).tokens.view(each, len(kinds), -1)[:, :, 0].numpy()
    for kind, rules in enumerate(kinds):
        if rules["temperature"] == 0.0:
            assert set(tokens[:, kind]) == {int(toy.table[ANCHOR].argmax())}
        else:
            assert_follows(
                tokens[:, kind : kind + 1], next_law(toy.table[ANCHOR].numpy(), [ANCHOR], rules)
            )


@pytest.mark.parametrize("limit", [0, 1])
def test_a_lower_limit_keeps_the_law(limit: int) -> None:
    toy = Toy(VOCAB, DRAFTS, noise=0.5, seed=3, fast=True)
    batch, sampler = Batch(make_requests(SAMPLES, temperature=1.0), VOCAB), toy.sampler(seed=1)
    limits = torch.full((SAMPLES,), limit, dtype=torch.int32)
    decision = toy.round(sampler, batch, toy.prefill(sampler, batch, ANCHOR), limit=limits)
    assert int(decision.accepted.max()) == limit
    first = decision.tokens.view(SAMPLES, -1)[:, :1].numpy()
    assert_follows(first, next_law(toy.table[ANCHOR].numpy(), [ANCHOR], {}))
