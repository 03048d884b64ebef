"""`longspark bench MEASUREMENT`: picks a measurement, as `longspark` picks a command."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

# name -> (module with add_arguments and run, one line of help)
MEASUREMENTS: dict[str, tuple[str, str]] = {
    "rounds": ("rounds", "one round by phase, against context and batch (synthetic context)"),
}


def main(argv: Sequence[str]) -> int:
    """Entry of `longspark bench`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="longspark bench",
        usage="longspark bench [-h] <measurement> ...",
        description="Measurements that anybody can repeat, and a gate that CI can run.",
        epilog="measurements:\n"
        + "".join(f"  {name:<12}{text}\n" for name, (_, text) in MEASUREMENTS.items())
        + "\n`longspark bench <measurement> --help` lists its arguments.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("measurement", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    name, text = MEASUREMENTS[chosen.measurement]
    module = importlib.import_module(f"longspark_sglang.bench.{name}")
    parser = argparse.ArgumentParser(
        prog=f"longspark bench {chosen.measurement}", description=f"{text}."
    )
    module.add_arguments(parser)
    return module.run(parser.parse_args(chosen.arguments), list(argv))
