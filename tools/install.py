"""Bring a virtual environment up to date with this checkout: `python tools/install.py .venv`.

Two steps, each skipped while nothing that it depends on has changed: SGLang with the tools (long),
then this checkout's packages in editable mode (seconds, or minutes where operators are compiled).
Only the standard library is used, and only pip; the index is whatever pip is configured for.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRESS_EVERY = 20.0  # seconds


def say(text: str) -> None:
    """One line for a waiting person."""
    print(f"[install] {text}", flush=True)


def run_with_progress(command: list[str], log: Path) -> None:
    """Run a command with its output in a log file; every now and then say what it is doing."""
    started = last_line = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        while (code := process.poll()) is None:
            time.sleep(0.2)
            if time.monotonic() - last_line >= PROGRESS_EVERY:
                last_line = time.monotonic()
                say(f"{last_line - started:.0f} s: {current_step(log.read_text(errors='replace'))}")
    if code:
        print(*log.read_text(errors="replace").splitlines()[-30:], sep="\n")
        sys.exit(f"[install] failed with status {code}; the whole output is in {log}")


def current_step(output: str) -> str:
    """What pip is doing, from its output so far: the last line that names a package."""
    steps = [
        line
        for line in map(str.strip, output.splitlines())
        if line.startswith(("Collecting", "Downloading", "Using cached", "Processing", "building"))
    ]
    if "\nInstalling collected packages:" in output:
        count = output.rsplit("Installing collected packages:", 1)[1].splitlines()[0].count(",") + 1
        return f"unpacking {count} packages"
    return steps[-1][:90] if steps else "starting"


def fingerprint(parts: Iterable[Path | str]) -> str:
    """A hash of file contents and texts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode()
        digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()


def up_to_date(stamp: Path, wanted: str) -> bool:
    """Whether the step that leaves this stamp was last done for the same inputs."""
    return stamp.exists() and stamp.read_text() == wanted


def install_stack(venv: Path) -> None:
    """SGLang and the tools. The list is pyproject.toml's, so every pin has one home."""
    project_file, constraints = ROOT / "pyproject.toml", ROOT / "constraints.txt"
    project = tomllib.loads(project_file.read_text())["project"]
    wanted = [*project["dependencies"], "setuptools", "wheel"]
    wanted += [item for extra in project["optional-dependencies"].values() for item in extra]
    python_version = "{}.{}".format(*sys.version_info)
    key = fingerprint([constraints, python_version, *wanted])
    stamp = venv / ".longspark-stack"
    if up_to_date(stamp, key):
        return
    if not (venv / "bin/python").exists():
        say(f"making {venv} with Python {python_version}")
        made = subprocess.run([sys.executable, "-m", "venv", str(venv)])
        if made.returncode:
            shutil.rmtree(venv, ignore_errors=True)
            sys.exit("[install] python -m venv failed: on Debian, install python3-venv")
    say("installing SGLang, torch and their CUDA libraries: 11 GB on disk, some minutes")
    pip = [str(venv / "bin/python"), "-m", "pip", "install", "--progress-bar", "off"]
    run_with_progress([*pip, "-c", str(constraints), *wanted], venv / "install-stack.log")
    stamp.write_text(key)


def install_packages(venv: Path) -> None:
    """longspark-sglang, and the CPU platform where no CUDA device is."""
    python = venv / "bin/python"
    inputs = [ROOT / "pyproject.toml", ROOT / "setup.py", ROOT / "cpu_platform/pyproject.toml"]
    inputs += sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    # In the checkout, not in the environment: an environment that two checkouts share holds the
    # packages of whichever came last.
    stamp = ROOT / "build/.packages"
    key = fingerprint([*inputs, str(venv), (venv / ".longspark-stack").read_text()])
    if up_to_date(stamp, key):
        return
    probe = [str(python), "-c", "import torch; print(torch.cuda.is_available())"]
    has_cuda = subprocess.run(probe, check=True, stdout=subprocess.PIPE).stdout.strip() == b"True"
    # Without isolation, so that the operators are compiled against the torch that will load them.
    pip = [str(python), "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-v"]
    say("installing longspark-sglang; operators are compiled if there is a compiler")
    run_with_progress([*pip, "-e", str(ROOT)], venv / "install-longspark.log")
    if not has_cuda:
        say("installing longspark-cpu-platform: no CUDA device here")
        run_with_progress([*pip, "-e", str(ROOT / "cpu_platform")], venv / "install-platform.log")
    stamp.parent.mkdir(exist_ok=True)
    stamp.write_text(key)


def main() -> None:
    """Command line: the environment's folder is the only argument."""
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/install.py VENV")
    venv = Path(sys.argv[1]).absolute()
    install_stack(venv)
    install_packages(venv)


if __name__ == "__main__":
    main()
