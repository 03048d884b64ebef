"""Accept length by data set, from local JSONL files, through real servers.

    longspark bench quality --model M --draft D --data gsm8k=gsm8k.jsonl --data mbpp=mbpp.jsonl

`workloads` lists the layouts; `benchmark/fetch_data.py` downloads the usual sets on a machine with
a network. The accept length is tokens emitted per verify round, bonus included, over a whole set:
not the mean of the requests' own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from longspark_sglang.bench import servers, workloads
from longspark_sglang.bench.options import (
    BenchError,
    add_model_options,
    add_output_options,
    server_arguments,
    settings,
)
from longspark_sglang.bench.record import Lines, data_hash, fingerprint, say, spread
from longspark_sglang.bench.servers import PLAIN, Fleet, RunningServer
from longspark_sglang.bench.tables import table
from longspark_sglang.client import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `longspark bench quality`."""
    add_model_options(parser, draft_required=False)
    servers.add_method_options(parser)
    parser.add_argument(
        "--data", action="append", required=True, metavar="NAME=JSONL", help="a data set"
    )
    parser.add_argument("--limit", type=int, help="prompts per data set")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    add_output_options(parser)


def named_files(data: Sequence[str]) -> dict[str, str]:
    """NAME=FILE, or a file that gives its own name. BenchError for a name used twice."""
    found: dict[str, str] = {}
    for text in data:
        name, _, path = text.rpartition("=")
        name = name or Path(path).stem
        if name in found:
            raise BenchError(f"two data sets are called {name}; write NAME=FILE")
        found[name] = path
    return found


def ask(server: RunningServer, prompts: Sequence[str], options: argparse.Namespace) -> list[Answer]:
    """Answers in the order of the prompts."""
    with ThreadPoolExecutor(options.concurrency) as threads:
        return list(
            threads.map(
                lambda prompt: server.client.generate(
                    prompt, options.output_tokens, temperature=options.temperature
                ),
                prompts,
            )
        )


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Accept length of a set and of its requests, and how often each slot was accepted."""
    rounds = sum(answer.rounds for answer in answers)
    if not rounds:
        raise BenchError("no round was speculated: the answers carry no spec_verify_ct")
    slots: list[int] = []
    for answer in answers:
        histogram = answer.meta.get("spec_correct_drafts_histogram") or []
        for count, times in enumerate(histogram):
            slots += [0] * max(0, count - len(slots))
            for slot in range(count):
                slots[slot] += times
    return {
        "accept_length": 1.0 + sum(answer.accepted for answer in answers) / rounds,
        "per_request": spread(1.0 + a.accepted / a.rounds for a in answers if a.rounds),
        "rounds": rounds,
        "tokens": sum(len(answer.ids) for answer in answers),
        "accepted_per_slot": [count / rounds for count in slots],
    }


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Accept length by set and method."""
    lines = [
        [
            row["data"],
            row["method"],
            row["accept_length"],
            f"{row['per_request']['min']:.2f}..{row['per_request']['max']:.2f}",
            row["prompts"],
            " ".join(f"{share:.2f}" for share in row["accepted_per_slot"]),
        ]
        for row in rows
        if row["kind"] == "quality"
    ]
    header = ["data", "method", "accept length", "requests", "prompts", "accepted, slot by slot"]
    return table(header, lines)


def run(options: argparse.Namespace, command: Sequence[str]) -> int:
    """`longspark bench quality`; returns the exit code."""
    tokenizer = workloads.load_tokenizer(options.model)
    sets = {
        name: [
            workloads.as_text(tokenizer, messages)
            for messages in workloads.read_prompts(path, options.limit)
        ]
        for name, path in named_files(options.data).items()
    }
    arguments = {
        name: [*server_arguments(options), *extra]
        for name, extra in servers.methods(options).items()
        if name != PLAIN
    }
    if not arguments:
        raise BenchError("no drafter was named: --draft, --dspark-draft, ...")
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
                "data_sha256": {name: data_hash(prompts) for name, prompts in sets.items()},
                "servers": arguments,
            }
        )
        for method in arguments:
            server = fleet.get(method)
            for name, prompts in sets.items():
                answers = ask(server, prompts, options)
                lines.add(
                    {
                        "kind": "quality",
                        "method": method,
                        "data": name,
                        "prompts": len(prompts),
                        "temperature": options.temperature,
                        **figures(answers),
                    }
                )
                say(f"{method}: {name} done")
        print(summary(lines.rows))
    return 0
