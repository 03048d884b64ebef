"""Compiles every CUDA kernel for every architecture: `python csrc/compile_cuda.py [--update]`.

Needs nvcc, no GPU. Warnings are errors. Prints what each kernel takes (registers, static shared
memory, spilled bytes) and compares it with csrc/cuda_budget.json: more registers, shared memory or
spills than budgeted is an error, so that a change that costs occupancy is seen when it is made.
Register counts depend on the compiler; the budget names the release it was made with, and with
another one only spills and compilation itself are held against it. --update writes the budget anew.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CSRC = Path(__file__).resolve().parent
BUDGET = CSRC / "cuda_budget.json"
ARCHS = ("80", "89", "90a", "100a", "120a")
# Spilled bytes beyond the budget that another compiler release may need.
SPILL_SLACK = 64
ENTRY = re.compile(
    r"Compiling entry function '(?P<symbol>\S+)' for 'sm_\w+'.*?"
    r"(?P<spill>\d+) bytes spill stores.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def nvcc() -> str:
    """The compiler's path, or exit."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which(f"{home}/bin/nvcc" if home else "nvcc")
    # Else the one that pip installed next to torch.
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or [] if package else []:
        found = found or shutil.which(f"{folder}/cu13/bin/nvcc")
    if found is None:
        sys.exit("no nvcc found; put it on PATH or set CUDA_HOME")
    return found


def release(compiler: str) -> str:
    """nvcc's release, e.g. "13.0"."""
    text = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"release (\d+\.\d+)", text.stdout)
    return found.group(1) if found else "unknown"


def readable(symbols: list[str]) -> dict[str, str]:
    """Mangled -> short readable names."""
    demangle = shutil.which("c++filt") or shutil.which("cu++filt")
    if demangle is None:
        return {symbol: symbol for symbol in symbols}
    text = subprocess.run(
        [demangle], input="\n".join(symbols), capture_output=True, text=True, check=True
    )
    short = [
        re.sub(r"\(.*", "", line).replace("longspark::", "").replace("void ", "")
        for line in text.stdout.splitlines()
    ]
    return dict(zip(symbols, short, strict=True))


def compile_one(compiler: str, source: Path, arch: str, folder: Path) -> dict[str, dict[str, int]]:
    """Compile one file for one architecture; kernel symbol -> resources."""
    command = [compiler, "-std=c++20", "-O3", "-Werror", "all-warnings", "-Xptxas", "-v"]
    command += [f"-gencode=arch=compute_{arch},code=sm_{arch}", f"-I{CSRC}", f"-I{CSRC}/include"]
    command += ["-c", str(source), "-o", str(folder / f"{source.stem}.{arch}.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source.name} for sm_{arch}:\n{done.stdout}{done.stderr}")
    kernels = {}
    for entry in ENTRY.finditer(done.stderr):
        shared = re.search(r"(\d+) bytes smem", entry["rest"])
        kernels[entry["symbol"]] = {
            "registers": int(entry["registers"]),
            "shared": int(shared.group(1)) if shared else 0,
            "spill": int(entry["spill"]),
        }
    return kernels


def measure(compiler: str, jobs: int) -> dict[str, dict[str, dict[str, int]]]:
    """Kernel -> architecture -> resources. Raises RuntimeError with the compiler's output."""
    sources = sorted(CSRC.glob("*.cu"))
    table: dict[str, dict[str, dict[str, int]]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        tasks = [(source, arch) for source in sources for arch in ARCHS]
        results = pool.map(
            lambda task: compile_one(compiler, task[0], task[1], Path(folder)), tasks
        )
        for (source, arch), kernels in zip(tasks, results, strict=True):
            if not kernels:
                raise RuntimeError(f"{source.name} for sm_{arch}: ptxas reported no kernels")
            names = readable(list(kernels))
            for symbol, resources in kernels.items():
                table.setdefault(names[symbol], {})[arch] = resources
    return dict(sorted(table.items()))


def excesses(
    table: dict[str, dict[str, dict[str, int]]],
    budget: dict[str, dict[str, dict[str, int]]],
    same_release: bool,
) -> list[str]:
    """What exceeds the budget, one line each."""
    problems = []
    for kernel, archs in table.items():
        for arch, used in archs.items():
            allowed = budget.get(kernel, {}).get(arch)
            if allowed is None:
                problems.append(f"{kernel} for sm_{arch} is not in the budget")
                continue
            compared = ("registers", "shared", "spill") if same_release else ("shared",)
            for what in compared:
                if used[what] > allowed[what]:
                    problems.append(
                        f"{kernel} for sm_{arch}: {what} {used[what]}, budget {allowed[what]}"
                    )
            if not same_release and used["spill"] > allowed["spill"] + SPILL_SLACK:
                problems.append(
                    f"{kernel} for sm_{arch}: spill {used['spill']}, budget {allowed['spill']}"
                )
    gone = sorted(set(budget) - set(table))
    problems += [f"{kernel} is in the budget but not compiled any more" for kernel in gone]
    return problems


def show(table: dict[str, dict[str, dict[str, int]]]) -> None:
    """Print registers / shared bytes / spilled bytes per architecture."""
    width = max(len(kernel) for kernel in table)
    print(f"{'registers/shared/spilled':<{width}} " + " ".join(f"{'sm_' + a:>13}" for a in ARCHS))
    for kernel, archs in table.items():
        cells = [
            f"{r['registers']}/{r['shared']}/{r['spill']}" for r in (archs[arch] for arch in ARCHS)
        ]
        print(f"{kernel:<{width}} " + " ".join(f"{cell:>13}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the budget from this compiler")
    update = parser.parse_args().update
    compiler = nvcc()
    jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
    try:
        table = measure(compiler, jobs)
    except RuntimeError as error:
        sys.exit(str(error))
    show(table)
    if update:
        budget = {"nvcc": release(compiler), "kernels": table}
        BUDGET.write_text(json.dumps(budget, indent=1) + "\n")
        return
    budget = json.loads(BUDGET.read_text())
    same_release = budget["nvcc"] == release(compiler)
    problems = excesses(table, budget["kernels"], same_release)
    if problems:
        sys.exit("over budget (--update accepts it):\n  " + "\n  ".join(problems))
    print(f"{len(table)} kernels, {len(ARCHS)} architectures: within csrc/cuda_budget.json")


if __name__ == "__main__":
    main()
