"""Weights that change or leave the memory under a running server."""

from __future__ import annotations

from pathlib import Path

from serving.server import Server, ServerPool
from serving.test_identity import CHECKED, CHUNKED
from serving.workload import Request, free_counts, outputs, words


def test_new_target_weights_reach_the_drafter_and_leave_its_own_alone(
    servers: ServerPool, tiny_target: Path, tiny_drafter: Path, pair_cache
) -> None:
    """User case: after a weight update drafts came from zeros, and nobody noticed."""
    other = pair_cache.target(seed=1)
    requests = [Request(tuple(words(60, 20 + i)), 40) for i in range(8)]
    expected_other = outputs(servers.get(other, extra_args=CHUNKED), requests, 8)
    server = servers.get(tiny_target, tiny_drafter, extra_args=CHUNKED, env=CHECKED)
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
    server = servers.get(tiny_target, tiny_drafter, extra_args=CHUNKED, env=CHECKED)
    before = free_counts(server)
    requests = [Request(tuple(words(60, 40 + i)), 40) for i in range(4)]
    original = _answers_and_histograms(server, requests)
    server.post("/release_memory_occupation", {})
    server.post("/resume_memory_occupation", {})
    assert _answers_and_histograms(server, requests) == original
    assert free_counts(server) == before


def _update_weights(server: Server, folder: Path) -> None:
    server.flush()  # waits for the last request to leave; the update does not
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
