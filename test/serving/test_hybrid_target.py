"""A target of full-attention and sliding-window layers, which have a pool each."""

from __future__ import annotations

import re

from serving.server import ServerPool
from serving.test_identity import CHECKED
from serving.workload import free_counts, state, words

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
    prompts = [words(PROMPT, 60 + i) for i in range(CLIENTS)]
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
