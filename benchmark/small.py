"""`longspark bench` on the tests' tiny pairs, for machines without a GPU and without weights.

    python benchmark/small.py rounds --output rounds.jsonl --report report
    python benchmark/small.py context        # DSPARK, DFLASH and EAGLE3 drafts of the same kind too
    python benchmark/small.py regress        # the gate that .ci/run runs

Everything after the measurement's name goes to `longspark bench`, on top of its preset cpu-small.
The pairs are made from seeds (test/pairs.py, test/baseline_drafts.py) and nothing in them is
trained: they show costs and mechanics. What they accept says nothing about any real drafter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

# Before torch: its threads wait by spinning, and two engines share these cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "test"))

from baseline_drafts import MAKERS  # noqa: E402
from longspark_sglang import cli  # noqa: E402
from pairs import PairCache  # noqa: E402

BASELINE = ROOT / "benchmark/baselines/cpu-small.json"
LONGEST = 140_000  # positions; 128K and what is generated after them
COMPARED = ("context", "concurrency", "breakeven", "memory")


def pair(folder: Path) -> tuple[Path, Path]:
    """The tiny target and its LongSpark drafter."""
    cache = PairCache(folder)
    target = cache.target(max_positions=LONGEST)
    return target, cache.drafter(target)


def baselines(folder: Path, target: Path) -> list[str]:
    """Options that name the other methods' drafts for the target."""
    options = []
    for method, make in MAKERS.items():
        draft = folder / f"{method}-for-{target.name}"
        if not draft.exists():
            make(draft, target)
        options += [f"--{method.lower()}-draft", str(draft)]
    return options


def main(arguments: Sequence[str]) -> int:
    """Command line: a measurement and its options."""
    if not arguments or arguments[0].startswith("-"):
        print(__doc__)
        return 2
    measurement, *options = arguments
    root = Path(os.environ.get("LONGSPARK_CACHE") or "~/.cache/longspark").expanduser()
    folder = root / "bench-pairs"
    target, draft = pair(folder)
    chosen = ["--preset", "cpu-small", "--model", str(target), "--draft", str(draft)]
    chosen += ["--device", "cpu"]
    if measurement in COMPARED:
        chosen += baselines(folder, target)
    if measurement in ("context", "concurrency", "breakeven"):
        # What else runs here shall not decide how much memory a server thinks it may have.
        chosen += ["--server-arg=--mem-fraction-static", "--server-arg=0.9"]
    if measurement == "concurrency":
        chosen += ["--server-arg=--max-total-tokens", "--server-arg=32768"]
    if measurement == "regress":
        chosen += ["--baseline", str(BASELINE)]
    return cli.main(["bench", measurement, *chosen, *options])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
