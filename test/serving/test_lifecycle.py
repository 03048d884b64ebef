"""A server's life: flushes under and between requests, clients that leave."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.server import Server, ServerError, ServerPool
from serving.test_identity import CHECKED, CHUNKED
from serving.workload import free_counts, mixed_requests, outputs, words


def test_flushes_between_requests_and_while_one_runs(
    servers: ServerPool, tiny_target: Path, tiny_drafter: Path
) -> None:
    ids = words(300, 7)
    plain = servers.get(tiny_target, extra_args=CHUNKED)
    expected = plain.generate(ids, max_new_tokens=200, ignore_eos=True)["output_ids"]
    server = servers.get(tiny_target, tiny_drafter, extra_args=CHUNKED, env=CHECKED)
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


def test_clients_that_abort_or_hang_up_leave_the_others_alone(
    servers: ServerPool, tiny_target: Path, tiny_drafter: Path
) -> None:
    """User case: a request that ends while its block is verified; its row goes to another one."""
    bystanders = mixed_requests(60)[8:40]
    plain = servers.get(tiny_target, extra_args=CHUNKED)
    expected = outputs(plain, bystanders, 8)
    server = servers.get(tiny_target, tiny_drafter, extra_args=CHUNKED, env=CHECKED)
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
                words(draw.randrange(5, 80), client), rid=rid, max_new_tokens=2000, ignore_eos=True
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
            words(draw.randrange(5, 80), client), max_new_tokens=2000, ignore_eos=True
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
