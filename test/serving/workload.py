"""The mixed workload of the identity tests: prefixes shared, repeated, long, many at once."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from serving.server import Server

FIRST, LAST = 4, 2000  # ordinary token ids of the tiny target
MANY = 32


def words(length: int, seed: int) -> list[int]:
    """A prompt of ordinary tokens."""
    draw = random.Random(seed)
    return [draw.randrange(FIRST, LAST) for _ in range(length)]


def state(server: Server) -> dict[str, Any]:
    """LONGSPARK's own counters in /server_info."""
    return server.server_info()["internal_states"][0]["longspark"]


@dataclass(frozen=True)
class Request:
    """One greedy request of the workload."""

    prompt: tuple[int, ...]
    tokens: int


def mixed_requests(count: int = 200, seed: int = 0) -> list[Request]:
    """`count` requests: fresh prompts, prefix hits, exact re-hits and a few 6,000-token prompts."""
    draw = random.Random(seed)

    def fresh(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(FIRST, LAST) for _ in range(length))

    base = fresh(300)
    long = fresh(6000)
    requests = [
        Request(long, 24),
        Request(long, 24),
        Request((*long[:5000], *fresh(7)), 24),
        Request(base, 48),
        Request(base, 48),
        Request((*base, *fresh(3)), 48),
        Request(base[:299], 48),
        Request(fresh(1), 48),
    ]
    while len(requests) < count:
        kind = draw.random()
        if kind < 0.4:  # a prefix hit that ends anywhere, also inside a page
            prompt = (*base[: draw.randrange(1, 300)], *fresh(draw.randrange(1, 12)))
        elif kind < 0.6:  # an exact re-hit
            prompt = draw.choice(requests[3:]).prompt
        else:
            prompt = fresh(draw.randrange(2, 120))
        requests.append(Request(prompt, draw.choice((1, 2, 9, 24, 40))))
    return requests


def outputs(server: Server, requests: list[Request], concurrency: int) -> list[list[int]]:
    """Token ids that the server answers to each request at temperature 0."""
    answers: dict[int, list[int]] = {}
    for tokens in sorted({request.tokens for request in requests}):
        chosen = [i for i, request in enumerate(requests) if request.tokens == tokens]
        replies = server.generate_many(
            [requests[i].prompt for i in chosen],
            concurrency=concurrency,
            max_new_tokens=tokens,
            ignore_eos=True,
        )
        for i, reply in zip(chosen, replies, strict=True):
            answers[i] = reply["output_ids"]
    return [answers[i] for i in range(len(requests))]


def free_counts(server: Server) -> dict[str, int]:
    """What the pools and the store hold when nothing runs and the prefix cache is empty."""
    server.flush()
    now = state(server)
    return {name: now[name] for name in ("free_kv_tokens", "free_request_rows", "owned_rows")}
