"""The accept length at which speculation pays: two runs, one with acceptance simulated as zero.

A server with SGLANG_SIMULATE_ACC_LEN=1 pays for every round and gets one token out of it. Its time
per token over that of plain decoding is therefore the accept length (bonus included) from which on
speculation is faster. It needs no trained drafter, and no luck with prompts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from longspark_sglang.bench import context, servers, workloads
from longspark_sglang.bench.options import name_of_size, server_arguments, settings
from longspark_sglang.bench.record import Lines, data_hash, fingerprint, spread
from longspark_sglang.bench.servers import PLAIN, Fleet
from longspark_sglang.bench.tables import table

# Named as SGLang names them; the other two keep SGLang's defaults except that real tokens go round.
SIMULATED = {
    "SGLANG_SIMULATE_ACC_LEN": "1",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `longspark bench breakeven`: that of `context`."""
    context.add_arguments(parser)


def breakeven(cell: context.Cell, plain: context.Cell) -> dict[str, float]:
    """Ratios of time per token, request by request: the same prompts in the same order."""
    return spread(mine / other for mine, other in zip(cell.tpots, plain.tpots, strict=True))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Break-even accept lengths by method and context."""
    lines = [
        [
            name_of_size(row["context"]),
            row["method"],
            f"{row['breakeven']['median']:.2f} ({row['breakeven']['min']:.2f}.."
            f"{row['breakeven']['max']:.2f})",
            row["round_ms"]["median"],
            row["plain_ms"]["median"],
        ]
        for row in rows
        if row["kind"] == "breakeven"
    ]
    header = ["context", "method", "break-even accept length", "round ms", "plain token ms"]
    return table(header, lines)


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """`longspark bench breakeven`; returns the exit code."""
    tokenizer = workloads.load_tokenizer(options.model)
    sources = workloads.texts(options.text)
    prompts = {
        length: workloads.long_prompts(tokenizer, sources, length, options.prompts, options.seed)
        for length in options.contexts
    }
    arguments = {
        name: [*server_arguments(options), *context.pool_arguments(options), *extra]
        for name, extra in servers.methods(options).items()
    }
    variables = {name: SIMULATED for name in arguments if name != PLAIN}
    with (
        Lines(options.output, command) as lines,
        Fleet(arguments, servers.fleet_size(options, len(arguments)), variables) as fleet,
    ):
        lines.add(
            {
                "kind": "settings",
                **settings(options),
                "target": fingerprint(options.model),
                "drafter": fingerprint(options.draft),
                "data_sha256": data_hash(prompts.values()),
                "servers": arguments,
                "simulated": SIMULATED,
                "gpus_per_method": options.tp_size,
            }
        )
        found, _ = context.measure(fleet, prompts, options)
        for length in options.contexts:
            plain = found[PLAIN, length]
            for name in variables:
                cell = found[name, length]
                lines.add(
                    {
                        "kind": "breakeven",
                        "method": name,
                        "context": length,
                        "breakeven": breakeven(cell, plain),
                        "round_ms": spread(cell.tpots),
                        "plain_ms": spread(plain.tpots),
                        "accept_length": spread(cell.accept_lengths),
                    }
                )
        print(summary(lines.rows))
    return 0
