"""What a training run shows."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from longspark_sglang.training.config import TrainingError
from longspark_sglang.training.report import TrainingReport

RECORDS: list[dict[str, Any]] = [
    {"step": 1, "loss": 2.0},
    {"step": 2, "loss": 1.5, "accept_length": 1.25, "per_slot": [0.2, 0.05]},
    {"step": 3, "loss": 1.0},
]


def show(report: TrainingReport) -> None:
    for record in RECORDS:
        report.step(record, tokens=10)
    report.close()


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show(TrainingReport(3, 0, line_every=2))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step 2/3", "step 3/3"]
    assert "loss 1.0000" in lines[1] and "tok/s" in lines[1]
    assert "accept length 1.250 (0.20 0.05)" in lines[1]


def test_one_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    show(TrainingReport(3, 0, line_every=2))
    printed = capsys.readouterr().out
    assert "3/3" in printed and "loss 1.0000" in printed and "accept length 1.250" in printed
    assert "step 2/3" not in printed


def test_tensorboard_gets_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in: the package is optional and large."""
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    show(TrainingReport(3, 0, line_every=2, tensorboard=tmp_path))
    assert [(v, s) for n, v, s in written if n == "loss"] == [(2.0, 1), (1.5, 2), (1.0, 3)]
    assert ("accept length", 1.25, 2) in written and ("acceptance/slot 1", 0.05, 2) in written
    assert written[-1][0] == "closed"


def test_absent_tensorboard_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrainingError, match="pip install tensorboard"):
        TrainingReport(3, 0, line_every=2, tensorboard=tmp_path)
