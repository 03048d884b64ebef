"""The `longspark` command: picks a sub-command and hands over.

A sub-command is a module with `main(argv) -> exit code`, imported only when it is asked for, so
that `longspark --help` loads neither torch nor sglang. A new one is one more line in `COMMANDS`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from longspark_sglang import __version__
from longspark_sglang.config import LongSparkError

# name -> (module, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "check": (
        "longspark_sglang.check",
        "can this installation serve LONGSPARK, with these server arguments?",
    ),
    "verify": (
        "longspark_sglang.verify",
        "does a running server speculate, and exactly?",
    ),
    "bench": (
        "longspark_sglang.bench.command",
        "measure rounds, contexts, concurrency, memory; gate regressions",
    ),
    "data": (
        "longspark_sglang.training.data_command",
        "let a target answer prompts, and pack its answers for training",
    ),
    "train": (
        "longspark_sglang.training.train_command",
        "train a drafter for a target",
    ),
    "eval": (
        "longspark_sglang.training.eval_command",
        "accept length of a drafter, offline",
    ),
}

EXIT_PROBLEM = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; returns its exit code (0 good, 1 problems found, 2 bad usage)."""
    parser = argparse.ArgumentParser(
        prog="longspark",
        usage="longspark [-h] [--version] <command> ...",
        description="LongSpark drafters for SGLang.",
        epilog="commands:\n"
        + "".join(f"  {name:<10}{text}\n" for name, (_, text) in COMMANDS.items())
        + "\n`longspark <command> --help` lists a command's arguments.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"longspark-sglang {__version__}")
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    module = importlib.import_module(COMMANDS[options.command][0])
    try:
        return module.main(options.arguments)
    except LongSparkError as error:
        print(f"longspark {options.command}: {error}", file=sys.stderr)
        return EXIT_PROBLEM
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PROBLEM


if __name__ == "__main__":
    sys.exit(main())
