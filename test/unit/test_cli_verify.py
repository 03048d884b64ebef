"""`longspark verify`: passes on a sound server, and each check fails on the fault it is there for.

The server is a fake; the real one is in test/serving/test_verify.py.
"""

from __future__ import annotations

import io
import json
import socket
from pathlib import Path

import pytest
from fake_server import FakeServer
from longspark_sglang.cli import main
from longspark_sglang.client import Answer, ServerClient
from longspark_sglang.verify import (
    count_faults,
    first_difference,
    stop_strings,
    stop_tokens,
    verify,
)

PROMPTS = ["The first of them", "A second prompt, longer than the first", "0x3f, 17; (third)"]
PARITY, AT_ONCE, WARM = "greedy parity", "greedy parity, all at once", "cold = warm prefix"
SPEED, STOPS, LOGPROBS = "accept length", "stop strings and tokens", "log-probabilities"
CHOICES, STREAM = "/v1/completions, n=2", "/v1/completions, streamed"
COUNTS = "counts and finish reasons"
ALL = {PARITY, AT_ONCE, WARM, SPEED, STOPS, CHOICES, STREAM, LOGPROBS, COUNTS}


def run(
    *faults: str, reference: FakeServer | None = None, **options
) -> tuple[dict[str, str], dict[str, bool | None]]:
    """(check -> figure and details, check -> passed) against a fake with these faults."""
    with FakeServer(faults) as server:
        report = verify(
            ServerClient(server.url, timeout=10),
            options.pop("prompts", PROMPTS),
            tokens=24,
            reference=ServerClient(reference.url, timeout=10) if reference else None,
            **options,
        )
    findings = [finding for group in report.sections.values() for finding in group]
    words = {f.name: "\n".join([f.figure, *f.details]) for f in findings}
    return words, {f.name: f.passed for f in findings}


def failed(passed: dict[str, bool | None]) -> set[str]:
    return {name for name, good in passed.items() if good is False}


def test_a_sound_server_passes_every_check() -> None:
    words, passed = run()
    assert failed(passed) == set()
    assert {name for name, good in passed.items() if good} >= ALL
    assert "3 of 3 answers of 24 tokens identical" in words[PARITY]
    assert words[SPEED].startswith("4.00 over")
    assert "6 pairs" in words[WARM]
    assert "12 stops" in words[STOPS]  # three strings and a token in each of three answers


# fault -> (checks that must fail, and no other; words in the first of them)
FAULTS: dict[str, tuple[set[str], str]] = {
    "wrong token": (
        {PARITY, AT_ONCE, STOPS, CHOICES, STREAM},
        "with speculation 1",
    ),
    "wrong token the second time": ({AT_ONCE}, "token 3: with speculation"),
    "switch is ignored": ({PARITY}, "--reference"),
    "nothing accepted": ({SPEED}, "longspark check"),
    "no spec fields": ({SPEED}, "spec_verify_ct"),
    "wrong token when warm": ({AT_ONCE, WARM, CHOICES, STREAM, STOPS}, "token 5: cold"),
    "drafts fail when warm": ({WARM}, "accept length falls from 4.00 cold to 1.00 warm"),
    "cache never hits": ({WARM}, "no prompt token came from the cache"),
    "flush does nothing": ({WARM}, "left the cache filled"),
    "flush is refused": ({WARM}, "answered 400: Flush cache failed: requests are running"),
    "ids run past the stop": ({STOPS}, "ids "),
    "text runs past the stop": ({STOPS}, "runs past the stop string"),
    "stop is missed": ({STOPS}, "not stopped"),
    "usage counts drafts wrong": ({COUNTS}, "completion_tokens 23 of an answer with 24 ids"),
    "prompt counted wrong": ({COUNTS}, "prompt_tokens 18 of an answer with 17 prompt ids"),
    "aborts": ({COUNTS, STOPS}, "abort"),
    "log-probabilities are missing": ({LOGPROBS}, "22 log-probabilities"),
    "log-probabilities are shifted": ({LOGPROBS}, "log-probability of"),
    "log-probabilities are of drafts": ({LOGPROBS}, "the best -0.25000"),
    "log-probabilities are off": ({LOGPROBS}, "more than 0.1"),
    "n is ignored": ({CHOICES}, "choices [0], not [0, 1]"),
    "usage of one choice": ({CHOICES}, "completion_tokens 24, not 48"),
    "choices differ": ({CHOICES}, "choice 1 has another text"),
    "stream loses a chunk": ({STREAM}, "text ..."),
    "stream lacks usage": ({STREAM}, "prompt_tokens None"),
    "stream fails": ({STREAM}, "the scheduler died"),
    "generate fails": (ALL, "/generate answered 500"),
    "answer lacks ids": (ALL, "'output_ids'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_fails_its_checks_and_no_other(fault: str) -> None:
    expected, words_wanted = FAULTS[fault]
    words, passed = run(fault)
    assert failed(passed) == expected
    assert any(words_wanted in words[name] for name in expected)


def test_a_drafter_that_is_right_by_accident_fails() -> None:
    """A random drafter hits a token now and then; that is no speculation."""
    words, passed = run("one draft accepted")
    assert failed(passed) == {SPEED}
    assert words[SPEED].startswith("1.0") and "at least 1.1 are wanted" in words[SPEED]
    assert failed(run("one draft accepted", min_accept_length=1.0)[1]) == set()
    assert failed(run(min_accept_length=4.5)[1]) == {SPEED}


def test_progress_names_each_check() -> None:
    lines = io.StringIO()
    run(progress=lines)
    assert lines.getvalue().startswith("[1/9] greedy parity\n[2/9] ")
    assert lines.getvalue().count("\n") == 9


def test_an_answer_that_ends_early_is_noticed() -> None:
    words, passed = run("ends early")
    assert COUNTS in failed(passed)
    assert "finish reason 'length' after 23 of 24 tokens" in words[COUNTS]


def test_a_tie_is_shown_and_forgiven_only_on_request() -> None:
    words, passed = run("wrong token at a tie")
    assert failed(passed) == {PARITY, AT_ONCE}
    assert "token 9: with speculation" in words[PARITY]
    assert "--tie-gap" in words[PARITY]
    words, passed = run("wrong token at a tie", tie_gap=0.01)
    assert failed(passed) == set()
    assert "2 of 3" in words[PARITY] and "1 apart at a tie within 0.01 nats" in words[PARITY]
    # A real fault has a gap; forgiving ties does not forgive it.
    assert PARITY in failed(run("wrong token", tie_gap=0.01)[1])


def test_batch_dependent_arithmetic_is_named() -> None:
    words, passed = run("arithmetic depends on the batch")
    assert AT_ONCE in failed(passed)
    assert "plain decoding also changes with the batch" in words[AT_ONCE]


def test_a_server_without_longspark_is_refused_at_once() -> None:
    words, passed = run("plain server")
    assert failed(passed) == {"speculative algorithm"}
    assert "--speculative-algorithm LONGSPARK" in words["speculative algorithm"]
    assert PARITY not in passed


def test_a_reference_server_replaces_the_switch() -> None:
    with FakeServer({"plain server"}) as plain:
        assert failed(run("switch is ignored", reference=plain)[1]) == set()
    # A reference that speculates itself is switched off per request.
    with FakeServer() as speculating:
        assert failed(run(reference=speculating)[1]) == set()
    with FakeServer({"switch is ignored"}) as stubborn:
        assert PARITY in failed(run(reference=stubborn)[1])


def test_without_a_prefix_cache_the_warm_check_says_so() -> None:
    words, passed = run("radix cache off")
    assert failed(passed) == set() and passed[WARM] is None
    assert "--disable-radix-cache" in words[WARM]


def test_built_in_prompts_that_do_not_fit_are_left_out() -> None:
    words, passed = run("small context", prompts=None)
    assert failed(passed) == set()
    # 100 tokens of context less twice 24.
    assert "2 of 2 answers" in words[PARITY]
    assert "6 of 6 answers" in run(prompts=None)[0][PARITY]


# -- the command -----------------------------------------------------------------------------------


def test_exit_code_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one prompt\n\nand another\n")
    arguments = ["--tokens", "16", "--prompts", str(prompts), "--json"]
    with FakeServer() as server:
        assert main(["verify", server.url, *arguments]) == 0
        good = json.loads(capsys.readouterr().out)
        assert main(["verify", server.url + "/", "--tokens", "16"]) == 0
        assert capsys.readouterr().out.endswith("passed\n")
    assert good["passed"] is True
    parity = next(f for f in good["sections"]["output"] if f["name"] == PARITY)
    assert parity["figure"] == "2 of 2 answers of 16 tokens identical"
    with FakeServer({"nothing accepted"}) as server:
        assert main(["verify", server.url, *arguments]) == 1
        bad = json.loads(capsys.readouterr().out)
        assert main(["verify", server.url, "--tokens", "16"]) == 1
        text = capsys.readouterr().out
    assert bad["passed"] is False
    assert "FAIL" in text and text.endswith("FAILED\n")
    assert "\x1b" not in text  # no terminal, no colour


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    assert main(["verify", url]) == 1
    assert "cannot be reached: [Errno 111] Connection refused" in capsys.readouterr().out


def test_a_page_of_another_server(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer({"answers html"}) as server:
        assert main(["verify", server.url]) == 1
    assert 'answered no JSON but "<html>' in capsys.readouterr().out


def test_a_server_that_never_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main(["verify", url, "--timeout", "0.2"]) == 1
    assert "did not answer within 0.2 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["localhost:30000"], "use http://host:port"),
        (["file:///etc/hostname"], "use http://host:port"),
        (["http://127.0.0.1:1", "--tokens", "2"], "use at least 8"),
        (["http://127.0.0.1:1", "--prompts", "/no/such/file"], "No such file"),
        (["http://127.0.0.1:1", "--prompts", "/dev/null"], "has no lines"),
    ],
)
def test_bad_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["verify", *arguments])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


# -- the parts -------------------------------------------------------------------------------------


def answer(ids: list[int], tops: list | None = None, **meta) -> Answer:
    meta = {"completion_tokens": len(ids), "prompt_tokens": 2, **meta}
    meta.setdefault("finish_reason", {"type": "length"})
    if tops is not None:
        meta["output_top_logprobs"] = tops
    return Answer(asked=4, ids=ids, text="", meta=meta, prompt_ids=[1, 2])


def test_first_difference_knows_a_shorter_answer() -> None:
    difference = first_difference(answer([1, 2]), answer([1, 2, 3]))
    assert difference is not None and difference.position == 2
    assert "with speculation the end" in difference.text
    assert first_difference(answer([1, 2]), answer([1, 2])) is None


def test_a_tie_needs_the_same_two_tokens_on_top_of_both() -> None:
    both = [[(-1.0, 5, "a"), (-1.01, 6, "b")]]
    other = [[(-1.0, 6, "b"), (-1.01, 7, "c")]]
    assert first_difference(answer([5], both), answer([6], both), tie_gap=0.02).tie  # type: ignore[union-attr]
    assert not first_difference(answer([5], both), answer([6], both), tie_gap=0.001).tie  # type: ignore[union-attr]
    assert not first_difference(answer([5], both), answer([6], other), tie_gap=0.02).tie  # type: ignore[union-attr]
    assert not first_difference(answer([5]), answer([6]), tie_gap=0.02).tie  # type: ignore[union-attr]


def test_stop_strings_are_found_first_where_they_were_taken() -> None:
    text = "ab ab ab cd\ufffdef gh ijkl mnop"
    pieces = stop_strings(text)
    assert pieces and len(set(pieces)) == len(pieces)
    for piece in pieces:
        assert piece.strip() == piece and "\ufffd" not in piece
        assert text.find(piece) >= len(text) // 4
    assert stop_strings("aaaaaaaaaaaaaaaa") == []
    assert stop_strings("") == []


def test_stop_tokens_were_not_emitted_before() -> None:
    assert stop_tokens([1, 2, 1, 2, 3, 1]) == [3]
    assert stop_tokens([1, 1, 1, 1]) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"completion_tokens": 3}, "completion_tokens 3 of an answer with 4 ids"),
        ({"completion_tokens": None}, "completion_tokens None"),
        ({"prompt_tokens": 1}, "prompt_tokens 1 of an answer with 2 prompt ids"),
        ({"finish_reason": None}, "finish reason None"),
        ({"finish_reason": {"type": "abort"}}, "finish reason 'abort'"),
    ],
)
def test_count_faults(changes: dict, words: str) -> None:
    assert count_faults(answer([1, 2, 3, 4])) == []
    assert words in "\n".join(count_faults(answer([1, 2, 3, 4], **changes)))


def test_more_tokens_than_asked_are_noticed() -> None:
    assert "5 ids where 4 were asked for" in count_faults(answer([1, 2, 3, 4, 5]))
