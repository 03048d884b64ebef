"""One decoding round, split into what it does, against context length and batch size.

The context is *synthetic*: the K/V pool holds random rows and the target's prefill is skipped, so
that 128K cost no prefill. The rounds are the scheduler's and worker's own (see `engine_process`).
Contexts take turns, so that what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from longspark_sglang.bench.engine import Engine
from longspark_sglang.bench.options import (
    BenchError,
    add_model_options,
    add_output_options,
    longspark_arguments,
    name_of_size,
    server_arguments,
    settings,
    sizes,
)
from longspark_sglang.bench.record import Lines, fingerprint, say, spread
from longspark_sglang.bench.tables import table

PHASES = ("proposal", "sampling", "verify", "accept", "update", "other")
# Rounds by (method, context, batch): milliseconds by phase.
Rounds = dict[tuple[str, int, int], list[dict[str, float]]]
# Rows that the rounds of one turn may append, and what the scheduler wants in reserve.
HEADROOM = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `longspark bench rounds`."""
    add_model_options(parser)
    parser.add_argument("--contexts", type=sizes, default="1K,8K,32K,128K", help="tokens")
    parser.add_argument("--batches", type=sizes, default="1,8")
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds of one turn")
    parser.add_argument("--repeats", type=int, default=3, help="turns of every context")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--max-rows", type=sizes, default="1M", help="skip context x batch above this"
    )
    parser.add_argument(
        "--cold", action=argparse.BooleanOptionalAction, default=False,
        help="empty the caches before drafting and before the update of every round, as the pass "
        "of a target that is larger than they are does; tiny targets need it to be compared",
    )  # fmt: skip
    parser.add_argument("--no-plain", action="store_true", help="leave plain decoding out")
    add_output_options(parser)


def cells(options: argparse.Namespace) -> list[tuple[int, int]]:
    """(context, batch) to measure, what is too large left out with a word."""
    wanted = [(context, batch) for batch in options.batches for context in options.contexts]
    limit = options.max_rows[0]
    kept = [(context, batch) for context, batch in wanted if context * batch <= limit]
    for context, batch in wanted:
        if (context, batch) not in kept:
            say(f"skipped: {batch} x {name_of_size(context)} rows are more than --max-rows")
    return kept


def pool_arguments(wanted: Sequence[tuple[int, int]]) -> list[str]:
    """SGLang arguments for pools that hold every cell."""
    rows = max(batch * (context + HEADROOM) for context, batch in wanted)
    longest = max(context for context, _ in wanted) + HEADROOM
    return [
        *("--max-total-tokens", str(rows)),
        *("--context-length", str(longest)),
        *("--max-running-requests", str(max(batch for _, batch in wanted))),
    ]


def start_engines(
    options: argparse.Namespace, wanted: Sequence[tuple[int, int]]
) -> dict[str, Engine]:
    """LONGSPARK and, unless it is left out, plain decoding, both with the same pools."""
    common = [*server_arguments(options), *pool_arguments(wanted)]
    engines = {"LONGSPARK": Engine([*common, *longspark_arguments(options)])}
    if not options.no_plain:
        engines["plain"] = Engine(common)
    try:
        for engine in engines.values():
            engine.launch()
        for engine in engines.values():
            engine.wait()
            engine.ask("fill_pool")
    except BaseException:
        stop(engines)
        raise
    return engines


def those_that_fit(
    wanted: Sequence[tuple[int, int]], engines: dict[str, Engine]
) -> list[tuple[int, int]]:
    """The cells that the pools hold: SGLang makes them smaller where memory is short."""
    rows = min(engine.info["max_total_tokens"] for engine in engines.values())
    kept = [(context, batch) for context, batch in wanted if batch * (context + HEADROOM) <= rows]
    for context, batch in wanted:
        if (context, batch) not in kept:
            say(f"skipped: {batch} x {name_of_size(context)} rows do not fit into {rows}")
    if not kept:
        raise BenchError(f"no cell fits into the {rows} rows of the pools; name smaller --contexts")
    return kept


def stop(engines: dict[str, Engine]) -> None:
    """End all of them."""
    for engine in engines.values():
        engine.stop()


def measure(
    engines: dict[str, Engine],
    wanted: Sequence[tuple[int, int]],
    options: argparse.Namespace,
    found: Rounds,
) -> None:
    """Add rounds to `found`: all cells in turns, `repeats` times."""
    for repeat in range(options.repeats):
        for context, batch in wanted:
            for name, engine in engines.items():
                answer = engine.ask(
                    "rounds",
                    context=context,
                    batch=batch,
                    count=options.rounds,
                    temperature=options.temperature,
                    cold=options.cold,
                )
                found[name, context, batch] += answer["rounds"]
        say(f"turn {repeat + 1} of {options.repeats} done")


def lines_of(
    found: Rounds,
    engines: dict[str, Engine],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """One JSON line for each cell."""
    rows = []
    for (method, context, batch), rounds in found.items():
        info = engines[method].info
        names = sorted({name for taken in rounds for name in taken})
        rows.append(
            {
                "kind": "rounds",
                "method": method,
                "context": context,
                "batch": batch,
                "synthetic_context": True,
                "temperature": options.temperature,
                "cold": options.cold,
                "dtype": info["dtype"],
                "device": info["device"],
                "ms": {name: spread(t[name] for t in rounds if name in t) for name in names},
                "drafting_ms": spread(map(drafting, rounds)) if method != "plain" else None,
                "update_ms": spread(map(updating, rounds)) if method != "plain" else None,
                "state_bytes": (info.get("longspark") or {}).get("state_bytes_per_request"),
            }
        )
    return rows


def drafting(taken: dict[str, float]) -> float:
    """Proposal and sampling of one round, milliseconds."""
    return taken["proposal"] + taken.get("sampling", 0.0)


def updating(taken: dict[str, float]) -> float:
    """Summary update of one round, milliseconds; with acceptance where a graph holds both."""
    return taken["update"] if "update" in taken else taken["accept"]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The table of medians, and how drafting and update grow from the shortest context."""
    cells = [row for row in rows if row["kind"] == "rounds"]
    lines = []
    for row in cells:
        ms = {name: value["median"] for name, value in row["ms"].items()}
        lines.append(
            [row["method"], name_of_size(row["context"]), row["batch"], ms["round"]]
            + [ms.get(phase, ms.get("decode") if phase == "verify" else None) for phase in PHASES]
            + [row["state_bytes"]]
        )
    header = ["method", "context", "batch", "round ms", *PHASES, "state bytes"]
    text = ["median ms of a round (synthetic context; verify of plain: its decode pass)", ""]
    text += [table(header, lines), ""]
    for batch in dict.fromkeys(row["batch"] for row in cells):
        ours = [r for r in cells if r["method"] == "LONGSPARK" and r["batch"] == batch]
        near, far = min(ours, key=lambda r: r["context"]), max(ours, key=lambda r: r["context"])
        text.append(
            f"batch {batch}, {name_of_size(far['context'])} over {name_of_size(near['context'])}: "
            f"drafting {growth(near, far, 'drafting_ms'):.3f}x, "
            f"update {growth(near, far, 'update_ms'):.3f}x"
        )
    return "\n".join(text)


def growth(near: dict[str, Any], far: dict[str, Any], what: str) -> float:
    """Median at the far context over that at the near one."""
    return far[what]["median"] / near[what]["median"]


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """`longspark bench rounds`; returns the exit code."""
    wanted = cells(options)
    with Lines(options.output, command) as lines:
        lines.add({"kind": "settings", **settings(options), "target": fingerprint(options.model),
                   "drafter": fingerprint(options.draft)})  # fmt: skip
        engines = start_engines(options, wanted)
        found: Rounds = defaultdict(list)
        try:
            measure(engines, those_that_fit(wanted, engines), options, found)
        finally:
            stop(engines)
            # Also of a run that was interrupted.
            for row in lines_of(found, engines, options):
                lines.add(row)
        print(summary(lines.rows))
    return 0
