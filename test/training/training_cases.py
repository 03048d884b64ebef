"""A tiny target, a small drafter for it and one sequence, as the training tests share them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from longspark_sglang.config import LongSparkConfig
from longspark_sglang.drafter import LongSparkDrafter, TargetParts, collect_views
from longspark_sglang.training.data_command import main as pack_data
from longspark_sglang.training.forward import SequenceViews
from transformers import AutoModelForCausalLM

SMALL: dict[str, Any] = dict(
    mask_token_id=3,
    num_layers=2,
    num_draft_tokens=3,
    summary_slots=4,
    window=8,
    markov_rank=8,
    intermediate_size=48,
)


def load_target(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def small_config(hf_config: Any, **more: Any) -> LongSparkConfig:
    return LongSparkConfig.for_target(hf_config, **{**SMALL, **more})


def lively_drafter(config: LongSparkConfig, seed: int = 1) -> LongSparkDrafter:
    """A drafter whose every part matters: activations of size 1, not 0.02."""
    drafter = LongSparkDrafter(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        drafter.summary_queries.mul_(4)
    return drafter


@dataclass
class Case:
    model: Any
    drafter: LongSparkDrafter
    parts: TargetParts
    views: SequenceViews
    ids: torch.Tensor


def make_case(folder: Path, tokens: int = 24, dtype: torch.dtype = torch.float64) -> Case:
    model = load_target(folder, dtype)
    drafter = lively_drafter(small_config(model.config)).to(dtype)
    ids = torch.randint(4, 50, (tokens,), generator=torch.Generator().manual_seed(2))
    views = SequenceViews.of(collect_views(model, ids[None], drafter.config))
    return Case(model, drafter, TargetParts.from_hf(model), views, ids)


@torch.no_grad()
def target_answers(
    model: Any, count: int, tokens: int, temperature: float = 0.0, prompt: int = 4, seed: int = 0
) -> list[list[int]]:
    """Prompts of random tokens and the target's own continuations, as one list of ids each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 50, (count, prompt), generator=generator)
    for _ in range(tokens):
        logits = model(input_ids=ids).logits[:, -1].float()
        if temperature == 0:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            law = (logits / temperature).softmax(-1)
            chosen = torch.multinomial(law, 1, generator=generator)
        ids = torch.cat((ids, chosen), dim=1)
    return ids.tolist()


def pack_answers(folder: Path, answers: list[list[int]], prompt: int = 4) -> Path:
    """The packed form of `target_answers`, a fifth of it held out; returns its folder."""
    source = folder / "answers"
    source.mkdir(parents=True)
    with (source / "answers-00000-of-00001.jsonl").open("w") as file:
        for i, ids in enumerate(answers):
            record = {"id": f"{i * 7919:016x}", "temperature": 0.0}
            record |= {"prompt_ids": ids[:prompt], "output_ids": ids[prompt:]}
            file.write(json.dumps(record) + "\n")
    arguments = ["--answers", str(source), "--output", str(folder / "packed")]
    assert pack_data(["pack", *arguments, "--held-out", "0.2"]) == 0
    return folder / "packed"
