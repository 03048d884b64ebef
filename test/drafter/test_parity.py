"""The plain drafter against a float64 oracle written from the text (LongSpark spec, section 3)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from longspark_sglang.drafter import (
    LongSparkDrafter,
    TargetParts,
    TargetViews,
    collect_views,
    summary_of,
)
from oracle import Oracle, OracleResult
from tiny_targets import VOCAB, make_drafter, make_target, oracle_target

CONTEXTS = (1, 2, 16, 255, 256, 257, 4096, 12000)
# (query heads, K/V heads, tied head, tapped layers); the targets have 4 layers.
SHAPES = {
    "g1": (2, 2, False, (0, 2, 3)),
    "g3-tied": (3, 1, True, (0, 1, 2)),
    "g4": (8, 2, True, (3, 0, 1)),  # order is the list's, not sorted
    "g5": (5, 1, False, (1, 2)),
}
TOLERANCE = 1e-6  # of the largest magnitude in a tensor


@dataclass
class Case:
    target: Any
    drafter: LongSparkDrafter
    views: TargetViews
    ids: torch.Tensor
    oracle: Oracle


@cache
def case(name: str) -> Case:
    heads, kv_heads, tied, taps = SHAPES[name]
    target = make_target(heads=heads, kv_heads=kv_heads, tied=tied, seed=heads)
    drafter = make_drafter(target, target_layer_ids=taps)
    generator = torch.Generator().manual_seed(heads)
    ids = torch.randint(0, VOCAB, (1, max(CONTEXTS) + 1), generator=generator)
    # One run serves all contexts: the target is causal, so a prefix's views are a slice.
    views = collect_views(target, ids[:, :-1], drafter.config)
    oracle = Oracle(drafter.state_dict(), drafter.config.to_dict(), oracle_target(target))
    return Case(target, drafter, views, ids, oracle)


def worst(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


def run_drafter(
    drafter: LongSparkDrafter, parts: TargetParts, views: TargetViews, anchor: int, committed: int
):
    """The drafter's own state and proposal at one context length."""
    dtype = drafter.summary_queries.dtype
    keys, values = (x[0, :, :committed].to(dtype) for x in (views.key, views.value))
    m, lse = summary_of(drafter.summary_queries, keys, values)
    window = drafter.config.window
    proposal = drafter.propose(
        torch.tensor([anchor]),
        views.boundary[:, committed - 1].to(dtype),
        m[None],
        keys[None, :, -window:],
        values[None, :, -window:],
        torch.tensor([min(committed, window)]),
        torch.tensor([committed]),
        parts,
    )
    return m, lse, proposal


def run_oracle(
    oracle: Oracle, views: TargetViews, anchor: int, committed: int
) -> tuple[torch.Tensor, torch.Tensor, OracleResult]:
    keys, values = views.key[0, :, :committed], views.value[0, :, :committed]
    m, lam = oracle.summary(keys, values)
    boundary = views.boundary[0, committed - 1]
    return m, lam, oracle.propose(anchor, boundary, m, keys, values, committed)


@pytest.mark.parametrize("committed", CONTEXTS)
@pytest.mark.parametrize("name", SHAPES)
def test_float32_drafter_equals_the_oracle(name: str, committed: int) -> None:
    it = case(name)
    anchor = int(it.ids[0, committed])
    parts = TargetParts.from_hf(it.target)
    m, lse, proposal = run_drafter(it.drafter, parts, it.views, anchor, committed)
    m64, lam64, wanted = run_oracle(it.oracle, it.views, anchor, committed)

    assert worst(m, m64) < TOLERANCE
    assert worst(lse, lam64) < TOLERANCE
    c = it.drafter.boundary_vector(it.views.boundary[:, committed - 1])
    assert worst(c[0], wanted.c) < TOLERANCE
    x = it.drafter.block_inputs(torch.tensor([anchor]), c, parts.embed_tokens)
    assert worst(x[0], wanted.inputs) < TOLERANCE
    assert worst(proposal.hidden[0], wanted.hidden) < TOLERANCE
    assert worst(proposal.base_logits[0], wanted.base_logits) < TOLERANCE
    assert proposal.draft_tokens[0].tolist() == wanted.draft_tokens


@pytest.mark.parametrize("committed", (1, 257, 4096))
@pytest.mark.parametrize("name", SHAPES)
def test_float64_drafter_equals_the_oracle_to_rounding(name: str, committed: int) -> None:
    """Where only rounding differs, float64 leaves no room for a small systematic error."""
    it = case(name)
    anchor = int(it.ids[0, committed])
    parts = TargetParts.from_hf(it.target)
    drafter = copy.deepcopy(it.drafter).double()
    m, lse, proposal = run_drafter(drafter, parts, it.views, anchor, committed)
    m64, lam64, wanted = run_oracle(it.oracle, it.views, anchor, committed)
    assert worst(m, m64) < 1e-13
    assert worst(lse, lam64) < 1e-13
    assert worst(proposal.hidden[0], wanted.hidden) < 1e-13
    assert worst(proposal.base_logits[0], wanted.base_logits) < 1e-13
    previous = torch.tensor([[anchor, *wanted.draft_tokens[:-1]]])
    corrected = drafter.parallel_markov_head(proposal.base_logits, previous)
    assert worst(corrected[0], wanted.corrected) < 1e-13


def test_a_batch_of_different_lengths_equals_its_requests_alone() -> None:
    """Rows of a padded window, NaN in the padding, and one position per request."""
    it = case("g4")
    parts = TargetParts.from_hf(it.target)
    lengths = (1, 16, 255, 256, 4096)
    window = it.drafter.config.window
    alone, rows = [], []
    for committed in lengths:
        anchor = int(it.ids[0, committed])
        m, _, proposal = run_drafter(it.drafter, parts, it.views, anchor, committed)
        alone.append(proposal)
        used = min(committed, window)
        padded = []
        for pool in (it.views.key, it.views.value):
            rows_of = torch.full((*pool.shape[1:2], window, *pool.shape[3:]), torch.nan)
            rows_of[:, :used] = pool[0, :, committed - used : committed]
            padded.append(rows_of)
        rows.append((anchor, it.views.boundary[0, committed - 1], m, *padded, used, committed))
    anchors, boundary, m, key, value, used, positions = zip(*rows, strict=True)
    batch = it.drafter.propose(
        torch.tensor(anchors),
        torch.stack(boundary),
        torch.stack(m),
        torch.stack(key),
        torch.stack(value),
        torch.tensor(used),
        torch.tensor(positions),
        parts,
    )
    for i, proposal in enumerate(alone):
        assert worst(batch.hidden[i], proposal.hidden[0].double()) < TOLERANCE
        assert batch.draft_tokens[i].tolist() == proposal.draft_tokens[0].tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_bfloat16_drafter_stays_near_the_oracle(name: str) -> None:
    """The dtype of the release: same tensors in both, so the distance is rounding alone."""
    it = case(name)
    committed = 300
    anchor = int(it.ids[0, committed])
    drafter = copy.deepcopy(it.drafter).bfloat16()
    oracle = Oracle(drafter.state_dict(), drafter.config.to_dict(), oracle_target(it.target))
    _, _, proposal = run_drafter(
        drafter, TargetParts.from_hf(it.target), it.views, anchor, committed
    )
    assert proposal.base_logits.dtype == torch.bfloat16
    _, _, wanted = run_oracle(oracle, it.views, anchor, committed)
    assert worst(proposal.hidden[0], wanted.hidden) < 0.03
    assert worst(proposal.base_logits[0], wanted.base_logits) < 0.03
    assert worst(proposal.hidden[0], wanted.hidden) > 1e-4  # it did compute in bfloat16


def test_every_view_reaches_the_proposal() -> None:
    """A parity test would pass on a drafter and an oracle that both ignore an input."""
    it = case("g1")
    committed = 300
    parts = TargetParts.from_hf(it.target)
    window = it.drafter.config.window
    keys, values = it.views.key[0, :, :committed], it.views.value[0, :, :committed]
    m, _ = summary_of(it.drafter.summary_queries, keys, values)
    arguments = {
        "anchor": torch.tensor([5]),
        "boundary": it.views.boundary[:, committed - 1],
        "summary_value": m[None],
        "window_key": keys[None, :, -window:],
        "window_value": values[None, :, -window:],
        "window_lens": torch.tensor([window]),
        "positions": torch.tensor([committed]),
    }
    base = it.drafter.propose(**arguments, target=parts).hidden
    for name, argument in arguments.items():
        for layer in range(it.drafter.config.num_layers):
            changed = argument.clone()
            per_layer = argument.dim() > 1
            (changed[:, layer] if per_layer else changed).sub_(1)
            other = it.drafter.propose(**{**arguments, name: changed}, target=parts).hidden
            assert (other - base).abs().max() > 1e-4, (name, layer)
            if not per_layer:
                break
