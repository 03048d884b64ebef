"""Accept length (bonus included) of a drafter, offline, from answers of its target."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from longspark_sglang.training.config import VIEWS


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """--device and --dtype, the target's."""
    parser.add_argument("--device", help="default: cuda where there is one")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        help="of the target; default: bfloat16 on a GPU, float32 on the CPU",
    )


def main(argv: Sequence[str]) -> int:
    """Entry of `longspark eval`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="longspark eval", description=__doc__)
    parser.add_argument("--target", required=True, help="folder or hub id")
    parser.add_argument("--draft", required=True, help="folder or hub id")
    parser.add_argument("--data", nargs="+", required=True, help="packed folders")
    parser.add_argument("--split", default="held_out", choices=("held_out", "train"))
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--limit", type=int, help="answers per data set")
    parser.add_argument(
        "--without", action="append", default=[], help=f"ablation, one of {', '.join(VIEWS)}"
    )
    parser.add_argument("--json", help="also write the table to this file")
    parser.add_argument("--chart", help="also draw it: a .png or .svg file (needs matplotlib)")
    add_device_options(parser)
    options = parser.parse_args(argv)
    # Imported here: this needs torch, and `--help` does not.
    from longspark_sglang.training import evaluate

    return evaluate.run(options)
