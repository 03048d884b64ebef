"""Train a LongSpark drafter for a frozen target, on its own packed answers."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from longspark_sglang.training.config import TrainingConfig
from longspark_sglang.training.eval_command import add_device_options


def main(argv: Sequence[str]) -> int:
    """Entry of `longspark train`; returns the exit code."""
    options = _parser().parse_args(argv)
    # Imported here: this needs torch, and `--help` does not.
    from longspark_sglang.training import train

    return train.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longspark train", description=__doc__)
    parser.add_argument("--target", required=True, help="folder or hub id of the frozen target")
    parser.add_argument("--data", required=True, help="folder of `longspark data pack`")
    parser.add_argument("--output", required=True, help="folder for drafter, curve and state")
    parser.add_argument("--resume", action="store_true", help="continue the training in --output")
    parser.add_argument("--stop-at", type=int, help="save and stop at this step")
    parser.add_argument("--cache", type=Path, help="folder for the target's features")
    parser.add_argument("--eval-every", type=int, default=100, help="steps")
    parser.add_argument("--eval-sequences", type=int, default=16)
    parser.add_argument("--save-every", type=int, default=500, help="steps")
    parser.add_argument("--line-every", type=int, default=10, help="steps")
    parser.add_argument("--tensorboard", type=Path, help="folder for event files")
    add_device_options(parser)

    shape = parser.add_argument_group("drafter")
    shape.add_argument("--init", help="start from this drafter, and its shape")
    shape.add_argument("--mask-token-id", type=int, help="default: the tokenizer's mask token")
    shape.add_argument("--layers", type=int, default=5)
    shape.add_argument("--layer-ids", type=int, nargs="+", help="default: evenly spaced")
    shape.add_argument("--draft-tokens", type=int, default=7)
    shape.add_argument("--summary-slots", type=int, default=16)
    shape.add_argument("--window", type=int, default=256)
    shape.add_argument("--markov-rank", type=int, default=256)
    shape.add_argument("--intermediate-size", type=int, help="default: the target's")

    training = parser.add_argument_group("training (see training/config.py)")
    for item in dataclasses.fields(TrainingConfig):
        flag = "--" + item.name.replace("_", "-")
        if item.name == "without":
            training.add_argument(flag, action="append", default=[], help="a view to take away")
        elif isinstance(item.default, bool):
            training.add_argument(flag, action=argparse.BooleanOptionalAction, default=item.default)
        elif item.name != "facts":
            training.add_argument(
                flag, type=type(item.default), default=item.default, help=f"{item.default}"
            )
    return parser
