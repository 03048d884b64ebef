"""Where one decoding round spends its time: timers around the worker's own methods.

The serving code knows nothing of this: the methods of one worker object are wrapped from outside,
so a server that is not being measured pays nothing. On a GPU a phase is the time between two CUDA
events on the current stream, read after the round; on a CPU, where calls are synchronous, it is a
monotonic clock.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

# phase -> (attribute path of the object below the worker, method). A phase nested in another one is
# taken out of the outer, so that the phases of a round add up to at most its whole.
LONGSPARK_PHASES: dict[str, tuple[str, str]] = {
    "proposal": ("drafter", "propose"),
    "sampling": ("drafter", "_draw"),
    "verify": ("", "_verify"),
    "accept": ("sampler", "accept"),
    "update": ("store", "commit"),
}
# Where rounds are captured as CUDA graphs, these run instead: sampling is a part of the first, the
# summary update a part of the second, and neither can be seen apart from it.
GRAPH_PHASES: dict[str, tuple[str, str]] = {
    "proposal": ("graphs", "propose"),
    "accept": ("graphs", "accept"),
}
PLAIN_PHASES: dict[str, tuple[str, str]] = {"decode": ("", "forward_batch_generation")}
EVICTION = "eviction"  # what the measurement itself adds to a round; it is taken out again
NESTED = {"sampling": "proposal"}


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class PhaseClock:
    """Times of named phases, round by round.

    Args:
        device: "cuda" measures with events, everything else with the monotonic clock.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._marks: dict[str, list[tuple[Any, Any]]] = {}
        self._read = CLOCKS["wall"]

    def use(self, clock: str) -> None:
        """Read "wall" time, or "cpu" time: what this process used on all of its cores."""
        self._read = CLOCKS[clock]

    def wrap(self, owner: Any, method: str, phase: str) -> None:
        """Time every call of `owner.method` as `phase`."""
        function: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                self._marks.setdefault(phase, []).append((start, self._now()))

        # Through __dict__, since an nn.Module's __setattr__ would be none the wiser either way.
        owner.__dict__[method] = timed

    def attach(self, worker: Any, phases: dict[str, tuple[str, str]]) -> None:
        """Wrap the phases of a worker. AttributeError names one that no longer exists."""
        for phase, (path, method) in phases.items():
            owner = functools.reduce(getattr, path.split("."), worker) if path else worker
            self.wrap(owner, method, phase)

    def start_round(self) -> float:
        """Forget what was measured; returns the clock in seconds."""
        self._marks.clear()
        return self._read()

    def end_round(self, started: float) -> dict[str, float]:
        """Milliseconds of each phase that ran since `start_round`, and of the whole as "round"."""
        if self._on_gpu:
            torch.cuda.synchronize()
        taken = {"round": (self._read() - started) * 1e3}
        for phase, marks in self._marks.items():
            taken[phase] = sum(self._between(start, end) for start, end in marks)
        taken["round"] -= taken.pop(EVICTION, 0.0)
        for inner, outer in NESTED.items():
            if inner in taken and outer in taken:
                taken[outer] -= taken[inner]
        named = sum(value for phase, value in taken.items() if phase != "round")
        # On a GPU the host runs ahead, so this is what neither phase nor overlap accounts for.
        taken["other"] = max(0.0, taken["round"] - named)
        return taken

    def _now(self) -> Any:
        if not self._on_gpu:
            return self._read()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) if self._on_gpu else (end - start) * 1e3
