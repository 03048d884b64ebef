"""A server's life: verify widths, flushes, new weights, hybrid caches, clients that leave."""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.server import Server, ServerError, ServerPool
from serving.test_identity import CHECKED, CHUNKED
from serving.workload import FIRST, LAST, Request, free_counts, mixed_requests, outputs


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(FIRST, LAST) for _ in range(length)]


def state(server: Server) -> dict[str, Any]:
    return server.server_info()["internal_states"][0]["longspark"]


def checked_server(servers: ServerPool, target: Path, draft: Path, *more: str) -> Server:
    """The server of the identity tests, or one with more arguments."""
    return servers.get(target, draft, extra_args=(*CHUNKED, *more), env=CHECKED)


# -- verify widths --------------------------------------------------------------------------------


def identifier_requests(count: int = 24) -> list[Request]:
    """Prompts that use a few random identifiers of several tokens again and again."""
    draw = random.Random(3)
    requests = []
    for _ in range(count):
        names = [
            tuple(draw.randrange(FIRST, LAST) for _ in range(draw.randrange(3, 9)))
            for _ in range(4)
        ]
        text = [draw.choice(names) for _ in range(draw.randrange(8, 25))]
        requests.append(Request(sum(text, ()), 40))
    return requests


@pytest.mark.parametrize("width", [2, 4, 7])
def test_each_verify_width_equals_plain_decoding(
    servers: ServerPool, tiny_target: Path, tiny_drafter: Path, width: int
) -> None:
    """User case: one width alone garbled names copied from the prompt, and only under load."""
    requests = identifier_requests()
    plain = servers.get(tiny_target, extra_args=CHUNKED)
    expected = outputs(plain, requests, 8)
    server = checked_server(
        servers, tiny_target, tiny_drafter, "--speculative-num-draft-tokens", str(width)
    )
    before = free_counts(server)
    assert outputs(server, requests[:8], 1) == expected[:8]
    assert outputs(server, requests, 8) == expected
    per_slot = state(server)["accepted_per_slot"]
    assert len(per_slot) == width - 1
    assert min(per_slot) > 0, f"a slot was never accepted: {per_slot}"
    reply = server.generate(requests[0].prompt, max_new_tokens=40, ignore_eos=True)["meta_info"]
    assert reply["spec_num_proposed_drafts"] == reply["spec_verify_ct"] * (width - 1)
    assert free_counts(server) == before


# -- flush, weights, memory -----------------------------------------------------------------------


def test_flushes_between_requests_and_while_one_runs(
    servers: ServerPool, tiny_target: Path, tiny_drafter: Path
) -> None:
    ids = prompt(300, 7)
    plain = servers.get(tiny_target, extra_args=CHUNKED)
    expected = plain.generate(ids, max_new_tokens=200, ignore_eos=True)["output_ids"]
    server = checked_server(servers, tiny_target, tiny_drafter)
    before = free_counts(server)

    def ask() -> dict[str, Any]:
        return server.generate(ids, max_new_tokens=200, ignore_eos=True)

    cold, warm = ask(), ask()
    server.flush()
    again = ask()
    for reply in (cold, warm, again):
        assert reply["output_ids"] == expected
    assert [r["meta_info"]["cached_tokens"] for r in (cold, warm, again)] == [0, 299, 0]
    histograms = [r["meta_info"]["spec_correct_drafts_histogram"] for r in (cold, warm, again)]
    assert histograms[0] == histograms[1] == histograms[2]

    stream = server.stream(ids, max_new_tokens=200, ignore_eos=True)
    first = next(stream)
    assert len(first["output_ids"]) < 100
    with pytest.raises(ServerError, match="400"):  # SGLang does not flush under a request
        server.post("/flush_cache")
    assert [*stream][-1]["output_ids"] == expected
    assert free_counts(server) == before


def test_new_target_weights_reach_the_drafter_and_leave_its_own_alone(
    servers: ServerPool, tiny_target: Path, tiny_drafter: Path, pair_cache
) -> None:
    """User case: after a weight update drafts came from zeros, and nobody noticed."""
    other = pair_cache.target(seed=1)
    requests = [Request(tuple(prompt(60, 20 + i)), 40) for i in range(8)]
    expected_other = outputs(servers.get(other, extra_args=CHUNKED), requests, 8)
    server = checked_server(servers, tiny_target, tiny_drafter)
    before = free_counts(server)
    original = _answers_and_histograms(server, requests)
    try:
        for _ in range(2):  # the same weights, then the other ones and back
            _update_weights(server, tiny_target)
            assert _answers_and_histograms(server, requests) == original
            _update_weights(server, other)
            replies = server.generate_many(
                [r.prompt for r in requests], concurrency=8, max_new_tokens=40, ignore_eos=True
            )
            assert [reply["output_ids"] for reply in replies] == expected_other
            # This drafter knows another language, and the numbers say so.
            assert all(1.0 <= r["meta_info"]["spec_accept_length"] < 1.5 for r in replies)
            assert server.log.count("none of the drafts") == 1
    finally:
        _update_weights(server, tiny_target)
    assert _answers_and_histograms(server, requests) == original
    assert [ids for ids, _ in original] != expected_other
    assert free_counts(server) == before


def test_released_memory_comes_back_with_the_drafter_in_it(
    servers: ServerPool, tiny_target: Path, tiny_drafter: Path
) -> None:
    """User case: draft weights came back as zeros after release and resume."""
    server = checked_server(servers, tiny_target, tiny_drafter)
    before = free_counts(server)
    requests = [Request(tuple(prompt(60, 40 + i)), 40) for i in range(4)]
    original = _answers_and_histograms(server, requests)
    server.post("/release_memory_occupation", {})
    server.post("/resume_memory_occupation", {})
    assert _answers_and_histograms(server, requests) == original
    assert free_counts(server) == before


def _update_weights(server: Server, folder: Path) -> None:
    reply = server.post("/update_weights_from_disk", {"model_path": str(folder)}).json()
    assert reply["success"], reply


def _answers_and_histograms(server: Server, requests: list[Request]) -> list[tuple]:
    """Tokens and how many rounds accepted how many drafts: both show a drafter that changed."""
    server.flush()
    replies = [
        server.generate(request.prompt, max_new_tokens=request.tokens, ignore_eos=True)
        for request in requests
    ]
    found = [(r["output_ids"], r["meta_info"]["spec_correct_drafts_histogram"]) for r in replies]
    assert any(sum(histogram[2:]) for _, histogram in found), "hardly a draft was accepted"
    return found


# -- hybrid sliding-window target -----------------------------------------------------------------

SLIDING = 64
CLIENTS, PROMPT, ANSWER = 8, 100, 600
# Room for all answers in the full-attention layers, for little more than half in the others.
HYBRID = {
    "extra_args": ("--max-running-requests", "40", "--swa-full-tokens-ratio", "0.4"),
    "max_total_tokens": 8_000,
}
# Of each request: its prompt, which the prefix cache holds, its window, what SGLang lets gather
# before it evicts (every 128 tokens), and the reserve of two blocks.
MOST_SLIDING = PROMPT + SLIDING + 128 + 2 * 8


def test_a_hybrid_target_evicts_what_left_its_window(servers: ServerPool, pair_cache) -> None:
    """User case: a worker that prepares its own steps forgot to evict, and requests retracted."""
    target = pair_cache.target(sliding_window=SLIDING)
    draft = pair_cache.drafter(target)
    prompts = [prompt(PROMPT, 60 + i) for i in range(CLIENTS)]
    answers = {}
    for name, server in (
        ("plain", servers.get(target, **HYBRID)),
        ("longspark", servers.get(target, draft, env=CHECKED, **HYBRID)),
    ):
        replies = server.generate_many(
            prompts, concurrency=CLIENTS, max_new_tokens=ANSWER, ignore_eos=True
        )
        answers[name] = [reply["output_ids"] for reply in replies]
        usage = [int(rows) for rows in re.findall(r"#swa token: (\d+)", server.log)]
        assert usage, "the server has no sliding-window pool"
        assert CLIENTS * SLIDING <= max(usage) <= CLIENTS * MOST_SLIDING, usage
        assert all(reply["meta_info"]["num_retractions"] == 0 for reply in replies)
    assert answers["longspark"] == answers["plain"]
    per_slot = state(server)["accepted_per_slot"]
    assert per_slot[0] > per_slot[-1] > 0
    assert free_counts(server)["owned_rows"] == 0


# -- clients that leave ---------------------------------------------------------------------------


def test_clients_that_abort_or_hang_up_leave_the_others_alone(
    servers: ServerPool, tiny_target: Path, tiny_drafter: Path
) -> None:
    """User case: a request that ends while its block is verified; its row goes to another one."""
    bystanders = mixed_requests(60)[8:40]
    plain = servers.get(tiny_target, extra_args=CHUNKED)
    expected = outputs(plain, bystanders, 8)
    server = checked_server(servers, tiny_target, tiny_drafter)
    before = free_counts(server)
    with ThreadPoolExecutor(64) as clients:
        leaving = [clients.submit(_leave, server, i) for i in range(64)]
        got = outputs(server, bystanders, 8)
        received = [client.result(timeout=120) for client in leaving]
    assert got == expected
    # Some were cut off in the middle of their answers, not before the first token.
    assert sum(0 < tokens < 2000 for tokens in received) > 16, received
    assert free_counts(server) == before
    assert outputs(server, bystanders, 8) == expected
    assert server.alive


def _leave(server: Server, client: int) -> int:
    """A long request that its client ends at a random moment; returns how many tokens it got."""
    draw = random.Random(client)
    rid = f"leaving-{client}"
    time.sleep(draw.random() * 2)
    if client % 2:
        ended = threading.Event()
        aborter = threading.Thread(
            target=_abort_until, args=(server, rid, draw.random() * 3, ended)
        )
        aborter.start()
        try:
            reply = server.generate(
                prompt(draw.randrange(5, 80), client), rid=rid, max_new_tokens=2000, ignore_eos=True
            )
        except ServerError as error:  # ended in the queue, before it had a row
            assert "abort" in str(error).lower(), error
            return 0
        finally:
            ended.set()
            aborter.join()
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        return len(reply["output_ids"])
    received = 0
    with contextlib.suppress(httpx.HTTPError):
        stream = server.stream(
            prompt(draw.randrange(5, 80), client), max_new_tokens=2000, ignore_eos=True
        )
        for chunk in stream:
            received = len(chunk["output_ids"])
            if received > draw.randrange(1, 40):
                break
        stream.close()  # the connection ends with it
    return received


def _abort_until(server: Server, rid: str, delay: float, ended: threading.Event) -> None:
    """Abort after a delay; again and again, because an abort that comes too early is forgotten."""
    while not ended.wait(delay):
        server.abort(rid)
        delay = 0.3
