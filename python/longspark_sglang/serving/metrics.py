"""What an operator sees: start-up lines, Prometheus gauges, the numbers in /server_info, one
warning.

The accept length itself needs nothing here: SGLang computes it from what the worker returns.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from longspark_sglang import ops
from longspark_sglang.serving import compat
from longspark_sglang.serving.snapshots import PrefixSnapshots

logger = logging.getLogger(__name__)

MIB = 1 << 20

# name -> (documentation, how to read it from the worker)
GAUGES = {
    "longspark:state_bytes": (
        "Bytes of drafter state of all request rows",
        lambda w: w.store.total_bytes,
    ),
    "longspark:state_bytes_per_request": (
        "Bytes of drafter state of one request",
        lambda w: w.store.bytes_per_row,
    ),
    "longspark:summary_rebuilds": (
        "Summaries rebuilt from the target's cache (prefix hits, retractions)",
        lambda w: w.store.counters.rebuilds,
    ),
    "longspark:summary_rebuilt_rows": (
        "K/V rows read again by those rebuilds",
        lambda w: w.store.counters.rebuilt_rows,
    ),
    "longspark:snapshot_hits": (
        "Rebuilds that started from a prefix snapshot",
        lambda w: _snapshots(w, lambda s: s.counters.hits),
    ),
    "longspark:snapshot_rows_saved": (
        "K/V rows that those rebuilds did not have to read",
        lambda w: _snapshots(w, lambda s: s.counters.rows_saved),
    ),
    "longspark:snapshot_bytes": (
        "Host bytes that hold prefix snapshots",
        lambda w: _snapshots(w, lambda s: s.used_bytes),
    ),
    "longspark:snapshot_evictions": (
        "Prefix snapshots given up for newer ones",
        lambda w: _snapshots(w, lambda s: s.counters.evictions),
    ),
    "longspark:proposals": ("Blocks proposed (requests x rounds)", lambda w: w.metrics.proposals),
    "longspark:accepted_drafts": (
        "Draft tokens accepted (bonus tokens not counted)",
        lambda w: w.metrics.accepted,
    ),
    "longspark:refused_requests": (
        "Requests refused because they could not be served exactly",
        lambda w: w.metrics.refusals,
    ),
}


def _snapshots(worker: Any, read: Callable[[PrefixSnapshots], int]) -> int:
    """A number of the prefix snapshots, 0 where there are none."""
    return 0 if worker.store.snapshots is None else read(worker.store.snapshots)


class Metrics:
    """Counts what the worker does and publishes it.

    Args:
        worker: the LongSparkWorker.
        args: resolved server arguments; gauges exist only where metrics are enabled.
    """

    def __init__(self, worker: Any, args: Any) -> None:
        self.worker = worker
        self.proposals = 0
        self.accepted = 0
        self.accepted_per_slot = [0] * (worker.width - 1)
        self.refusals = 0
        self._warn_after = compat.number("LONGSPARK_WARN_ROUNDS", 200)
        self._fruitless = 0  # blocks since a draft was last accepted
        self._warned = False
        self._launched: deque[list[bool]] = deque()
        self._gauges = _make_gauges(args) if getattr(args, "enable_metrics", False) else []

    def note_launch(self, speculating: list[bool]) -> None:
        """A round is on its way; per request, whether it speculates at all. `note_round` follows in
        the same order.
        """
        self._launched.append(speculating)

    def note_round(self, accepted_drafts: list[int]) -> None:
        """Account one verified round; `accepted_drafts` per request, bonus not counted.

        Requests with speculation switched off count nowhere: they say nothing about the drafter.
        """
        speculating = self._launched.popleft()
        counts = [n for n, drafted in zip(accepted_drafts, speculating, strict=True) if drafted]
        self.proposals += len(counts)
        self.accepted += sum(counts)
        for count in counts:
            for slot in range(count):
                self.accepted_per_slot[slot] += 1
        self._fruitless = 0 if any(counts) else self._fruitless + len(counts)
        for gauge, read in self._gauges:
            gauge.set(read(self.worker))
        self._warn_if_nothing_is_accepted()

    def snapshot(self) -> dict[str, float]:
        """The gauges' values by name and the pools' free counts, for /server_info."""
        worker = self.worker
        values = {
            name.removeprefix("longspark:"): read(worker) for name, (_, read) in GAUGES.items()
        }
        return {
            **values,
            "simulated_acceptance": worker.simulation and worker.simulation.as_dict(),
            "accepted_per_slot": list(self.accepted_per_slot),
            "owned_rows": worker.store.owned_rows(worker.req_to_token_pool.free_slots),
            "free_request_rows": worker.req_to_token_pool.available_size(),
            "free_kv_tokens": worker.token_to_kv_pool_allocator.available_size(),
            "state_checks": worker.self_check.checks,
            "poisoned_rows": worker.self_check.poisoned,
            "largest_state_difference": worker.self_check.largest_difference,
        }

    def _warn_if_nothing_is_accepted(self) -> None:
        """A wrong drafter costs speed and nothing else, so nobody would notice: say it once."""
        if self._warned or not self._fruitless or self._fruitless < self._warn_after:
            return
        self._warned = True
        logger.warning(
            "LONGSPARK: none of the drafts of the last %d blocks was accepted (accept length 1). "
            "The output is right, but speculation only costs time. Is the drafter trained for this "
            "target (vocabulary, RoPE base, chat template), and for its present weights? Run "
            "`longspark check`.",
            self._fruitless,
        )


def _make_gauges(args: Any) -> list[tuple[Any, Any]]:
    # prometheus_client picks its multiprocess mode when it is first imported: SGLang has set the
    # variable by now, at import time of this module it may not have.
    from prometheus_client import Gauge

    labels = {"model_name": str(getattr(args, "served_model_name", None) or args.model_path)}
    return [
        (
            Gauge(
                name, documentation, labelnames=list(labels), multiprocess_mode="mostrecent"
            ).labels(**labels),
            read,
        )
        for name, (documentation, read) in GAUGES.items()
    ]


def start_up_lines(worker: Any) -> list[str]:
    """What LONGSPARK uses, in the terms of the documentation."""
    config, store = worker.config, worker.store
    by_source: dict[str, list[str]] = {}
    for op, source in sorted(ops.sources(worker.store.value.device.type).items()):
        by_source.setdefault(source, []).append(op)
    sources = "; ".join(f"{source}: {', '.join(names)}" for source, names in by_source.items())
    lines = [
        f"LONGSPARK: {config.num_layers} drafter layers read target layers "
        f"{list(config.tapped_layers)}; window {config.window} rows in place, "
        f"{config.summary_slots} summary slots per query head; verify width {worker.width} "
        f"(anchor + {worker.width - 1} drafts)",
        f"LONGSPARK: drafter weights {worker.drafter.weight_bytes / MIB:.1f} MiB on this rank; "
        f"state {store.bytes_per_row / MIB:.3f} MiB a request, {store.total_bytes / MIB:.1f} MiB "
        f"for {store.num_rows} request rows; taps {worker.taps.buffer.nbytes / MIB:.1f} MiB",
        f"LONGSPARK: operators from {sources}",
        _snapshot_line(store.snapshots),
    ]
    every = worker.self_check.every
    if every:
        lines.append(
            f"LONGSPARK: LONGSPARK_CHECK={every}: row ids are checked every round, states compared "
            f"with a rebuild every {every} rounds"
        )
    overrides = [name for name in compat.ENVIRONMENT if name in os.environ]
    if overrides:
        lines.append(f"LONGSPARK: environment overrides {', '.join(overrides)}")
    return lines


def _snapshot_line(snapshots: PrefixSnapshots | None) -> str:
    if snapshots is None:
        return "LONGSPARK: prefix snapshots are off"
    capacity, size = len(snapshots.value), snapshots.value.nbytes + snapshots.lse.nbytes
    return (
        f"LONGSPARK: prefix snapshots every {snapshots.block} rows, at most {capacity} "
        f"({size / MIB:.1f} MiB of host memory)"
    )
