"""Five minutes of soak, as benchmark/soak.py runs it for longer: no mismatch, no leak, no hang."""

from __future__ import annotations

import sys
from pathlib import Path

from serving.server import ServerPool

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

import soak

SECONDS = 300


def test_five_minutes_of_soak(servers: ServerPool, tiny_target: Path, tiny_drafter: Path) -> None:
    server = servers.get(tiny_target, tiny_drafter, **soak.SERVER)
    # Figures of shared cores say nothing about speed, and caches still fill.
    bounds = soak.Bounds(throughput=None, accept_length=0.1, memory=0.05)
    report = soak.Soak(server, soak.CLIENTS).run(SECONDS, cases=48, bounds=bounds)
    print(report.text())
    assert not report.failures, report.text()
    for what in ("compared", "retractions", "aborts", "disconnects", "grammars", "sampled"):
        assert report.counts[what] > 0, report.text()
    assert report.counts["flushes"] >= 2
    for what in ("summary_rebuilds", "snapshot_hits", "states recomputed"):
        assert report.figures[what] > 0, report.text()
