"""Time per output token against context length, through real servers, all methods in one run.

Each prompt is prefilled once (bench_serving's warm-up request) and answered from the prefix cache,
so that only decoding is timed. Methods take turns at every prompt where all their servers fit next
to each other, else at every repeat. /server_info and the count of verify rounds prove for each cell
that the method really ran.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from longspark_sglang.bench import servers, workloads
from longspark_sglang.bench.options import (
    BenchError,
    add_model_options,
    add_output_options,
    name_of_size,
    server_arguments,
    settings,
    sizes,
)
from longspark_sglang.bench.record import Lines, data_hash, fingerprint, say, spread
from longspark_sglang.bench.servers import PLAIN, Counters, Fleet, RunningServer
from longspark_sglang.bench.serving_client import run_bench_serving
from longspark_sglang.bench.tables import table

MIN_PROMPTS = 5  # accept length differs more between prompts than between anything else


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `longspark bench context`."""
    add_model_options(parser, draft_required=False)
    servers.add_method_options(parser)
    add_workload_options(parser)
    parser.add_argument("--contexts", type=sizes, default="1K,8K,32K", help="prompt tokens")
    parser.add_argument(
        "--prompts", type=int, default=5, help=f"per length, at least {MIN_PROMPTS}"
    )
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1, help="turns of every prompt")
    add_output_options(parser)


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Where prompts come from, and how they are sampled."""
    parser.add_argument(
        "--text", action="append", default=[], metavar="FILE",
        help="long text to cut prompts from (default: sources of Python's library)",
    )  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)


@dataclass
class Cell:
    """What one method did at one length.

    Attributes:
        tpots: milliseconds per token, one a request.
        throughputs: output tokens per second of decoding, one a request.
        prompt_tokens: as the server counted them.
        added: counters over the measured requests and their warm-ups.
        command: the last command line of bench_serving.
    """

    tpots: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    added: list[Counters] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    @property
    def accept_lengths(self) -> list[float]:
        """One for each prompt."""
        return [added.accept_length for added in self.added if added.accept_length is not None]


def measure_prompt(
    server: RunningServer, cell: Cell, prompt: str, options: argparse.Namespace
) -> None:
    """Time one prompt on one server, and prove that its method ran."""
    before = server.counters()
    result = run_bench_serving(
        server.url,
        [prompt],
        options.output_tokens,
        concurrency=1,
        temperature=options.temperature,
        seed=options.seed,
    )
    added = server.counters().since(before)
    servers.confirm_rounds(server.method, added)
    cell.tpots += result.tpots
    cell.prompt_tokens += [request.prompt_tokens for request in result.requests]
    cell.added.append(added)
    cell.command = result.command


def turns(
    names: Sequence[str], lengths: Sequence[int], options: argparse.Namespace, freely: bool
) -> Iterator[tuple[str, int, int]]:
    """(method, length, number of the prompt) in the order of measurement."""
    for repeat in range(options.repeats):
        # Nobody is always first.
        order = [names[(i + repeat) % len(names)] for i in range(len(names))]
        if freely:
            for length in lengths:
                for number in range(options.prompts):
                    yield from ((name, length, number) for name in order)
        else:
            for name in order:
                for length in lengths:
                    yield from ((name, length, number) for number in range(options.prompts))


def measure(
    fleet: Fleet, prompts: dict[int, list[str]], options: argparse.Namespace
) -> tuple[dict[tuple[str, int], Cell], dict[str, dict[str, Any]]]:
    """Cells by (method, length), and /server_info by method."""
    found: dict[tuple[str, int], Cell] = defaultdict(Cell)
    infos: dict[str, dict[str, Any]] = {}
    last = None
    for name, length, number in turns(
        list(fleet.arguments), list(prompts), options, fleet.alternates_freely
    ):
        server = fleet.get(name)
        measure_prompt(server, found[name, length], prompts[length][number], options)
        infos[name] = server.info()
        if (length, number) != last:
            say(f"{name_of_size(length)}, prompt {number + 1} of {options.prompts}")
        last = length, number
    return found, infos


def pool_arguments(options: argparse.Namespace) -> list[str]:
    """SGLang arguments that fix the pools, so that memory is not traded for anything."""
    rows = max(options.contexts) + options.output_tokens + 512
    arguments = []
    if "--max-total-tokens" not in options.server_arg:
        arguments += ["--max-total-tokens", str(2 * rows)]
    if "--context-length" not in options.server_arg:
        arguments += ["--context-length", str(rows)]
    return arguments


def line_of(
    method: str, length: int, cell: Cell, info: dict[str, Any], baseline: Cell | None
) -> dict[str, Any]:
    """The JSON line of one cell."""
    state = info["internal_states"][0]
    tpot = spread(cell.tpots)
    accept = cell.accept_lengths
    return {
        "kind": "context",
        "method": method,
        "context": length,
        "prompt_tokens": spread(cell.prompt_tokens),
        "tpot_ms": tpot,
        "tokens_per_second": spread(1e3 / value for value in cell.tpots),
        "accept_length": spread(accept) if accept else None,
        "verify_rounds": sum(added.rounds for added in cell.added),
        "speculative_algorithm": info.get("speculative_algorithm"),
        "over_plain": tpot["median"] / spread(baseline.tpots)["median"] if baseline else None,
        "drafter_state_bytes": (state.get("longspark") or {}).get("state_bytes_per_request"),
        "token_capacity": (state.get("memory_usage") or {}).get("token_capacity"),
        "bench_serving": cell.command,
    }


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The table of medians with extremes."""
    lines = [
        [
            name_of_size(row["context"]),
            row["method"],
            f"{row['tpot_ms']['median']:.2f} ({row['tpot_ms']['min']:.2f}.."
            f"{row['tpot_ms']['max']:.2f})",
            row["over_plain"],
            row["accept_length"]["median"] if row["accept_length"] else None,
            row["tpot_ms"]["n"],
            row["drafter_state_bytes"],
        ]
        for row in rows
        if row["kind"] == "context"
    ]
    header = [
        "context",
        "method",
        "TPOT ms (min..max)",
        "over plain",
        "accept length",
        "n",
        "state",
    ]
    return table(header, lines)


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """`longspark bench context`; returns the exit code."""
    if options.prompts < MIN_PROMPTS:
        raise BenchError(f"--prompts {options.prompts}: at least {MIN_PROMPTS} per length")
    tokenizer = workloads.load_tokenizer(options.model)
    sources = workloads.texts(options.text)
    prompts = {
        length: workloads.long_prompts(tokenizer, sources, length, options.prompts, options.seed)
        for length in options.contexts
    }
    arguments = {
        name: [*server_arguments(options), *pool_arguments(options), *extra]
        for name, extra in servers.methods(options).items()
    }
    with (
        Lines(options.output, command) as lines,
        Fleet(arguments, servers.fleet_size(options, len(arguments))) as fleet,
    ):
        lines.add(
            {
                "kind": "settings",
                **settings(options),
                "target": fingerprint(options.model),
                "drafter": fingerprint(options.draft),
                "data_sha256": data_hash(prompts.values()),
                "servers": arguments,
                "gpus_per_method": options.tp_size,
                "alternating": "at every prompt" if fleet.alternates_freely else "at every repeat",
            }
        )
        found, infos = measure(fleet, prompts, options)
        for length in options.contexts:
            for name in arguments:
                plain = found.get((PLAIN, length))
                lines.add(line_of(name, length, found[name, length], infos[name], plain))
        print(summary(lines.rows))
    return 0
