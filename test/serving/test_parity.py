"""What the server drafts is what the plain PyTorch drafter drafts.

The whole speculative decoding of a prompt is replayed with transformers and
`longspark_sglang.drafter`; the server must accept as many drafts in as many rounds. Any fault in a
boundary row, a summary, a window row, a position, a rotation or the borrowed head moves a count.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from longspark_sglang.drafter import LongSparkDrafter, TargetParts, collect_views, summary_of
from transformers import AutoModelForCausalLM

from serving.server import Server, ServerPool
from serving.test_identity import CHECKED, CHUNKED
from serving.workload import state

TOKENS = 64
LENGTHS = (1, 9, 255, 257, 700)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
PAIRS: dict[str, tuple[dict, dict]] = {
    # target recipe, server options
    "qwen3": ({}, {"extra_args": CHUNKED}),
    "llama-tied-padded-g3-yarn-tp2": (
        {
            "architecture": "llama",
            "tied": True,
            "hidden": 384,
            "heads": 6,
            "kv_heads": 2,
            "vocab": 2000,
            "padded_to": 2050,  # no multiple of 64, so SGLang pads it again
            "rope_scaling": YARN,
            "max_positions": 2048,
        },
        {"tp": 2, "context_length": None, "max_total_tokens": 8000},
    ),
}


class Replay:
    """Greedy speculative decoding with the plain drafter, one prompt at a time."""

    def __init__(self, target: Path, draft: Path, vocab: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.drafter = LongSparkDrafter.from_pretrained(draft, dtype=torch.float32)
        self.parts = TargetParts.from_hf(self.model, vocab_limit=vocab)
        self.config = self.drafter.config

    def histogram(self, prompt: list[int], output: list[int]) -> dict[int, int]:
        """How many rounds accepted how many drafts, if the target's answer is `output`."""
        views = collect_views(self.model, torch.tensor([prompt + output[:-1]]), self.config)
        rounds: Counter[int] = Counter()
        done = 1  # the first token comes out of the prefill
        while done < len(output):
            drafts = self._drafts(views, len(prompt) + done - 1, output[done - 1])
            truth = output[done : done + self.config.num_draft_tokens]
            accepted = 0
            while accepted < len(truth) and drafts[accepted] == truth[accepted]:
                accepted += 1
            # The server cuts a round where the request ends; its last round is not compared.
            if done + accepted + 1 < len(output):
                rounds[accepted] += 1
            done += accepted + 1
        return dict(rounds)

    def _drafts(self, views, committed: int, anchor: int) -> list[int]:
        key, value = views.key[:, :, :committed], views.value[:, :, :committed]
        summary, _ = summary_of(self.drafter.summary_queries, key[0], value[0])
        window = min(committed, self.config.window)
        proposal = self.drafter.propose(
            anchor=torch.tensor([anchor]),
            boundary=views.boundary[:, committed - 1],
            summary_value=summary[None],
            window_key=key[:, :, -window:],
            window_value=value[:, :, -window:],
            window_lens=torch.tensor([window]),
            positions=torch.tensor([committed]),
            target=self.parts,
        )
        return proposal.draft_tokens[0].tolist()


def served_histogram(server: Server, prompt: list[int]) -> tuple[list[int], Counter[int]]:
    reply = server.generate(prompt, max_new_tokens=TOKENS, ignore_eos=True)
    counts = reply["meta_info"]["spec_correct_drafts_histogram"]
    return reply["output_ids"], Counter({i: n for i, n in enumerate(counts) if n})


@pytest.mark.parametrize("pair", PAIRS)
def test_the_server_accepts_what_the_plain_drafter_would(
    servers: ServerPool, pair_cache, pair: str
) -> None:
    recipe, options = PAIRS[pair]
    target = pair_cache.target(**recipe)
    draft = pair_cache.drafter(target)
    server = servers.get(target, draft, env=CHECKED, **options)
    replay = Replay(target, draft, recipe.get("padded_to", recipe.get("vocab", 2048)))
    draw = random.Random(5)
    seen: Counter[int] = Counter()
    for length in LENGTHS:
        prompt = [draw.randrange(4, 1900) for _ in range(length)]
        output, served = served_histogram(server, prompt)
        expected = replay.histogram(prompt, output)
        last_round = served - Counter(expected)
        assert Counter(expected) - served == Counter(), (length, expected, served)
        assert last_round.total() == 1, (length, expected, served)
        seen += Counter(expected)
    assert len(seen) >= 4, f"accept lengths hardly vary, so this shows little: {seen}"


def test_a_warm_prefix_drafts_like_a_cold_one(
    servers: ServerPool, tiny_target: Path, tiny_drafter: Path
) -> None:
    """User case: restored rows that the drafter never saw cost acceptance, silently."""
    server = servers.get(tiny_target, tiny_drafter, env=CHECKED, extra_args=CHUNKED)
    draw = random.Random(11)
    prompt = [draw.randrange(4, 1900) for _ in range(900)]
    longer = [*prompt, *(draw.randrange(4, 1900) for _ in range(40))]
    cold, cold_longer = served_histogram(server, prompt), None
    before = state(server)
    warm = served_histogram(server, prompt)
    warm_longer = served_histogram(server, longer)
    after = state(server)
    server.flush()
    cold_longer = served_histogram(server, longer)
    assert warm == cold
    assert warm_longer == cold_longer
    assert after["summary_rebuilds"] >= before["summary_rebuilds"] + 2
    assert after["largest_state_difference"] < 1e-4
