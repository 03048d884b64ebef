"""tools/install.py: what it tells a waiting person, and when it may skip a step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import install


@pytest.mark.parametrize(
    ("output", "step"),
    [
        ("", "starting"),
        ("Collecting sglang==0.5.23\n  WARNING: something else\n", "Collecting sglang==0.5.23"),
        (
            "Collecting a\n  Downloading torch-2.14.1.whl (800 MB)\n",
            "Downloading torch-2.14.1.whl (800 MB)",
        ),
        (
            "Collecting a\nInstalling collected packages: a, b, c\n  Attempting uninstall: b\n",
            "unpacking 3 packages",
        ),
    ],
)
def test_progress_names_the_step(output: str, step: str) -> None:
    assert install.current_step(output) == step


def test_a_failing_command_shows_the_end_of_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "print('first'); print('reason'); raise SystemExit(3)"]
    with pytest.raises(SystemExit, match=r"failed with status 3; the whole output is in .*log"):
        install.run_with_progress(command, tmp_path / "log")
    assert capsys.readouterr().out == "first\nreason\n"


def test_a_step_is_repeated_when_an_input_changes(tmp_path: Path) -> None:
    source, stamp = tmp_path / "source", tmp_path / "stamp"
    source.write_text("a")
    key = install.fingerprint([source, "3.11"])
    assert not install.up_to_date(stamp, key)
    stamp.write_text(key)
    assert install.up_to_date(stamp, install.fingerprint([source, "3.11"]))
    assert not install.up_to_date(stamp, install.fingerprint([source, "3.12"]))
    source.write_text("b")
    assert not install.up_to_date(stamp, install.fingerprint([source, "3.11"]))
    # Parts keep their borders: moving a character from one to the next is a change.
    assert install.fingerprint(["ab", "c"]) != install.fingerprint(["a", "bc"])
