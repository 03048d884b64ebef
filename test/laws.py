"""Exact laws of the first tokens of a text, and checks of samples against them.

The rules are written here once more, from what SGLang documents, in float64 numpy: nothing is
shared with the sampler under test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

EOS = 1  # of the toy target and of the tiny pairs

# What a request asks for; T 0.3 to 2, every filter, all penalties.
RULES: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 0.3},
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 2.0},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "penalties": {
        "temperature": 1.0,
        "frequency_penalty": 1.2,
        "presence_penalty": 0.6,
        "repetition_penalty": 1.4,
    },
}


def next_law(logits: np.ndarray, history: Sequence[int], rules: dict[str, Any]) -> np.ndarray:
    """Probabilities [V] of the next token from raw logits [V]; history: tokens generated so far."""
    logits = logits.astype(np.float64)
    count = np.bincount(np.asarray(history, dtype=np.int64), minlength=len(logits))
    logits = logits - rules.get("frequency_penalty", 0.0) * count
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
    keep = np.arange(len(logits)) < rules.get("top_k", len(logits))
    keep &= np.cumsum(ranked) - ranked <= rules.get("top_p", 1.0)
    keep &= ranked >= rules.get("min_p", 0.0) * ranked[0]
    law = np.zeros(len(logits))
    law[order] = np.where(keep, ranked, 0.0)
    return law / law.sum()


def three_token_law(
    logits_after: Callable[[tuple[int, ...]], np.ndarray],
    rules: dict[str, Any],
    history: tuple[int, ...] = (),
) -> np.ndarray:
    """[V, V, V] probabilities of the next three tokens.

    logits_after(tokens) are the raw logits [V] after those tokens, which follow `history`, the
    tokens generated before.
    """
    first = next_law(logits_after(()), history, rules)
    law = np.zeros((len(first),) * 3)
    for a in np.flatnonzero(first):
        second = next_law(logits_after((a,)), (*history, a), rules)
        for b in np.flatnonzero(second):
            third = next_law(logits_after((a, b)), (*history, a, b), rules)
            law[a, b] = first[a] * second[b] * third
    return law


def assert_possible(tokens: np.ndarray, law: np.ndarray) -> None:
    """No row of tokens [n, d] has probability 0 in their joint law."""
    assert law[tuple(tokens.T)].min() > 0, "a token of probability 0 was emitted"


def assert_follows(tokens: np.ndarray, law: np.ndarray) -> None:
    """Tokens [n, d] against their joint law over d axes.

    Chi-square at p > 0.001 for the first token, the first two, and so on, and for each one alone
    (one cell holds what is expected less than 5 times); nothing impossible; total variation within
    what sampling explains.
    """
    assert_possible(tokens, law)
    axes = range(law.ndim)
    for kept in sorted({tuple(range(n + 1)) for n in axes} | {(axis,) for axis in axes}):
        marginal = law.sum(tuple(axis for axis in axes if axis not in kept)).ravel()
        cells = np.ravel_multi_index(tuple(tokens[:, kept].T), (law.shape[0],) * len(kept))
        counts = np.bincount(cells, minlength=marginal.size)
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
