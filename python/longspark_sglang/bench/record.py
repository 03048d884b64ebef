"""JSON lines that describe themselves: what was measured, with what, on what.

The first line of a file is the environment; every later one is a measurement and carries its own
settings, so that lines of several runs can be put into one file.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

PACKAGES = (
    "longspark-sglang",
    "sglang",
    "torch",
    "transformers",
    "sglang-kernel",
    "flashinfer-python",
)
VARIABLES = ("LONGSPARK_", "SGLANG_", "OMP_", "CUDA_VISIBLE_DEVICES")
ROOT = Path(__file__).resolve().parents[3]


def environment(command: Sequence[str]) -> dict[str, Any]:
    """Everything about this run that its numbers may depend on.

    Args:
        command: the `longspark bench` command line as it was given.
    """
    return {
        "kind": "environment",
        "command": ["longspark", "bench", *command],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {name: _version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        **_commit(),
        "hardware": hardware(),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)
        },
    }


def hardware() -> dict[str, Any]:
    """CPU, memory and GPUs of this machine; `gpu_count` is what the process may use."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "gpus": gpus,
        "gpu_count": len(gpus),
        "cuda": torch.version.cuda if gpus else None,
        "driver": _driver() if gpus else None,
    }


def fingerprint(folder_or_id: str | os.PathLike[str] | None) -> dict[str, Any] | None:
    """What identifies a model: its name, and for a folder a hash of its config and file sizes."""
    if folder_or_id is None:
        return None
    folder = Path(folder_or_id)
    if not folder.is_dir():
        return {"name": str(folder_or_id)}
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        if file.suffix == ".json":
            digest.update(file.read_bytes())
    return {"name": folder.resolve().name, "sha256": digest.hexdigest()[:16]}


def data_hash(rows: Iterable[Any]) -> str:
    """A hash of the prompts that were sent, whatever file they came from."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, extremes and number of some measurements. ValueError where there are none."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("nothing was measured")
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "n": len(ordered),
    }


class Lines:
    """JSON lines going to a file (or nowhere) and kept for the summary.

    Args:
        path: the file, written anew; None keeps the lines in memory only.
        command: as for `environment`, which becomes the first line.
    """

    def __init__(self, path: str | os.PathLike[str] | None, command: Sequence[str]) -> None:
        self._file: TextIO | None = None
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self.rows: list[dict[str, Any]] = []
        self.add(environment(command))

    def add(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Append one line; it is on disk when this returns."""
        kept = dict(row)
        self.rows.append(kept)
        if self._file is not None:
            self._file.write(json.dumps(kept) + "\n")
            self._file.flush()
        return kept

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(paths: Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """All lines of some files. ValueError names the file and line that is no JSON object."""
    rows = []
    for path in paths:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is no JSON object")
            rows.append(row)
    return rows


def say(text: str) -> None:
    """One line of progress; stdout is left to the tables."""
    print(text, file=sys.stderr, flush=True)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> dict[str, Any]:
    """The checkout's commit, and whether tracked files differ from it; None where there is none."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    changed = git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": git("rev-parse", "HEAD"),
        "modified": bool(changed) if changed is not None else None,
    }


def _driver() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None
