"""What a training run shows: one progress bar on a terminal, else lines; TensorBoard on demand."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from longspark_sglang.training.config import TrainingError


class TrainingReport:
    """Follows one run.

    Args:
        steps: at which the run ends.
        begin: step it begins at.
        line_every: steps between lines, where there is no terminal for a bar.
        tensorboard: folder of event files.
    Raises:
        TrainingError: TensorBoard is asked for and not installed.
    """

    def __init__(
        self, steps: int, begin: int, line_every: int, tensorboard: Path | None = None
    ) -> None:
        self.steps, self.line_every = steps, line_every
        self.started, self.tokens, self.accept_length = time.monotonic(), 0, ""
        self._events = _event_writer(tensorboard) if tensorboard else None
        self._bar = _bar(steps, begin) if sys.stdout.isatty() else None

    def step(self, record: dict[str, Any], tokens: int) -> None:
        """One step: step, loss, where measured accept_length and per_slot; and its tokens."""
        self.tokens += tokens
        step = record["step"]
        speed = self.tokens / max(time.monotonic() - self.started, 1e-9)
        if "accept_length" in record:
            slots = " ".join(f"{share:.2f}" for share in record["per_slot"])
            self.accept_length = f", accept length {record['accept_length']:.3f} ({slots})"
        figures = f"loss {record['loss']:.4f}, {speed:.0f} tok/s{self.accept_length}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, figures=figures)
        elif step == self.steps or step % self.line_every == 0:
            print(f"step {step}/{self.steps}, {figures}", flush=True)
        if self._events is not None:
            self._events.add_scalar("loss", record["loss"], step)
            self._events.add_scalar("tokens per second", speed, step)
            if "accept_length" in record:
                self._events.add_scalar("accept length", record["accept_length"], step)
                for slot, share in enumerate(record["per_slot"]):
                    self._events.add_scalar(f"acceptance/slot {slot}", share, step)

    def close(self) -> None:
        """Leave the terminal in order and the event file complete."""
        if self._bar is not None:
            self._bar.stop()
        if self._events is not None:
            self._events.close()


def _bar(steps: int, begin: int) -> Any | None:
    """A started bar, or None without rich."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining
    except ImportError:
        return None
    figures = TextColumn("{task.fields[figures]}")
    bar = Progress(TextColumn("step"), BarColumn(20), MofNCompleteColumn(), Remaining(), figures)
    bar.add_task("", total=steps, completed=begin, figures="")
    bar.start()
    return bar


def _event_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TrainingError(
            "--tensorboard cannot be used", [f"{error}: pip install tensorboard, or drop the flag"]
        ) from error
    return SummaryWriter(str(folder))
