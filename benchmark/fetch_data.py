"""Download the evaluation sets for `longspark bench quality`, on a machine with a network.

    python benchmark/fetch_data.py FOLDER [NAME ...]

Each set becomes FOLDER/NAME.jsonl as its authors publish it; `longspark bench quality` knows their
layouts. The sets have licences of their own, which is why none of them is in this repository.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import urllib.request
from pathlib import Path

GITHUB = "https://raw.githubusercontent.com"
HUB = "https://huggingface.co/datasets"
# name -> files, one after the other
SETS: dict[str, list[str]] = {
    "gsm8k": [f"{GITHUB}/openai/grade-school-math/master/grade_school_math/data/test.jsonl"],
    "math500": [f"{HUB}/HuggingFaceH4/MATH-500/resolve/main/test.jsonl"],
    "aime25": [
        f"{HUB}/opencompass/AIME2025/resolve/main/aime2025-I.jsonl",
        f"{HUB}/opencompass/AIME2025/resolve/main/aime2025-II.jsonl",
    ],
    "humaneval": [f"{GITHUB}/openai/human-eval/master/data/HumanEval.jsonl.gz"],
    "mbpp": [f"{GITHUB}/google-research/google-research/master/mbpp/mbpp.jsonl"],
    "livecodebench": [f"{HUB}/livecodebench/code_generation_lite/resolve/main/test6.jsonl"],
    "mt-bench": [f"{GITHUB}/lm-sys/FastChat/main/fastchat/llm_judge/data/mt_bench/question.jsonl"],
    "alpaca": [f"{GITHUB}/tatsu-lab/stanford_alpaca/main/alpaca_data.json"],
}


def fetch(name: str, folder: Path) -> str:
    """Write FOLDER/NAME.jsonl; returns a line with its size and hash."""
    lines: list[str] = []
    for url in SETS[name]:
        with urllib.request.urlopen(url, timeout=120) as response:
            data = response.read()
        text = (gzip.decompress(data) if url.endswith(".gz") else data).decode("utf-8")
        if url.endswith(".json"):
            lines += [json.dumps(record) for record in json.loads(text)]
        else:
            lines += [line for line in text.splitlines() if line.strip()]
    for line in lines:
        json.loads(line)  # an error page is none
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{path}: {len(lines)} records, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SETS)}")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in SETS]
    if unknown:
        parser.error(f"no such set: {', '.join(unknown)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in options.names or SETS:
        try:
            print(fetch(name, options.folder), flush=True)
        except (OSError, ValueError) as error:
            failed += 1
            print(f"{name}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
