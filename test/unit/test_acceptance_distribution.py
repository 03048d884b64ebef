"""The law of what is emitted, against an exact enumeration (user case 8).

20,000 requests with the same parameters decode in one batch until each has three tokens. The law of
three tokens is enumerated in float64 numpy from the rules as SGLang documents them, sharing no code
with the sampler.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from toy_serving import EOS, Batch, Toy, make_request, make_requests

VOCAB, DRAFTS, ANCHOR, SAMPLES = 50, 3, 7, 20_000


def next_law(row: np.ndarray, history: list[int], rules: dict[str, Any]) -> np.ndarray:
    """Probabilities [V] of the next token; row: raw logits [V], history: generated tokens."""
    logits = row.astype(np.float64).copy()
    count = np.bincount(history, minlength=VOCAB)
    logits -= rules.get("frequency_penalty", 0.0) * count
    logits -= rules.get("presence_penalty", 0.0) * (count > 0)
    factor = np.where(count > 0, rules.get("repetition_penalty", 1.0), 1.0)
    logits = np.where(logits < 0, logits * factor, logits / factor)
    if len(history) < rules.get("min_new_tokens", 0):
        logits[[EOS, *rules.get("stop_token_ids", [])]] = -np.inf
    for token, bias in rules.get("logit_bias", {}).items():
        logits[int(token)] += bias
    logits = logits / rules.get("temperature", 1.0)
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")
    ranked = weights[order]
    keep = np.arange(VOCAB) < rules.get("top_k", VOCAB)
    keep &= np.cumsum(ranked) - ranked <= rules.get("top_p", 1.0)
    keep &= ranked >= rules.get("min_p", 0.0) * ranked[0]
    law = np.zeros(VOCAB)
    law[order] = np.where(keep, ranked, 0.0)
    return law / law.sum()


def three_token_law(table: np.ndarray, rules: dict[str, Any]) -> np.ndarray:
    """[V, V, V] probabilities of the three tokens after the anchor (itself a generated token)."""
    law = np.zeros((VOCAB,) * 3)
    first = next_law(table[ANCHOR], [ANCHOR], rules)
    for a in np.flatnonzero(first):
        second = next_law(table[a], [ANCHOR, a], rules)
        for b in np.flatnonzero(second):
            law[a, b] = first[a] * second[b] * next_law(table[b], [ANCHOR, a, b], rules)
    return law


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


def assert_follows(tokens: np.ndarray, law: np.ndarray) -> None:
    """Tokens [n, d] against their joint law over d axes.

    Chi-square at p > 0.001 for the first token, the first two, and so on, and for each one alone
    (one cell holds what is expected less than 5 times); nothing impossible; total variation within
    what sampling explains.
    """
    axes = range(law.ndim)
    for kept in {tuple(range(n)) for n in range(1, law.ndim + 1)} | {(axis,) for axis in axes}:
        marginal = law.sum(tuple(axis for axis in axes if axis not in kept)).ravel()
        cells = np.ravel_multi_index(tuple(tokens[:, kept].T), (law.shape[0],) * len(kept))
        counts = np.bincount(cells, minlength=marginal.size)
        assert counts[marginal == 0].sum() == 0, "a token of probability 0 was emitted"
        p_value = chi_square(counts, marginal * len(tokens))
        assert p_value > 0.001, f"chi-square of tokens {kept}: p = {p_value}"

    counts = np.bincount(np.ravel_multi_index(tuple(tokens.T), law.shape), minlength=law.size)
    draws = np.random.default_rng(0).multinomial(len(tokens), law.ravel() / law.sum(), size=20)
    null = np.abs(draws / len(tokens) - law.ravel()).sum(1) / 2
    distance = np.abs(counts / len(tokens) - law.ravel()).sum() / 2
    assert distance < null.mean() + 5 * null.std(), f"TV {distance}, by chance {null.mean()}"


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """p value, cells expected less than 5 times taken together."""
    often = expected >= 5
    observed, wanted = counts[often], expected[often]
    if expected[~often].sum() >= 5:
        observed = np.append(observed, counts[~often].sum())
        wanted = np.append(wanted, expected[~often].sum())
    if len(wanted) < 2:
        return 1.0
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


RULES: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 0.3},
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 2.0},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "filters": {"temperature": 1.3, "top_k": 8, "top_p": 0.8, "min_p": 0.05},
    "penalties": {
        "temperature": 1.0,
        "frequency_penalty": 1.2,
        "presence_penalty": 0.6,
        "repetition_penalty": 1.4,
    },
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


@pytest.mark.parametrize(("drafter", "name"), itertools.product(DRAFTERS, RULES))
def test_three_token_law(drafter: str, name: str) -> None:
    toy = Toy(VOCAB, DRAFTS, noise=DRAFTERS[drafter], seed=1, fast=True)
    tokens, accepted = sample(toy, RULES[name], seed=11)
    assert accepted > 0.4 if drafter == "good" else accepted < 0.3
    assert_follows(tokens, three_token_law(toy.table.numpy(), RULES[name]))


def test_the_check_notices_a_wrong_law() -> None:
    """Samples of a slightly different law fail the check that the others pass."""
    toy = Toy(VOCAB, DRAFTS, noise=0.2, seed=1, fast=True)
    tokens, _ = sample(toy, {"temperature": 1.0}, seed=11)
    for wrong in ({"temperature": 1.1}, {"logit_bias": {"20": 0.3}}, {"frequency_penalty": 0.5}):
        with pytest.raises(AssertionError, match="chi-square"):
            assert_follows(tokens, three_token_law(toy.table.numpy(), wrong))
    with pytest.raises(AssertionError, match="probability 0"):
        assert_follows(
            tokens, three_token_law(toy.table.numpy(), {"temperature": 1.0, "top_k": 45})
        )


def test_neighbours_do_not_change_a_law() -> None:
    """One batch holds every kind of request; each kind follows its own law."""
    toy = Toy(VOCAB, DRAFTS, noise=0.5, seed=2)
    kinds = [*RULES.values(), {"temperature": 0.0}]
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
