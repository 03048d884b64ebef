"""Prompts, regeneration through HTTP, and packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from flaky_server import FlakyServer
from longspark_sglang import cli
from longspark_sglang.training.data import (
    DataError,
    PackedData,
    first_turn,
    loop_begin,
    read_prompts,
)
from longspark_sglang.training.data_command import main
from transformers import AutoTokenizer

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "hello"},
        {"messages": [*HELLO, {"role": "assistant", "content": "hi"}]},
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]},
    ],
)
def test_layouts_of_prompts(record: dict[str, Any]) -> None:
    assert first_turn(record) == HELLO


def test_a_system_message_is_kept() -> None:
    system = {"role": "system", "content": "be brief"}
    assert first_turn({"messages": [system, *HELLO, *HELLO]}) == [system, *HELLO]


def write_prompts(path: Path, prompts: list[str]) -> Path:
    records: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_jsonl_and_parquet_agree_and_repetitions_go(tmp_path: Path) -> None:
    lines = write_prompts(tmp_path / "a.jsonl", ["one", "two", "one"])
    turns = [[{"from": "human", "value": text}] for text in ("one", "two")]
    table = pyarrow.table({"conversations": turns})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    from_lines = list(read_prompts([lines]))
    assert [m[0]["content"] for _, m in from_lines] == ["one", "two"]
    assert list(read_prompts([tmp_path / "b.parquet"])) == from_lines
    assert list(read_prompts([lines, tmp_path / "b.parquet"])) == from_lines


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 1"),
        ("[1]", "no JSON object"),
        ('{"text": "x"}', "none of the keys"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no turn of the user"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "no known role"),
    ],
)
def test_bad_prompts_are_named(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "bad.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=r"bad\.jsonl") as caught:
        list(read_prompts([tmp_path / "bad.jsonl"]))
    assert reason in str(caught.value)


def regenerate(
    target: Path, prompts: Path, output: Path, servers: list[FlakyServer], *more: str
) -> int:
    urls = [server.url for server in servers]
    arguments = ["--prompts", str(prompts), "--url", *urls, "--target", str(target)]
    arguments += ["--output", str(output), "--concurrency", "4", "--retry-wait", "0.01", *more]
    return main(["regenerate", *arguments])


def answers_in(output: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(output.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "p.jsonl", [f"say {i}" for i in range(12)])


def test_regeneration(fifty_target: Path, prompts: Path, tmp_path: Path) -> None:
    """Servers take turns, failures are retried, ids and settings are kept."""
    output = tmp_path / "out"
    with FlakyServer(fail_first=1) as one, FlakyServer() as two:
        more = ["--temperature", "0.5", "--max-new-tokens", "9"]
        assert regenerate(fifty_target, prompts, output, [one, two], *more) == 0
        assert one.asked.total() == 6  # each of them failed there, and went on to the other
        assert two.asked.total() == 12
        body = two.bodies[0]
    assert body["sampling_params"]["temperature"] == 0.5
    assert body["sampling_params"]["max_new_tokens"] == 9
    tokenizer = AutoTokenizer.from_pretrained(fifty_target)
    records = answers_in(output)
    assert len({record["id"] for record in records}) == 12
    for record in records:
        rendered = tokenizer.apply_chat_template(
            record["messages"], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        assert record["prompt_ids"] == ids and record["output_ids"] == ids[::-1]
    provenance = json.loads((output / "answers-00000-of-00001.json").read_text())
    assert provenance["sampling"]["temperature"] == 0.5
    assert provenance["server"]["model_path"] == "toy"


def test_a_run_is_continued_after_failures_and_torn_lines(
    fifty_target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    with FlakyServer(fail_first=2) as server:
        assert regenerate(fifty_target, prompts, output, [server], "--retries", "0") == 1
        assert "0/12 answers, 12 failed, 0 retried" in capsys.readouterr().out
        assert regenerate(fifty_target, prompts, output, [server], "--retries", "1") == 0
        assert "12/12 answers, 0 failed, 12 retried" in capsys.readouterr().out
        before = server.asked.total()
        (answers,) = output.glob("*.jsonl")
        lines = answers.read_bytes().splitlines(keepends=True)
        answers.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # as a crash leaves it
        assert regenerate(fifty_target, prompts, output, [server]) == 0
        assert server.asked.total() == before + 1
        assert len(answers_in(output)) == 12


def test_a_run_is_not_continued_with_other_settings(
    fifty_target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FlakyServer() as server:
        assert regenerate(fifty_target, prompts, tmp_path / "out", [server]) == 0
        with pytest.raises(DataError, match="other settings") as caught:
            regenerate(fifty_target, prompts, tmp_path / "out", [server], "--temperature", "1")
    assert [reason.split()[0] for reason in caught.value.reasons] == ["sampling"]


def test_shards_partition_the_prompts(fifty_target: Path, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with FlakyServer() as server:
        for shard in ("0/2", "1/2"):
            assert regenerate(fifty_target, prompts, output, [server], "--shard", shard) == 0
        assert set(server.asked.values()) == {1}
    assert len(list(output.glob("*.jsonl"))) == 2 and len(answers_in(output)) == 12


def test_an_unreachable_server_is_one_clear_error(
    fifty_target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--prompts", str(prompts), "--target", str(fifty_target)]
    arguments += ["--output", str(tmp_path / "out"), "--url", "http://127.0.0.1:1"]
    assert cli.main(["data", "regenerate", *arguments]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def write_answers(folder: Path, lengths: list[tuple[int, int]]) -> Path:
    """Answers with these lengths of prompt and output."""
    folder.mkdir()
    with (folder / "answers-00000-of-00001.jsonl").open("w") as file:
        for i, (prompt, output) in enumerate(lengths):
            ids = [4 + (i + k) % 40 for k in range(prompt + output)]
            record = {"id": f"{i * 7919:016x}", "temperature": 0.0}
            record |= {"prompt_ids": ids[:prompt], "output_ids": ids[prompt:]}
            file.write(json.dumps(record) + "\n")
    return folder


def test_packing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [(5, 20), (60, 30), (3, 1), (90, 100), *[(4, 10)] * 40]
    answers = write_answers(tmp_path / "a", lengths)
    arguments = ["--answers", str(answers), "--output", str(tmp_path / "p")]
    assert main(["pack", *arguments, "--max-length", "128", "--held-out", "0.2"]) == 0
    printed = capsys.readouterr().out
    assert "1 cut" in printed and "1 too short an answer" in printed
    data = PackedData.load(tmp_path / "p")
    assert data.temperatures == [0.0]
    train, held_out = data.sequences["train"], data.sequences["held_out"]
    assert len(train) + len(held_out) == 43 and 0 < len(held_out) < 20
    manifest = json.loads((tmp_path / "p/manifest.json").read_text())
    assert {entry["longest"] for entry in manifest["files"]} == {64, 128}
    by_begin = {s.response_begin: s for s in train + held_out}
    assert len(by_begin[60].ids) == 90 and by_begin[60].bucket == 128
    assert len(by_begin[90].ids) == 128  # cut
    assert by_begin[5].ids.tolist() == [4 + k % 40 for k in range(25)]
    assert by_begin[5].response.tolist() == [False] * 5 + [True] * 20


def test_damaged_packs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = write_answers(tmp_path / "a", [(4, 10), (40, 60)])
    arguments = ["--answers", str(answers), "--output", str(tmp_path / "p"), "--held-out", "0"]
    assert main(["pack", *arguments]) == 0
    with pytest.raises(DataError, match="packed data already"):
        main(["pack", *arguments])
    first, second = sorted((tmp_path / "p").glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1] + b"\7")
    with pytest.raises(DataError) as caught:
        PackedData.load(tmp_path / "p")
    assert "missing" in caught.value.reasons[0] and "not as it was" in caught.value.reasons[1]
    with pytest.raises(DataError, match="holds no packed data"):
        PackedData.load(tmp_path)


@pytest.mark.parametrize(
    ("ids", "begin"),
    [
        ([], None),
        (list(range(100)), None),
        ([*range(10), *[7] * 40], 11),  # the last of the ten is no 7
        ([*range(10), *[1, 2, 3] * 8, 1], 13),  # the last one unfinished
        ([*range(10), *[1, 2, 3] * 7], None),  # 21 tokens are no loop yet
        ([*range(10), *range(50, 80), *range(50, 80), *range(50, 80)], None),  # three times only
        ([*range(10), *[1, 2, 3] * 20, 9, 9], None),  # it found its way out
        ([5] * 30, 1),
    ],
)
def test_loops(ids: list[int], begin: int | None) -> None:
    assert loop_begin(ids) == begin


def test_looping_answers_are_kept_cut_or_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "a"
    answers.mkdir()
    records = [
        {"id": f"{i:016x}", "temperature": 0.0, "prompt_ids": [9, 9], "output_ids": output}
        for i, output in enumerate([[*range(4, 40)], [*range(4, 10), *[1, 2, 3] * 20]])
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (answers / "answers-00000-of-00001.jsonl").write_text(lines)
    lengths = {}
    for loops in ("keep", "cut", "drop"):
        arguments = ["--answers", str(answers), "--output", str(tmp_path / loops)]
        assert main(["pack", *arguments, "--loops", loops, "--held-out", "0"]) == 0
        sequences = PackedData.load(tmp_path / loops).sequences["train"]
        lengths[loops] = sorted(len(s.ids) for s in sequences)
    assert lengths == {"keep": [38, 68], "cut": [11, 38], "drop": [38]}
    printed = capsys.readouterr().out
    assert "1 looping, cut" in printed and "1 looping, left out" in printed


def test_several_answer_folders_are_packed_together(tmp_path: Path) -> None:
    """Answers to one prompt at two temperatures are two sequences; repetitions are dropped."""
    first = write_answers(tmp_path / "a", [(4, 10), (5, 12)])
    second = write_answers(tmp_path / "b", [(4, 10), (5, 12)])
    (path,) = second.glob("*.jsonl")
    path.write_text(path.read_text().replace('"temperature": 0.0', '"temperature": 1.0', 1))
    arguments = ["--answers", str(first), str(second), "--output", str(tmp_path / "p")]
    assert main(["pack", *arguments, "--held-out", "0"]) == 0
    data = PackedData.load(tmp_path / "p")
    assert len(data.sequences["train"]) == 3 and data.temperatures == [0.0, 1.0]
    manifest = json.loads((tmp_path / "p/manifest.json").read_text())
    assert len(manifest["answers"]) == 2 and manifest["left_out_or_cut"] == {"repeated": 1}
    with pytest.raises(DataError, match="no answers"):
        (tmp_path / "none").mkdir()
        main(["pack", "--answers", str(tmp_path / "none"), "--output", str(tmp_path / "q")])
