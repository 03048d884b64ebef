"""A measurement engine into which faults can be planted, for the tests of the regression gate."""

from __future__ import annotations

import time
from typing import Any

from longspark_sglang.bench import engine_process
from longspark_sglang.bench.engine_process import EngineProcess


class PlantedEngine(EngineProcess):
    """`EngineProcess` with one more command, `plant`."""

    def __init__(self, arguments: Any) -> None:
        super().__init__(arguments)
        self.factor, self.slot = 1.0, 0
        if not self.speculates:
            return
        worker = self.scheduler.draft_worker
        a_round, draw = worker._round, worker.drafter._draw
        vocabulary = self.scheduler.model_config.vocab_size

        def slow_round(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = a_round(*args, **kwargs)
            now = time.perf_counter()
            while time.perf_counter() < now + (self.factor - 1) * (now - started):
                pass
            return result

        def wrong_draw(*args: Any, **kwargs: Any) -> Any:
            proposal = draw(*args, **kwargs)
            if self.slot:
                tokens = proposal.draft_tokens[:, self.slot - 1]
                tokens.copy_((tokens + 1) % vocabulary)
            return proposal

        worker._round = slow_round
        worker.drafter.__dict__["_draw"] = wrong_draw

    def plant(self, factor: float = 1.0, slot: int = 0) -> dict[str, Any]:
        """From now on rounds take `factor` times as long, and `slot` (from 1 on) is drafted wrong;
        0 is none.
        """
        self.factor, self.slot = factor, slot
        return {}


if __name__ == "__main__":
    engine_process.EngineProcess = PlantedEngine  # type: ignore[misc]
    import sys

    engine_process.main(sys.argv[1:])
