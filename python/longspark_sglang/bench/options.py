"""Arguments that several measurements share, and the sizes people write as 8K."""

from __future__ import annotations

import argparse
import re
from typing import Any

from longspark_sglang.config import LongSparkError


class BenchError(LongSparkError):
    """A measurement that cannot be made as asked."""

    def __init__(self, problem: str) -> None:
        super().__init__("longspark bench", [problem])


def size(text: str) -> int:
    """A number of tokens: 1024, 1K (1024) or 1M. Raises argparse's error for anything else."""
    match = re.fullmatch(r"(\d+)([KkMm]?)", text.strip())
    if not match or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 1024 or 1K")
    return int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()]


def sizes(text: str) -> list[int]:
    """Sizes separated by commas."""
    return [size(part) for part in text.split(",")]


def name_of_size(tokens: int) -> str:
    """1024 -> 1K."""
    for unit, factor in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens % factor == 0:
            return f"{tokens // factor}{unit}"
    return str(tokens)


def add_model_options(parser: argparse.ArgumentParser, draft_required: bool = True) -> None:
    """The pair, and how it is loaded."""
    parser.add_argument("--model", required=True, help="target: folder or hub id")
    parser.add_argument("--draft", required=draft_required, help="LONGSPARK drafter")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--dtype", help="default: auto on a GPU, float32 on a CPU")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument(
        "--server-arg", action="append", default=[], metavar="ARG",
        help="one more SGLang argument, e.g. --server-arg=--page-size --server-arg=16",
    )  # fmt: skip


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Where results go."""
    parser.add_argument("--output", metavar="FILE", help="JSON lines")
    parser.add_argument(
        "--report", metavar="FOLDER", help="plots (PNG and SVG) and report.html go there"
    )


def server_arguments(options: argparse.Namespace) -> list[str]:
    """SGLang arguments of the target, for every method alike."""
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments = ["--model-path", str(options.model), "--device", device]
    arguments += ["--dtype", options.dtype or ("float32" if device == "cpu" else "auto")]
    arguments += ["--tp-size", str(options.tp_size)]
    return [*arguments, *options.server_arg]


def longspark_arguments(options: argparse.Namespace) -> list[str]:
    """What turns LONGSPARK on."""
    return [
        *("--speculative-algorithm", "LONGSPARK"),
        *("--speculative-draft-model-path", str(options.draft)),
    ]


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The parsed arguments as a JSON line keeps them."""
    return {key: value for key, value in sorted(vars(options).items()) if not callable(value)}
