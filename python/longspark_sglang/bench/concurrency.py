"""Throughput against concurrency: what each method gains over plain decoding and over DSPARK.

With `--window SKIP,LENGTH` only a steady stretch of each run counts, as in the published
measurements (30 s are skipped, 120 s count); without it the whole run does. Every seed has prompts
of its own.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

from longspark_sglang.bench import servers, workloads
from longspark_sglang.bench.context import add_workload_options
from longspark_sglang.bench.options import (
    BenchError,
    add_model_options,
    add_output_options,
    server_arguments,
    settings,
    size,
    sizes,
)
from longspark_sglang.bench.record import Lines, data_hash, fingerprint, say, spread
from longspark_sglang.bench.servers import PLAIN, Fleet
from longspark_sglang.bench.serving_client import run_bench_serving, steady_window
from longspark_sglang.bench.tables import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `longspark bench concurrency`."""
    add_model_options(parser, draft_required=False)
    servers.add_method_options(parser)
    add_workload_options(parser)
    parser.add_argument("--concurrency", type=sizes, default="1,2,4,8,16")
    parser.add_argument("--context", type=size, default="8K", help="prompt tokens, without --data")
    parser.add_argument(
        "--data", action="append", default=[], metavar="JSONL", help="prompts to use instead"
    )
    parser.add_argument("--prompts-per-slot", type=int, default=2, help="requests per concurrency")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--window", type=window, help="SKIP,LENGTH in seconds")
    parser.add_argument("--stop-at-eos", action="store_true", help="answers may end early")
    add_output_options(parser)


def window(text: str) -> tuple[float, float]:
    """SKIP,LENGTH."""
    try:
        skip, length = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not SKIP,LENGTH in seconds") from None
    return skip, length


def prompts_for(
    tokenizer: Any, options: argparse.Namespace, concurrency: int, seed: int
) -> list[str]:
    """The prompts of one run; other ones for every seed."""
    count = concurrency * options.prompts_per_slot
    if not options.data:
        sources = workloads.texts(options.text)
        return workloads.long_prompts(tokenizer, sources, options.context, count, seed)
    known = [
        workloads.as_text(tokenizer, messages)
        for path in options.data
        for messages in workloads.read_prompts(path)
    ]
    start = (seed * count) % len(known)
    rotated = known[start:] + known[:start]
    return [rotated[i % len(rotated)] for i in range(count)]


def measure_one(
    server: servers.RunningServer,
    prompts: Sequence[str],
    concurrency: int,
    seed: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One run of bench_serving at one concurrency."""
    server.client.flush()
    before = server.counters()
    result = run_bench_serving(
        server.url,
        prompts,
        options.output_tokens,
        concurrency=concurrency,
        temperature=options.temperature,
        seed=seed,
        ignore_eos=not options.stop_at_eos,
        warm=False,
    )
    added = server.counters().since(before)
    servers.confirm_rounds(server.method, added)
    throughput = float(result.figures["output_throughput"])
    tpot = median(result.tpots)
    if options.window:
        steady = steady_window(result.requests, *options.window)
        throughput, tpot = steady.throughput, steady.tpot
    return {
        "throughput": throughput,
        "tpot_ms": tpot,
        "accept_length": added.accept_length,
        "reached": float(result.figures["concurrency"]),
    }


def gain(
    rows: dict[tuple[str, int], list[dict[str, Any]]], over: str
) -> dict[tuple[str, int], Any]:
    """Throughput over that of another method, run by run (same prompts), by cell."""
    gains: dict[tuple[str, int], Any] = {}
    for (name, concurrency), runs in rows.items():
        others = rows.get((over, concurrency))
        if others:
            gains[name, concurrency] = spread(
                mine["throughput"] / other["throughput"]
                for mine, other in zip(runs, others, strict=True)
            )
    return gains


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Throughput and gains by concurrency."""

    def of(row: dict[str, Any], name: str) -> Any:
        value = row[name]
        return f"{value['median']:.3g} ({value['min']:.3g}..{value['max']:.3g})" if value else None

    lines = [
        [
            row["concurrency"],
            row["method"],
            *(of(row, n) for n in ("throughput", "over_plain", "over_dspark", "accept_length")),
        ]
        for row in rows
        if row["kind"] == "concurrency"
    ]
    header = ["C", "method", "tokens/s (min..max)", "over plain", "over DSPARK", "accept length"]
    return table(header, lines)


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """`longspark bench concurrency`; returns the exit code."""
    if options.seeds < 1:
        raise BenchError("--seeds must be 1 or more")
    tokenizer = workloads.load_tokenizer(options.model)
    extra = []
    if "--max-running-requests" not in options.server_arg:
        extra = ["--max-running-requests", str(max(options.concurrency))]
    arguments = {
        name: [*server_arguments(options), *extra, *selected]
        for name, selected in servers.methods(options).items()
    }
    used: list[list[str]] = []
    found: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    with (
        Lines(options.output, command) as lines,
        Fleet(arguments, servers.fleet_size(options, len(arguments))) as fleet,
    ):
        for seed in range(options.seed, options.seed + options.seeds):
            for concurrency in options.concurrency:
                prompts = prompts_for(tokenizer, options, concurrency, seed)
                used.append(prompts)
                for name in arguments:
                    run_ = measure_one(fleet.get(name), prompts, concurrency, seed, options)
                    found[name, concurrency].append(run_)
                say(f"seed {seed}: {concurrency} at a time done")
        lines.add(
            {
                "kind": "settings",
                **settings(options),
                "target": fingerprint(options.model),
                "drafter": fingerprint(options.draft),
                "data_sha256": data_hash(used),
                "servers": arguments,
                "gpus_per_method": options.tp_size,
            }
        )
        over_plain, over_dspark = gain(found, PLAIN), gain(found, "DSPARK")
        for cell, runs in sorted(found.items(), key=lambda item: item[0][1]):
            accept = [r["accept_length"] for r in runs if r["accept_length"] is not None]
            lines.add(
                {
                    "kind": "concurrency",
                    "method": cell[0],
                    "concurrency": cell[1],
                    "throughput": spread(r["throughput"] for r in runs),
                    "tpot_ms": spread(r["tpot_ms"] for r in runs),
                    "accept_length": spread(accept) if accept else None,
                    "over_plain": over_plain.get(cell),
                    "over_dspark": over_dspark.get(cell),
                    "reached_concurrency": spread(r["reached"] for r in runs),
                }
            )
        print(summary(lines.rows))
    return 0
