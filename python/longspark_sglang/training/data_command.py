"""Answers of the target itself, and their packed form for training.

`regenerate` has running SGLang servers answer prompts; `pack` turns the answers into token files
with a manifest.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard: use i/n with i from 0 to n-1")
    return int(match[1]), int(match[2])


def main(argv: Sequence[str]) -> int:
    """Entry of `longspark data`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="longspark data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    make = commands.add_parser("regenerate", help="let the target answer prompts")
    make.add_argument("--prompts", nargs="+", required=True, help="JSONL or parquet files")
    make.add_argument("--url", nargs="+", required=True, help="SGLang servers, used in turn")
    make.add_argument("--target", required=True, help="folder or hub id, for its chat template")
    make.add_argument("--output", required=True, help="folder; an unfinished run is continued")
    make.add_argument("--temperature", type=float, default=0.0)
    make.add_argument("--top-p", type=float, default=1.0)
    make.add_argument("--top-k", type=int, default=-1)
    make.add_argument("--max-new-tokens", type=int, default=1024)
    make.add_argument("--thinking", action="store_true", help="leave thinking mode on")
    make.add_argument("--concurrency", type=int, default=16, help="requests in flight")
    make.add_argument("--retries", type=int, default=3, help="per prompt")
    make.add_argument("--retry-wait", type=float, default=1.0, help="seconds, doubled each time")
    make.add_argument("--timeout", type=float, default=600.0, help="seconds per request")
    make.add_argument("--limit", type=int, help="use the first prompts only")
    make.add_argument("--shard", type=_shard, default=(0, 1), help="i/n: every n-th prompt from i")
    make.add_argument("--progress-every", type=float, default=5.0, help="seconds")

    packing = commands.add_parser("pack", help="turn answers into token files")
    packing.add_argument("--answers", nargs="+", required=True, help="output folders of regenerate")
    packing.add_argument("--output", required=True, help="new folder")
    packing.add_argument("--max-length", type=int, default=4096, help="tokens; longer ones are cut")
    packing.add_argument("--min-response", type=int, default=2, help="tokens of the answer")
    packing.add_argument(
        "--loops",
        choices=("keep", "cut", "drop"),
        default="keep",
        help="answers that end in a loop: keep, cut after the first repetition, or leave out",
    )
    packing.add_argument("--held-out", type=float, default=0.05, help="share never trained on")

    options = parser.parse_args(argv)
    # Imported here: these need torch, and `--help` does not.
    from longspark_sglang.training import data

    return data.regenerate(options) if options.command == "regenerate" else data.pack(options)
