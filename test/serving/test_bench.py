"""`longspark bench` on real engines and servers: the numbers are of what really ran.

No test here looks at a clock: how fast something was is for the gate, not for a shared machine.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from longspark_sglang.bench import command, context, quality, regress, rounds
from longspark_sglang.bench.engine import Engine, EngineError
from longspark_sglang.bench.servers import RunningServer
from longspark_sglang.config import LongSparkConfig

from serving.server import ServerPool
from serving.test_identity import CHECKED, CHUNKED

FLOAT32 = 4
CELLS = [(700, 2)]
PROMPTS = [[5 + seed, *range(20 + seed, 90)] for seed in range(2)]
PLANTED = (str(Path(__file__).with_name("planted_engine.py")),)


@pytest.fixture(scope="module")
def engines(tiny_target: Path, tiny_drafter: Path) -> Iterator[dict[str, Engine]]:
    options = command.parse(
        "rounds", ["--model", str(tiny_target), "--draft", str(tiny_drafter), "--device", "cpu"]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(rounds, "Engine", lambda arguments: Engine(arguments, program=PLANTED))
        started = rounds.start_engines(options, CELLS)
    yield started
    rounds.stop(started)


def test_a_round_has_all_its_phases_and_the_state_its_bytes(
    engines: dict[str, Engine], tiny_drafter: Path
) -> None:
    options = argparse.Namespace(rounds=4, repeats=1, temperature=0.0, cold=True)
    found: rounds.Rounds = defaultdict(list)
    rounds.measure(engines, CELLS, options, found)
    lines = {line["method"]: line for line in rounds.lines_of(found, engines, options)}
    ours, plain = lines["LONGSPARK"], lines["plain"]
    assert ours["ms"].keys() == {"round", *rounds.PHASES}
    assert plain["ms"].keys() == {"round", "decode", "other"}
    assert all(value["n"] == 4 and value["min"] >= 0 for value in ours["ms"].values())
    config = LongSparkConfig.from_pretrained(tiny_drafter)
    assert ours["state_bytes"] == config.state_bytes_per_request(1, FLOAT32)
    assert "700" in rounds.summary(list(lines.values()))


def test_a_round_of_random_rows_commits_and_samples(engines: dict[str, Engine]) -> None:
    answer = engines["LONGSPARK"].ask("rounds", context=300, batch=2, count=3, temperature=1.0)
    # One token of the prefill, and at least one of each round.
    assert all(emitted >= 1 + 3 + 3 for emitted in answer["emitted"])
    again = engines["LONGSPARK"].ask("info")["longspark"]
    assert again["owned_rows"] == 0 and again["free_kv_tokens"] == again_total(engines)


def again_total(engines: dict[str, Engine]) -> int:
    return engines["LONGSPARK"].info["max_total_tokens"]


def test_both_engines_answer_alike(engines: dict[str, Engine]) -> None:
    answers = {name: e.ask("generate", prompts=PROMPTS, tokens=40) for name, e in engines.items()}
    ours, plain = answers["LONGSPARK"]["output_ids"], answers["plain"]["output_ids"]
    assert [ids[:40] for ids in ours] == [ids[:40] for ids in plain]
    assert answers["LONGSPARK"]["proposals"] > 0 and "proposals" not in answers["plain"]


def test_what_cannot_be_run_is_said_and_forgiven(engines: dict[str, Engine]) -> None:
    with pytest.raises(EngineError, match="do not fit"):
        engines["plain"].ask("rounds", context=700, batch=5, count=1)
    assert engines["plain"].ask("rounds", context=100, batch=1, count=1)["rounds"]


def test_the_gate_sees_a_wrong_slot_and_wrong_bytes(engines: dict[str, Engine]) -> None:
    options = argparse.Namespace(
        context=600, rounds=2, repeats=1, output_tokens=60, attempts=1, clock="cpu"
    )
    ours = engines["LONGSPARK"]
    baseline = regress.figures(engines, PROMPTS, options)

    def failed(**changed: Any) -> list[str]:
        now = regress.figures(engines, PROMPTS, options) | changed
        checks = regress.compare(baseline, now, max_slowdown=100.0, tolerance=0.02)
        return [check.name for check in checks if not check.passed]

    assert failed() == []
    assert failed(state_bytes_per_request=1) == ["state_bytes_per_request"]
    ours.ask("plant", slot=3)
    try:
        # The slots before it may move too: the rounds fall differently now.
        assert {f"accept_rate_slot_{slot}" for slot in range(3, 8)} <= set(failed())
    finally:
        ours.ask("plant")
    assert failed() == []


class PoolFleet:
    """Servers that the tests share, as a Fleet."""

    alternates_freely = True

    def __init__(self, servers: dict[str, RunningServer]) -> None:
        self.arguments: dict[str, list[str]] = {name: [] for name in servers}
        self.get = servers.__getitem__


def test_context_and_quality_measure_what_ran(
    servers: ServerPool, tiny_target: Path, tiny_drafter: Path, capsys
) -> None:
    ours = servers.get(tiny_target, tiny_drafter, extra_args=CHUNKED, env=CHECKED)
    plain = servers.get(tiny_target, extra_args=CHUNKED)
    fleet = PoolFleet(
        {
            "plain": RunningServer("plain", plain.url),
            "LONGSPARK": RunningServer("LONGSPARK", ours.url),
        }
    )
    arguments = ["--model", str(tiny_target), "--output-tokens", "24", "--contexts", "200"]
    options = command.parse("context", arguments)
    options.prompts = 2
    prompts = {200: ["a story of " * 60, "another story with " * 40]}
    found, infos = context.measure(fleet, prompts, options)
    line = context.line_of("LONGSPARK", 200, found["LONGSPARK", 200], infos["LONGSPARK"], None)
    assert line["tpot_ms"]["n"] == 2 and line["over_plain"] is None
    assert line["verify_rounds"] > 0 and line["accept_length"]["median"] > 1
    assert line["drafter_state_bytes"] > 0 and line["speculative_algorithm"] == "LONGSPARK"
    assert line["prompt_tokens"]["n"] == 2 and line["prompt_tokens"]["min"] > 100
    assert "LONGSPARK" in context.summary([line])

    asked = argparse.Namespace(concurrency=2, output_tokens=30, temperature=0.0)
    figures = quality.figures(quality.ask(fleet.get("LONGSPARK"), prompts[200], asked))
    assert figures["accept_length"] == pytest.approx(1 + sum(figures["accepted_per_slot"]))
    capsys.readouterr()
