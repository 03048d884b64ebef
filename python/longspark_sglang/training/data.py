"""`longspark data`: answers of the target itself, and their packed form for training.

`regenerate` has a running SGLang server answer prompts; `pack` turns the answers into token files
with a manifest. A drafter imitates its target, so only the target's own answers are worth learning.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from longspark_sglang import __version__
from longspark_sglang.client import ServerClient, ServerError
from longspark_sglang.config import LongSparkError, read_json_object

_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant"}
_ROLES |= {"system": "system"}
MANIFEST = "manifest.json"


class DataError(LongSparkError):
    """Prompts, answers or packed data cannot be used; each reason names the file and the fix."""


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- prompts ---------------------------------------------------------------------------------------


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl or .parquet file. DataError names the line that is none."""
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise DataError(f"{path} cannot be read", ["pip install pyarrow"]) from error
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256):
            yield from batch.to_pylist()
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{path} cannot be read", [f"line {number}: {error}"]) from None
                if not isinstance(record, dict):
                    raise DataError(f"{path} cannot be read", [f"line {number} is no JSON object"])
                yield record


def first_turn(record: dict[str, Any]) -> list[dict[str, str]]:
    """The messages up to and including the first of the user, as [{role, content}].

    Understood are ``messages`` (role, content), ``conversations`` (from, value: the layout of
    Open-PerfectBlend and ShareGPT) and a plain string ``prompt``. ValueError says what is wrong.
    """
    if isinstance(record.get("prompt"), str):
        return [{"role": "user", "content": record["prompt"]}]
    turns = record.get("messages") or record.get("conversations")
    if not isinstance(turns, list):
        raise ValueError("it has none of the keys messages, conversations, prompt")
    messages = []
    for turn in turns:
        spoken = turn.get("role") or turn.get("from") if isinstance(turn, dict) else None
        role = _ROLES.get(str(spoken))
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if role is None or not isinstance(content, str):
            raise ValueError(f"a turn has no known role or no text: {str(turn)[:80]}")
        if role == "assistant":
            continue
        messages.append({"role": role, "content": content})
        if role == "user":
            return messages
    raise ValueError("it has no turn of the user")


def read_prompts(files: Sequence[Path]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """(id, messages) of every distinct prompt; the id is a hash of the messages.

    DataError for a file that is missing or a record that is no prompt.
    """
    missing = [f"{path} is not there" for path in files if not path.is_file()]
    if missing:
        raise DataError("prompts cannot be read", missing)
    seen = set()
    for path in files:
        for number, record in enumerate(read_records(path), 1):
            try:
                messages = first_turn(record)
            except ValueError as error:
                raise DataError(
                    f"{path} holds no prompt in record {number}", [str(error)]
                ) from None
            text = json.dumps(messages, sort_keys=True)
            name = hashlib.sha256(text.encode()).hexdigest()[:16]
            if name not in seen:
                seen.add(name)
                yield name, messages


# -- regenerate ------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Counters of one run, and the line that shows them."""

    total: int
    done: int = 0
    failed: int = 0
    retried: int = 0
    tokens: int = 0
    started: float = 0.0

    def line(self) -> str:
        """One line: answers, failures, retries, tokens per second."""
        seconds = max(time.monotonic() - self.started, 1e-9)
        return (
            f"{self.done}/{self.total} answers, {self.failed} failed, {self.retried} retried, "
            f"{self.tokens} tokens, {self.tokens / seconds:.0f} tok/s"
        )


def regenerate(options: argparse.Namespace) -> int:
    """Answer all prompts of this shard; 1 if some failed for good (run again to retry them)."""
    shard, shards = options.shard
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    name = f"answers-{shard:05d}-of-{shards:05d}"
    answers = output / f"{name}.jsonl"
    clients = [ServerClient(url, timeout=options.timeout) for url in options.url]
    sampling = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "max_new_tokens": options.max_new_tokens,
    }
    files = [Path(file) for file in options.prompts]
    prompts = list(read_prompts(files))
    prompts = prompts[: options.limit][shard::shards]
    provenance = {
        "command": "longspark data regenerate",
        "longspark": __version__,
        "python": platform.python_version(),
        "target": options.target,
        "server": _served(clients[0]),
        "prompts": {path.name: file_hash(path) for path in files},
        "sampling": sampling,
        "limit": options.limit,
    }
    _continue_or_start(output / f"{name}.json", provenance)
    finished = _finished(answers)
    waiting = [(i, m) for i, m in prompts if i not in finished]
    print(f"{len(prompts)} prompts in this shard, {len(prompts) - len(waiting)} answered before")

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    progress = Progress(total=len(waiting), started=time.monotonic())

    def answer(index: int, prompt: tuple[str, list[dict[str, str]]]) -> tuple[dict | None, int]:
        identity, messages = prompt
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **_template_options(options)
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        reason = ""
        for attempt in range(options.retries + 1):
            if attempt:
                time.sleep(min(options.retry_wait * 2 ** (attempt - 1), 60.0))
            client = clients[(index + attempt) % len(clients)]
            extra = {k: v for k, v in sampling.items() if k != "max_new_tokens"}
            try:
                result = client.generate(ids, options.max_new_tokens, **extra)
            except ServerError as error:
                reason = str(error)
                continue
            return {
                "id": identity,
                "messages": messages,
                "prompt_ids": ids,
                "output_ids": result.ids,
                "text": result.text,
                "finish": result.meta.get("finish_reason"),
                "rounds": result.rounds,  # of the server's own speculation; 0 without
                "temperature": options.temperature,
            }, attempt
        print(f"prompt {identity} failed: {reason}", file=sys.stderr)
        return None, options.retries

    with (
        ThreadPoolExecutor(options.concurrency) as threads,
        answers.open("a", encoding="utf-8") as file,
    ):
        todo = iter(enumerate(waiting))
        running: set[Future] = set()
        printed = 0.0
        while True:
            # Submitted a few at a time, so that an interrupt does not wait for thousands.
            while len(running) < 2 * options.concurrency and (entry := next(todo, None)):
                running.add(threads.submit(answer, *entry))
            if not running:
                break
            ready, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ready:
                record, retries = future.result()
                progress.retried += retries
                if record is None:
                    progress.failed += 1
                    continue
                file.write(json.dumps(record) + "\n")
                file.flush()
                progress.done += 1
                progress.tokens += len(record["output_ids"])
            if time.monotonic() - printed > options.progress_every:
                printed = time.monotonic()
                print(progress.line(), file=sys.stderr, flush=True)
    print(progress.line())
    return 1 if progress.failed else 0


def _template_options(options: argparse.Namespace) -> dict[str, Any]:
    return {"enable_thinking": False} if not options.thinking else {}


def _served(client: ServerClient) -> dict[str, Any]:
    """What the server says of itself, for the record."""
    try:
        info = client.get("/server_info")
    except ServerError as error:
        raise DataError("nobody can answer", [f"{error}: start a server, or check --url"]) from None
    keys = ("model_path", "dtype", "version", "speculative_algorithm")
    return {key: info.get(key) for key in keys}


def _continue_or_start(path: Path, provenance: dict[str, Any]) -> None:
    """Write the settings, or insist that they are those of the run to be continued."""
    if path.exists():
        before = read_json_object(path)
        reasons = [
            f"{key} was {before.get(key)!r} and is now {provenance[key]!r}: use another --output, "
            "or the former setting"
            for key in ("target", "prompts", "sampling", "limit", "server")
            if before.get(key) != provenance[key]
        ]
        if reasons:
            raise DataError(f"{path} was begun with other settings", reasons)
    path.write_text(json.dumps(provenance, indent=2, sort_keys=True) + "\n")


def _finished(answers: Path) -> set[str]:
    """Ids already answered. A line torn by a crash at the very end is cut off."""
    if not answers.exists():
        return set()
    content = answers.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        answers.write_bytes(whole)
    return {json.loads(line)["id"] for line in whole.splitlines()}


# -- looping answers -------------------------------------------------------------------------------


def loop_begin(ids: Sequence[int], times: int = 4, least: int = 24) -> int | None:
    """Where an answer begins to repeat itself until its end; None if it does not.

    A loop is a passage that stands at the end ``times`` times in a row, the last one possibly
    unfinished, and all of them together are at least ``least`` tokens. Returned is the index at
    which the passage has been said once: what follows is repetition.
    """
    count = len(ids)
    for period in range(1, count // times + 1):
        run = period  # tokens at the end that have this period
        while run < count and ids[count - 1 - run] == ids[count - 1 - run + period]:
            run += 1
        if run >= max(times * period, least):
            return count - run + period
    return None


# -- pack ------------------------------------------------------------------------------------------


def pack(options: argparse.Namespace) -> int:
    """Answers -> token files by split and length bucket, and the manifest."""
    sources, output = [Path(folder) for folder in options.answers], Path(options.output)
    found = {source: sorted(source.glob("answers-*.jsonl")) for source in sources}
    if empty := [f"{source} holds none" for source, of_it in found.items() if not of_it]:
        raise DataError("no answers", [*empty, "run `longspark data regenerate` first"])
    files = [path for of_it in found.values() for path in of_it]
    if (output / MANIFEST).exists():
        raise DataError(f"{output} holds packed data already", ["use another --output"])
    output.mkdir(parents=True, exist_ok=True)
    buckets: dict[tuple[str, int], list[tuple[list[int], int]]] = {}
    counts: Counter[str] = Counter()
    temperatures = set()
    seen = set()
    for path in files:
        for record in read_records(path):
            ids = record["prompt_ids"] + record["output_ids"]
            begin = len(record["prompt_ids"])
            if (answer := (record["id"], record["temperature"])) in seen:
                counts["repeated"] += 1
                continue
            seen.add(answer)
            if options.loops != "keep" and (at := loop_begin(record["output_ids"])) is not None:
                counts["looping, cut" if options.loops == "cut" else "looping, left out"] += 1
                if options.loops == "drop":
                    continue
                ids = ids[: begin + at]
            if len(ids) > options.max_length:
                counts["cut"] += 1
                ids = ids[: options.max_length]
            if len(ids) - begin < options.min_response:
                counts["too short an answer"] += 1
                continue
            temperatures.add(record["temperature"])
            # By the id alone, so that a prompt stays on its side when more data are added.
            held_out = int(record["id"], 16) % 10_000 < options.held_out * 10_000
            edge = max(64, 1 << (len(ids) - 1).bit_length())
            buckets.setdefault(("held_out" if held_out else "train", edge), []).append((ids, begin))
    entries = []
    for (split, edge), sequences in sorted(buckets.items()):
        name = f"{split}-{edge:06d}.safetensors"
        lengths = torch.tensor([len(ids) for ids, _ in sequences])
        save_file(
            {
                "tokens": torch.tensor([t for ids, _ in sequences for t in ids], dtype=torch.int32),
                "ends": lengths.cumsum(0),
                "response_begins": torch.tensor([begin for _, begin in sequences]),
            },
            output / name,
        )
        entries.append(
            {
                "file": name,
                "split": split,
                "longest": edge,
                "sequences": len(sequences),
                "tokens": int(lengths.sum()),
                "response_tokens": sum(len(ids) - begin for ids, begin in sequences),
                "sha256": file_hash(output / name),
            }
        )
    manifest = {
        "command": "longspark data pack",
        "longspark": __version__,
        "answers": {f"{path.parent.name}/{path.name}": file_hash(path) for path in files},
        "provenance": [
            read_json_object(p) for f in files if (p := f.with_suffix(".json")).exists()
        ],
        "temperatures": sorted(temperatures),
        "max_length": options.max_length,
        "loops": options.loops,
        "left_out_or_cut": dict(counts),
        "files": entries,
    }
    (output / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    for entry in entries:
        print(
            f"{entry['file']}: {entry['sequences']} sequences, {entry['tokens']} tokens, "
            f"{entry['response_tokens']} of answers"
        )
    print("".join(f"{count} {what}\n" for what, count in sorted(counts.items())), end="")
    if not entries:
        raise DataError("no usable answer", ["lower --min-response, or pack other answers"])
    return 0


# -- reading packed data ---------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedSequence:
    """One sequence: token ids [T] int64; those from ``response_begin`` on are the target's own."""

    ids: torch.Tensor
    response_begin: int
    bucket: int

    @property
    def response(self) -> torch.Tensor:
        """[T] bool, true for tokens of the answer."""
        return torch.arange(len(self.ids)) >= self.response_begin


@dataclass(frozen=True)
class PackedData:
    """What `pack` wrote.

    Attributes:
        sequences: by split, "train" and "held_out".
        manifest_hash: SHA-256 of the manifest, which holds the hashes of everything else.
        temperatures: at which the answers were drawn.
    """

    sequences: dict[str, list[PackedSequence]]
    manifest_hash: str
    temperatures: list[float]

    @classmethod
    def load(cls, folder: str | Path) -> PackedData:
        """Read all of it into memory. DataError lists missing and altered files."""
        folder = Path(folder)
        try:
            manifest = read_json_object(folder / MANIFEST)
        except ValueError as error:
            raise DataError(f"{folder} holds no packed data", [str(error)]) from None
        reasons = []
        for entry in manifest["files"]:
            path = folder / entry["file"]
            if not path.is_file():
                reasons.append(f"{entry['file']} is missing: pack the answers again")
            elif file_hash(path) != entry["sha256"]:
                reasons.append(f"{entry['file']} is not as it was written: pack the answers again")
        if reasons:
            raise DataError(f"{folder} is damaged", reasons)
        sequences: dict[str, list[PackedSequence]] = {"train": [], "held_out": []}
        for entry in manifest["files"]:
            tensors = load_file(folder / entry["file"])
            begin = 0
            for end, response_begin in zip(
                tensors["ends"].tolist(), tensors["response_begins"].tolist(), strict=True
            ):
                ids = tensors["tokens"][begin:end].long()
                sequences[entry["split"]].append(
                    PackedSequence(ids, response_begin, entry["longest"])
                )
                begin = end
        return cls(sequences, file_hash(folder / MANIFEST), manifest["temperatures"])
