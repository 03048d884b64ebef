"""What a drafter costs in memory: its state per request, and the K/V tokens that are left.

Measured from the allocations of a loaded scheduler, not from formulas: bytes of every K/V pool that
is not the target's, of LONGSPARK's state, and SGLang's own count of the tokens that its pool holds
at the same --mem-fraction-static.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from longspark_sglang.bench import servers
from longspark_sglang.bench.engine import Engine
from longspark_sglang.bench.options import (
    add_model_options,
    add_output_options,
    name_of_size,
    server_arguments,
    settings,
    sizes,
)
from longspark_sglang.bench.record import Lines, fingerprint, say
from longspark_sglang.bench.tables import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `longspark bench memory`."""
    add_model_options(parser, draft_required=False)
    servers.add_method_options(parser)
    parser.add_argument("--contexts", type=sizes, default="1K,8K,32K,128K")
    parser.add_argument("--mem-fraction-static", type=float, help="the same for every method")
    add_output_options(parser)


def per_request(info: dict[str, Any], context: int) -> int:
    """Bytes of drafter state of one request of `context` tokens."""
    fixed = (info.get("longspark") or {}).get("state_bytes_per_request", 0)
    return fixed + context * info["draft_pool_bytes"] // max(1, info["draft_pool_rows"])


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """State by context, and tokens left."""
    cells = [row for row in rows if row["kind"] == "memory"]
    contexts = list(cells[0]["state_bytes"])
    lines = [
        [
            row["method"],
            row["token_capacity"],
            *(row["state_bytes"][c] / 2**20 for c in contexts),
            row["draft_pool_bytes"] / 2**20,
        ]
        for row in cells
    ]
    header = ["method", "pool tokens", *(f"MiB a request at {c}" for c in contexts)]
    return table([*header, "draft pool MiB"], lines)


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """`longspark bench memory`; returns the exit code."""
    common = server_arguments(options)
    if options.mem_fraction_static is not None:
        common += ["--mem-fraction-static", str(options.mem_fraction_static)]
    with Lines(options.output, command) as lines:
        lines.add(
            {
                "kind": "settings",
                **settings(options),
                "target": fingerprint(options.model),
                "drafter": fingerprint(options.draft),
            }
        )
        for name, extra in servers.methods(options).items():
            say(f"loading {name}")
            # One after the other: what is left of the memory is what is measured.
            with Engine([*common, *extra]) as engine:
                info = engine.info
            lines.add(
                {
                    "kind": "memory",
                    "method": name,
                    "algorithm": info["algorithm"],
                    "token_capacity": info["max_total_tokens"],
                    "draft_pool_bytes": info["draft_pool_bytes"],
                    "draft_pool_rows": info["draft_pool_rows"],
                    "state_bytes": {
                        name_of_size(context): per_request(info, context)
                        for context in options.contexts
                    },
                }
            )
        print(summary(lines.rows))
    return 0
