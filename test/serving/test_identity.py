"""At temperature 0 in float32 every answer equals that of the same server without speculation."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from serving.server import Server, ServerPool
from serving.workload import MANY, Request, free_counts, mixed_requests, outputs, state

# Chunks of 512 split the 6,000-token prompts into twelve.
CHUNKED = ("--chunked-prefill-size", "512", "--max-running-requests", "40")
# A prime, so that checks fall on every kind of round.
CHECKED = {"LONGSPARK_CHECK": "7"}
# Where the number of a pass of the target is a multiple of this one, and the pass decodes several
# requests, one of them is retracted, and prefilled again with what it has generated.
RETRACTED = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "17"}
# What the server gets beside CHUNKED, and its page size and ranks, which its plain twin has too.
SETTINGS: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "page-16": ((), {"page_size": 16}),
    "tp-2": ((), {"tp": 2}),
    "no-overlap": (("--disable-overlap-schedule",), {}),
    "mixed-chunk": (("--enable-mixed-chunk",), {}),
    "overlap": ((), {}),
}


@pytest.fixture(scope="module")
def known() -> dict[str, list[list[int]]]:
    """Answers of plain servers: how passes are put together makes no difference to theirs."""
    return {}


@pytest.mark.parametrize("setting", SETTINGS)
def test_200_mixed_requests_equal_plain_decoding(
    servers: ServerPool,
    tiny_target: Path,
    tiny_drafter: Path,
    known: dict[str, list[list[int]]],
    setting: str,
) -> None:
    more, twins = SETTINGS[setting]
    requests = mixed_requests(200)
    plain = servers.get(tiny_target, extra_args=CHUNKED, **twins)
    if str(twins) not in known:
        known[str(twins)] = outputs(plain, requests, MANY)
    expected = known[str(twins)]
    server = servers.get(
        tiny_target,
        tiny_drafter,
        extra_args=(*CHUNKED, *more),
        env={**CHECKED, **RETRACTED},
        **twins,
    )
    before = free_counts(server)
    # One after another first (every prefix hit is then a hit), then many at once, among them some
    # whose clients abort them while a verify pass may be in flight.
    assert outputs(server, requests[:24], 1) == expected[:24]
    aborted = _abort_while_running(server, [Request(r.prompt, 400) for r in requests[8:24]])
    assert outputs(server, requests, MANY) == expected
    for thread in aborted:
        thread.join(timeout=60)
        assert not thread.is_alive()
    _assert_accept_lengths_vary(server)
    assert re.search(r"#retracted_reqs: [1-9]", server.log), (
        "nothing was retracted, so this shows less than it says"
    )
    assert free_counts(server) == before
    assert server.alive


def _abort_while_running(server: Server, requests: list[Request]) -> list[threading.Thread]:
    """Start requests and abort them one by one; their callers run in the threads returned."""
    callers = []
    for i, request in enumerate(requests):
        call = {
            "rid": f"doomed-{i}",
            "max_new_tokens": request.tokens,
            "ignore_eos": True,
        }
        caller = threading.Thread(target=server.generate, args=(request.prompt,), kwargs=call)
        caller.start()
        callers.append(caller)

    def abort_all() -> None:
        for i in range(len(requests)):
            time.sleep(0.02 * (i % 5))
            server.abort(f"doomed-{i}")

    aborter = threading.Thread(target=abort_all)
    aborter.start()
    return [*callers, aborter]


def _assert_accept_lengths_vary(server: Server) -> None:
    """The identity above means something only where drafts are accepted now and rejected then."""
    now = state(server)
    rounds, per_slot = now["proposals"], now["accepted_per_slot"]
    assert rounds > 100
    assert per_slot[0] > 0.5 * rounds, f"drafts are hardly accepted: {per_slot} of {rounds}"
    assert 0 < per_slot[-1] < 0.9 * rounds, f"accept lengths do not vary: {per_slot} of {rounds}"
    assert now["state_checks"] > rounds / 20
