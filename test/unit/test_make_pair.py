"""What makes the demo pair, without its hours: prompts, and the figures of served answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import demo_prompts
import make_pair

FUNCTION = '''
def module{m}_{i}(x):
    """Add {i}."""
    y = x + {i}
    z = y * {i}
    return z
'''


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of twelve modules, and no wheels."""
    library = tmp_path / "library"
    (library / "test").mkdir(parents=True)
    for module in range(12):
        code = "".join(FUNCTION.format(m=module, i=i) for i in range(10))
        (library / f"module{module}.py").write_text(code)
    (library / "test/unseen.py").write_text(FUNCTION.format(m=99, i=0))
    (library / "broken.py").write_text("def f(:\n")
    monkeypatch.setattr(demo_prompts.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    monkeypatch.setattr(demo_prompts, "from_wheels", lambda draw, work: iter(()))
    return library


def test_prompts_are_seeded_and_held_out_by_source(sources: Path, tmp_path: Path) -> None:
    def texts(name: str, seed: int) -> dict[str, list[dict[str, str]]]:
        demo_prompts.make_prompts(tmp_path / name, seed)
        return {
            path.name: [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted((tmp_path / name).glob("*.jsonl"))
        }

    one = texts("a", 0)
    assert one == texts("b", 0) != texts("c", 1)
    assert sorted(one) == [
        *(f"held-out-{d}.jsonl" for d in ("chat", "code", "math")),
        "train.jsonl",
    ]
    train = {record["prompt"] for record in one.pop("train.jsonl")}
    apart = {record["prompt"] for records in one.values() for record in records}
    assert len(apart) == 3 * demo_prompts.HELD_OUT_PER_DOMAIN and not train & apart
    assert not any("{" + slot + "}" in p for p in train | apart for slot in demo_prompts.SLOTS)
    assert not any("module99" in p for p in train | apart)  # tests of the library are no source
    # No module is on both sides.
    for module in range(12):
        hold = demo_prompts.held_out(f"module{module}.py")
        assert not any(f"module{module}_" in prompt for prompt in (train if hold else apart))
    held_templates = [
        line for lines in demo_prompts.TEMPLATES.values() for line in lines.split("\n")
    ]
    assert sum(line.startswith("!") for line in held_templates) >= 5 * 3


def test_slots_of_one_list_differ() -> None:
    draw = demo_prompts.random.Random(0)
    for _ in range(50):
        first, second = demo_prompts.fill("{name}|{name2}", draw).split("|")
        assert first != second
    assert demo_prompts.fill("{name} {name}", draw).split()[0] in demo_prompts.SLOTS["name"]


def test_served_figures() -> None:
    loop = [1, 2, 3] * 20
    records = [
        {"output_ids": list(range(21)), "rounds": 10},
        {"output_ids": list(range(31)), "rounds": 10},
        {"output_ids": loop, "rounds": 8},
        {"output_ids": [5], "rounds": 0},  # ended before the first round
    ]
    every = make_pair.served_row(records, "code", 0.0, with_loops=True)
    assert every["answers"] == 3 and every["served"] == (20 + 30 + 59) / 28
    assert every["low"] < every["served"] < every["high"]
    some = make_pair.served_row(records, "code", 0.0, with_loops=False)
    assert some["answers"] == 2 and some["served"] == 2.5
    assert 2.0 <= some["low"] <= some["high"] <= 3.0
