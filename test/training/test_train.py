"""Training runs: they learn, resume, share work, and export what serving reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from longspark_sglang import checkpoint, cli
from longspark_sglang.config import ConfigError, LongSparkConfig
from longspark_sglang.drafter import LongSparkDrafter, TargetParts, collect_views, summary_of
from longspark_sglang.training.config import TrainingConfig, TrainingError
from longspark_sglang.training.data import PackedData, PackedSequence
from longspark_sglang.training.features import Features, bytes_per_token
from longspark_sglang.training.forward import SequenceViews, prefix_summaries
from longspark_sglang.training.train import (
    Crew,
    Trainer,
    epoch_order,
    make_optimizers,
    sequence_loss,
)
from longspark_sglang.training.train_command import main
from longspark_sglang.training.vocabulary import TrainVocabulary
from training_cases import load_target, make_case, pack_answers, small_config, target_answers

SHAPE = ["--layers", "2", "--draft-tokens", "3", "--summary-slots", "4", "--window", "8"]
SHAPE += ["--markov-rank", "8", "--intermediate-size", "48"]
SHORT = ["--steps", "6", "--sequences-per-step", "4", "--anchors-per-sequence", "8"]
SHORT += ["--anchors-per-group", "5", "--learning-rate", "3e-3", "--eval-sequences", "4"]


@pytest.fixture(scope="session")
def packed(fifty_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 greedy answers of 30 tokens."""
    answers = target_answers(load_target(fifty_target, torch.float32), 40, 30)
    return pack_answers(tmp_path_factory.mktemp("data"), answers)


def arguments(target: Path, data: Path, output: Path, *more: str) -> list[str]:
    folders = ["--target", str(target), "--data", str(data), "--output", str(output)]
    return [*folders, *SHAPE, *SHORT, *more]


def curve(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "curve.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def whole(fifty_target: Path, packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps without a break."""
    output = tmp_path_factory.mktemp("whole") / "out"
    assert main(arguments(fifty_target, packed, output)) == 0
    return output


def same_state(one: Path, two: Path) -> bool:
    first, second = (torch.load(p / "state.pt", weights_only=True) for p in (one, two))
    assert first["step"] == second["step"]
    return all(
        torch.equal(first["drafter"][name], second["drafter"][name]) for name in first["drafter"]
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_is_the_same_bit_for_bit(
    fifty_target: Path, packed: Path, whole: Path, tmp_path: Path, optimizer: str
) -> None:
    more = ["--optimizer", optimizer]
    straight = whole
    if optimizer != "adamw":
        straight = tmp_path / "straight"
        assert main(arguments(fifty_target, packed, straight, *more)) == 0
    broken = tmp_path / "broken"
    assert main(arguments(fifty_target, packed, broken, *more, "--stop-at", "2")) == 0
    with (broken / "curve.jsonl").open("a") as file:  # a step after the save, then a crash
        file.write('{"step": 3, "loss": 9.0}\n{"step": 4, "lo')
    assert main(arguments(fifty_target, packed, broken, *more, "--resume")) == 0
    assert same_state(broken, straight)
    assert [r["loss"] for r in curve(broken)] == [r["loss"] for r in curve(straight)]


def test_a_run_is_not_resumed_with_other_settings(
    fifty_target: Path, packed: Path, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match="other settings") as caught:
        main(arguments(fifty_target, packed, whole, "--resume", "--seed", "3", "--gamma", "2"))
    assert sorted(reason.split()[0] for reason in caught.value.reasons) == ["gamma", "seed"]
    with pytest.raises(TrainingError, match="the drafter's block_size was 3 and is now 5"):
        main(arguments(fifty_target, packed, whole, "--resume", "--draft-tokens", "5"))
    with pytest.raises(TrainingError, match="holds a training already"):
        main(arguments(fifty_target, packed, whole))
    with pytest.raises(TrainingError, match="cannot be resumed"):
        main(arguments(fifty_target, packed, tmp_path / "none", "--resume"))


def test_two_processes_give_the_curve_of_one(
    fifty_target: Path, packed: Path, whole: Path, tmp_path: Path
) -> None:
    output = tmp_path / "two"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["-m", "longspark_sglang.cli", "train"]
    done = subprocess.run(
        [*command, *arguments(fifty_target, packed, output)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("step 6/6") == 1
    found, wanted = ([r["loss"] for r in curve(path)] for path in (output, whole))
    assert len(found) == 6
    assert torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=2e-4)


def test_uneven_shares_and_too_few_data_are_refused(fifty_target: Path, packed: Path) -> None:
    case = make_case(fifty_target)
    with pytest.raises(TrainingError) as caught:
        Trainer(
            case.drafter,
            Features(case.model, case.drafter.config),
            case.parts,
            PackedData.load(packed),
            TrainingConfig(sequences_per_step=999),
            Path(),
            Crew(0, 2),
        )
    assert len(caught.value.reasons) == 2


@pytest.mark.parametrize("checkpointing", [True, False])
def test_grouping_and_checkpointing_do_not_change_the_gradient(
    fifty_target: Path, checkpointing: bool
) -> None:
    case = make_case(fifty_target)
    sequence = PackedSequence(case.ids, 4, 64)
    anchors = torch.tensor([5, 6, 9, 14, 20])

    def gradient(**settings: Any) -> list[torch.Tensor]:
        config = TrainingConfig(**settings)
        loss = sequence_loss(case.drafter, case.views, sequence, anchors, case.parts, config)
        return list(torch.autograd.grad(loss, list(case.drafter.parameters())))

    plain = gradient(anchors_per_group=99, checkpointing=False)
    grouped = gradient(anchors_per_group=2, checkpointing=checkpointing)
    for one, other in zip(plain, grouped, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_training_learns_and_autocast_trains_too(
    fifty_target: Path, packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    more = ["--steps", "40", "--autocast", "--learning-rate", "1e-2", "--cache"]
    more += [str(tmp_path / "cache"), "--eval-every", "20"]
    assert main(arguments(fifty_target, packed, output, *more)) == 0
    records = curve(output)
    assert records[-1]["loss"] < 0.9 * records[0]["loss"]
    assert records[-1]["accept_length"] > 1.3  # untrained, nearly all drafts are wrong: 1.03
    assert len(records[-1]["per_slot"]) == 3
    printed = capsys.readouterr().out
    assert "bytes per token" in printed and "step 40/40, loss" in printed and "tok/s" in printed


def test_a_view_taken_away_gets_no_gradient(fifty_target: Path) -> None:
    case = make_case(fifty_target)
    sequence = PackedSequence(case.ids, 4, 64)
    parts = {"boundary": "draft_state_encoder", "markov": "markov_w2", "summary": "learned_query"}
    for view, part in parts.items():
        case.drafter.zero_grad()
        config = TrainingConfig(without=(view,))
        anchors = torch.tensor([5, 9])
        sequence_loss(case.drafter, case.views, sequence, anchors, case.parts, config).backward()
        for name, parameter in case.drafter.named_parameters():
            has_gradient = parameter.grad is not None and bool(parameter.grad.any())
            unused = part in name or (view == "markov" and "markov" in name)
            assert has_gradient != unused, (view, name)


def test_what_is_exported_proposes_as_in_training(fifty_target: Path, whole: Path) -> None:
    """Read back from the released format, the drafter's proposals are the trained module's."""
    state = torch.load(whole / "state.pt", weights_only=True)["drafter"]
    config = LongSparkConfig.from_pretrained(whole)
    trained = LongSparkDrafter(config)
    # The export is bfloat16: so is the module that it is compared with.
    trained.load_state_dict({name: x.bfloat16().float() for name, x in state.items()})
    exported = LongSparkDrafter.from_pretrained(whole, dtype=torch.float32)
    assert checkpoint.expected_tensors(config).keys() == exported.state_dict().keys()
    model = load_target(fifty_target, torch.float32)
    ids = torch.tensor(target_answers(model, 1, 20)[0])
    views = SequenceViews.of(collect_views(model, ids[None], config))
    anchors = torch.tensor([4, 9, 17])
    summaries = prefix_summaries(trained.summary_queries, views.key, views.value, anchors)
    parts = TargetParts.from_hf(model)
    for anchor, summary in zip(anchors.tolist(), summaries.detach(), strict=True):
        begin = max(0, anchor - config.window)
        common = (views.key[None, :, begin:anchor], views.value[None, :, begin:anchor])
        rest = (torch.tensor([anchor - begin]), torch.tensor([anchor]), parts)
        start = (ids[anchor][None], views.boundary[anchor - 1][None])
        scanned = summary_of(
            exported.summary_queries, views.key[:, :anchor], views.value[:, :anchor]
        )[0].detach()
        mine = trained.propose(*start, summary[None], *common, *rest)
        theirs = exported.propose(*start, scanned[None], *common, *rest)
        assert torch.equal(mine.draft_tokens, theirs.draft_tokens)
        assert torch.allclose(mine.base_logits, theirs.base_logits, atol=1e-5)


def test_settings_are_saved_beside_the_weights(whole: Path, packed: Path) -> None:
    config = TrainingConfig.load(whole)
    assert config.steps == 6 and config.loss == "0.1*ce+0.9*l1" and config.gamma == 4
    assert config.facts["data_manifest"] == PackedData.load(packed).manifest_hash


def test_a_training_continues_from_an_exported_drafter(
    fifty_target: Path, packed: Path, whole: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    more = ["--init", str(whole), "--steps", "1", "--learning-rate", "1e-12"]
    assert main(arguments(fifty_target, packed, output, *more)) == 0
    for name, tensor in checkpoint.load_state(
        output, LongSparkConfig.from_pretrained(whole)
    ).items():
        before = LongSparkDrafter.from_pretrained(whole).state_dict()[name]
        assert torch.equal(tensor, before), name


def test_all_bad_settings_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingConfig(steps=0, loss="mse", optimizer="sgd", schedule="x", warmup=2, without=("a",))
    assert len(caught.value.reasons) == 6
    with pytest.raises(ConfigError, match="train_vocabulary"):
        TrainingConfig(train_vocabulary=-1)


def test_a_vocabulary_of_all_tokens_changes_nothing_and_a_smaller_one_masks(
    fifty_target: Path,
) -> None:
    case = make_case(fifty_target)
    sequence = PackedSequence(case.ids, 4, 64)
    anchors = torch.tensor([5, 9, 14])
    config = TrainingConfig(loss="0.5*ce+0.5*tv")
    size = case.drafter.config.vocab_size

    def gradient(known: TrainVocabulary | None) -> tuple[float, list[torch.Tensor]]:
        target = case.parts if known is None else known.parts(case.parts)
        loss = sequence_loss(
            case.drafter, case.views, sequence, anchors, target, config, vocabulary=known
        )
        return loss.item(), list(torch.autograd.grad(loss, list(case.drafter.parameters())))

    everything = TrainVocabulary(torch.arange(size), torch.arange(size), 1.0)
    loss, slopes = gradient(None)
    same, same_slopes = gradient(everything)
    assert same == pytest.approx(loss, rel=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(slopes, same_slopes, strict=True))

    known = TrainVocabulary.most_frequent([sequence], 6, size)
    assert len(known.tokens) == 6 and 0 < known.coverage < 1
    assert (known.tokens.diff() > 0).all() and known.place[known.tokens].tolist() == list(range(6))
    counts = torch.bincount(case.ids[4:], minlength=size)
    assert counts[known.tokens].min() >= counts[known.place < 0].max()
    less, less_slopes = gradient(known)
    assert less < loss  # fewer tokens to be told apart
    names = [name for name, _ in case.drafter.named_parameters()]
    rows = less_slopes[names.index("parallel_markov_head.markov_w2.weight")].abs().sum(1) > 0
    assert rows.nonzero().flatten().tolist() == known.tokens.tolist()


def test_training_with_a_reduced_vocabulary_exports_the_whole_one(
    fifty_target: Path, packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    more = ["--train-vocabulary", "20", "--steps", "30", "--learning-rate", "1e-2"]
    assert main(arguments(fifty_target, packed, output, *more)) == 0
    assert "losses over 20 of" in capsys.readouterr().out
    records = curve(output)
    assert records[-1]["loss"] < 0.9 * records[0]["loss"]
    config = LongSparkConfig.from_pretrained(output)
    state = checkpoint.load_state(output, config)
    assert len(state["parallel_markov_head.markov_w2.weight"]) == config.vocab_size
    assert TrainingConfig.load(output).train_vocabulary == 20


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedules(schedule: str) -> None:
    config = TrainingConfig(steps=100, warmup=0.1, floor=0.1, schedule=schedule)
    rates = [config.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1
    assert all(a < b for a, b in pairwise(rates[:10]))
    if schedule == "constant":
        assert set(rates[10:]) == {1.0}
    else:
        assert all(a > b for a, b in pairwise(rates[10:]))
        assert 0.1 < rates[-1] < 0.12


def test_an_epoch_visits_buckets_together_and_everything_once() -> None:
    sequences = [PackedSequence(torch.zeros(4), 1, 64 if i % 3 else 128) for i in range(30)]
    order = epoch_order(sequences, 4, seed=0, epoch=0)
    visited = [i for step in order for i in step]
    assert len(order) == 7 and len(set(visited)) == 28
    mixed = [step for step in order if len({sequences[i].bucket for i in step}) > 1]
    assert len(mixed) <= 1
    assert order != epoch_order(sequences, 4, seed=0, epoch=1)
    assert len(epoch_order(sequences, 4, seed=0, epoch=1)) == len(order)


def test_muon_takes_the_maps_and_leaves_the_tables(fifty_target: Path) -> None:
    drafter = LongSparkDrafter(small_config(load_target(fifty_target).config))
    muon, adam = make_optimizers(drafter, TrainingConfig(optimizer="muon"))
    in_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    names = {n for n, p in drafter.named_parameters() if id(p) in in_muon}
    assert all("_proj" in name or "proj.net" in name for name in names)
    count = sum(len(g["params"]) for o in (muon, adam) for g in o.param_groups)
    assert count == len(list(drafter.parameters()))


def test_features_are_computed_once_and_cost_what_is_said(
    fifty_target: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_target(fifty_target, torch.float32)
    config = small_config(model.config)
    features = Features(model, config, tmp_path / "cache")
    sequence = PackedData.load(packed).sequences["train"][0]
    each = bytes_per_token(config, 4)
    total = each * len(sequence.ids)
    assert f"{total:,} bytes to be written" in features.announce([sequence])
    first = features.of(sequence.ids)
    (file,) = (tmp_path / "cache").iterdir()
    assert total <= file.stat().st_size < total + 1000
    monkeypatch.setattr(features, "_compute", lambda ids: pytest.fail("computed again"))
    again = features.of(sequence.ids)
    for name, tensor in vars(first).items():
        assert torch.equal(tensor, getattr(again, name))
    assert "0 bytes to be written" in features.announce([sequence])
    # Other taps must not find it.
    other = Features(model, small_config(model.config, target_layer_ids=[0, 1]), features.cache)
    assert f"{total:,} bytes to be written" in other.announce([sequence])
    file.write_bytes(b"damaged")
    with pytest.raises(TrainingError, match="cache is damaged"):
        features.of(sequence.ids)


def test_a_cache_that_does_not_fit_is_refused_before_it_is_begun(
    fifty_target: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_target(fifty_target, torch.float32)
    features = Features(model, small_config(model.config), tmp_path / "cache")
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(TrainingError, match="does not fit"):
        features.announce(PackedData.load(packed).sequences["train"])


def test_a_target_that_is_not_there_is_told(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *arguments(tmp_path / "none", packed, tmp_path / "out")]) == 1
    assert "no target at" in capsys.readouterr().err


def test_a_target_without_mask_token_is_told(
    fifty_target: Path, packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    shutil.copytree(fifty_target, target)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (target / name).exists():
            content = json.loads((target / name).read_text())
            content.pop("mask_token", None)
            (target / name).write_text(json.dumps(content))
    assert cli.main(["train", *arguments(target, packed, tmp_path / "out")]) == 1
    assert "--mask-token-id" in capsys.readouterr().err
