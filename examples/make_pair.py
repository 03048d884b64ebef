"""`make pair`: the demo drafter for SmolLM2-135M-Instruct, from prompts to the finished folder.

    python examples/make_pair.py --work FOLDER [--prompts N]

Every step is a `longspark` command, printed before it runs; what is finished in the work folder is
not done again, so an interrupted run goes on where it stopped. On a GPU the same steps use it.

 1. target        examples/smollm2.py
 2. prompts       examples/demo_prompts.py
 3. answers       the target's own, through a plain SGLang server: every second prompt greedily, the
                  others sampled at temperature 1
 4. packed data   loops are cut after their first repetition
 5. training
 6. measurement   the pair is served and asks the held-out prompts, greedily and at temperature 1;
                  the same answers go through `longspark eval`, which must agree
 7. the drafter   config, weights, settings, curve and figures, copied to --output
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from demo_prompts import make_prompts
from longspark_sglang import cli
from longspark_sglang.training.data import loop_begin, read_prompts
from serve import CPU_OPTIONS, DEMO_DRAFTER, SMOLLM2_MASK_TOKEN, end, healthy
from smollm2 import smollm2

DOMAINS = ("code", "math", "chat")
TEMPERATURES = {"greedy": "0", "sampled": "1"}
TOKENS = "384"  # at most, of each training answer
MEASURED = ["--max-new-tokens", "192"]  # on the held-out prompts

# At most 24 MB in bfloat16: half of the target's MLP width, and a Markov rank of 32.
SHAPE = "--layer-ids 6 16 27 --draft-tokens 7 --window 256 --summary-slots 16"
SHAPE += f" --markov-rank 32 --intermediate-size 704 --mask-token-id {SMOLLM2_MASK_TOKEN}"
TRAINING = "--optimizer muon --sequences-per-step 8 --anchors-per-sequence 48"
TRAINING += " --anchors-per-group 48 --train-vocabulary 6144 --autocast --no-checkpointing"
# Cross entropy learns fastest at first; the target's whole law is what it then overfits less.
STAGES = {
    "stage1": "--loss 0.5*ce+0.5*tv --learning-rate 0.02 --schedule linear --steps 960"
    " --stop-at 480 --seed 0",
    "stage2": "--loss 0.5*kl+0.5*tv --learning-rate 0.01 --schedule constant --steps 300"
    " --stop-at 160 --seed 1",
    "drafter": "--loss 0.5*kl+0.5*tv --learning-rate 0.01 --schedule linear --steps 370 --seed 2",
}


def progress(text: str) -> None:
    """One line for a waiting person."""
    print(f"[pair] {text}", flush=True)


def longspark(*arguments: str | Path) -> None:
    """Run a longspark command; ends the program if it fails."""
    words = [str(word) for word in arguments]
    progress(shlex.join(["longspark", *words]))
    if code := cli.main(words):
        sys.exit(code)


@contextlib.contextmanager
def server(target: Path, log: Path, draft: Path | None = None) -> Iterator[str]:
    """A server, plain and in bfloat16, or with the drafter as `make serve` has it: its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(target)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    if draft is not None:
        command += ["--speculative-algorithm", "LONGSPARK"]
        command += ["--speculative-draft-model-path", str(draft)]
        command += [] if torch.cuda.is_available() else CPU_OPTIONS
    else:
        command += ["--dtype", "bfloat16"]
        if not torch.cuda.is_available():
            command += ["--device", "cpu", "--mem-fraction-static", "0.3"]
            command += ["--max-total-tokens", "65536", "--max-running-requests", "64"]
    progress(shlex.join(command))
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        started = time.monotonic()
        while not healthy(url):
            if process.poll() is not None or time.monotonic() - started > 600:
                sys.exit(f"[pair] the server did not start: see {log}")
            time.sleep(1)
        yield url
    finally:
        end(process)


def regenerate(target: Path, work: Path, url: str, limit: int) -> None:
    """Answers to the training prompts, as two shards of one folder."""
    common: list[str | Path] = ["data", "regenerate", "--target", target, "--url", url]
    common += ["--prompts", work / "prompts/train.jsonl", "--output", work / "answers"]
    common += ["--max-new-tokens", TOKENS, "--concurrency", "64"]
    common += ["--limit", str(limit)]
    for shard, temperature in enumerate(TEMPERATURES.values()):
        longspark(*common, "--shard", f"{shard}/2", "--temperature", temperature)


def pack(work: Path) -> None:
    """Training data; 3% of the prompts are watched during training (not the held-out set)."""
    if not (work / "packed/manifest.json").exists():
        rest = ["--loops", "cut", "--held-out", "0.03", "--max-length", "1024"]
        longspark("data", "pack", "--answers", work / "answers", "--output", work / "packed", *rest)


def train(target: Path, work: Path) -> None:
    """All stages, each from the drafter of the one before; a finished stage is done in no time."""
    begin = SHAPE.split()
    for name, settings in STAGES.items():
        folders = ["--target", target, "--data", work / "packed", "--output", work / name]
        rest = [*begin, *TRAINING.split(), *settings.split(), "--cache", work / "features"]
        rest += [] if torch.cuda.is_available() else ["--dtype", "bfloat16"]
        rest += ["--save-every", "40", "--eval-every", "200", "--eval-sequences", "30"]
        rest += ["--resume"] if (work / name / "state.pt").exists() else []
        longspark("train", *folders, *rest)
        begin = ["--init", str(work / name)]


def measure(target: Path, work: Path) -> list[dict[str, Any]]:
    """Serve the pair, ask the held-out prompts, count rounds; then the same answers offline."""
    with server(target, work / "speculative-server.log", draft=work / "drafter") as url:
        for name, temperature in TEMPERATURES.items():
            prompts = [work / f"prompts/held-out-{domain}.jsonl" for domain in DOMAINS]
            one = ["--prompts", *prompts, "--temperature", temperature]
            one += ["--output", work / f"held-out/{name}", "--concurrency", "16"]
            longspark("data", "regenerate", "--target", target, "--url", url, *MEASURED, *one)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            f"{url}/server_info", timeout=60
        ) as answer:
            (work / "server_info.json").write_bytes(answer.read())
    rows = []
    for name, temperature in TEMPERATURES.items():
        (source,) = (work / f"held-out/{name}").glob("*.jsonl")
        every = [json.loads(line) for line in source.open()]
        rows += [served_row(every, "all", float(temperature), x) for x in (True, False)]
        packed = []
        for domain in DOMAINS:
            asked = {i for i, _ in read_prompts([work / f"prompts/held-out-{domain}.jsonl"])}
            records = [record for record in every if record["id"] in asked]
            rows += [served_row(records, domain, float(temperature), x) for x in (True, False)]
            answers = work / f"held-out/{name}-{domain}"
            answers.mkdir(exist_ok=True)
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (answers / source.name).write_text(lines)
            packed.append(work / f"packed-held-out/{domain}-{name}")
            if not packed[-1].exists():
                rest = ["--output", packed[-1], "--held-out", "1"]
                longspark("data", "pack", "--answers", answers, *rest)
        table = work / f"eval-{name}.json"
        rest = ["--temperature", temperature, "--json", table]
        longspark("eval", "--target", target, "--draft", work / "drafter", "--data", *packed, *rest)
        for domain, found in zip(DOMAINS, json.loads(table.read_text()), strict=True):
            for row in rows:
                if (row["domain"], row["temperature"]) == (domain, float(temperature)):
                    row |= {"offline": found["accept_length"]} if row["with_loops"] else {}
    for row in rows:
        print(json.dumps(row))
    return rows


def served_row(
    records: list[dict[str, Any]], domain: str, temperature: float, with_loops: bool
) -> dict[str, Any]:
    """Accept length as served (bonus included, first token not), its 95% bootstrap interval."""
    used = [
        (len(record["output_ids"]) - 1, record["rounds"])
        for record in records
        if record["rounds"] and (with_loops or loop_begin(record["output_ids"]) is None)
    ]
    draw = random.Random(0)
    lengths = []
    for _ in range(1000):
        some = draw.choices(used, k=len(used))
        lengths.append(sum(t for t, _ in some) / sum(r for _, r in some))
    lengths.sort()
    return {
        "domain": domain,
        "temperature": temperature,
        "with_loops": with_loops,
        "answers": len(used),
        "tokens": sum(t for t, _ in used),
        "served": sum(t for t, _ in used) / sum(r for _, r in used),
        "low": lengths[25],
        "high": lengths[974],
    }


def export(work: Path, output: Path, rows: list[dict[str, Any]]) -> None:
    """What belongs beside the weights: settings without this machine's paths, curve, hashes.

    ``held_out`` lists the prompts that were never trained on, by the ids of `longspark data`.
    """
    output.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(work / "drafter" / name, output / name)
    settings, curve = {}, ""
    for stage in STAGES:
        settings[stage] = json.loads((work / stage / "training.json").read_text())
        settings[stage]["facts"] |= {"target": "SmolLM2-135M-Instruct, dequantised from Q4_1"}
        settings[stage]["facts"] |= {"init": None}  # a path; it is the stage before
        for line in (work / stage / "curve.jsonl").read_text().splitlines():
            curve += json.dumps({"stage": stage, **json.loads(line)}) + "\n"
    (output / "curve.jsonl").write_text(curve)
    manifest = json.loads((work / "packed/manifest.json").read_text())
    record = {
        "training": settings,
        "prompts": json.loads((work / "prompts/sources.json").read_text()),
        "held_out": {
            domain: [name for name, _ in read_prompts([work / f"prompts/held-out-{domain}.jsonl"])]
            for domain in DOMAINS
        },
        "packed": {key: manifest[key] for key in ("answers", "files", "left_out_or_cut")},
        "accept_lengths": rows,
    }
    (output / "made_of.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    progress(f"the drafter is in {output}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for everything on the way")
    parser.add_argument("--output", type=Path, default=DEMO_DRAFTER, help="the finished drafter")
    parser.add_argument(
        "--prompts", type=int, default=1600, help="the first of the training prompts"
    )
    options = parser.parse_args()
    # SIGTERM leaves through `finally`, so that no server is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options.work.mkdir(parents=True, exist_ok=True)
    target = smollm2()
    if not (options.work / "prompts").exists():
        make_prompts(options.work / "prompts")
    with server(target, options.work / "server.log") as url:
        regenerate(target, options.work, url, options.prompts)
    pack(options.work)
    train(target, options.work)
    export(options.work, options.output, measure(target, options.work))


if __name__ == "__main__":
    main()
