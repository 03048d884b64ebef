"""Everything that needs a GPU to be known about the kernels: `python benchmark/gpu_check.py`.

For a machine with an NVIDIA GPU, torch and a CUDA toolkit; SGLang is not needed. In order:
  build      compile the extension with its CUDA kernels
  tests      every operator test on the GPU, against float64 loops
  emulation  the kernels on the GPU against their own source run on the CPU
  sanitizer  compute-sanitizer memcheck, racecheck, synccheck and initcheck on small cases
  graphs     propose and commit as two CUDA graphs, replayed with poisoned padding: eager's bits
  timings    each operator against the time that moving its bytes takes, torch and FlashInfer
Writes benchmark/results/<card>.json and prints the table; `--render FILE` prints the table of such
a file again. The exit status is 0 only if every step that was asked for ran and passed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kernel_cases as cases
import torch
from kernel_round import Round, differing

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark/results"
STEPS = ("build", "tests", "emulation", "sanitizer", "graphs", "timings")
BATCHES = (1, 8, 32, 128)
CONTEXTS = (1024, 8192, 32768, 131072)
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
REPLAYS = 1000


def say(text: str) -> None:
    print(f"[gpu-check] {text}", flush=True)


def why_not_here() -> list[str]:
    """Why this machine can't run the check; empty if it can."""
    reasons = [
        f"{package} is missing: pip install pytest pytest-timeout hypothesis"
        for package in ("pytest", "hypothesis")
        if find_spec(package) is None
    ]
    if not torch.version.cuda:
        reasons.append("this torch was built without CUDA: install a CUDA build of torch")
    elif not torch.cuda.is_available():
        reasons.append("torch sees no CUDA device: run this on a machine with an NVIDIA GPU")
    elif torch.cuda.get_device_capability() < (8, 0):
        reasons.append("the kernels need compute capability 8.0 or later")
    return reasons


def environment() -> dict[str, str]:
    """What the numbers were made with."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "memory_gib": f"{properties.total_memory / 2**30:.1f}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }


# ---- Steps that run other programs ---------------------------------------------------------------


def run(command: list[str], timeout: float, **variables: str) -> tuple[bool, str]:
    """Run a command from the repository's root; (succeeded, the end of its output)."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return False, f"no end after {timeout:.0f} s"
    return done.returncode == 0, done.stdout[-4000:]


def step_build() -> dict[str, Any]:
    ok, output = run(
        [sys.executable, "setup.py", "build_ext", "--inplace"], 1800, LONGSPARK_BUILD="cuda"
    )
    return {"passed": ok, "output": "" if ok else output}


def step_tests() -> dict[str, Any]:
    ok, output = run([sys.executable, "-m", "pytest", "test/ops", "-m", "gpu", "-q"], 3600)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|error)", output)
    # All skipped is a success for pytest, but not for us.
    passed = ok and any(c.endswith("passed") for c in counts)
    passed = passed and not any(c.endswith("skipped") for c in counts)
    return {"passed": passed, "tests": ", ".join(counts), "output": "" if passed else output}


def find_sanitizer() -> str | None:
    """compute-sanitizer on PATH, in the toolkit, or as pip installs it."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    for candidate in ("compute-sanitizer", f"{home}/bin/compute-sanitizer"):
        if found := shutil.which(candidate):
            return found
    return None


def step_sanitizer() -> dict[str, Any]:
    sanitizer = find_sanitizer()
    if sanitizer is None:
        return {"passed": False, "output": "compute-sanitizer not found; install the CUDA toolkit"}
    result: dict[str, Any] = {"passed": True, "output": ""}
    for tool in TOOLS:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
        command += ["--kernel-name-exclude", "kernel_substring=at::"]
        command += [sys.executable, str(Path(__file__).resolve()), "--small-cases"]
        # Torch's caching allocator would hide accesses behind the end of a tensor.
        ok, output = run(command, 1800, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        result[tool] = ok
        if not ok:
            result["passed"] = False
            result["output"] += f"{tool}:\n{output}\n"
    return result


# ---- Cases that tests and sanitizer share --------------------------------------------------------


def small_cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Label -> (operator, arguments), a few of each kernel, from the tests' own generators."""
    sys.path.insert(0, str(ROOT / "test/ops"))
    import test_accept_chain as accept
    import test_block_attention as attention
    import test_draft_sample as sample
    import test_markov_step as markov
    import test_summary_merge as merge
    import test_window_gather as window

    half, full = torch.bfloat16, torch.float32
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for layout in ("flat", "hnd", "strided"):
        found[f"window_gather {layout}"] = (
            "window_gather",
            window.gather_case(1, [0, 5, 32], [0, 40, 1000], 32, layout),
        )
    found["window_index"] = (
        "window_index",
        dict(**window.index_case(1, [0, 3, 600]), window=256),
    )
    for dtype, dim in ((half, 64), (half, 128), (half, 256), (half, 80), (full, 64)):
        label = f"{str(dtype).removeprefix('torch.')} d{dim}"
        found[f"block_attention {label}"] = (
            "block_attention",
            attention.case_of([0, 17, 32], dtype=dtype, dim=dim, group=5, kv_heads=1),
        )
        case = merge.case_of([0, 3, 8], dtype=dtype, dim=dim, group=3, kv_heads=2)
        found[f"summary_merge {label}"] = ("summary_merge", case)
        case = merge.case_of([700, 0, 33], dtype=dtype, dim=dim, columns=700, kv_heads=1, layers=1)
        found[f"summary_merge_bulk {label}"] = ("summary_merge_bulk", merge.bulk(case))
    for dtype, rank in ((half, 64), (half, 7), (full, 32)):
        label = f"{str(dtype).removeprefix('torch.')} r{rank}"
        case = markov.case_of(18, 1100, rank, dtype, dtype)
        found[f"markov_step {label}"] = ("markov_step", case)
        case = sample.case_of([0.0, 1.0, 0.3], vocab=1100, rank=rank, dtype=dtype)
        found[f"draft_sample {label}"] = ("draft_sample", case)
        case = accept.case_of(20, vocab=1100, rank=rank, dtype=dtype)
        found[f"accept_chain {label}"] = ("accept_chain", case)
    return found


def run_small_cases() -> None:
    """What compute-sanitizer watches."""
    found = small_cases()
    import op_cases

    for op, arguments in found.values():
        op_cases.run(op, "cuda", **arguments)
    torch.cuda.synchronize()


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value or () for t in tensors_of(item)]


def step_emulation() -> dict[str, Any]:
    """Largest difference between GPU and emulation, per case.

    Integers and copies are the same bits. Elsewhere exp and log differ in the last place and the
    tensor cores sum in an order of their own, so floats agree to a few units of the result's
    dtype. A draw may differ where two tokens are closer than that; the tests judge draws, here the
    share of different ones is noted.
    """
    found = small_cases()
    import op_cases

    result: dict[str, Any] = {"passed": True, "output": "", "differences": {}}
    for label, (op, arguments) in found.items():
        gpu, gpu_after = op_cases.run(op, "cuda", **arguments)
        cpu, cpu_after = op_cases.run(op, "emulation", **arguments)
        written = [name for name in arguments if name.startswith(("state_", "out_"))]
        pairs = zip(
            tensors_of(gpu) + [gpu_after[name] for name in written],
            tensors_of(cpu) + [cpu_after[name] for name in written],
            strict=True,
        )
        worst = 0.0
        for a, b in pairs:
            difference, allowed = compared(op, arguments, a, b)
            worst = max(worst, difference)
            if difference > allowed:
                result["passed"] = False
                result["output"] += f"{label}: {difference:.3e}, allowed {allowed:.3e}\n"
        result["differences"][label] = worst
    return result


def compared(
    op: str, arguments: dict[str, Any], a: torch.Tensor, b: torch.Tensor
) -> tuple[float, float]:
    """How far two results are apart, and how far they may be (see step_emulation)."""
    if not a.numel():
        return 0.0, 0.0
    exact = op.startswith("window")
    if not a.is_floating_point():  # share of different elements
        return float((a != b).double().mean()), 0.0 if exact else 0.1
    if op == "draft_sample":  # log q, of another token where the draw differs
        return float((a - b).abs().median()), 1e-3
    # Corrected logits are fp32, but rounded to the dtype of the logits that came in.
    dtype = arguments["base_logits"].dtype if op == "markov_step" else a.dtype
    unit = max(torch.finfo(dtype).eps, 2**-20)
    finite = a.isfinite()
    if not torch.equal(a[~finite].nan_to_num(nan=7e7), b[~b.isfinite()].nan_to_num(nan=7e7)):
        return float("inf"), 0.0
    a, b = a[finite].double(), b[finite].double()
    if not a.numel():
        return 0.0, 0.0
    return float((a - b).abs().max()), 0.0 if exact else 4 * unit * (1 + float(b.abs().max()))


# ---- CUDA graphs ---------------------------------------------------------------------------------


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `function` and its (static) result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def step_graphs(shape: cases.Shape | None = None) -> dict[str, Any]:
    """Replay the two graphs of a round with changing inputs; compare with eager runs."""
    shape = shape or cases.Shape(vocab=32768)
    work = Round(shape, batch=5, padded=8, device="cuda")
    propose, proposal = captured(lambda: work.propose("cuda"))
    start = work.state_value.clone(), work.state_lse.clone()
    commit, verdict = captured(lambda: work.commit(proposal, "cuda"))
    problems: set[str] = set()
    for i in range(REPLAYS):
        if i % 20 == 0:
            work.fill(100 + i)
        work.state_value.copy_(start[0])
        work.state_lse.copy_(start[1])
        propose.replay()
        commit.replay()
        if i % 20 == 0:
            graph = work.real({**proposal, **verdict})
            work.state_value.copy_(start[0])
            work.state_lse.copy_(start[1])
            eager = work.propose("cuda")
            problems |= set(differing(graph, work.real({**eager, **work.commit(eager, "cuda")})))
            expected = graph
        else:
            problems |= set(differing(expected, work.real({**proposal, **verdict})))
    text = f"differ between replays or from eager: {sorted(problems)}" if problems else ""
    return {"passed": not problems, "replays": REPLAYS, "output": text}


# ---- Timings -------------------------------------------------------------------------------------


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a large copy on the device."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / time_of(lambda: target.copy_(source), flush=False)


def time_of(function: Callable[[], Any], flush: bool = True, repeats: int = 30) -> float:
    """Median seconds of one call on the device, from a CUDA graph, caches emptied before each."""
    graph, _ = captured(function)
    # Twice the L2 cache of the largest GPUs.
    scrap = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for _ in range(repeats):
        if flush:
            scrap.zero_()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def eager_time_of(function: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds of one eager call (for what can't be captured), launches included."""
    function()
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def timed_case(case: cases.Case, bandwidth: float) -> dict[str, Any]:
    """Microseconds of the kernel, of its floor and of everything else that computes the same."""
    row: dict[str, Any] = {
        "us": 1e6 * time_of(lambda: case.run("cuda")),
        "floor_us": 1e6 * case.floor_bytes / bandwidth,
        "others_us": {},
    }
    for name, function in case.others.items():
        if name in case.uncapturable:
            row["others_us"][f"{name} (eager)"] = 1e6 * eager_time_of(function)
        else:
            row["others_us"][name] = 1e6 * time_of(function)
    return row


def add_flashinfer(case: cases.Case, shape: cases.Shape) -> None:
    """FlashInfer's paged attention over the window alone, where it is installed.

    It does less than block_attention (no summary, no block rows, and their merge would come on
    top), so it is a bound from below, not an equal.
    """
    try:
        import flashinfer
    except ImportError:
        return
    a = case.arguments
    batch, window = a["rows"].shape
    query = a["query"].reshape(-1, shape.heads, shape.dim).contiguous()
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    steps = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    wrapper.plan(
        steps * shape.block,
        steps * window,
        a["rows"].reshape(-1).contiguous(),
        torch.ones(batch, dtype=torch.int32, device="cuda"),
        shape.heads,
        shape.kv_heads,
        shape.dim,
        1,
        causal=False,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
    )
    pools = (a["key_pool"].unsqueeze(1), a["value_pool"].unsqueeze(1))
    case.others["FlashInfer, window only"] = lambda: wrapper.run(query, pools)


def step_timings() -> dict[str, Any]:
    shape = cases.Shape()
    bandwidth = copy_bandwidth()
    memory = torch.cuda.mem_get_info()[0] // 3
    say(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    result: dict[str, Any] = {"passed": True, "output": "", "copy_gb_s": bandwidth / 1e9}
    rows = result["rows"] = []

    def add(case: cases.Case, batch: int, context: int | None, note: str = "") -> None:
        row = {"op": case.op, "batch": batch, "context": context, "note": note}
        rows.append({**row, **timed_case(case, bandwidth)})
        say(render_row(rows[-1]))

    for context in CONTEXTS:
        for batch in BATCHES:
            cache = cases.Cache(shape, batch, context, "cuda", memory)
            attention = cases.block_attention_case(shape, cache)
            try:
                add_flashinfer(attention, shape)
            except Exception as error:
                result.setdefault("flashinfer", f"{type(error).__name__}: {error}"[:500])
            add(attention, batch, context, "one layer")
            add(cases.summary_merge_case(shape, cache), batch, context, "8 rows")
            add(cases.window_gather_case(shape, cache), batch, context)
            if batch == 1:
                chunk = min(8192, context)
                case = cases.summary_merge_bulk_case(shape, cache, chunk)
                add(case, batch, context, f"{chunk} rows")
            del cache
    markov = cases.MarkovInputs.make(shape, "cuda")
    for batch in BATCHES:
        add(cases.markov_step_case(shape, markov, batch, "cuda"), batch, None)
        for temperature in (0.0, 1.0):
            case = cases.draft_sample_case(shape, markov, batch, temperature, "cuda")
            add(case, batch, None, f"T = {temperature:g}")
        add(cases.accept_chain_case(shape, markov, batch, "cuda"), batch, None, "all reject")
    return result


# ---- Results -------------------------------------------------------------------------------------


def render_row(row: dict[str, Any]) -> str:
    """One line of the timing table, Markdown."""
    others = ", ".join(f"{name} {us:.1f}" for name, us in row["others_us"].items())
    context = "" if row["context"] is None else f"{row['context'] // 1024}K"
    name = f"{row['op']} {row['note']}".strip()
    return (
        f"| {name} | {row['batch']} | {context} | {row['us']:.1f} | {row['floor_us']:.1f} "
        f"| {row['us'] / row['floor_us']:.2f} | {others} |"
    )


def render(results: dict[str, Any]) -> str:
    """The report as Markdown."""
    made_with = ", ".join(f"{key} {value}" for key, value in results["environment"].items())
    lines = [f"Kernels on {results['environment']['card']} ({made_with})", ""]
    for step, outcome in results["steps"].items():
        detail = {
            key: value
            for key, value in outcome.items()
            if key not in ("passed", "output", "rows", "differences")
        }
        verdict = "passed" if outcome["passed"] else "FAILED"
        lines.append(f"- {step}: {verdict} {json.dumps(detail) if detail else ''}".rstrip())
    timings = results["steps"].get("timings")
    if timings and timings.get("rows"):
        lines += ["", "| operator | B | context | us | floor us | ratio | others, us |"]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [render_row(row) for row in timings["rows"]]
    return "\n".join(lines)


def check(steps: list[str]) -> dict[str, Any]:
    """Run the steps; a step that raises has failed and the others still run."""
    functions = {
        "build": step_build,
        "tests": step_tests,
        "emulation": step_emulation,
        "sanitizer": step_sanitizer,
        "graphs": step_graphs,
        "timings": step_timings,
    }
    results: dict[str, Any] = {"environment": environment(), "steps": {}}
    for step in steps:
        say(step)
        try:
            outcome = functions[step]()
        except Exception as error:
            outcome = {"passed": False, "output": f"{type(error).__name__}: {error}"}
        results["steps"][step] = outcome
        if outcome.get("output"):
            print(outcome["output"])
        say(f"{step}: {'passed' if outcome['passed'] else 'FAILED'}")
        if step == "build" and not outcome["passed"]:
            break  # everything else would test an older build
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--render", metavar="FILE", help="print the table of an earlier run")
    parser.add_argument("--small-cases", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.render:
        print(render(json.loads(Path(arguments.render).read_text())))
        return
    reasons = why_not_here()
    if reasons:
        sys.exit("gpu-check can't run here: " + "; ".join(reasons))
    if arguments.small_cases:
        run_small_cases()
        return
    results = check(arguments.steps)
    RESULTS.mkdir(parents=True, exist_ok=True)
    card = re.sub(r"[^a-z0-9]+", "-", results["environment"]["card"].lower()).strip("-")
    path = RESULTS / f"{card}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(render(results))
    say(f"written to {path.relative_to(ROOT)}")
    failed = [step for step, outcome in results["steps"].items() if not outcome["passed"]]
    if failed:
        sys.exit(f"gpu-check: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
