"""Compiles the host emulation: `python csrc/host_emulation/build.py [--sanitize]`.

Prints the library, which registers torch.ops.longspark_emu.*: the CUDA kernels' own source, run on
CPU tensors. Only tests load it. An object file is compiled anew when its source or any header is
newer.
"""

import argparse
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

CSRC = Path(__file__).resolve().parent.parent
ROOT = CSRC.parent
SOURCES = [
    CSRC / "bindings.cpp",
    *(CSRC / "host_emulation" / name for name in ("fiber", "kernels", "planted", "runtime")),
]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-parameter"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


class BuildError(RuntimeError):
    """The compiler refused; the message is its output."""


def compiler() -> str | None:
    """The C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def _flags(sanitize: bool) -> list[str]:
    torch_include = Path(torch.__file__).parent / "include"
    # -ffp-contract=off: a fused multiply-add here and there would make results depend on the host.
    flags = ["-std=c++20", "-O2", "-g1", "-fPIC", "-ffp-contract=off", *WARNINGS]
    flags += ["-DLONGSPARK_HOST_EMULATION", f"-I{CSRC}", f"-I{CSRC / 'include'}"]
    for folder in (torch_include, torch_include / "torch/csrc/api/include"):
        flags += ["-isystem", str(folder)]
    return flags + (SANITIZERS if sanitize else [])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stderr}")


def build(sanitize: bool = False) -> Path:
    """Compile what is out of date; returns the library's path. Raises BuildError."""
    cxx = compiler()
    if cxx is None:
        raise BuildError("no C++ compiler found; install g++ or set CXX")
    flags = _flags(sanitize)
    folder = ROOT / "build" / ("emulation-sanitized" if sanitize else "emulation")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "longspark_emu.so"
    torch_library = Path(torch.__file__).parent / "lib"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test sessions may ask at once
        stamp = folder / "flags"
        wanted = shlex.join([cxx, torch.__version__, *flags])
        if not stamp.exists() or stamp.read_text() != wanted:
            for stale in folder.glob("*.o"):
                stale.unlink()
        headers = [p for p in CSRC.rglob("*") if p.suffix in (".h", ".cuh", ".cu")]
        headers = [path for path in headers if path.parent.name != "cpu"]
        newest = max(path.stat().st_mtime for path in headers)
        stale_objects = []
        objects = []
        for source in SOURCES:
            source = source if source.suffix else source.with_suffix(".cpp")
            obj = folder / f"{source.stem}.o"
            objects.append(str(obj))
            if not obj.exists() or obj.stat().st_mtime < max(newest, source.stat().st_mtime):
                stale_objects.append((source, obj))
        if stale_objects or not library.exists():
            jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
            with ThreadPoolExecutor(jobs) as pool:
                list(
                    pool.map(
                        lambda job: _run([cxx, *flags, "-c", str(job[0]), "-o", str(job[1])]),
                        stale_objects,
                    )
                )
            link = [cxx, "-shared", *(SANITIZERS if sanitize else []), *objects]
            link += [f"-L{torch_library}", "-lc10", "-ltorch_cpu", "-ltorch", "-o", str(library)]
            _run(link)
            stamp.write_text(wanted)
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sanitize", action="store_true", help="with ASan and UBSan")
    try:
        print(build(parser.parse_args().sanitize))
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
