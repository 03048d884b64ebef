"""Time the CPU operators side by side with plain torch and with what memory and multiplier allow.

`python benchmark/kernels.py --device cpu` prints one JSON line per operator and shape, then a table
of the targets; with `--check` the exit status is 1 if one was missed.

Everything compared is timed in turns in one process, and a figure is the fastest of its turns.
Before every turn the caches are emptied: in a server, weights pass through them between two calls
of an operator. On one thread (the default) the clock is that thread's CPU time, which a neighbour
who takes the core for a while doesn't show in; on several it is the wall's.

Two floors stand beside each time:
  memory    the bytes that have to be read and written, at the rate at which torch sums a large
            tensor;
  multiply  the multiply-adds, at the rate of torch's matrix product in the same dtype;
both rates measured in the same turns, because a busy neighbour takes its share of either.
A target close to the memory floor can't be met by a CPU whose multiplier alone takes longer; the
table says so, and it is missed all the same.

A short and a long context are compared in pools of one size, because a server's pools don't grow
with what is in them: the rows of both are scattered alike.

Shapes: the Qwen3-8B drafter (5 layers, 32/8 heads, d 128, bf16), for which the targets are, and
SmolLM2-135M as a target (9/3 heads, d 64, V 49152; `--shape smollm2-135m`). On a GPU:
`make gpu-check`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import kernel_cases as cases
import torch
import torch.nn.functional as F
from longspark_sglang import ops
from longspark_sglang.ops import dispatch

ROOT = Path(__file__).resolve().parent.parent
BATCHES = (1, 8)
SHORT, LONG, VERIFY_CONTEXT = 1024, 131072, 32768
POOL_MEMORY = 1 << 30
SHAPES = ("qwen3-8b", "smollm2-135m")
SMOL = cases.Shape(layers=5, heads=9, kv_heads=3, dim=64, rank=64, vocab=49152, dtype=torch.float32)


class Clock:
    """Times functions in turns, with cold caches."""

    def __init__(self, turns: int):
        self.turns = turns
        self.now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self.large = torch.ones(64 << 20)  # 256 MiB: beyond any cache

    def fastest(self, functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """Seconds of each function's fastest turn."""
        return {name: min(times) for name, times in self.times(functions).items()}

    def times(self, functions: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
        taken: dict[str, list[float]] = {name: [] for name in functions}
        for function in functions.values():
            function()
        for _ in range(self.turns):
            for name, function in functions.items():
                self.large.sum()
                start = self.now()
                function()
                taken[name].append(self.now() - start)
        return taken


@dataclass(frozen=True)
class Rates:
    """What this machine does per second, measured in turns with what is judged by it."""

    bytes: float
    flops: float

    def floors(self, size: int, flops: int) -> dict[str, float]:
        return {
            "memory_floor_ms": size / self.bytes * 1e3,
            "multiply_floor_ms": flops / self.flops * 1e3,
        }


def compare(
    clock: Clock, dtype: torch.dtype, functions: dict[str, Callable[[], Any]]
) -> tuple[dict[str, float], Rates]:
    """Seconds of each function, and the rates of reading memory and multiplying meanwhile."""
    read, side = clock.large[: 32 << 20], 768
    a, b = (torch.randn(side, side).to(dtype) for _ in range(2))
    taken = clock.fastest({**functions, "read": read.sum, "multiply": partial(torch.mm, a, b)})
    return taken, Rates(read.nbytes / taken.pop("read"), 2 * side**3 / taken.pop("multiply"))


def line(
    shape: str,
    op: str,
    taken: dict[str, float],
    rates: Rates,
    size: int,
    flops: int,
    **labels: Any,
) -> dict[str, Any]:
    """The record of one measurement; `taken` holds "ours" and what it is compared with."""
    ours = taken["ours"] * 1e3
    record: dict[str, Any] = {"op": op, "shape": shape, **labels, "ms": round(ours, 4)}
    for name, seconds in taken.items():
        if name != "ours":
            record[f"{name}_ms"] = round(seconds * 1e3, 4)
            record[f"times_faster_than_{name}"] = round(seconds * 1e3 / ours, 2)
    for name, floor in rates.floors(size, flops).items():
        record[name] = round(floor, 4)
        record[f"times_{name.removesuffix('_ms')}"] = round(ours / floor, 2) if floor else None
    record["read_gb_per_s"] = round(rates.bytes / 1e9, 1)
    record["multiply_gflop_per_s"] = round(rates.flops / 1e9)
    print(json.dumps(record), flush=True)
    return record


def multiply_adds(shape: cases.Shape, op: str, batch: int) -> int:
    """Floating point operations of an operator's products."""
    if op == "block_attention":
        rows = shape.window + shape.slots + shape.block
        return 4 * batch * shape.block * shape.heads * shape.dim * rows
    if op == "summary_merge":
        return 4 * batch * shape.layers * shape.heads * shape.slots * 8 * shape.dim
    return 2 * batch * shape.vocab * shape.rank  # the Markov product


def drafter_operators(
    clock: Clock, name: str, shape: cases.Shape, short: int, long: int
) -> list[dict[str, Any]]:
    """Proposal and commit at a short and a long context, in turns."""
    records = []
    markov = cases.MarkovInputs.make(shape, "cpu")
    for batch in BATCHES:
        far_cache = cases.Cache(shape, batch, long, "cpu", POOL_MEMORY)
        at = {
            short: cases.Cache(shape, batch, short, "cpu", POOL_MEMORY, pools=far_cache),
            long: far_cache,
        }
        makers = {
            "block_attention": cases.block_attention_case,
            "summary_merge": cases.summary_merge_case,
            "window_gather": cases.window_gather_case,
            "markov_step": lambda shape, cache: cases.markov_step_case(
                shape, markov, len(cache.seq_lens), "cpu"
            ),
        }
        for op, make in makers.items():
            near, far = make(shape, at[short]), make(shape, at[long])
            taken, rates = compare(
                clock,
                shape.dtype,
                {
                    "ours": partial(near.run, "cpu"),
                    "long": partial(far.run, "cpu"),
                    "reference": partial(near.run, "reference"),
                },
            )
            growth = taken.pop("long") / taken["ours"]
            flops = multiply_adds(shape, op, batch) if op != "window_gather" else 0
            records.append(
                line(
                    name, op, taken, rates, near.floor_bytes, flops, batch=batch, context=short,
                    long_context=long, times_at_long_context=round(growth, 3),
                )
            )  # fmt: skip
        for temperature in (0.0, 1.0):
            case = cases.draft_sample_case(shape, markov, batch, temperature, "cpu")
            records.append(against_reference(clock, name, case, shape, batch))
        case = cases.accept_chain_case(shape, markov, batch, "cpu")
        records.append(against_reference(clock, name, case, shape, batch))
    bulk = cases.summary_merge_bulk_case(shape, at[long], 8192 // BATCHES[-1])
    records.append(against_reference(clock, name, bulk, shape, BATCHES[-1]))
    return records


def against_reference(
    clock: Clock,
    name: str,
    case: cases.Case,
    shape: cases.Shape,
    batch: int,
) -> dict[str, Any]:
    taken, rates = compare(
        clock,
        shape.dtype,
        {"ours": partial(case.run, "cpu"), "reference": partial(case.run, "reference")},
    )
    flops = multiply_adds(shape, case.op, batch)
    if case.op == "summary_merge_bulk":
        rows = len(case.arguments["rows"])
        flops = 4 * shape.layers * shape.heads * shape.slots * rows * shape.dim
    labels: dict[str, Any] = {"batch": batch}
    if case.op == "draft_sample":
        labels["temperature"] = float(case.arguments["temperature"][0])
    return line(name, case.op, taken, rates, case.floor_bytes, flops, **labels)


def attention_case(
    shape: cases.Shape, batch: int, context: int, rows: int, scattered: bool = True
) -> dict[str, Any]:
    """`rows` query rows of each request at the end of `context` positions."""
    g = torch.Generator().manual_seed(5)
    total = batch * context
    order = torch.randperm(total, generator=g) if scattered else torch.arange(total)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=g).to(shape.dtype)

    return dict(
        query=normal(batch * rows, shape.heads, shape.dim),
        key_pool=normal(total, shape.kv_heads, shape.dim),
        value_pool=normal(total, shape.kv_heads, shape.dim),
        req_to_token=order.int().view(batch, context).contiguous(),
        req_rows=torch.arange(batch),
        kv_lens=torch.full((batch,), context),
        query_indptr=torch.arange(batch + 1) * rows,
        scale=shape.dim**-0.5,
    )


def gather_and_sdpa(case: dict[str, Any]) -> torch.Tensor:
    """What an attention backend in plain torch does: copy the rows, then torch's attention."""
    rows = len(case["query"]) // len(case["kv_lens"])
    outs = []
    for b, context in enumerate(case["kv_lens"].tolist()):
        ids = case["req_to_token"][b, :context].long()
        query = case["query"][b * rows : (b + 1) * rows].transpose(0, 1)
        key, value = (case[pool][ids].transpose(0, 1) for pool in ("key_pool", "value_pool"))
        mask = None
        if rows > 1:
            mask = torch.arange(context) <= torch.arange(context - rows, context)[:, None]
        attended = F.scaled_dot_product_attention(
            query[None], key[None], value[None], mask, scale=case["scale"], enable_gqa=True
        )
        outs.append(attended[0].transpose(0, 1))
    return torch.cat(outs)


def attention(
    clock: Clock,
    name: str,
    shape: cases.Shape,
    kind: str,
    batch: int,
    context: int,
    rows: int,
) -> dict[str, Any]:
    case = attention_case(shape, batch, context, rows)
    taken, rates = compare(
        clock,
        shape.dtype,
        {
            "ours": partial(ops.paged_attention, **case, backend="cpu"),
            "gather_and_sdpa": partial(gather_and_sdpa, case),
        },
    )
    # A causal prefill's rows see half of the last `rows` keys on average.
    seen = context - (rows - 1) / 2
    flops = int(4 * batch * rows * shape.heads * shape.dim * seen)
    size = case["key_pool"].nbytes + case["value_pool"].nbytes + 2 * case["query"].nbytes
    return line(
        name, "paged_attention", taken, rates, size, flops, kind=kind, batch=batch, context=context,
        rows=rows, dtype=str(shape.dtype).removeprefix("torch."),
    )  # fmt: skip


@dataclass(frozen=True)
class Target:
    """What a figure of the Qwen3-8B shapes ought to be."""

    what: str
    value: float
    bound: float
    at_least: bool
    least: float = 0.0  # what the multiplier alone leaves possible, where the bound is from above

    @property
    def reached(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def verdict(self) -> str:
        if self.reached:
            return "reached"
        if self.least > self.bound:
            return f"MISSED: the products alone take {self.least:.1f} times the memory floor here"
        return "MISSED"


def targets(records: list[dict[str, Any]]) -> list[Target]:
    """The targets that these records are about."""
    found = []
    for r in records:
        if r["shape"] != "qwen3-8b":
            continue
        op = "verify attention" if r.get("kind") == "verify" else r["op"]
        label = f"{op} B={r['batch']}"

        def over_memory(r: dict[str, Any] = r, label: str = label) -> Target:
            least = r["multiply_floor_ms"] / r["memory_floor_ms"]
            what = f"{label}: times its memory floor"
            return Target(what, r["times_memory_floor"], 1.5, False, least)

        if op == "block_attention":
            faster = r["times_faster_than_reference"]
            found.append(Target(f"{label}: times faster than plain torch", faster, 3, True))
            found.append(over_memory())
        if op == "summary_merge":
            faster = r["times_faster_than_reference"]
            found.append(Target(f"{label}: times faster than plain torch", faster, 5, True))
        if op == "verify attention":
            faster = r["times_faster_than_gather_and_sdpa"]
            found.append(Target(f"{label}: times faster than gather + SDPA", faster, 1.3, True))
            found.append(over_memory())
        if op in ("block_attention", "summary_merge", "markov_step"):
            growth = r["times_at_long_context"]
            found.append(Target(f"{label}: time at 128K over 1K", growth, 1.05, False))
    return found


def environment(turns: int) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    model = next(
        (
            text.split(":", 1)[1].strip()
            for text in Path("/proc/cpuinfo").read_text().splitlines()
            if text.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": torch.ops.longspark.cpu_isa(),
        "torch": torch.__version__,
        "commit": commit,
        "turns": turns,
        "load_before": round(os.getloadavg()[0], 2),
    }


def measure(shape_name: str, clock: Clock) -> list[dict[str, Any]]:
    """Every record of one of SHAPES."""
    few = Clock(max(2, clock.turns // 5))  # for what takes seconds
    if shape_name == "qwen3-8b":
        qwen = cases.Shape()
        records = drafter_operators(clock, shape_name, qwen, SHORT, LONG)
        for kind, batch, context, rows in (
            ("verify", 1, VERIFY_CONTEXT, 8),
            ("verify", 8, VERIFY_CONTEXT, 8),
            ("decode", 1, VERIFY_CONTEXT, 1),
            ("prefill", 1, 4096, 1024),
        ):
            turns = few if batch > 1 or kind == "prefill" else clock
            records.append(attention(turns, shape_name, qwen, kind, batch, context, rows))
        return records
    records = drafter_operators(clock, shape_name, SMOL, SHORT, VERIFY_CONTEXT)
    for dtype in (torch.float32, torch.bfloat16):
        smol = cases.Shape(**{**vars(SMOL), "dtype": dtype})
        for kind, batch, context, rows in (
            ("verify", 1, VERIFY_CONTEXT, 8),
            ("verify", 1, 1024, 8),
            ("verify", 8, 8192, 8),
            ("decode", 1, VERIFY_CONTEXT, 1),
            ("prefill", 1, 8192, 8192),
            ("prefill", 1, VERIFY_CONTEXT, 2048),
        ):
            turns = few if kind == "prefill" else clock
            records.append(attention(turns, shape_name, smol, kind, batch, context, rows))
    return records


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["qwen3-8b"])
    parser.add_argument("--turns", type=int, default=15, help="timings of everything")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target was missed")
    arguments = parser.parse_args()
    if not dispatch.is_compiled("block_attention", "cpu"):
        parser.error("the CPU operators aren't compiled: LONGSPARK_BUILD=cpu pip install -e .")
    torch.set_num_threads(arguments.threads)
    clock = Clock(arguments.turns)
    print(json.dumps({"environment": environment(arguments.turns)}), flush=True)
    records = [r for name in arguments.shape for r in measure(name, clock)]

    judged = targets(records)
    width = max((len(target.what) for target in judged), default=0)
    for target in judged:
        bound = f"{'>=' if target.at_least else '<='} {target.bound}"
        print(f"{target.what:{width}}  {target.value:8.2f}  {bound:>7}  {target.verdict}")
    return int(arguments.check and not all(target.reached for target in judged))


if __name__ == "__main__":
    raise SystemExit(main())
