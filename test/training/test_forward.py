"""Training's forward pass is serving's, and its gradients are right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from longspark_sglang.drafter import summary_of
from longspark_sglang.training import forward
from longspark_sglang.training.anchors import labels_of
from longspark_sglang.training.config import TrainingError, check_views
from longspark_sglang.training.forward import (
    base_logits_at,
    corrected_logits,
    prefix_summaries,
    target_logits_at,
)
from longspark_sglang.training.losses import slot_losses
from pairs import FIFTY, PairCache
from training_cases import Case, make_case

ANCHORS = torch.tensor([1, 5, 6, 11, 20])


@pytest.fixture(scope="module")
def case(fifty_target: Path) -> Case:
    return make_case(fifty_target)


def test_prefix_summaries_are_the_summaries_of_the_prefixes(case: Case) -> None:
    queries = case.drafter.summary_queries
    found = prefix_summaries(queries, case.views.key, case.views.value, ANCHORS)
    for a, anchor in enumerate(ANCHORS.tolist()):
        wanted, _ = summary_of(queries, case.views.key[:, :anchor], case.views.value[:, :anchor])
        assert torch.allclose(found[a], wanted, atol=1e-12)


@pytest.mark.parametrize("chunk", [3, 512])
def test_their_gradient_by_autograd_and_by_finite_differences(
    case: Case, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "CHUNK_ROWS", chunk)
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(1, 4, 2, 4, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, 1, 14, 2, 4, generator=generator, dtype=torch.float64) * 2
    anchors = torch.tensor([1, 4, 4, 13])
    queries.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q: prefix_summaries(q, keys, values, anchors), (queries,)
    )
    weights = torch.randn(4, 1, 4, 2, 4, generator=generator, dtype=torch.float64)
    (found,) = torch.autograd.grad(
        (prefix_summaries(queries, keys, values, anchors) * weights).sum(), queries
    )
    plain = torch.stack([summary_of(queries, keys[:, :p], values[:, :p])[0] for p in anchors])
    (wanted,) = torch.autograd.grad((plain * weights).sum(), queries)
    assert torch.allclose(found, wanted, atol=1e-12)


def test_large_scores_give_finite_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    queries = (torch.randn(1, 2, 3, 8, generator=generator) * 60).requires_grad_()
    keys, values = torch.randn(2, 1, 40, 1, 8, generator=generator) * 5
    prefix_summaries(queries, keys, values, torch.tensor([1, 9, 40])).sum().backward()
    assert queries.grad is not None and torch.isfinite(queries.grad).all()


@pytest.mark.parametrize("anchors", [[0, 3], [5, 3], [3, 25]])
def test_impossible_anchors_are_refused(case: Case, anchors: list[int]) -> None:
    with pytest.raises(ValueError, match="anchor"):
        prefix_summaries(
            case.drafter.summary_queries, case.views.key, case.views.value, torch.tensor(anchors)
        )


LLAMA = {
    **FIFTY,
    "architecture": "llama",
    "tied": True,
    "heads": 3,
    "hidden": 96,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("recipe", [FIFTY, LLAMA], ids=["qwen3", "llama-tied-g3-yarn"])
def test_logits_are_those_of_a_proposal(
    pair_cache: PairCache, recipe: dict[str, Any], dtype: torch.dtype
) -> None:
    """Teacher-forced training at an anchor = `propose` on the views that serving has there."""
    case = make_case(pair_cache.target(**recipe), dtype=dtype)
    config, views = case.drafter.config, case.views
    with torch.no_grad():
        summary = prefix_summaries(case.drafter.summary_queries, views.key, views.value, ANCHORS)
        found = base_logits_at(case.drafter, views, case.ids, ANCHORS, summary, case.parts)
    for a, anchor in enumerate(ANCHORS.tolist()):
        first = max(0, anchor - config.window)
        state, _ = summary_of(
            case.drafter.summary_queries, views.key[:, :anchor], views.value[:, :anchor]
        )
        proposal = case.drafter.propose(
            case.ids[anchor][None],
            views.boundary[anchor - 1][None],
            state.detach()[None],
            views.key[:, first:anchor][None],
            views.value[:, first:anchor][None],
            torch.tensor([anchor - first]),
            torch.tensor([anchor]),
            case.parts,
        )
        tolerance = 1e-10 if dtype == torch.float64 else 2e-5
        assert torch.allclose(found[a], proposal.base_logits[0], atol=tolerance)
        # Where the drafts are taken as the known tokens, the corrected logits choose them again.
        prev = torch.cat((case.ids[anchor][None], proposal.draft_tokens[0, :-1]))
        chosen = corrected_logits(case.drafter, found[a][None], prev[None]).argmax(-1)
        assert torch.equal(chosen[0], proposal.draft_tokens[0])


@pytest.mark.parametrize("without", [(), ("window",), ("summary",)])
def test_windows_are_shared_or_copied_with_one_result(
    case: Case, without: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anchors that see different parts of the sequence, with their gradients."""
    assert int(ANCHORS.max()) > 2 * case.drafter.config.window  # so windows differ in both ends
    found = []
    for limit in (forward.SHARED_WINDOWS, -1):
        monkeypatch.setattr(forward, "SHARED_WINDOWS", limit)
        summary = prefix_summaries(
            case.drafter.summary_queries, case.views.key, case.views.value, ANCHORS
        )
        logits = base_logits_at(
            case.drafter, case.views, case.ids, ANCHORS, summary, case.parts, without
        )
        parameters = [p for n, p in case.drafter.named_parameters() if "markov" not in n]
        slopes = torch.autograd.grad(logits.square().sum(), parameters, materialize_grads=True)
        found.append([logits, *slopes])
    for shared, copied in zip(*found, strict=True):
        assert torch.allclose(shared, copied, rtol=1e-9, atol=1e-9)


def test_target_logits_are_the_models(case: Case) -> None:
    with torch.no_grad():
        whole = case.model(input_ids=case.ids[None]).logits[0]
    found = target_logits_at(case.views, ANCHORS, 3, case.parts)
    for a, anchor in enumerate(ANCHORS.tolist()):
        assert torch.allclose(found[a], whole[anchor : anchor + 3], atol=1e-10)


def loss_of(case: Case) -> torch.Tensor:
    response = torch.ones(len(case.ids), dtype=torch.bool)
    labels, prev, valid = labels_of(case.ids, response, ANCHORS, 3)
    summary = prefix_summaries(
        case.drafter.summary_queries, case.views.key, case.views.value, ANCHORS
    )
    base = base_logits_at(case.drafter, case.views, case.ids, ANCHORS, summary, case.parts)
    losses = slot_losses(
        {"ce": 0.5, "kl": 0.5},
        corrected_logits(case.drafter, base, prev),
        target_logits_at(case.views, ANCHORS, 3, case.parts),
        labels,
    )
    return losses[valid].mean()


def test_gradients_of_every_part_by_finite_differences(case: Case) -> None:
    """Of the whole loss in float64; for the queries that is both roles at once."""
    parameters = dict(case.drafter.named_parameters())
    gradients = torch.autograd.grad(loss_of(case), list(parameters.values()))
    generator = torch.Generator().manual_seed(4)
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        assert gradient.abs().max() > 0, name
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        direction /= direction.norm()
        with torch.no_grad():
            step = 1e-5
            parameter.add_(direction * step)
            above = loss_of(case)
            parameter.sub_(direction * 2 * step)
            below = loss_of(case)
            parameter.add_(direction * step)
        measured = (above - below) / (2 * step)
        assert torch.allclose((gradient * direction).sum(), measured, rtol=1e-5, atol=1e-9), name


def test_queries_learn_through_both_roles(case: Case) -> None:
    """Writing the summary and reading it each give a gradient, and together they give the whole."""
    views, queries = case.views, case.drafter.summary_queries

    def gradient(write: bool, read: bool) -> torch.Tensor:
        writer = queries if write else queries.detach()
        summary = prefix_summaries(writer, views.key, views.value, ANCHORS)
        if not write:
            summary = summary.detach()
        queries.requires_grad_(read or write)
        base = base_logits_at(case.drafter, views, case.ids, ANCHORS, summary, case.parts)
        inputs = summary if write and not read else queries
        (found,) = torch.autograd.grad(base.square().mean(), inputs, retain_graph=True)
        if write and not read:
            (found,) = torch.autograd.grad(summary, queries, found)
        return found

    written, read, both = gradient(True, False), gradient(False, True), gradient(True, True)
    assert written.abs().max() > 0 and read.abs().max() > 0
    assert torch.allclose(written + read, both, rtol=1e-8, atol=1e-14)


def test_unknown_views_are_named_at_once() -> None:
    check_views(["window", "markov"])
    with pytest.raises(TrainingError, match="use one of window") as caught:
        check_views(["windows", "heads"])
    assert len(caught.value.reasons) == 2


# Peak memory is a process's own, so each length is measured in a fresh one.
MEASURE = """
import resource, sys, torch
from longspark_sglang.training.forward import prefix_summaries
torch.set_num_threads(1)
rows = int(sys.argv[1])
queries = torch.randn(1, 8, 16, 8, requires_grad=True)
keys = torch.randn(1, rows, 1, 8)
anchors = torch.arange(1, rows, rows // 8)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prefix_summaries(queries, keys[:, :600], keys[:, :600], torch.tensor([1, 600])).sum().backward()
before = peak()
prefix_summaries(queries, keys, keys, anchors).sum().backward()
print(peak() - before)
"""


def test_memory_is_flat_in_the_length() -> None:
    def growth_kb(rows: int) -> int:
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(rows)], check=True, capture_output=True, text=True
        )
        return int(done.stdout)

    # The scores of 65,536 rows alone would take 33 MB, and autograd would keep several such.
    assert growth_kb(65536) < 12_000
