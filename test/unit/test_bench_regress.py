"""The regression gate on engines whose times are known, noise included."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from longspark_sglang.bench import command, regress, rounds, workloads
from longspark_sglang.bench.options import BenchError

PHASES = {"proposal": 4.0, "sampling": 0.6, "verify": 20.0, "accept": 0.3, "update": 0.3}
PLAIN_ROUND = 12.0
ACCEPTED = [90, 80, 70, 60, 50, 40, 30]


class NoisyEngine:
    """An engine on a busy machine: every round is a little slower, some are much slower.

    Args:
        seed: of the noise. machine: factor of everything. slowdown: factor of single phases.
        accepted: of 100 blocks, how many had each slot accepted.
    """

    def __init__(
        self,
        seed: int,
        *,
        plain: bool = False,
        machine: float = 1.0,
        slowdown: dict[str, float] | None = None,
        accepted: list[int] = ACCEPTED,
        state: int = 52992,
    ) -> None:
        self.draw = random.Random(seed)
        self.plain, self.machine, self.slowdown = plain, machine, slowdown or {}
        self.accepted, self.state = accepted, state
        self.info = {"dtype": "float32", "device": "cpu"}

    def ask(self, name: str, **arguments: Any) -> dict[str, Any]:
        if name == "rounds":
            return {"rounds": [self._round() for _ in range(arguments["count"])]}
        if name == "generate":
            return {"proposals": 100, "accepted_per_slot": self.accepted}
        assert name == "info"
        return {"longspark": {"state_bytes_per_request": self.state}}

    def stop(self) -> None:
        pass

    def _round(self) -> dict[str, float]:
        parts = {"decode": PLAIN_ROUND} if self.plain else PHASES
        taken = {}
        for phase, milliseconds in parts.items():
            factor = self.slowdown.get(phase, self.slowdown.get("all", 1.0))
            noise = 1 + abs(self.draw.gauss(0, 0.05))
            if self.draw.random() < 0.2:  # another process had the core
                noise += self.draw.random() * 3
            taken[phase] = milliseconds * self.machine * factor * noise
        taken["round"] = sum(taken.values()) + self.machine
        return taken


def engines(seed: int, machine: float = 1.0, **ours: Any) -> dict[str, NoisyEngine]:
    return {
        "LONGSPARK": NoisyEngine(seed, machine=machine, **ours),
        "plain": NoisyEngine(seed + 1000, plain=True, machine=machine),
    }


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`longspark bench regress` on given engines; the baseline is there already."""
    baseline = tmp_path / "baseline.json"
    monkeypatch.setattr(regress, "cut_prompts", lambda options: [[1, 2, 3]] * options.prompts)

    def call(machines: dict[str, NoisyEngine], *more: str) -> int:
        monkeypatch.setattr(rounds, "start_engines", lambda options, cells: machines)
        arguments = ["--model", "m", "--draft", "d", "--baseline", str(baseline)]
        return command.main(["regress", *arguments, *more])

    assert call(engines(0), "--write-baseline") == 0
    return call


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("machine", [1.0, 3.0])
def test_clean_repeats_pass_on_a_busy_and_on_a_slow_machine(run, seed: int, machine: float) -> None:
    assert run(engines(100 + seed, machine)) == 0


@pytest.mark.parametrize(
    ("slowdown", "figures"),
    [
        ({"all": 1.2}, {"tpot_over_plain", "round_over_plain", "drafting_over_plain"}),
        ({"proposal": 1.2, "sampling": 1.2}, {"drafting_over_plain"}),
        ({"update": 1.2}, {"update_over_plain"}),
        ({"verify": 1.2}, {"tpot_over_plain", "round_over_plain"}),
    ],
)
@pytest.mark.parametrize("seed", [200, 300])
def test_a_planted_slow_down_of_a_fifth_fails(
    run, tmp_path: Path, slowdown: dict[str, float], figures: set[str], seed: int
) -> None:
    assert run(engines(seed, slowdown=slowdown), "--junit", str(tmp_path / "junit.xml")) == 1
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    failed = {case.get("name") for case in suite if case.find("failure") is not None}
    assert figures <= failed
    assert suite.get("failures") == str(len(failed))


def test_a_planted_drop_of_one_slot_fails_whatever_the_speed(run, capsys) -> None:
    dropped = [90, 80, 70, 55, 50, 40, 30]
    assert run(engines(400, accepted=dropped)) == 1
    printed = capsys.readouterr().out
    assert "FAIL accept_rate_slot_4: 0.55, the baseline has 0.6" in printed
    assert printed.count("\nFAIL ") == 1
    assert run(engines(400, accepted=dropped), "--accept-tolerance", "0.06") == 0


def test_a_byte_of_state_fails(run, capsys) -> None:
    assert run(engines(500, state=52993)) == 1
    assert "FAIL state_bytes_per_request: 52993, the baseline has 52992" in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused(run, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="context=16384, this run has 8192"):
        run(engines(1), "--context", "8K")
    with pytest.raises(BenchError, match="7 draft slots and this drafter 3"):
        run(engines(1, accepted=[9, 8, 7]))
    baseline = tmp_path / "baseline.json"
    content = json.loads(baseline.read_text())
    del content["figures"]["update_over_plain"]
    baseline.write_text(json.dumps(content))
    with pytest.raises(BenchError, match="it has no update_over_plain"):
        run(engines(1))
    baseline.write_text("{}")
    with pytest.raises(BenchError, match="is no baseline of this tool"):
        run(engines(1))
    baseline.unlink()
    with pytest.raises(BenchError, match=r"there is no baseline .* --write-baseline"):
        run(engines(1))


def test_a_spike_is_measured_again(run, capsys) -> None:
    machines = engines(600)
    quiet = machines["LONGSPARK"].slowdown
    turns = {"left": 5}  # the first attempt's

    class Spiking(NoisyEngine):
        def ask(self, name: str, **arguments: Any) -> dict[str, Any]:
            if name == "rounds":
                turns["left"] -= 1
                self.slowdown = {"all": 1.5} if turns["left"] >= 0 else quiet
            return super().ask(name, **arguments)

    machines["LONGSPARK"] = Spiking(600)
    assert run(machines) == 0
    assert "attempt 2 of 3" in capsys.readouterr().err
    turns["left"] = 5
    machines["LONGSPARK"] = Spiking(600)
    assert run(machines, "--attempts", "1") == 1


def test_prompts_are_cut_from_texts(tiny_target: Path) -> None:
    options = command.parse(
        "regress", ["--model", str(tiny_target), "--draft", "d", "--baseline", "b"]
    )
    prompts = regress.cut_prompts(options)
    assert len(prompts) == options.prompts
    assert all(abs(len(ids) - options.prompt_tokens) < 10 for ids in prompts)
    assert prompts == regress.cut_prompts(options)
    assert workloads.texts([])
