"""`longspark eval` against rounds that are really played."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from longspark_sglang.config import LongSparkError
from longspark_sglang.drafter import LongSparkDrafter, TargetParts, summary_of
from longspark_sglang.training.data import PackedSequence
from longspark_sglang.training.eval_command import main
from longspark_sglang.training.evaluate import (
    Replay,
    Summary,
    accept_chances,
    draw_chart,
    replay,
)
from longspark_sglang.training.features import Features
from longspark_sglang.training.forward import SequenceViews
from training_cases import load_target, pack_answers, target_answers


def draft_at(
    drafter: LongSparkDrafter,
    views: SequenceViews,
    ids: torch.Tensor,
    anchor: int,
    parts: TargetParts,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[int]:
    begin = max(0, anchor - drafter.config.window)
    state, _ = summary_of(drafter.summary_queries, views.key[:, :anchor], views.value[:, :anchor])
    proposal = drafter.propose(
        ids[anchor][None],
        views.boundary[anchor - 1][None],
        state.detach()[None],
        views.key[None, :, begin:anchor],
        views.value[None, :, begin:anchor],
        torch.tensor([anchor - begin]),
        torch.tensor([anchor]),
        parts,
        torch.tensor([temperature]),
        generator,
    )
    return proposal.draft_tokens[0].tolist()


@pytest.fixture(scope="module")
def pair(tiny_target: Path, tiny_drafter: Path) -> tuple:
    model = load_target(tiny_target, torch.float32)
    drafter = LongSparkDrafter.from_pretrained(tiny_drafter, dtype=torch.float32)
    return model, drafter, TargetParts.from_hf(model), Features(model, drafter.config)


def test_at_temperature_0_the_rounds_are_those_of_serving(pair: tuple) -> None:
    """Greedy answers: play propose, compare, commit round by round and count."""
    model, drafter, parts, features = pair
    rounds_seen = set()
    for answer in target_answers(model, 3, 40):
        ids = torch.tensor(answer)
        views = features.of(ids)
        anchor, rounds, last = 4, 0, len(ids) - 1
        accepted_at = torch.zeros(drafter.config.num_draft_tokens, dtype=torch.float64)
        while anchor < last:
            drafts = draft_at(drafter, views, ids, anchor, parts)
            count = 0
            while anchor + count < last and count < len(drafts):
                if drafts[count] != ids[anchor + 1 + count]:
                    break
                accepted_at[count] += 1
                count += 1
            anchor, rounds = anchor + count + 1, rounds + 1
        sequence = PackedSequence(ids, 4, 64)
        found = replay(*accept_chances(drafter, views, sequence, parts, 0.0), last=last)
        assert found.rounds == rounds and found.tokens == last - 4
        assert torch.equal(found.accepted, accepted_at)
        rounds_seen.add(rounds)
    assert min(rounds_seen) < 39  # something was accepted


def test_the_chances_at_temperature_1_are_those_of_sampling(pair: tuple) -> None:
    """A slot's chance given its token, times the token's probability, is min(p, q): enumerated."""
    model, drafter, parts, features = pair
    (answer,) = target_answers(model, 1, 6, temperature=1.0)
    vocabulary = model.config.vocab_size
    ids = torch.tensor(answer)
    views = features.of(ids)
    anchor = len(ids) - 2  # its one label is the last token: put every token there
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits
    law_p = logits[0, anchor].double().softmax(-1)
    chances = torch.zeros(vocabulary, dtype=torch.float64)
    tried = range(4, vocabulary, 97)
    for token in tried:
        changed = ids.clone()
        changed[-1] = token
        sequence = PackedSequence(changed, anchor, 64)
        anchors, found = accept_chances(drafter, views, sequence, parts, 1.0)
        assert anchors.tolist() == [anchor] and not found[0, 1:].any()
        chances[token] = found[0, 0]
    generator = torch.Generator().manual_seed(0)
    assert draft_at(drafter, views, ids, anchor, parts, 1.0, generator)
    begin = max(0, anchor - drafter.config.window)
    state, _ = summary_of(drafter.summary_queries, views.key[:, :anchor], views.value[:, :anchor])
    base = drafter.propose(
        ids[anchor][None],
        views.boundary[anchor - 1][None],
        state.detach()[None],
        views.key[None, :, begin:anchor],
        views.value[None, :, begin:anchor],
        torch.tensor([anchor - begin]),
        torch.tensor([anchor]),
        parts,
    ).base_logits[0, 0]
    with torch.no_grad():
        law_q = drafter.parallel_markov_head(base, ids[anchor]).double().softmax(-1)
    for token in tried:
        wanted = min(law_p[token].item(), law_q[token].item())
        assert math.isclose(chances[token] * law_p[token], wanted, rel_tol=1e-3, abs_tol=1e-12)


def test_expected_rounds_by_simulation() -> None:
    """The chain's exact expectations, against many plays with a coin per slot."""
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(12, 3, generator=generator, dtype=torch.float64)
    for i, left in ((10, 2), (11, 1)):  # slots beyond the end
        chances[i, left:] = 0
    found = replay(torch.arange(5, 17), chances, last=17)
    plays = 4000
    rounds, accepted, reached = 0, torch.zeros(3), torch.zeros(3)
    for _ in range(plays):
        at = 0
        while at < 12:
            rounds += 1
            coins = torch.rand(3, generator=generator)
            count = 0
            for slot in range(min(3, 12 - at)):
                reached[slot] += 1
                if coins[slot] >= chances[at, slot]:
                    break
                accepted[slot] += 1
                count += 1
            at += count + 1
    assert found.tokens == 12
    assert abs(rounds / plays - found.rounds) < 0.06
    assert torch.allclose(accepted.double() / plays, found.accepted, atol=0.08)
    assert torch.allclose(reached.double() / plays, found.reached, atol=0.08)


@pytest.mark.parametrize(("chance", "length"), [(0.0, 1.0), (1.0, 4.0)])
def test_extremes(chance: float, length: float) -> None:
    chances = torch.full((12, 3), chance, dtype=torch.float64)
    chances[10, 2:] = chances[11, 1:] = 0
    found = Summary.of([replay(torch.arange(5, 17), chances, last=17)] * 3)
    assert found.accept_length == length == found.low == found.high


def test_the_interval_contains_the_figure_and_narrows() -> None:
    generator = torch.Generator().manual_seed(1)

    def summary(count: int) -> Summary:
        ones = torch.ones(2, dtype=torch.float64)
        rounds = 5 + 5 * torch.rand(count, generator=generator)
        return Summary.of([Replay(20, r.item(), ones, ones / 2) for r in rounds])

    few, many = summary(5), summary(500)
    assert few.low < few.accept_length < few.high
    assert many.high - many.low < 0.3 * (few.high - few.low)
    assert many.per_slot == [0.5, 0.5]


def test_answers_too_short_are_no_figure() -> None:
    chances = torch.zeros(0, 3, dtype=torch.float64)
    empty = replay(torch.zeros(0, dtype=torch.int64), chances, last=4)
    with pytest.raises(LongSparkError, match="nothing to evaluate"):
        Summary.of([empty])


def test_the_command_prints_each_temperature_and_ablation(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_target(tiny_target, torch.float32)
    packed = pack_answers(tmp_path, target_answers(model, 12, 24))
    table = tmp_path / "table.json"
    arguments = ["--target", str(tiny_target), "--draft", str(tiny_drafter), "--data", str(packed)]
    arguments += ["--without", "markov", "--without", "summary", "--split", "train"]
    arguments += ["--limit", "3", "--device", "cpu", "--dtype", "float32", "--json", str(table)]
    chart = tmp_path / "chart.svg"
    assert main([*arguments, "--chart", str(chart)]) == 0
    rows = json.loads(table.read_text())
    shown = [(row["temperature"], row["without"], row["law_of_serving"]) for row in rows]
    views = ([], ["markov"], ["summary"])
    assert shown == [(t, view, t == 0.0) for t in (0.0, 1.0) for view in views]
    lengths = {(row["temperature"], *row["without"]): row["accept_length"] for row in rows}
    # This pair's acceptance comes from the Markov matrices (see pairs.py).
    assert lengths[0.0,] > lengths[0.0, "markov"] + 0.3
    assert all(1 <= length <= 8 for length in lengths.values())
    printed = capsys.readouterr().out
    assert f"{lengths[0.0,]:.3f}" in printed and "answers drawn at T = [0.0]" in printed
    drawn = chart.read_text()
    assert drawn.count("<!-- T = 1, without markov -->") == 1 and "<!-- packed -->" in drawn
    with pytest.raises(LongSparkError, match=r"name a \.png or \.svg"):
        draw_chart(rows, tmp_path / "chart.spark")


def test_an_unknown_view_is_refused(tmp_path: Path) -> None:
    folders = ["--target", str(tmp_path), "--draft", str(tmp_path), "--data", str(tmp_path)]
    with pytest.raises(LongSparkError, match="use one of window"):
        main([*folders, "--without", "heads"])
