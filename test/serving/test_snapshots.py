"""Chats and agents over a long prefix: the summary is not recomputed, the output stays equal."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from serving.server import Server, ServerPool
from serving.test_identity import CHECKED, CHUNKED
from serving.workload import state, words

BLOCK = 512
# A prefill of 16K takes minutes on two cores; what is counted does not depend on the length.
PREFIX, TURNS, ANSWER = 4096, 20, 40


def plainly(server: Server, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Answers of plain decoding, by the same server."""
    off = {"longspark": {"enabled": False}}
    replies = server.generate_many(
        prompts, concurrency=8, max_new_tokens=tokens, ignore_eos=True, custom_params=off
    )
    return [reply["output_ids"] for reply in replies]


@pytest.fixture
def server(servers: ServerPool, tiny_target: Path, tiny_drafter: Path) -> Iterator[Server]:
    yield servers.get(tiny_target, tiny_drafter, extra_args=CHUNKED, env=CHECKED)


def test_twenty_turns_over_a_long_prefix(server: Server) -> None:
    """Each turn recomputes less than a block; the answers are those of a cold cache."""
    history, turns = words(PREFIX, 1), []
    for turn in range(TURNS):
        history += words(random.Random(turn).randrange(3, 60), 100 + turn)
        before = state(server)
        reply = server.generate(history, max_new_tokens=ANSWER, ignore_eos=True)
        after = state(server)
        read = after["summary_rebuilt_rows"] - before["summary_rebuilt_rows"]
        saved = after["snapshot_rows_saved"] - before["snapshot_rows_saved"]
        cached = reply["meta_info"]["cached_tokens"]
        if turn:
            assert cached > PREFIX + ANSWER * (turn - 1)
            assert read < BLOCK, (turn, read)
            assert read + saved == cached
            assert saved % BLOCK == 0
        turns.append((list(history), reply["output_ids"]))
        history += reply["output_ids"]
    assert len(history) > PREFIX + BLOCK, "no answer ever crossed a boundary"
    for ids, answer in (turns[0], turns[7], turns[-1]):
        server.flush()
        assert plainly(server, [ids], ANSWER) == [answer]


def test_agents_that_branch_from_one_system_prompt(server: Server) -> None:
    system = words(1500, 2)
    branches = [[*system, *words(20 * i + 1, 10 + i)] for i in range(8)]
    tool_calls = [
        [*branch, *words(600, 30 + i), *words(9, 50 + i)] for i, branch in enumerate(branches)
    ]
    before = state(server)
    answers = []
    for prompts in ([system], branches, tool_calls, tool_calls):
        replies = server.generate_many(prompts, concurrency=8, max_new_tokens=24, ignore_eos=True)
        answers.append([reply["output_ids"] for reply in replies])
    after = state(server)
    hits = after["snapshot_hits"] - before["snapshot_hits"]
    rebuilds = after["summary_rebuilds"] - before["summary_rebuilds"]
    assert rebuilds >= 24 and hits == rebuilds
    rows = after["summary_rebuilt_rows"] - before["summary_rebuilt_rows"]
    assert rows < rebuilds * BLOCK
    server.flush()
    for prompts, expected in zip(([system], branches, tool_calls), answers, strict=False):
        assert plainly(server, prompts, 24) == expected
    assert answers[3] == answers[2]


def test_salts_keep_prefixes_apart_and_a_flush_forgets(server: Server) -> None:
    ids = words(1100, 3)

    def ask(**fields: Any) -> tuple[list[int], int]:
        """The answer, and the rows that a snapshot saved."""
        before = state(server)["snapshot_rows_saved"]
        reply = server.generate(ids, max_new_tokens=8, ignore_eos=True, **fields)
        return reply["output_ids"], state(server)["snapshot_rows_saved"] - before

    cold, saved = ask()
    assert saved == 0
    assert ask(extra_key="tenant") == (cold, 0)
    assert ask() == (cold, 1024)
    assert ask(extra_key="tenant") == (cold, 1024)
    assert state(server)["snapshot_bytes"] > 0
    server.flush()
    assert state(server)["snapshot_bytes"] == 0
    assert ask() == (cold, 0)
