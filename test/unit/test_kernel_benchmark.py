"""What `benchmark/kernels.py` makes of its measurements."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmark"))

import kernels
from longspark_sglang.ops import dispatch


def record(op, **figures):
    """A record that reaches every target, but for `figures`."""
    return {
        "op": op,
        "shape": "qwen3-8b",
        "batch": 1,
        "times_faster_than_reference": 9.0,
        "times_faster_than_gather_and_sdpa": 9.0,
        "times_memory_floor": 1.2,
        "times_at_long_context": 1.0,
        "memory_floor_ms": 1.0,
        "multiply_floor_ms": 0.5,
        **figures,
    }


VERIFY = dict(kind="verify", context=32768)


@pytest.mark.parametrize(
    "op, figures, missed",
    [
        ("block_attention", {"times_faster_than_reference": 2.9}, "faster than plain torch"),
        ("block_attention", {"times_memory_floor": 1.51}, "its memory floor"),
        ("block_attention", {"times_at_long_context": 1.06}, "128K over 1K"),
        ("summary_merge", {"times_faster_than_reference": 4.9}, "faster than plain torch"),
        ("summary_merge", {"times_at_long_context": 1.06}, "128K over 1K"),
        ("markov_step", {"times_at_long_context": 1.06}, "128K over 1K"),
        (
            "paged_attention",
            {**VERIFY, "times_faster_than_gather_and_sdpa": 1.2},
            "faster than gather + SDPA",
        ),
        ("paged_attention", {**VERIFY, "times_memory_floor": 1.6}, "its memory floor"),
    ],
)
def test_each_target_is_missed_alone(op, figures, missed):
    good = {key: value for key, value in figures.items() if key in VERIFY}
    assert all(target.reached for target in kernels.targets([record(op, **good)]))
    judged = kernels.targets([record(op, **figures)])
    assert [missed in t.what for t in judged if not t.reached] == [True]


def test_other_shapes_and_other_attention_have_no_targets():
    assert not kernels.targets([{**record("block_attention"), "shape": "smollm2-135m"}])
    assert not kernels.targets([record("paged_attention", kind="decode", context=32768)])


def test_a_target_below_what_the_multiplier_can_do_is_missed_with_the_reason():
    slow = record("block_attention", times_memory_floor=3.0, multiply_floor_ms=2.5)
    verdicts = [target.verdict for target in kernels.targets([slow]) if not target.reached]
    assert verdicts == ["MISSED: the products alone take 2.5 times the memory floor here"]


@pytest.mark.skipif(
    not dispatch.is_compiled("block_attention", "cpu"), reason="needs the CPU operators"
)
def test_the_status_follows_the_targets_only_where_asked(monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    results = {"good": [record("markov_step")], "bad": [record("markov_step", batch=8)]}
    results["bad"][0]["times_at_long_context"] = 2.0
    for outcome, options, status in (
        ("good", ["--check"], 0),
        ("bad", ["--check"], 1),
        ("bad", [], 0),
    ):
        monkeypatch.setattr(kernels, "measure", lambda name, clock, r=results[outcome]: r)
        monkeypatch.setattr(sys, "argv", ["kernels.py", "--turns", "1", *options])
        assert kernels.main() == status
        first, *table = capsys.readouterr().out.splitlines()
        assert json.loads(first)["environment"]["turns"] == 1
        assert ("MISSED" in table[0]) == (outcome == "bad")


def test_gathering_and_sdpa_computes_what_is_compared_with_it():
    shape = kernels.cases.Shape(heads=4, kv_heads=2, dim=16, dtype=torch.float32)
    for rows in (1, 8):
        case = kernels.attention_case(shape, 2, 40, rows)
        ours = kernels.ops.paged_attention(**case, backend="reference")
        torch.testing.assert_close(kernels.gather_and_sdpa(case), ours)
