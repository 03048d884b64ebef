"""Verify widths other than 8."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from serving.server import ServerPool
from serving.test_identity import CHECKED, CHUNKED
from serving.workload import FIRST, LAST, Request, free_counts, outputs, state


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
    drafts = ("--speculative-num-draft-tokens", str(width))
    server = servers.get(tiny_target, tiny_drafter, extra_args=(*CHUNKED, *drafts), env=CHECKED)
    before = free_counts(server)
    assert outputs(server, requests[:8], 1) == expected[:8]
    assert outputs(server, requests, 8) == expected
    per_slot = state(server)["accepted_per_slot"]
    assert len(per_slot) == width - 1
    assert min(per_slot) > 0, f"a slot was never accepted: {per_slot}"
    reply = server.generate(requests[0].prompt, max_new_tokens=40, ignore_eos=True)["meta_info"]
    assert reply["spec_num_proposed_drafts"] == reply["spec_verify_ct"] * (width - 1)
    assert free_counts(server) == before
