"""The CPU platform without speculation: the server says what transformers says."""

from __future__ import annotations

import pytest
from pairs import PairCache

from serving.hf_reference import Reference, assert_follows, prompts, samples
from serving.server import Server, ServerPool

LENGTHS = (1, 5, 40, 255, 257, 1100)  # the last is prefilled in chunks
TOKENS = 32
CHUNKED = ("--chunked-prefill-size", "512")
DETERMINISTIC = ("--enable-deterministic-inference", *CHUNKED)
# The platform must find the cores of the ranks itself, whatever the harness sets for others.
NO_BINDING = {"SGLANG_CPU_OMP_THREADS_BIND": ""}

SERVERS: dict[str, tuple[dict, dict]] = {
    "qwen3": ({}, {"extra_args": CHUNKED}),
    "llama-page16": (
        {"architecture": "llama"},
        {"page_size": 16, "extra_args": DETERMINISTIC},
    ),
    "qwen3-tp2": ({}, {"tp": 2, "extra_args": CHUNKED, "env": NO_BINDING}),
    "sliding-window": ({"sliding_window": 64}, {"extra_args": CHUNKED}),
}


# The pool keeps two servers alive: the tests below come in an order that starts each one once.


def start(servers: ServerPool, pair_cache: PairCache, name: str) -> tuple[Server, Reference]:
    recipe, options = SERVERS[name]
    target = pair_cache.target(**recipe)
    return servers.get(target, **options), Reference(target)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 2.0, "min_p": 0.3},
        {"temperature": 1.5, "top_k": 8, "min_p": 0.1},
    ],
    ids=str,
)
def test_samples_follow_the_law(servers, pair_cache, sampling):
    server, reference = start(servers, pair_cache, "qwen3")
    prompt = prompts((30,), seed=2)[0]
    law = reference.law(prompt, 2, **sampling)
    assert_follows(samples(server, prompt, 1000, 2, **sampling), law)


@pytest.mark.parametrize("name", SERVERS)
def test_greedy_equals_transformers(servers, pair_cache, name):
    server, reference = start(servers, pair_cache, name)
    asked = prompts(LENGTHS)
    expected = [reference.greedy(prompt, TOKENS) for prompt in asked]
    options = {"max_new_tokens": TOKENS, "ignore_eos": True}
    one_by_one = [server.generate(prompt, **options)["output_ids"] for prompt in asked]
    assert one_by_one == expected
    together = server.generate_many(asked * 3, concurrency=18, **options)
    assert [answer["output_ids"] for answer in together] == expected * 3
