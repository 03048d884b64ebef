"""`longspark bench` without a server: arithmetic, files, prompts, plots, options."""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shlex
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from longspark_sglang.bench import (
    breakeven,
    command,
    concurrency,
    context,
    engine,
    memory,
    phases,
    plots,
    presets,
    quality,
    record,
    rounds,
    servers,
    workloads,
)
from longspark_sglang.bench.options import BenchError, name_of_size, size, sizes
from longspark_sglang.bench.phases import EVICTION, PhaseClock
from longspark_sglang.bench.serving_client import Request, steady_window
from longspark_sglang.client import Answer

# -- options ---------------------------------------------------------------------------------------


def test_sizes_as_people_write_them() -> None:
    assert sizes("512,1K,128k,1M") == [512, 1024, 131072, 1 << 20]
    assert [name_of_size(n) for n in (512, 1024, 131072, 1 << 20)] == ["512", "1K", "128K", "1M"]
    for bad in ("", "0", "-1", "1G", "1.5K"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
            size(bad)


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_every_value_of_every_preset_is_an_option(preset: str) -> None:
    needed = {
        "rounds": ["--draft", "d"],
        "regress": ["--draft", "d", "--baseline", "b"],
        "quality": ["--data", "d"],
    }
    for measurement, values in presets.PRESETS[preset].items():
        arguments = ["--model", "m", "--preset", preset, *needed.get(measurement, [])]
        plain = command.parse(measurement, [a for a in arguments if a not in ("--preset", preset)])
        options = command.parse(measurement, arguments)
        assert values.keys() <= vars(plain).keys()
        for name, value in values.items():
            given = getattr(options, name)
            assert given == value or isinstance(value, str)  # a string went through its parser
            assert not isinstance(given, str) or name == "clock"


def test_the_command_line_wins_over_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "m", "--preset", "cpu-small", "--contexts", "2K"]
    assert command.parse("context", arguments).contexts == [2048]
    with pytest.raises(SystemExit):
        command.parse("rounds", ["--model", "m", "--draft", "d", "--preset", "paper-short"])
    assert "preset paper-short has nothing for rounds" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.parse("memory", ["--model", "m", "--report", "folder"])
    assert "--report is made of the lines of --output" in capsys.readouterr().err


# -- files -----------------------------------------------------------------------------------------


def test_lines_describe_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPARK_CHECK", "3")
    with record.Lines(tmp_path / "new" / "lines.jsonl", ["rounds", "--model", "m"]) as lines:
        lines.add({"kind": "rounds", "value": 1})
    first, second = record.read_lines([tmp_path / "new" / "lines.jsonl"])
    assert first["command"] == ["longspark", "bench", "rounds", "--model", "m"]
    assert {"sglang", "torch", "longspark-sglang", "python"} <= first["versions"].keys()
    assert first["hardware"]["cores"] >= 1 and first["hardware"]["gpu_count"] >= 0
    assert first["variables"]["LONGSPARK_CHECK"] == "3"
    assert "commit" in first and "modified" in first
    assert second == {"kind": "rounds", "value": 1}


def test_lines_that_are_none_are_named(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": 1}\n\nnonsense\n')
    with pytest.raises(ValueError, match=r"lines\.jsonl, line 3 is no JSON"):
        record.read_lines([file])
    file.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1 is no JSON object"):
        record.read_lines([file])


def test_fingerprints_and_hashes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = record.fingerprint(tmp_path)
    assert first is not None and first["name"] == tmp_path.name
    (tmp_path / "config.json").write_text("[]")
    assert record.fingerprint(tmp_path) != first
    assert record.fingerprint("Qwen/Qwen3-8B") == {"name": "Qwen/Qwen3-8B"}
    assert record.fingerprint(None) is None
    assert record.data_hash(["a", "b"]) != record.data_hash(["ab"])


def test_spread() -> None:
    assert record.spread([3.0, 1.0, 2.0, 10.0]) == {"median": 2.5, "min": 1.0, "max": 10.0, "n": 4}
    with pytest.raises(ValueError, match="nothing was measured"):
        record.spread([])


# -- phases ----------------------------------------------------------------------------------------


class Worker:
    """A worker of known times."""

    def __init__(self) -> None:
        self.drafter = SimpleNamespace(propose=self._propose, _draw=self._draw)

    def _propose(self) -> str:
        time.sleep(0.02)
        return self.drafter._draw()

    def _draw(self) -> str:
        time.sleep(0.01)
        return "drafts"


def test_a_nested_phase_is_taken_out_of_the_outer() -> None:
    clock, worker = PhaseClock("cpu"), Worker()
    clock.attach(worker, {"proposal": ("drafter", "propose"), "sampling": ("drafter", "_draw")})
    for calls in (1, 2):
        started = clock.start_round()
        for _ in range(calls):
            assert worker.drafter.propose() == "drafts"
        taken = clock.end_round(started)
        assert taken["sampling"] >= 9.9 * calls and taken["proposal"] >= 19.9 * calls
        parts = sum(value for name, value in taken.items() if name != "round")
        assert parts == pytest.approx(taken["round"])
    assert clock.end_round(clock.start_round()).keys() == {"round", "other"}


def test_what_the_measurement_adds_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 0.001, 0.031, 0.032])
    monkeypatch.setitem(phases.CLOCKS, "wall", lambda: next(seconds))
    clock, worker = PhaseClock("cpu"), SimpleNamespace(read=lambda: None)
    clock.wrap(worker, "read", EVICTION)
    started = clock.start_round()
    worker.read()
    assert clock.end_round(started) == pytest.approx({"round": 2.0, "other": 2.0})


def test_a_phase_that_is_gone_is_named() -> None:
    with pytest.raises(AttributeError, match="propose_all"):
        PhaseClock("cpu").attach(Worker(), {"proposal": ("drafter", "propose_all")})


# -- servers ---------------------------------------------------------------------------------------

METRICS = """
# HELP sglang:generation_tokens_total tokens
sglang:generation_tokens_total{model_name="m",rank="0"} 30.0
sglang:generation_tokens_total{model_name="m",rank="1"} 12.0
sglang:num_requests_total{model_name="m"} 2.0
"""


def test_accept_length_of_counters() -> None:
    totals = servers.prometheus_totals(METRICS)
    assert totals["sglang:generation_tokens_total"] == 42
    before = servers.Counters(requests=1, tokens=10, rounds=3)
    after = servers.Counters(requests=3, tokens=42, rounds=13)
    added = after.since(before)
    assert added.accept_length == (32 - 2) / 10  # a prefill emits each request's first token
    assert servers.Counters(1, 5, 0).accept_length is None


@pytest.mark.parametrize(
    ("method", "rounds_", "tokens", "complaint"),
    [
        ("LONGSPARK", 0, 9, "LONGSPARK: 0 verify rounds for 9 tokens"),
        ("plain", 3, 9, "plain: 3 verify rounds"),
        ("plain", 0, 0, "emitted nothing"),
    ],
)
def test_a_method_that_did_not_run_is_no_measurement(
    method: str, rounds_: int, tokens: int, complaint: str
) -> None:
    with pytest.raises(BenchError, match=complaint):
        servers.confirm_rounds(method, servers.Counters(1, tokens, rounds_))
    servers.confirm_rounds("plain", servers.Counters(1, 9, 0))
    servers.confirm_rounds("DSPARK", servers.Counters(1, 9, 4))


def test_server_info_must_name_the_algorithm() -> None:
    servers.confirm_algorithm("plain", {"speculative_algorithm": None})
    servers.confirm_algorithm("LONGSPARK", {"speculative_algorithm": "LONGSPARK"})
    with pytest.raises(BenchError, match="the DSPARK server runs LONGSPARK"):
        servers.confirm_algorithm("DSPARK", {"speculative_algorithm": "LONGSPARK"})
    with pytest.raises(BenchError, match="runs no speculation"):
        servers.confirm_algorithm("DSPARK", {})


def test_methods_are_those_with_a_draft() -> None:
    options = command.parse("context", ["--model", "m", "--draft", "d", "--eagle3-draft", "e"])
    found = servers.methods(options)
    assert list(found) == ["plain", "LONGSPARK", "EAGLE3"]
    assert found["plain"] == []
    assert found["EAGLE3"][:4] == [
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "e"),
    ]


def test_a_steady_window_counts_what_falls_into_it() -> None:
    def request(start: float, first: float, gap: float, tokens: int) -> Request:
        times = tuple(first + i * gap for i in range(tokens))
        return Request(start, first, times[-1], times, 10, tokens)

    # One token a second each, from 0 and from 1 on; the stretch is [2, 6).
    found = steady_window([request(0, 0, 1, 10), request(0.5, 1, 1, 9)], skip=2, length=4)
    assert found.throughput == 8 / 4
    assert found.tpot == pytest.approx(1000)
    assert request(0, 0, 1, 10).tpot == pytest.approx(1000)
    assert request(0, 0, 1, 1).tpot is None
    # Half a character shows no text, so bench_serving sees the first token late.
    assert Request(0, 3, 9, (3, 5, 7, 9), 10, 7).tpot == pytest.approx(2000)
    with pytest.raises(BenchError, match="the run lasted 9 s, the window ends after 14 s"):
        steady_window([request(0, 0, 1, 10)], skip=10, length=4)


# -- prompts ---------------------------------------------------------------------------------------


class Words:
    """A tokenizer of words."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[str]:
        return text.split()

    def decode(self, ids: list[str]) -> str:
        return " ".join(ids)


def test_long_prompts_are_distinct_and_repeat_with_the_seed() -> None:
    source = " ".join(f"w{i}" for i in range(500))
    prompts = workloads.long_prompts(Words(), [source], 100, 5)
    assert len(set(prompts)) == 5 and all(len(p.split()) == 100 for p in prompts)
    assert prompts == workloads.long_prompts(Words(), [source], 100, 5)
    assert prompts != workloads.long_prompts(Words(), [source], 100, 5, seed=1)
    with pytest.raises(BenchError, match="the texts have 500 tokens, 5 prompts of 600"):
        workloads.long_prompts(Words(), [source], 600, 5)


def test_python_itself_has_long_texts() -> None:
    assert sum(map(len, workloads.texts([]))) > 500_000
    with pytest.raises(BenchError, match="no such text: nowhere"):
        workloads.texts(["nowhere"])


LAYOUTS: list[tuple[dict[str, Any], str]] = [
    ({"question": "gsm8k?", "answer": "4"}, "gsm8k?"),
    ({"problem": "math?"}, "math?"),
    ({"prompt": "def f():", "task_id": "HumanEval/0"}, "def f():"),
    ({"text": "mbpp?"}, "mbpp?"),
    ({"question_content": "lcb?"}, "lcb?"),
    ({"turns": ["first", "second"]}, "first"),
    ({"instruction": "Do", "input": "this"}, "Do\n\nthis"),
    ({"instruction": "Do", "input": ""}, "Do"),
    ({"context": "long text", "input": "What?"}, "long text\n\nWhat?"),
    ({"conversations": [{"from": "human", "value": "hi"}]}, "hi"),
]


@pytest.mark.parametrize(("layout", "expected"), LAYOUTS)
def test_layouts(layout: dict[str, Any], expected: str) -> None:
    assert workloads.prompt_of(layout) == [{"role": "user", "content": expected}]


def test_a_bad_record_is_named(tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text('{"question": "a"}\n{"nothing": 1}\n')
    assert len(workloads.read_prompts(str(file), limit=1)) == 1
    with pytest.raises(BenchError, match=r"set\.jsonl, record 2 is no prompt"):
        workloads.read_prompts(str(file))
    with pytest.raises(BenchError, match="no such data file"):
        workloads.read_prompts(str(tmp_path / "none"))
    assert quality.named_files([f"gsm8k={file}", "a/b.jsonl"]) == {
        "gsm8k": str(file),
        "b": "a/b.jsonl",
    }
    with pytest.raises(BenchError, match="two data sets are called b"):
        quality.named_files(["a/b.jsonl", "c/b.jsonl"])


def test_quality_figures_weigh_requests_by_their_rounds() -> None:
    def answer(accepted: int, count: int, histogram: list[int]) -> Answer:
        meta = {
            "spec_verify_ct": count,
            "spec_num_correct_drafts": accepted,
            "spec_correct_drafts_histogram": histogram,
        }
        return Answer(9, [1] * (accepted + count), "", meta, [])

    found = quality.figures([answer(6, 4, [1, 1, 1, 1]), answer(0, 1, [1])])
    assert found["accept_length"] == 1 + 6 / 5
    assert found["per_request"]["min"] == 1 and found["per_request"]["max"] == 2.5
    assert found["accepted_per_slot"] == [3 / 5, 2 / 5, 1 / 5]
    with pytest.raises(BenchError, match="no round was speculated"):
        quality.figures([answer(0, 0, [])])


# -- measurements ----------------------------------------------------------------------------------


def test_methods_take_turns() -> None:
    options = argparse.Namespace(repeats=2, prompts=2)
    freely = list(context.turns(["a", "b"], [1, 2], options, freely=True))
    assert freely[:4] == [("a", 1, 0), ("b", 1, 0), ("a", 1, 1), ("b", 1, 1)]
    assert freely[8:10] == [("b", 1, 0), ("a", 1, 0)]  # the other one goes first
    one_by_one = list(context.turns(["a", "b"], [1, 2], options, freely=False))
    assert sorted(freely) == sorted(one_by_one)
    names = [name for name, _, _ in one_by_one]
    assert names == ["a"] * 4 + ["b"] * 8 + ["a"] * 4  # as few restarts as turns allow


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(BenchError, match="at least 5 per length"):
        context.run(command.parse("context", ["--model", "m", "--prompts", "4"]), [])


def test_gains_are_taken_run_by_run() -> None:
    runs = {
        ("plain", 1): [{"throughput": 10.0}, {"throughput": 20.0}],
        ("LONGSPARK", 1): [{"throughput": 15.0}, {"throughput": 50.0}],
    }
    gains = concurrency.gain(runs, "plain")
    assert gains["LONGSPARK", 1] == {"median": 2.0, "min": 1.5, "max": 2.5, "n": 2}
    assert concurrency.gain(runs, "DSPARK") == {}
    assert concurrency.window("30,120") == (30, 120)
    with pytest.raises(argparse.ArgumentTypeError, match="SKIP,LENGTH"):
        concurrency.window("30")


def test_breakeven_compares_the_same_prompts() -> None:
    found = breakeven.breakeven(context.Cell(tpots=[30.0, 20.0]), context.Cell(tpots=[10.0, 10.0]))
    assert found == {"median": 2.5, "min": 2.0, "max": 3.0, "n": 2}


def test_state_of_a_request() -> None:
    ours = {"longspark": {"state_bytes_per_request": 100}}
    ours |= {"draft_pool_bytes": 0, "draft_pool_rows": 0}
    assert memory.per_request(ours, 1000) == memory.per_request(ours, 1) == 100
    assert memory.per_request({"draft_pool_bytes": 5000, "draft_pool_rows": 50}, 8) == 800


def test_cells_that_do_not_fit_are_skipped_with_a_word(capsys) -> None:
    options = argparse.Namespace(contexts=[1024, 4096], batches=[1, 8], max_rows=[8192])
    assert rounds.cells(options) == [(1024, 1), (4096, 1), (1024, 8)]
    assert "skipped: 8 x 4K rows" in capsys.readouterr().err
    engines = {"plain": SimpleNamespace(info={"max_total_tokens": 9000})}
    assert rounds.those_that_fit([(1024, 1), (1024, 8)], engines) == [(1024, 1)]
    assert "skipped: 8 x 1K rows do not fit into 9000" in capsys.readouterr().err
    with pytest.raises(BenchError, match="no cell fits into the 9000 rows"):
        rounds.those_that_fit([(8192, 1)], engines)


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("import sys; sys.exit('no such drafter')", "the engine has ended\nno such drafter"),
        ('print(\'{"error": "ValueError: too large"}\'); input()', "ValueError: too large"),
        ("input()", "no answer within 0 s"),
    ],
)
def test_an_engine_that_cannot_start_gives_its_reason(
    monkeypatch: pytest.MonkeyPatch, program: str, complaint: str
) -> None:
    monkeypatch.setattr(engine, "START_TIMEOUT", 0.0 if "within" in complaint else 60.0)
    started = engine.Engine([], program=("-c", program)).launch()
    try:
        with pytest.raises(engine.EngineError, match=complaint):
            started.wait()
    finally:
        started.stop()


def test_a_round_of_graphs_has_its_update_inside_acceptance() -> None:
    assert rounds.updating({"accept": 2.0, "update": 1.0}) == 1.0
    assert rounds.updating({"accept": 2.0}) == 2.0
    assert rounds.drafting({"proposal": 3.0}) == 3.0


# -- plots -----------------------------------------------------------------------------------------


def sample_lines() -> list[dict[str, Any]]:
    """A line of every kind, as the measurements write them."""
    value = {"median": 2.0, "min": 1.0, "max": 3.0, "n": 3}
    names = ("round", *rounds.PHASES)
    lines: list[dict[str, Any]] = [record.environment(["everything"])]
    state = {"1K": 1, "8K": 8}
    for method in ("plain", "LONGSPARK", "DSPARK"):
        accept = None if method == "plain" else value
        for n in (1024, 8192):
            lines.append(
                {
                    "kind": "context", "method": method, "context": n, "tpot_ms": value,
                    "accept_length": accept, "over_plain": 1.5, "drafter_state_bytes": 1,
                }
            )  # fmt: skip
            lines.append({"kind": "breakeven", "method": method, "context": n, "breakeven": value,
                          "round_ms": value, "plain_ms": value})  # fmt: skip
            lines.append(
                {
                    "kind": "concurrency", "method": method, "concurrency": n // 1024,
                    "throughput": value, "over_plain": value, "over_dspark": None,
                    "accept_length": accept,
                }
            )  # fmt: skip
            if method != "DSPARK":
                ms = {p: value for p in (names if method == "LONGSPARK" else ("round", "decode"))}
                lines.append(
                    {
                        "kind": "rounds", "method": method, "context": n, "batch": 1, "ms": ms,
                        "drafting_ms": value, "update_ms": value, "state_bytes": 7,
                    }
                )  # fmt: skip
        lines.append(
            {
                "kind": "memory", "method": method, "token_capacity": 9, "draft_pool_bytes": 8,
                "state_bytes": state,
            }
        )  # fmt: skip
        lines.append({"kind": "quality", "method": method, "data": "<gsm8k>", "accept_length": 2.0,
                      "per_request": value, "prompts": 3, "accepted_per_slot": [0.5]})  # fmt: skip
    return lines


def test_the_report_opens_without_a_network(tmp_path: Path) -> None:
    page = plots.write_report(sample_lines(), tmp_path / "report").read_text()
    links = re.findall(r"(?:src|href)\s*=\s*['\"]?([^'\"\s>]+)", page)
    assert links and all(link.startswith("data:image/png;base64,") for link in links)
    drawn = sorted(path.stem for path in (tmp_path / "report").glob("*.svg"))
    assert drawn == sorted(name for plots_ in plots.PLOTS.values() for name in plots_)
    assert sorted(path.stem for path in (tmp_path / "report").glob("*.png")) == drawn
    assert page.count("data:image/png;base64,") == len(drawn)
    assert "&lt;gsm8k&gt;" in page and "<gsm8k>" not in page
    assert "longspark-sglang" in page  # the environment is in it


def test_nothing_measured_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="hold no measurement"):
        plots.write_report([record.environment([])], tmp_path)
    file = tmp_path / "lines.jsonl"
    file.write_text("nonsense")
    options = command.parse("plot", [str(file), "--report", str(tmp_path)])
    with pytest.raises(BenchError, match="line 1 is no JSON"):
        plots.run(options, [])
    file.write_text("\n".join(json.dumps(line) for line in sample_lines()))
    assert command.main(["plot", str(file), "--report", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again/report.html").exists()


# -- documents -------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "docs/benchmarks.md", *sorted((ROOT / "examples/ci").glob("*.yml"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_line_of_a_document_is_one(document: Path) -> None:
    text = re.sub(r"\\\n#?", " ", document.read_text())  # a workflow's header is a comment
    lines = re.findall(r"^[#\s]*longspark bench (\w+) (.*)$", text, flags=re.MULTILINE)
    assert lines
    for measurement, arguments in lines:
        command.parse(measurement, shlex.split(arguments, comments=True))


def test_workflows_are_workflows() -> None:
    for path in DOCUMENTS[1:]:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["jobs"]["gate"]["timeout-minutes"] <= 60
        steps = " ".join(str(step.get("run")) for step in workflow["jobs"]["gate"]["steps"])
        assert "longspark bench regress" in steps and "--junit" in steps


def test_fetched_sets_become_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    import fetch_data

    (tmp_path / "a.json").write_text('[{"instruction": "x"}, {"instruction": "y"}]')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "p"}\n\n{"prompt": "q"}\n'))
    (tmp_path / "error.jsonl").write_text("<html>no such file</html>")
    urls = {name: (tmp_path / name).as_uri() for name in ("a.json", "b.jsonl.gz", "error.jsonl")}
    monkeypatch.setattr(
        fetch_data,
        "SETS",
        {"alpaca": [urls["a.json"]], "two": [urls["a.json"], urls["b.jsonl.gz"]],
         "bad": [urls["error.jsonl"]]},
    )  # fmt: skip
    assert fetch_data.fetch("alpaca", tmp_path).split(": ")[1].startswith("2 records, sha256 ")
    fetch_data.fetch("two", tmp_path)
    asked = workloads.read_prompts(str(tmp_path / "two.jsonl"))
    assert [messages[0]["content"] for messages in asked] == ["x", "y", "p", "q"]
    with pytest.raises(ValueError):
        fetch_data.fetch("bad", tmp_path)
    assert not (tmp_path / "bad.jsonl").exists()
