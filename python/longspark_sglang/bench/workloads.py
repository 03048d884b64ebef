"""Prompts: long ones cut out of texts, and the JSONL layouts of the usual evaluation sets.

Layouts that `prompt_of` understands, one object a line:

    gsm8k           {"question": ...}
    math500, aime25 {"problem": ...}
    humaneval       {"prompt": ...}
    mbpp            {"text": ...} or {"prompt": ...}
    livecodebench   {"question_content": ...}
    mt-bench        {"turns": [first, ...]} (the first turn is asked)
    alpaca          {"instruction": ..., "input": ...}
    long texts      {"context": ..., "question" or "input": ...} (LongSpec, CodeSpan, LongSWE style)
    any other       {"messages": [...]} or {"conversations": [...]}, as for `longspark data`
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspark_sglang.bench.options import BenchError

TOKENISED_AT_ONCE = 100_000  # characters
# Long files that every Python has (PSF licence), where the user names none of their own.
STANDARD_TEXTS = ("pydoc_data/topics.py", "_pydecimal.py", "tkinter/__init__.py", "typing.py")


def texts(files: Sequence[str]) -> list[str]:
    """The files' contents; without files, long sources of Python's own library."""
    if files:
        missing = [name for name in files if not Path(name).is_file()]
        if missing:
            raise BenchError(f"no such text: {', '.join(missing)}")
        return [Path(name).read_text(encoding="utf-8", errors="replace") for name in files]
    library = Path(sysconfig.get_path("stdlib"))
    return [
        (library / name).read_text(encoding="utf-8")
        for name in STANDARD_TEXTS
        if (library / name).is_file()
    ]


def long_prompts(
    tokenizer: Any, sources: Sequence[str], length: int, count: int, seed: int = 0
) -> list[str]:
    """`count` different pieces of about `length` tokens.

    A piece is decoded token ids, so that its own tokenisation may differ by a few tokens; what the
    server counted is what is reported. Raises BenchError where the texts are too short.
    """
    # Tokenising megabytes takes longer than a small measurement, so no more of them than that.
    enough = 2 * length * count
    ids: list[int] = []
    for text in sources:
        for start in range(0, len(text), TOKENISED_AT_ONCE):
            if len(ids) < enough:
                part = text[start : start + TOKENISED_AT_ONCE]
                ids += tokenizer.encode(part, add_special_tokens=False)
    if len(ids) < length + count:
        raise BenchError(
            f"the texts have {len(ids)} tokens, {count} prompts of {length} were asked for; "
            "name longer ones with --text"
        )
    draw = random.Random(f"{seed}-{length}")
    starts = sorted(draw.sample(range(len(ids) - length), count))
    return [tokenizer.decode(ids[start : start + length]) for start in starts]


def prompt_of(record: dict[str, Any]) -> list[dict[str, str]]:
    """The messages that a record of a known layout asks. ValueError says what is missing."""
    from longspark_sglang.training.data import first_turn

    def user(text: Any) -> list[dict[str, str]]:
        if not isinstance(text, str) or not text:
            raise ValueError(f"its prompt is {str(text)[:60]!r}")
        return [{"role": "user", "content": text}]

    if "context" in record:
        return user(f"{record['context']}\n\n{record.get('question') or record.get('input') or ''}")
    for key in ("question", "problem", "question_content", "text"):
        if key in record:
            return user(record[key])
    if "turns" in record:
        return user(record["turns"][0] if record["turns"] else None)
    if "instruction" in record:
        more = record.get("input") or ""
        return user(record["instruction"] + (f"\n\n{more}" if more else ""))
    return first_turn(record)


def read_prompts(path: str, limit: int | None = None) -> list[list[dict[str, str]]]:
    """Messages of the first `limit` records of a JSONL file. BenchError names the bad record."""
    from longspark_sglang.training.data import read_records

    file = Path(path)
    if not file.is_file():
        raise BenchError(f"no such data file: {path}")
    found: list[list[dict[str, str]]] = []
    for number, record in enumerate(read_records(file), 1):
        if limit is not None and len(found) >= limit:
            break
        try:
            found.append(prompt_of(record))
        except ValueError as error:
            raise BenchError(f"{path}, record {number} is no prompt: {error}") from None
    if not found:
        raise BenchError(f"{path} holds no prompt")
    return found


def load_tokenizer(model: str) -> Any:
    """The target's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.model_max_length = 1 << 40  # texts are longer than contexts; no warning needed
    return tokenizer


def as_text(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """The chat template's text, where there is a template; else the contents."""
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return "\n".join(message["content"] for message in messages)
