"""Which anchors are chosen, and exactly what each of them sees."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from longspark_sglang.training.anchors import (
    choose_anchors,
    labels_of,
    possible_anchors,
    window_rows,
)
from longspark_sglang.training.forward import SequenceViews, base_logits_at, prefix_summaries
from training_cases import Case, make_case


def bools(text: str) -> torch.Tensor:
    return torch.tensor([letter == "r" for letter in text], dtype=torch.bool)


@pytest.mark.parametrize(
    ("response", "wanted"),
    [("pprrrr", [2, 3, 4]), ("rrr", [1]), ("prpprr", [4]), ("pppp", []), ("r", []), ("", [])],
)
def test_possible_anchors(response: str, wanted: list[int]) -> None:
    """The anchor and its first label are the target's own, and a row precedes the anchor."""
    assert possible_anchors(bools(response)).tolist() == wanted


def test_chosen_anchors_are_distinct_seeded_and_spread() -> None:
    response = bools("p" * 10 + "r" * 90)
    possible = possible_anchors(response)
    counts = torch.zeros(100)
    for seed in range(300):
        drawn = choose_anchors(response, 20, torch.Generator().manual_seed(seed))
        again = choose_anchors(response, 20, torch.Generator().manual_seed(seed))
        assert torch.equal(drawn, again)
        assert len(drawn) == 20 and (drawn.diff() > 0).all()
        counts[drawn] += 1
    assert (counts[possible] > 0).all() and counts.sum() == counts[possible].sum()
    everything = choose_anchors(response, 1000, torch.Generator().manual_seed(0))
    assert torch.equal(everything, possible)


def test_labels_by_a_plain_loop() -> None:
    response = bools("pprrrprrr")
    ids = torch.arange(9) * 10
    anchors = torch.tensor([2, 3, 6, 7])
    labels, prev, valid = labels_of(ids, response, anchors, slots=3)
    for a, anchor in enumerate(anchors.tolist()):
        good = True
        for j in range(3):
            at = anchor + 1 + j
            good = good and at < 9 and bool(response[at])
            assert bool(valid[a, j]) == good
            if good:
                assert labels[a, j] == ids[at] and prev[a, j] == ids[at - 1]


def test_window_rows_by_a_plain_loop() -> None:
    anchors = torch.tensor([1, 3, 7, 8, 9, 20])
    rows, lens = window_rows(anchors, window=8)
    for a, anchor in enumerate(anchors.tolist()):
        wanted = list(range(max(0, anchor - 8), anchor))
        assert rows[a, : lens[a]].tolist() == wanted
        assert rows[a, lens[a] :].tolist() == [0] * (8 - len(wanted))


@pytest.fixture(scope="module")
def case(fifty_target: Path) -> Case:
    return make_case(fifty_target)


@pytest.mark.parametrize(
    "without",
    [("summary", "boundary"), ("window", "boundary"), ("window", "summary"), ()],
    ids=["window", "summary", "boundary", "all"],
)
def test_each_anchor_depends_on_exactly_its_rows(case: Case, without: tuple[str, ...]) -> None:
    """Against a mask made by a plain loop: disturb one row of the target at a time and look."""
    anchors = torch.tensor([1, 2, 7, 8, 9, 15, 20])
    window, total = case.drafter.config.window, len(case.ids)

    def logits(views: SequenceViews) -> torch.Tensor:
        with torch.no_grad():
            summary = prefix_summaries(
                case.drafter.summary_queries, views.key, views.value, anchors
            )
            return base_logits_at(
                case.drafter, views, case.ids, anchors, summary, case.parts, without
            )

    untouched = logits(case.views)
    for row in range(total):
        disturbed = {}
        for name, dim in (("boundary", 0), ("key", 1), ("value", 1)):
            tensor = getattr(case.views, name).clone()
            tensor.select(dim, row).add_(1.0)
            disturbed[name] = tensor
        changed = logits(dataclasses.replace(case.views, **disturbed)) != untouched
        for a, anchor in enumerate(anchors.tolist()):
            seen = {
                "window": anchor - window <= row < anchor,
                "summary": row < anchor,
                "boundary": row == anchor - 1,
            }
            wanted = any(seen[name] for name in seen if name not in without)
            assert bool(changed[a].any()) == wanted, f"anchor {anchor}, row {row}"
            if wanted:  # the block is bidirectional: every slot sees what one slot sees
                assert changed[a].any(dim=-1).all()


def test_an_anchor_depends_on_no_other_anchor(case: Case) -> None:
    def at(anchors: list[int]) -> torch.Tensor:
        places = torch.tensor(anchors)
        with torch.no_grad():
            summary = prefix_summaries(
                case.drafter.summary_queries, case.views.key, case.views.value, places
            )
            return base_logits_at(case.drafter, case.views, case.ids, places, summary, case.parts)

    together = at([3, 4, 5, 20])
    for index, anchor in enumerate((3, 4, 5, 20)):
        assert torch.allclose(at([anchor])[0], together[index], atol=1e-10)
