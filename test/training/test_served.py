"""From a live server's answers to a trained drafter, and back into a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from longspark_sglang import cli
from longspark_sglang.drafter import LongSparkDrafter, TargetParts
from longspark_sglang.training.data import PackedData
from longspark_sglang.training.evaluate import accept_chances, replay
from longspark_sglang.training.features import Features
from serving.server import Server
from training_cases import load_target, pack_answers, target_answers

WORDS = ("tea", "rain", "a list", "numbers", "the sea", "stone")


@pytest.mark.server
def test_a_trained_drafter_serves_as_it_was_trained_and_evaluated(
    tiny_target: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    """Each answer takes the server as many rounds as the offline replay says.

    The replay is training's own forward pass, so a difference between what was trained and what is
    served moves a count. The answers come through `regenerate` and `pack`.
    """
    model = load_target(tiny_target, torch.float32)
    first = pack_answers(tmp_path / "first", target_answers(model, 12, 16))
    trained = tmp_path / "trained"
    arguments = ["--target", str(tiny_target), "--data", str(first), "--output", str(trained)]
    arguments += ["--init", str(tiny_drafter), "--steps", "3", "--sequences-per-step", "4"]
    arguments += ["--anchors-per-sequence", "8", "--learning-rate", "1e-3", "--dtype", "float32"]
    assert cli.main(["train", *arguments, "--device", "cpu"]) == 0
    drafter = LongSparkDrafter.from_pretrained(trained, dtype=torch.float32)
    before = LongSparkDrafter.from_pretrained(tiny_drafter, dtype=torch.float32).state_dict()
    # In float32: the export's rounding hides small steps.
    after = torch.load(trained / "state.pt", weights_only=True)["drafter"]
    assert not [name for name in before if torch.equal(before[name], after[name])]

    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers"
    prompts.write_text("".join(json.dumps({"prompt": f"write of {w}"}) + "\n" for w in WORDS))
    with Server(tiny_target, trained) as server:
        arguments = ["--prompts", str(prompts), "--url", server.url, "--target", str(tiny_target)]
        arguments += ["--output", str(answers), "--max-new-tokens", "48"]
        assert cli.main(["data", "regenerate", *arguments]) == 0
    arguments = ["--answers", str(answers), "--output", str(tmp_path / "packed")]
    assert cli.main(["data", "pack", *arguments, "--held-out", "0"]) == 0

    (file,) = answers.glob("*.jsonl")
    served = {
        tuple(record["prompt_ids"] + record["output_ids"]): record["rounds"]
        for record in map(json.loads, file.read_text().splitlines())
    }
    assert len(served) == len(WORDS)
    parts, features = TargetParts.from_hf(model), Features(model, drafter.config)
    tokens = 0
    for sequence in PackedData.load(tmp_path / "packed").sequences["train"]:
        views = features.of(sequence.ids)
        chances = accept_chances(drafter, views, sequence, parts, 0.0)
        found = replay(*chances, last=len(sequence.ids) - 1)
        assert found.rounds == served[tuple(sequence.ids.tolist())]
        tokens += found.tokens
    assert tokens > 1.3 * sum(served.values())  # many drafts were accepted
