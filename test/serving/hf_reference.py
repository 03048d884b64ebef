"""What transformers says in float32 about a tiny target: greedy tokens and exact laws."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from serving.server import Server

Law = dict[tuple[int, ...], float]


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random prompts of ordinary tokens of the tiny target."""
    draw = random.Random(seed)
    return [[draw.randrange(4, 2000) for _ in range(length)] for length in lengths]


class Reference:
    """The target of a folder, run by transformers."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        """Continuation of exactly `tokens` tokens, never ended by an end token."""
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    @torch.no_grad()
    def law(
        self, prompt: list[int], tokens: int, temperature: float, top_k: int = 0, min_p: float = 0
    ) -> Law:
        """Probability of each continuation of `tokens` tokens that can be sampled."""
        laws: Law = {(): 1.0}
        for _ in range(tokens):
            histories = list(laws)
            logits = self.model(torch.tensor([[*prompt, *h] for h in histories])).logits[:, -1]
            probs = (logits.double() / temperature).softmax(-1)
            if top_k:
                probs[probs < probs.topk(top_k).values[:, -1:]] = 0
            probs[probs < min_p * probs.amax(-1, keepdim=True)] = 0
            probs /= probs.sum(-1, keepdim=True)
            laws = {
                (*history, token): laws[history] * row[token].item()
                for history, row in zip(histories, probs, strict=True)
                for token in row.nonzero()[:, 0].tolist()
            }
        return laws


def assert_follows(samples: list[tuple[int, ...]], law: Law) -> None:
    """Chi-square within 4 standard deviations of its mean; nothing outside the law.

    Continuations that are expected less than 5 times are counted together.
    """
    assert set(samples) <= set(law), set(samples) - set(law)
    common = [key for key, p in law.items() if p * len(samples) >= 5]
    cells = [(samples.count(key), law[key] * len(samples)) for key in common]
    rest = 1 - sum(law[key] for key in common)
    if rest * len(samples) >= 1:
        cells.append((len(samples) - sum(seen for seen, _ in cells), rest * len(samples)))
    chi2 = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    degrees = len(cells) - 1
    assert degrees >= 2, "the law is too sharp to test anything"
    assert chi2 < degrees + 4 * (2 * degrees) ** 0.5, (chi2, degrees)


def samples(
    server: Server, prompt: list[int], count: int, tokens: int, **sampling: Any
) -> list[tuple[int, ...]]:
    """`count` continuations from the server, many per request."""
    per_request = 50
    answers = server.generate_many(
        [prompt] * (count // per_request),
        concurrency=4,
        n=per_request,
        max_new_tokens=tokens,
        ignore_eos=True,
        **sampling,
    )
    flat = itertools.chain.from_iterable(answers)
    return [tuple(answer["output_ids"]) for answer in flat]
