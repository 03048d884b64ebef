"""benchmark/gpu_check.py as far as it goes without a GPU: its inputs, comparisons and report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmark/gpu_check.py"
for folder in ("benchmark", "test/ops"):
    sys.path.insert(0, str(ROOT / folder))

import gpu_check  # noqa: E402
import kernel_cases as cases  # noqa: E402
import kernel_round  # noqa: E402

SMALL = cases.Shape(
    layers=2, heads=4, kv_heads=2, dim=64, slots=16, window=32, block=3, rank=32, vocab=600
)


def cache_of(batch, context, shape=SMALL):
    return cases.Cache(shape, batch, context, "cpu", memory=2**22)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_refuses_and_says_why():
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert done.stderr.startswith("gpu-check can't run here: torch sees no CUDA device")


def all_cases():
    cache = cache_of(3, 100)
    markov = cases.MarkovInputs.make(SMALL, "cpu")
    return [
        cases.window_gather_case(SMALL, cache),
        cases.summary_merge_case(SMALL, cache),
        cases.summary_merge_bulk_case(SMALL, cache, 50),
        cases.block_attention_case(SMALL, cache),
        cases.markov_step_case(SMALL, markov, 3, "cpu"),
        cases.draft_sample_case(SMALL, markov, 3, 0.0, "cpu"),
        cases.draft_sample_case(SMALL, markov, 3, 1.0, "cpu"),
        cases.accept_chain_case(SMALL, markov, 3, "cpu"),
    ]


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.op)
def test_timed_cases_run(case):
    case.run()
    for function in case.others.values():
        function()
    assert case.floor_bytes > 0


def test_what_is_compared_computes_the_same():
    attention = cases.block_attention_case(SMALL, cache_of(3, 100))
    torch.testing.assert_close(
        attention.others["gather + SDPA"](), attention.run(), rtol=2e-2, atol=2e-2
    )
    gather = cases.window_gather_case(SMALL, cache_of(3, SMALL.window))
    gather.run()  # positions 0 .. W-1 lie in ring order
    ring = gather.arguments["out_key"].clone()
    gather.others["torch index_select"]()
    assert torch.equal(gather.arguments["out_key"], ring)


def test_short_windows_are_not_given_to_sdpa():
    assert "gather + SDPA" not in cases.block_attention_case(SMALL, cache_of(2, 10)).others


def test_byte_floors_count_every_tensor_once():
    """Against the sizes of what is read and written, at a window that is full."""
    cache = cache_of(2, 64)
    case = cases.block_attention_case(SMALL, cache)
    a = case.arguments
    rows = 2 * 2 * SMALL.window * SMALL.kv_heads * SMALL.dim * 2
    inputs = [a[name].nbytes for name in ("query", "summary_key", "block_key", "block_value")]
    summary = a["summary_value"][a["slots"]].nbytes
    assert case.floor_bytes == rows + sum(inputs) + summary + case.run().nbytes
    merge = cases.summary_merge_case(SMALL, cache)
    state = [merge.arguments[name][1:].nbytes for name in ("state_value", "state_lse")]
    rows = 2 * SMALL.layers * 2 * 8 * SMALL.row_bytes
    assert merge.floor_bytes == 2 * sum(state) + rows + merge.arguments["queries"].nbytes


def test_the_context_costs_no_more_memory_than_allowed():
    cache = cases.Cache(SMALL, 4, 50_000, "cpu", memory=2**22)
    assert sum(pool.nbytes for pool in cache.keys + cache.values) <= 2**22 + 2**20
    assert int(cache.req_to_token.max()) < cache.rows and int(cache.req_to_token.min()) >= 1


def run_round(work, backend):
    proposal = work.propose(backend)
    return work.real({**proposal, **work.commit(proposal, backend)})


def test_padding_changes_no_bit_of_a_round():
    """NaN in everything that belongs to padding; the reference operators."""
    alone = kernel_round.Round(SMALL, batch=3, padded=3, device="cpu")
    padded = kernel_round.Round(SMALL, batch=3, padded=5, device="cpu")
    for name in ("query", "block", "base_logits", "target_probs", "uniforms", "uniform_final"):
        source, target = getattr(alone, name), getattr(padded, name)
        axis = {"query": 1, "block": 2}.get(name, 0)
        target.narrow(axis, 0, 3).copy_(source)
    padded.anchors[:3], padded.new_rows[:3] = alone.anchors, alone.new_rows
    padded.cache = alone.cache
    padded.cache.req_rows = torch.tensor([1, 2, 3, 0, 0])
    padded.cache.seq_lens = torch.tensor([*alone.cache.seq_lens.tolist(), 0, 0])
    padded.queries, padded.markov = alone.queries, alone.markov
    for name in ("state_value", "state_lse"):
        getattr(padded, name)[1:4] = getattr(alone, name)[1:]
    with_padding = run_round(padded, "reference")
    alone.cache.req_rows, alone.cache.seq_lens = (
        padded.cache.req_rows[:3],
        padded.cache.seq_lens[:3],
    )
    without = run_round(alone, "reference")
    for name in ("state_value", "state_lse"):
        with_padding[name] = with_padding[name][:3]
    for name, value in without.items():
        assert not value.isnan().any(), name
        torch.testing.assert_close(with_padding[name], value, rtol=1e-2, atol=1e-2)


def test_a_round_with_poisoned_padding_on_the_emulated_kernels(monkeypatch):
    """The kernels that a GPU would run, on their own source: padding never reaches a request."""
    import emulation
    import op_cases

    if not emulation.is_possible():
        pytest.skip("needs a C++ compiler")

    class Emulated:
        def __getattr__(self, op):
            operator = getattr(emulation.operators(), op).default
            return lambda *arguments, backend: operator(*arguments)

    shape = cases.Shape(
        layers=1, heads=2, kv_heads=1, dim=64, slots=16, window=32, block=3, rank=32, vocab=600
    )
    reference = kernel_round.Round(shape, batch=2, padded=4, device="cpu")
    emulated = kernel_round.Round(shape, batch=2, padded=4, device="cpu")
    plain = run_round(reference, "reference")
    monkeypatch.setattr(kernel_round, "ops", Emulated())
    own = run_round(emulated, "emulation")
    for name in ("hidden", "tokens", "logq", "accepted", "token", "state_value", "state_lse"):
        assert not own[name].isnan().any(), name
    op_cases.assert_as_good_as(own["hidden"], plain["hidden"].double(), plain["hidden"], floor=1e-2)
    agree = (own["tokens"] == plain["tokens"]).double().mean()
    assert agree > 0.8  # a draw may flip where the product was rounded the other way


def test_a_timed_row_holds_everything_that_was_measured(monkeypatch):
    monkeypatch.setattr(gpu_check, "time_of", lambda function: (function() and None) or 2e-6)
    monkeypatch.setattr(gpu_check, "eager_time_of", lambda function: (function() and None) or 7e-6)
    case = cases.Case("markov_step", {}, 4000, {"a": lambda: 0, "b": lambda: 0}, ("b",))
    monkeypatch.setattr(case, "run", lambda backend: None)
    row = gpu_check.timed_case(case, bandwidth=1e9)
    assert row["us"] == pytest.approx(2) and row["floor_us"] == pytest.approx(4)
    assert row["others_us"] == pytest.approx({"a": 2.0, "b (eager)": 7.0})


def test_gpu_and_emulation_may_differ_by_rounding_only():
    ones = torch.ones(8)
    near, far = ones + 2e-6, ones + 1e-4
    inside = {
        "block_attention": [(ones, near), (ones.bfloat16(), ones.bfloat16() * 1.01)],
        "markov_step": [(ones, ones + 0.01)],
        "draft_sample": [(ones, near), (torch.arange(20), torch.arange(20).clamp(max=18))],
        "summary_merge": [(-torch.inf * ones, -torch.inf * ones)],
        "window_gather": [(ones, ones)],
    }
    outside = {
        "block_attention": [(ones, far), (ones, torch.full((8,), torch.nan))],
        "summary_merge": [
            (torch.cat([ones, -torch.inf * ones]), torch.cat([far, -torch.inf * ones])),
            (ones, -torch.inf * ones),
        ],
        "draft_sample": [(torch.arange(8), torch.zeros(8, dtype=torch.int64))],
        "window_gather": [(ones, near)],
        "window_index": [(torch.arange(20), torch.arange(20).clamp(max=18))],
    }
    arguments = {"base_logits": torch.zeros(1, dtype=torch.bfloat16)}
    for expected, pairs in ((True, inside), (False, outside)):
        for op, results in pairs.items():
            for a, b in results:
                difference, allowed = gpu_check.compared(op, arguments, a, b)
                assert (difference <= allowed) is expected, (op, difference, allowed)


def test_differing_names_what_differs():
    a = {"x": torch.tensor([1.0, torch.nan]), "y": torch.tensor([1])}
    assert gpu_check.differing(a, {name: value.clone() for name, value in a.items()}) == []
    assert gpu_check.differing(a, {**a, "y": torch.tensor([2])}) == ["y"]


def test_small_cases_cover_every_kernel_family():
    found = gpu_check.small_cases()
    assert {op for op, _ in found.values()} == {
        "accept_chain",
        "block_attention",
        "draft_sample",
        "markov_step",
        "summary_merge",
        "summary_merge_bulk",
        "window_gather",
        "window_index",
    }


def results():
    row = dict(op="markov_step", batch=8, context=None, note="", us=30.0, floor_us=20.0)
    attention = dict(row, op="block_attention", context=131072, note="one layer")
    return {
        "environment": {"card": "NVIDIA Test 9000", "torch": "2.14"},
        "steps": {
            "build": {"passed": True, "output": ""},
            "graphs": {"passed": False, "replays": 1000, "output": "differ"},
            "timings": {
                "passed": True,
                "output": "",
                "rows": [
                    {**row, "others_us": {"plain torch": 90.0}},
                    {**attention, "others_us": {}},
                ],
            },
        },
    }


def test_the_report(tmp_path):
    text = gpu_check.render(results())
    assert "Kernels on NVIDIA Test 9000" in text
    assert "- build: passed\n" in text and '- graphs: FAILED {"replays": 1000}' in text
    assert "| markov_step | 8 |  | 30.0 | 20.0 | 1.50 | plain torch 90.0 |" in text
    assert "| block_attention one layer | 8 | 128K | 30.0 | 20.0 | 1.50 |  |" in text
    saved = tmp_path / "card.json"
    saved.write_text(json.dumps(results()))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--render", str(saved)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == text.strip()


def test_a_step_that_raises_has_failed_and_the_next_runs(monkeypatch):
    monkeypatch.setattr(gpu_check, "environment", lambda: {"card": "x"})
    monkeypatch.setattr(gpu_check, "step_tests", lambda: 1 / 0)
    monkeypatch.setattr(gpu_check, "step_graphs", lambda: {"passed": True, "output": ""})
    steps = gpu_check.check(["tests", "graphs"])["steps"]
    assert not steps["tests"]["passed"] and "ZeroDivisionError" in steps["tests"]["output"]
    assert steps["graphs"]["passed"]


def test_a_failed_build_ends_the_check(monkeypatch):
    monkeypatch.setattr(gpu_check, "environment", lambda: {"card": "x"})
    monkeypatch.setattr(gpu_check, "step_build", lambda: {"passed": False, "output": "no"})
    assert list(gpu_check.check(["build", "tests"])["steps"]) == ["build"]


@pytest.mark.parametrize(
    "output, passed",
    [("12 passed in 3s", True), ("3 passed, 9 skipped in 1s", False), ("9 skipped", False)],
)
def test_skipped_tests_do_not_count_as_passed(monkeypatch, output, passed):
    monkeypatch.setattr(gpu_check, "run", lambda *arguments, **variables: (True, output))
    assert gpu_check.step_tests()["passed"] is passed


def test_a_missing_sanitizer_is_a_failure(monkeypatch):
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: None)
    outcome = gpu_check.step_sanitizer()
    assert not outcome["passed"] and "compute-sanitizer not found" in outcome["output"]


def test_running_programs():
    assert gpu_check.run([sys.executable, "-c", "print(5)"], 60) == (True, "5\n")
    assert not gpu_check.run([sys.executable, "-c", "raise SystemExit(3)"], 60)[0]
    slow = [sys.executable, "-c", "import time; time.sleep(30)"]
    assert gpu_check.run(slow, 0.5) == (False, "no end after 0 s")
