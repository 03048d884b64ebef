"""The regression gate: is this build slower, or its drafter less accepted, than a baseline file?

    longspark bench regress --model M --draft D --baseline FILE --write-baseline
    longspark bench regress --model M --draft D --baseline FILE --max-slowdown 1.10

Times are compared as ratios to plain decoding in the same run, so that a slow machine is no
regression. The two engines take turns, each turn counts by its quicker rounds (what a busy machine
adds, it adds to single rounds), and the median of all turns decides; a run that looks slow is
repeated before it fails. Greedy acceptance and state bytes repeat exactly, so they get no such
grace. Baselines are for one kind of machine: write your own.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol
from xml.etree import ElementTree

from longspark_sglang.bench import rounds, workloads
from longspark_sglang.bench.options import (
    BenchError,
    add_model_options,
    name_of_size,
    settings,
    size,
)
from longspark_sglang.bench.record import Lines, data_hash, fingerprint, say
from longspark_sglang.bench.tables import table

FORMAT = 1
# Figures of time, all relative to a plain decoding round of the same context in the same run.
TIMES = {
    "tpot_over_plain": "time per token, long context",
    "round_over_plain": "whole round, long context",
    "drafting_over_plain": "proposal + sampling, long context",
    "update_over_plain": "summary update, long context",
}
# Rounds of a turn that count: those up to this share of the quickest.
QUICK_SHARE = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `longspark bench regress`."""
    add_model_options(parser)
    parser.add_argument(
        "--baseline", required=True, metavar="FILE", help="JSON of --write-baseline"
    )
    parser.add_argument("--write-baseline", action="store_true", help="measure and write it")
    parser.add_argument("--max-slowdown", type=float, default=1.10, help="of each ratio")
    parser.add_argument(
        "--accept-tolerance", type=float, default=0.02, help="drop of a slot's rate to forgive"
    )
    parser.add_argument("--context", type=size, default="16K", help="the long context (synthetic)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of one turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each engine")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall",
        help="cpu: time that the engine used on its cores, for a CPU that other jobs share; "
        "it does not see what only waits",
    )  # fmt: skip
    parser.add_argument("--attempts", type=int, default=3, help="measurements before it is slow")
    parser.add_argument("--prompts", type=int, default=4, help="real prompts, for acceptance")
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--text", action="append", default=[], help="as for `context`")
    parser.add_argument("--junit", metavar="FILE", help="JUnit XML of the checks")
    # What `rounds` wants to know.
    parser.set_defaults(no_plain=False, temperature=0.0)
    parser.add_argument("--output", metavar="FILE", help="JSON lines")


class Asked(Protocol):
    """What is needed of an engine."""

    def ask(self, name: str, **arguments: Any) -> dict[str, Any]:
        """See `engine.Engine.ask`."""


# -- measuring -------------------------------------------------------------------------------------


def quick(values: Sequence[float]) -> float:
    """Mean of the quickest rounds."""
    ordered = sorted(values)
    kept = ordered[: max(1, math.ceil(len(ordered) * QUICK_SHARE))]
    return sum(kept) / len(kept)


def measure_times(
    engines: Mapping[str, Asked], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Ratios to plain decoding, one for each turn: round, drafting and update."""
    found: dict[str, list[float]] = {name: [] for name in TIMES if name != "tpot_over_plain"}
    asked = {"context": options.context, "batch": 1, "count": options.rounds}
    for repeat in range(options.repeats):
        # Nobody is always first.
        order = sorted(engines, reverse=bool(repeat % 2))
        taken = {
            name: engines[name].ask("rounds", clock=options.clock, **asked)["rounds"]
            for name in order
        }
        plain = quick([times["round"] for times in taken["plain"]])
        ours = taken["LONGSPARK"]
        found["round_over_plain"].append(quick([times["round"] for times in ours]) / plain)
        found["drafting_over_plain"].append(quick(list(map(rounds.drafting, ours))) / plain)
        found["update_over_plain"].append(quick(list(map(rounds.updating, ours))) / plain)
    return found


def measure_acceptance(
    engine: Asked, prompts: Sequence[Sequence[int]], tokens: int
) -> dict[str, Any]:
    """Accept length, bonus included, and rate of each slot over real prompts at temperature 0."""
    answer = engine.ask("generate", prompts=[list(ids) for ids in prompts], tokens=tokens)
    proposals = answer["proposals"]
    if not proposals:
        raise BenchError("no block was proposed, so there is no acceptance to compare")
    rates = [count / proposals for count in answer["accepted_per_slot"]]
    return {"accept_rates": rates, "accept_length": 1.0 + sum(rates)}


def figures(
    engines: Mapping[str, Asked],
    prompts: Sequence[Sequence[int]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Everything that a baseline holds and the gate compares."""
    accepted = measure_acceptance(engines["LONGSPARK"], prompts, options.output_tokens)
    state = engines["LONGSPARK"].ask("info")["longspark"]["state_bytes_per_request"]
    return {
        **times_of(engines, accepted["accept_length"], options),
        **accepted,
        "state_bytes_per_request": state,
    }


def steady_figures(
    engines: Mapping[str, Asked],
    prompts: Sequence[Sequence[int]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """`figures` for a baseline: of each time the median of all attempts, so that one lucky
    measurement doesn't make every later one look slow.
    """
    found = figures(engines, prompts, options)
    attempts = [found]
    for _ in range(1, options.attempts):
        attempts.append(times_of(engines, found["accept_length"], options))
    return found | {name: median(one[name] for one in attempts) for name in TIMES}


def times_of(
    engines: Mapping[str, Asked], accept_length: float, options: argparse.Namespace
) -> dict[str, float]:
    """The figures of `TIMES`: medians over all turns."""
    turns = measure_times(engines, options)
    found = {name: median(values) for name, values in turns.items()}
    found["tpot_over_plain"] = found["round_over_plain"] / accept_length
    return {name: found[name] for name in TIMES}


# -- comparing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: of the figure. baseline, now: its two values. limit: what `now` may reach.
        passed: whether it is within the limit.
        is_time: another measurement may differ.
    """

    name: str
    baseline: float
    now: float
    limit: float
    passed: bool
    is_time: bool

    @property
    def text(self) -> str:
        """What is wrong, for a log."""
        change = self.now / self.baseline if self.baseline else float("nan")
        return (
            f"{self.name}: {self.now:.6g}, the baseline has {self.baseline:.6g} "
            f"({change:.3f}x), the limit is {self.limit:.6g}"
        )


def compare(
    baseline: Mapping[str, Any], now: Mapping[str, Any], max_slowdown: float, tolerance: float
) -> list[Check]:
    """Every check of a run against a baseline.

    Raises BenchError where the two cannot be compared.
    """
    checks = []
    for name in TIMES:
        limit = baseline[name] * max_slowdown
        checks.append(Check(name, baseline[name], now[name], limit, now[name] <= limit, True))
    old, new = baseline["accept_rates"], now["accept_rates"]
    if len(old) != len(new):
        raise BenchError(
            f"the baseline has {len(old)} draft slots and this drafter {len(new)}: write a new one"
        )
    for slot, (was, rate) in enumerate(zip(old, new, strict=True), 1):
        floor = was - tolerance
        checks.append(Check(f"accept_rate_slot_{slot}", was, rate, floor, rate >= floor, False))
    was, is_now = (side["state_bytes_per_request"] for side in (baseline, now))
    checks.append(Check("state_bytes_per_request", was, is_now, was, was == is_now, False))
    return checks


def gate(
    baseline: Mapping[str, Any],
    engines: Mapping[str, Asked],
    prompts: Sequence[Sequence[int]],
    options: argparse.Namespace,
) -> tuple[list[Check], dict[str, Any]]:
    """The checks and the figures they are of; times that look slow are measured again."""
    now = figures(engines, prompts, options)

    def judge() -> list[Check]:
        return compare(baseline, now, options.max_slowdown, options.accept_tolerance)

    checks = judge()
    for attempt in range(1, options.attempts):
        slow = [check for check in checks if check.is_time and not check.passed]
        if not slow:
            break
        say(f"attempt {attempt + 1} of {options.attempts}, because of {slow[0].text}")
        again = times_of(engines, now["accept_length"], options)
        now |= {name: min(now[name], again[name]) for name in TIMES}
        checks = judge()
    return checks, now


def diff(checks: Sequence[Check]) -> str:
    """The table of a run against its baseline."""
    rows = [
        [
            "ok" if check.passed else "FAIL",
            check.name,
            f"{check.baseline:.5g}",
            f"{check.now:.5g}",
            f"{check.now / check.baseline:.3f}x" if check.baseline else "-",
            f"{check.limit:.5g}",
        ]
        for check in checks
    ]
    return table(["", "figure", "baseline", "now", "change", "limit"], rows)


def junit(checks: Sequence[Check]) -> str:
    """The checks as JUnit XML, one test case each."""
    failed = sum(not check.passed for check in checks)
    suite = ElementTree.Element(
        "testsuite",
        {"name": "longspark bench regress", "tests": str(len(checks)), "failures": str(failed)},
    )
    for check in checks:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": "longspark.regress", "name": check.name}
        )
        if not check.passed:
            ElementTree.SubElement(case, "failure", {"message": check.text}).text = check.text
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


# -- files -----------------------------------------------------------------------------------------


def read_baseline(path: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a baseline file.

    BenchError lists what it lacks, or how it was measured otherwise than `wanted`.
    """
    file = Path(path)
    if not file.is_file():
        raise BenchError(f"there is no baseline {path}; make one with --write-baseline")
    try:
        content = json.loads(file.read_text())
        figures_, measured = dict(content["figures"]), dict(content["measured"])
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path} is no baseline of this tool: {error!r}") from error
    names = [*TIMES, "accept_rates", "accept_length", "state_bytes_per_request"]
    problems = [f"it has no {name}" for name in names if name not in figures_]
    if content.get("format") != FORMAT:
        problems.append(f"its format is {content.get('format')}, not {FORMAT}")
    problems += [
        f"it was measured with {key}={measured.get(key)!r}, this run has {value!r}"
        for key, value in wanted.items()
        if measured.get(key) != value
    ]
    if problems:
        raise BenchError(
            f"{path} does not fit: {'; '.join(problems)}. Write a new one with --write-baseline"
        )
    return figures_


def measured_with(options: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The settings that a baseline and a run must share."""
    return {
        "context": options.context,
        "clock": options.clock,
        "output_tokens": options.output_tokens,
        "prompts_sha256": data_hash(prompts),
        "target": (fingerprint(options.model) or {}).get("sha256", options.model),
    }


def cut_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Token ids of the real prompts."""
    tokenizer = workloads.load_tokenizer(options.model)
    texts = workloads.long_prompts(
        tokenizer, workloads.texts(options.text), options.prompt_tokens, options.prompts
    )
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """`longspark bench regress`: 0 where nothing regressed, 1 where something did."""
    prompts = cut_prompts(options)
    wanted = measured_with(options, prompts)
    baseline = None if options.write_baseline else read_baseline(options.baseline, wanted)
    longest = max(len(ids) for ids in prompts) + options.output_tokens
    cells = [(options.context, 1), (longest, options.prompts)]
    with Lines(options.output, command) as lines:
        lines.add({"kind": "settings", **settings(options), "measured": wanted})
        engines = rounds.start_engines(options, cells)
        try:
            if baseline is None:
                now = steady_figures(engines, prompts, options)
                write_baseline(options.baseline, now, wanted, lines.rows[0])
                print(f"{options.baseline}: {json.dumps(now)}")
                return 0
            checks, now = gate(baseline, engines, prompts, options)
        finally:
            rounds.stop(engines)
        lines.add({"kind": "regress", "figures": now, "checks": [vars(check) for check in checks]})
    print(f"context {name_of_size(options.context)}, ratios to plain decoding in this run\n")
    print(diff(checks))
    if options.junit:
        Path(options.junit).parent.mkdir(parents=True, exist_ok=True)
        Path(options.junit).write_text(junit(checks))
    failed = [check for check in checks if not check.passed]
    for check in failed:
        print(f"\nFAIL {check.text}")
    print("\nFAILED" if failed else "\npassed")
    return 1 if failed else 0


def write_baseline(
    path: str, now: Mapping[str, Any], wanted: Mapping[str, Any], environment: Mapping[str, Any]
) -> None:
    """Write a baseline file: figures, how they were measured, and on what."""
    kept = {key: environment[key] for key in ("time", "commit", "modified", "versions", "hardware")}
    content = {"format": FORMAT, "figures": dict(now), "measured": dict(wanted), "made": kept}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=2) + "\n")
