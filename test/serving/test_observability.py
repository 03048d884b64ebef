"""What an operator sees: start-up lines, /server_info, meta_info, Prometheus, one warning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from longspark_sglang.config import LongSparkConfig

from serving.server import Server, ServerPool
from serving.test_identity import CHECKED, CHUNKED
from serving.workload import words

ROWS = 40 + 1  # --max-running-requests of CHUNKED, and SGLang's row for padding
FLOAT32 = 4
WARN_ROUNDS = 60
NOTHING_ACCEPTED = "none of the drafts"


@pytest.fixture
def server(servers: ServerPool, tiny_target: Path, tiny_drafter: Path) -> Server:
    return servers.get(tiny_target, tiny_drafter, extra_args=CHUNKED, env=CHECKED)


@pytest.fixture
def config(tiny_drafter: Path) -> LongSparkConfig:
    return LongSparkConfig.from_json_file(tiny_drafter / "config.json")


def internal_state(server: Server) -> dict[str, Any]:
    return server.server_info()["internal_states"][0]


def test_start_up_lines_say_what_is_used(server: Server, config: LongSparkConfig) -> None:
    lines = [
        line.split("LONGSPARK: ", 1)[1] for line in server.log.splitlines() if "LONGSPARK: " in line
    ]
    per_request = config.state_bytes_per_request(1, FLOAT32) / 2**20
    parameters = sum(_parameters(config))
    expected = [
        rf"3 drafter layers read target layers \[{', '.join(map(str, config.tapped_layers))}\]; "
        r"window 256 rows in place, 16 summary slots per query head; "
        r"verify width 8 \(anchor \+ 7 drafts\)",
        rf"drafter weights {parameters * FLOAT32 / 2**20:.1f} MiB on this rank; "
        rf"state {per_request:.3f} MiB a request, {ROWS * per_request:.1f} MiB for {ROWS} request "
        r"rows; taps [\d.]+ MiB",
        r"operators from .*block_attention.*",
        r"prefix snapshots every 512 rows, at most 79 \([\d.]+ MiB of host memory\)",
        r"LONGSPARK_CHECK=7: .*",
        r"environment overrides LONGSPARK_CHECK",
    ]
    for pattern in expected:
        found = [line for line in lines if re.fullmatch(pattern, line)]
        assert len(found) == 1, (pattern, lines)
    operators = next(line for line in lines if line.startswith("operators from"))
    for name in ("block_attention", "draft_sample", "summary_merge", "window_index"):
        assert name in operators


def _parameters(config: LongSparkConfig) -> list[int]:
    from longspark_sglang.checkpoint import expected_tensors

    sizes = []
    for shape in expected_tensors(config).values():
        size = 1
        for dimension in shape:
            size *= dimension
        sizes.append(size)
    return sizes


def test_numbers_of_a_request_and_of_the_server_add_up(
    server: Server, config: LongSparkConfig
) -> None:
    before = internal_state(server)["longspark"]
    replies = [
        server.generate(words(50, seed), max_new_tokens=150, ignore_eos=True) for seed in range(4)
    ]
    after = internal_state(server)
    ours = after["longspark"]
    rounds, correct = 0, 0
    for meta in (reply["meta_info"] for reply in replies):
        histogram = meta["spec_correct_drafts_histogram"]
        assert sum(histogram) == meta["spec_verify_ct"]
        assert sum(i * n for i, n in enumerate(histogram)) == meta["spec_num_correct_drafts"]
        assert meta["spec_num_proposed_drafts"] == 7 * meta["spec_verify_ct"]
        assert meta["spec_accept_length"] == pytest.approx(
            meta["completion_tokens"] / meta["spec_verify_ct"]
        )
        # The first token comes out of the prefill; the last round may be cut by the answer's end.
        emitted = 1 + meta["spec_verify_ct"] + meta["spec_num_correct_drafts"]
        assert 150 <= emitted < 150 + 8
        rounds += meta["spec_verify_ct"]
        correct += meta["spec_num_correct_drafts"]
    assert 1.5 < 600 / rounds < 8
    # Under overlap a finished request runs one round more.
    assert 0 <= ours["proposals"] - before["proposals"] - rounds <= len(replies)
    assert 0 <= ours["accepted_drafts"] - before["accepted_drafts"] - correct <= 7 * len(replies)
    assert sum(ours["accepted_per_slot"]) == ours["accepted_drafts"]
    assert ours["accepted_per_slot"] == sorted(ours["accepted_per_slot"], reverse=True)
    # Since the flush of this test's start, and up to SGLang's last report (every 40 rounds).
    assert after["avg_spec_accept_length"] == pytest.approx(600 / rounds, rel=0.3)
    assert ours["state_bytes_per_request"] == config.state_bytes_per_request(1, FLOAT32)
    assert ours["state_bytes"] == ROWS * ours["state_bytes_per_request"]
    assert ours["owned_rows"] == 0 and ours["free_request_rows"] == 40


def test_prometheus_has_every_gauge(server: Server) -> None:
    server.flush()
    ids = words(400, 9)
    before = internal_state(server)["longspark"]
    with pytest.raises(Exception, match="custom_params"):
        server.generate(ids, custom_params={"longspark": {"enabled": "no"}})
    server.generate(ids, max_new_tokens=4, ignore_eos=True)
    # A hit, and long enough for SGLang to publish its own numbers (every 40 rounds).
    reply = server.generate(ids, max_new_tokens=400, ignore_eos=True)
    assert reply["meta_info"]["cached_tokens"] == 399
    ours = internal_state(server)["longspark"]
    metrics = server.metrics()
    assert 1.5 < metrics["sglang:spec_accept_length"] < 8
    gauges = {
        name.removeprefix("longspark:"): value
        for name, value in metrics.items()
        if name.startswith("longspark:")
    }
    assert gauges == {name: ours[name] for name in gauges}
    assert gauges.keys() == {
        "state_bytes",
        "state_bytes_per_request",
        "summary_rebuilds",
        "summary_rebuilt_rows",
        "snapshot_hits",
        "snapshot_rows_saved",
        "snapshot_bytes",
        "snapshot_evictions",
        "proposals",
        "accepted_drafts",
        "refused_requests",
    }
    assert ours["refused_requests"] == before["refused_requests"] + 1
    assert ours["summary_rebuilds"] == before["summary_rebuilds"] + 1
    assert ours["summary_rebuilt_rows"] == before["summary_rebuilt_rows"] + 399
    assert ours["proposals"] > before["proposals"] + 50
    assert ours["accepted_drafts"] > before["accepted_drafts"]


def test_a_drafter_that_knows_nothing_is_reported_once(
    servers: ServerPool, tiny_target: Path, pair_cache, server: Server
) -> None:
    """User case: a wrong drafter costs speed and nothing else, so nobody notices."""
    ids = words(50, 1)
    warnings = server.log.count(NOTHING_ACCEPTED)  # of other tests, if any
    good = server.generate(ids, max_new_tokens=300, ignore_eos=True)
    # Requests that asked for no speculation say nothing about the drafter.
    server.generate_many(
        [ids] * 8, max_new_tokens=40, custom_params={"longspark": {"enabled": False}}
    )
    assert server.log.count(NOTHING_ACCEPTED) == warnings
    low = servers.get(
        tiny_target,
        pair_cache.drafter(tiny_target, agreement="low"),
        extra_args=CHUNKED,
        env={"LONGSPARK_WARN_ROUNDS": str(WARN_ROUNDS)},
    )
    first = low.generate(ids, max_new_tokens=WARN_ROUNDS // 2, ignore_eos=True)
    assert NOTHING_ACCEPTED not in low.log
    reply = low.generate(ids, max_new_tokens=300, ignore_eos=True)
    assert reply["output_ids"] == good["output_ids"]
    assert first["meta_info"]["spec_num_correct_drafts"] == 0
    assert low.log.count(NOTHING_ACCEPTED) == 1
    assert internal_state(low)["avg_spec_accept_length"] < 1.1
