"""What SGLang may do to a request's rows, each forced and seen to happen, under LONGSPARK_CHECK=1.

One server with a small K/V pool for all tests; each answer equals that of plain decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serving.server import Server, ServerError, ServerPool
from serving.workload import free_counts, state, words

ROWS, POOL = 8, 6000
SMALL = {
    "extra_args": (
        *("--chunked-prefill-size", "512", "--max-running-requests", str(ROWS)),
        *("--enable-priority-scheduling", "--enable-streaming-session"),
        *("--schedule-conservativeness", "0.1"),
    ),
    # SGLang expects short answers and lets in more than fits, so it has to take rows back.
    "env": {"LONGSPARK_CHECK": "1", "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "64"},
    "max_total_tokens": POOL,
}


def wait_until(condition: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what this test waits for did not happen"
        time.sleep(0.02)


@pytest.fixture
def server(servers: ServerPool, tiny_target: Path, tiny_drafter: Path) -> Iterator[Server]:
    """The small server; whatever a test did, nothing may stay behind."""
    server = servers.get(tiny_target, tiny_drafter, **SMALL)
    before = free_counts(server)
    assert before == {"free_kv_tokens": POOL, "free_request_rows": ROWS, "owned_rows": 0}
    checked = state(server)
    yield server
    assert free_counts(server) == before
    after = state(server)
    assert after["state_checks"] > checked["state_checks"]
    assert after["poisoned_rows"] > checked["poisoned_rows"]


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as clients:
        yield clients


@pytest.fixture
def plainly(server: Server) -> Callable[..., list[list[int]]]:
    """Answers of plain decoding, by the same server (test_identity compares with one of its own).

    Asked for last in each test: they leave prefixes behind.
    """

    def answers(prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        off = {"longspark": {"enabled": False}}
        replies = server.generate_many(
            prompts, concurrency=4, max_new_tokens=tokens, ignore_eos=True, custom_params=off
        )
        assert all(reply["meta_info"]["spec_num_correct_drafts"] == 0 for reply in replies)
        return ids_of(replies)

    return answers


def ask(server: Server, ids: Sequence[int], tokens: int, **fields: Any) -> dict[str, Any]:
    return server.generate(ids, max_new_tokens=tokens, ignore_eos=True, **fields)


def ids_of(replies: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [reply["output_ids"] for reply in replies]


# -- the prefix tree ------------------------------------------------------------------------------


def test_duplicate_rows_of_running_requests_are_replaced(
    server: Server, clients: ThreadPoolExecutor, plainly: Callable[..., list[list[int]]]
) -> None:
    """Equal prompts that are prefilled side by side end up with one copy of their rows."""
    ids, copies = words(128, 1), 4  # one chunk of 512: none can hit what another has cached
    body = {
        "input_ids": [ids] * copies,
        "sampling_params": {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True},
    }
    asked = clients.submit(server.post, "/generate", body)
    used: list[int] = []

    def seen() -> bool:
        now = state(server)
        if now["free_request_rows"] == ROWS - copies:
            used.append(POOL - now["free_kv_tokens"])
        return asked.done()

    wait_until(seen)
    replies = asked.result().json()
    assert [reply["meta_info"]["cached_tokens"] for reply in replies] == [0] * copies
    # With a prompt for each, the first look would have found 512 rows and what was generated.
    assert used and min(used) < copies * len(ids)
    assert ids_of(replies) == plainly([ids], 300) * copies


def test_a_node_is_split_under_a_running_request(
    server: Server, clients: ThreadPoolExecutor, plainly: Callable[..., list[list[int]]]
) -> None:
    base = words(1000, 3)
    running = server.stream(base, max_new_tokens=300, ignore_eos=True)
    first = next(running)
    branches = [[*base[:length], *words(5, length)] for length in (700, 333, 90)]
    replies = [ask(server, branch, 20) for branch in branches]
    assert [reply["meta_info"]["cached_tokens"] for reply in replies] == [700, 333, 90]
    last = [first, *running][-1]
    assert len(last["output_ids"]) == 300 > 2 * len(first["output_ids"])
    assert [last["output_ids"]] == plainly([base], 300)
    assert ids_of(replies) == plainly(branches, 20)
    again = ask(server, [*base, *last["output_ids"], 7], 20)
    assert again["meta_info"]["cached_tokens"] >= 1299
    assert ids_of([again]) == plainly([[*base, *last["output_ids"], 7]], 20)


def test_rows_are_evicted_while_others_run(
    server: Server, clients: ThreadPoolExecutor, plainly: Callable[..., list[list[int]]]
) -> None:
    base = words(1000, 4)
    first = ask(server, base, 8)
    running = clients.submit(ask, server, words(600, 5), 400)
    others = [words(1500, 10 + i) for i in range(5)]  # 7500 rows through a pool of 6000
    replies = [ask(server, ids, 8) for ids in others]
    again = ask(server, base, 8)
    assert again["meta_info"]["cached_tokens"] < 1000, "nothing was evicted"
    assert again["output_ids"] == first["output_ids"]
    assert ids_of(replies) == plainly(others, 8)
    assert ids_of([running.result()]) == plainly([words(600, 5)], 400)


# -- the scheduler --------------------------------------------------------------------------------


def test_requests_are_retracted_and_come_back(
    server: Server, plainly: Callable[..., list[list[int]]]
) -> None:
    """Eight answers of 900 tokens do not fit the pool together, and are let in together."""
    prompts = [words(60, 20 + i) for i in range(8)]
    replies = server.generate_many(prompts, concurrency=8, max_new_tokens=900, ignore_eos=True)
    retractions = sum(reply["meta_info"]["num_retractions"] for reply in replies)
    assert retractions > 0, "nothing was retracted"
    assert ids_of(replies) == plainly(prompts, 900)


def test_a_request_of_higher_priority_takes_a_running_ones_place(
    server: Server, clients: ThreadPoolExecutor, plainly: Callable[..., list[list[int]]]
) -> None:
    low = [words(50, 40 + i) for i in range(ROWS)]
    asked = [clients.submit(ask, server, ids, 300, priority=0) for ids in low]
    wait_until(lambda: state(server)["free_request_rows"] == 0)
    urgent = ask(server, words(50, 60), 20, priority=100)
    replies = [future.result() for future in asked]
    preempted = sum(reply["meta_info"]["num_retractions"] for reply in replies)
    assert preempted > 0, "nobody gave way"
    assert urgent["meta_info"]["num_retractions"] == 0
    assert ids_of(replies) == plainly(low, 300)
    assert ids_of([urgent]) == plainly([words(50, 60)], 20)


def test_several_answers_to_one_prompt(
    server: Server, plainly: Callable[..., list[list[int]]]
) -> None:
    ids = words(700, 6)
    replies: Any = ask(server, ids, 60, n=4)
    assert len(replies) == 4
    assert all(reply["meta_info"]["cached_tokens"] >= 699 for reply in replies)
    assert ids_of(replies) == plainly([ids], 60) * 4


@pytest.mark.parametrize("streaming", [False, True])
def test_sessions(server: Server, plainly: Callable[..., list[list[int]]], streaming: bool) -> None:
    """A session hands over the turn's new tokens only; a streaming one keeps its row."""
    opened = server.post(
        "/open_session", {"capacity_of_str_len": 10_000, "streaming": streaming}
    ).json()
    context: list[int] = []
    rid = None
    for turn in range(4):
        new = words(300, 70 + turn)
        body = {
            "input_ids": new,
            "session_params": {"id": opened, "rid": rid},
            "sampling_params": {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True},
        }
        reply = server.post("/generate", body).json()
        rid = None if streaming else reply["meta_info"]["id"]
        context += new
        assert reply["meta_info"]["prompt_tokens"] == len(context)
        if turn:
            assert reply["meta_info"]["cached_tokens"] > len(context) - 310
        assert ids_of([reply]) == plainly([context], 30)
        context += reply["output_ids"]
    server.post("/close_session", {"session_id": opened})


@pytest.mark.parametrize("phase", ["queued", "prefilled", "decoded"])
def test_an_abort_in_each_phase(
    server: Server,
    clients: ThreadPoolExecutor,
    plainly: Callable[..., list[list[int]]],
    phase: str,
) -> None:
    bystander = clients.submit(ask, server, words(50, 80), 300)
    if phase == "queued":
        fillers = [clients.submit(ask, server, words(50, 81 + i), 200) for i in range(ROWS)]
        wait_until(lambda: state(server)["free_request_rows"] == 0)
    length = 4500 if phase == "prefilled" else 100
    doomed = clients.submit(ask, server, words(length, 99), 1000, rid=phase)
    if phase == "queued":
        time.sleep(0.3)
        # It cannot have a row while the others hold all of them.
        assert state(server)["free_request_rows"] == 0
    elif phase == "prefilled":
        # The first of nine chunks is in; the pool is not shared with anything that large.
        wait_until(lambda: POOL - state(server)["free_kv_tokens"] > 600)
    else:
        wait_until(lambda: state(server)["free_request_rows"] <= ROWS - 2)
        time.sleep(0.3)
    server.abort(phase)
    try:
        reply = doomed.result(timeout=120)
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        received = len(reply["output_ids"])
    except ServerError as error:  # had no row yet
        assert "abort" in str(error).lower()
        received = 0
    if phase == "decoded":
        assert 0 < received < 1000
    else:
        assert received == 0
    if phase == "queued":
        expected = plainly([words(50, 81 + i) for i in range(ROWS)], 200)
        assert ids_of([future.result() for future in fillers]) == expected
    assert ids_of([bystander.result()]) == plainly([words(50, 80)], 300)


# -- weights --------------------------------------------------------------------------------------


def test_new_weights_without_a_flush_switch_snapshots_off_until_one(
    server: Server, tiny_target: Path
) -> None:
    ids = words(1100, 90)

    def hits() -> int:
        before = state(server)["snapshot_hits"]
        replies.append(ask(server, ids, 20))
        return state(server)["snapshot_hits"] - before

    replies: list[dict[str, Any]] = []
    assert (hits(), hits()) == (0, 1)
    reply = server.post(
        "/update_weights_from_disk", {"model_path": str(tiny_target), "flush_cache": False}
    ).json()
    assert reply["success"]
    assert state(server)["snapshot_bytes"] == 0
    assert (hits(), hits()) == (0, 0)
    assert replies[-1]["meta_info"]["cached_tokens"] == 1099  # SGLang kept its rows
    server.flush()
    assert (hits(), hits()) == (0, 1)
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 1
