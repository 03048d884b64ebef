"""`longspark bench MEASUREMENT`: picks a measurement, as `longspark` picks a command."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from longspark_sglang.bench.presets import PRESETS, defaults
from longspark_sglang.bench.record import read_lines

# name -> (module with add_arguments and run, one line of help)
MEASUREMENTS: dict[str, tuple[str, str]] = {
    "rounds": ("rounds", "one round by phase, against context and batch (synthetic context)"),
    "context": ("context", "time per token against context length, through real servers"),
    "concurrency": ("concurrency", "throughput against concurrency, through real servers"),
    "breakeven": ("breakeven", "accept length at which speculation pays (simulated acceptance)"),
    "memory": ("memory", "drafter state per request, and the K/V tokens left"),
    "quality": ("quality", "accept length by data set, from local JSONL files"),
    "regress": ("regress", "gate: fail where this build is slower than a baseline file"),
    "plot": ("plots", "plots and an HTML report from JSON lines"),
}


def main(argv: Sequence[str]) -> int:
    """Entry of `longspark bench`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="longspark bench",
        usage="longspark bench [-h] <measurement> [--preset NAME] ...",
        description="Measurements that anybody can repeat, and a gate that CI can run.",
        epilog="measurements:\n"
        + "".join(f"  {name:<12}{text}\n" for name, (_, text) in MEASUREMENTS.items())
        + f"\npresets: {', '.join(PRESETS)}; options on the command line win over them\n"
        + "`longspark bench <measurement> --help` lists its arguments.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("measurement", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    options = parse(chosen.measurement, chosen.arguments)
    module = importlib.import_module(
        f"longspark_sglang.bench.{MEASUREMENTS[chosen.measurement][0]}"
    )
    status = module.run(options, list(argv))
    output, report = getattr(options, "output", None), getattr(options, "report", None)
    if output and report:
        from longspark_sglang.bench.plots import write_report

        print(f"\n{write_report(read_lines([output]), report)}")
    return status


def parse(measurement: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Options of a measurement; a preset's values take the place of the defaults."""
    module, text = MEASUREMENTS[measurement]
    parser = argparse.ArgumentParser(
        prog=f"longspark bench {measurement}",
        description=f"{text}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    importlib.import_module(f"longspark_sglang.bench.{module}").add_arguments(parser)
    if measurement != "plot":
        parser.add_argument("--preset", choices=PRESETS, help="defaults by name")
        known, _ = _preset_parser().parse_known_args(arguments)
        if known.preset:
            try:
                parser.set_defaults(**defaults(known.preset, measurement))
            except KeyError as error:
                parser.error(str(error.args[0]))
    options = parser.parse_args(arguments)
    if measurement not in ("plot", "regress") and options.report and not options.output:
        parser.error("--report is made of the lines of --output: name that too")
    return options


def _preset_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", choices=PRESETS)
    return parser
