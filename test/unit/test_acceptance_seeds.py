"""Seeded requests: the tokens of SGLang's own seeded sampler, whatever was drafted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from longspark_sglang.ops import gumbel_noise
from sglang.srt.layers import sampler as sglang_sampler
from toy_serving import Batch, Toy, make_request

VOCAB, DRAFTS, START, STEPS = 60, 7, 5, 40


def murmur3(words: list[np.ndarray]) -> np.ndarray:
    """MurmurHash3_x86_32 (seed 0) of little-endian 32-bit words, vectorised; uint32."""
    mask = np.uint64(0xFFFFFFFF)

    def rotl(x: np.ndarray, r: int) -> np.ndarray:
        return ((x << np.uint64(r)) | (x >> np.uint64(32 - r))) & mask

    h = np.uint64(0)
    for word in words:
        k = rotl(word.astype(np.uint64) * np.uint64(0xCC9E2D51) & mask, 15)
        h = rotl(h ^ (k * np.uint64(0x1B873593) & mask), 13)
        h = (h * np.uint64(5) + np.uint64(0xE6546B64)) & mask
    h = h ^ np.uint64(4 * len(words))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> np.uint64(shift))) * np.uint64(factor) & mask
    return (h ^ (h >> np.uint64(16))).astype(np.uint32)


def hash_table(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """What SGLang's GPU kernel of this name computes."""
    bits = seed.view(torch.int64).numpy().view(np.uint64)[:, None]
    position = positions.numpy().astype(np.uint64)[:, None]
    column = columns.numpy().astype(np.uint64)[None]
    low = np.uint64(0xFFFFFFFF)
    words = [bits & low, bits >> np.uint64(32), position & low, column & low]
    return torch.from_numpy(murmur3(words))


@pytest.fixture(autouse=True)
def sglang_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's hash needs a kernel that CPU builds of 0.5.23 lack; all else is its own code."""
    monkeypatch.setattr(sglang_sampler, "murmur_hash32", hash_table)
    with torch.compiler.set_stance("force_eager"):
        yield


def test_noise_and_draws_are_those_of_sglangs_seeded_sampler(monkeypatch) -> None:
    """Bit for bit: what it adds to the log probabilities, and the token it then takes."""
    g = torch.Generator().manual_seed(1)
    rows, vocab = 8, 3000
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=g)
    positions = torch.randint(0, 2**20, (rows,), generator=g)
    logprobs = torch.log_softmax(torch.randn(rows, vocab, generator=g), dim=-1)
    added, argmax = [], torch.argmax
    monkeypatch.setattr(
        torch, "argmax", lambda x, *args, **kw: added.append(x.clone()) or argmax(x, *args, **kw)
    )
    token = sglang_sampler.multinomial_with_seed(logprobs, seeds, positions)
    scores = gumbel_noise(seeds, positions, torch.arange(vocab)) + logprobs.double()
    assert torch.equal(added[0], scores)
    assert torch.equal(token, argmax(scores, dim=1, keepdim=True))


def plain_decode(toy: Toy, request: Any, seq_len: int) -> list[int]:
    """One request alone, one token at a time, through SGLang's sampling functions."""
    batch = Batch([request], VOCAB, seeded=True)
    info = batch.sampling_info
    previous, tokens = torch.tensor([START]), []
    for step in range(STEPS):
        # SGLang seeds a draw with the position of the token that goes in, not the one drawn.
        position = torch.tensor([seq_len + step])
        logits = toy.table[previous].clone()
        if info.logit_bias is not None:
            logits += info.logit_bias
        probs = (logits / info.temperatures).softmax(-1)
        if info.need_top_k_sampling or info.need_top_p_sampling:
            previous = sglang_sampler.top_k_top_p_min_p_sampling_from_probs_torch(
                probs, info.top_ks, info.top_ps, info.min_ps, False, info.sampling_seed, position
            )
        else:
            previous = sglang_sampler.sampling_from_probs_torch(probs, info.sampling_seed, position)
        previous = previous.long()
        tokens.append(int(previous))
    return tokens


REQUESTS: list[dict[str, Any]] = [
    {"temperature": 1.0, "sampling_seed": 1},
    {"temperature": 1.0, "sampling_seed": 2},
    {"temperature": 0.6, "sampling_seed": 2**62 + 12345},
    {"temperature": 1.5, "sampling_seed": -7},
    {"temperature": 1.0},
    {"temperature": 1.0, "sampling_seed": 3, "top_p": 0.8},
    {"temperature": 1.2, "sampling_seed": 3, "top_k": 6},
    {"temperature": 1.2, "sampling_seed": 4, "top_k": 20, "top_p": 0.9, "logit_bias": {"8": 2.0}},
    {"temperature": 0.0, "sampling_seed": 5},
]


@pytest.mark.parametrize("noise", [0.1, 6.0])
def test_seeded_tokens_are_those_of_plain_decoding_alone(noise: float) -> None:
    """All kinds side by side in one batch, good and bad drafts."""
    toy = Toy(VOCAB, DRAFTS, noise=noise, seed=4)
    reqs = [make_request(row, **sampling) for row, sampling in enumerate(REQUESTS)]
    expected = [plain_decode(toy, req, seq_len=10) for req in reqs]
    batch, sampler = Batch(reqs, VOCAB, seeded=True, seq_len=10), toy.sampler()
    anchors = toy.prefill(sampler, batch, START)
    texts: list[list[int]] = [[] for _ in reqs]
    accepted, rounds = torch.zeros(len(reqs)), 0
    while min(len(text) for text in texts) < STEPS:
        decision = toy.round(sampler, batch, anchors)
        for text, tokens, count in zip(
            texts, decision.tokens.view(len(reqs), -1), decision.accept_lens, strict=True
        ):
            text += tokens[:count].tolist()
        anchors, rounds = decision.next_token, rounds + 1
        accepted += decision.accepted
    assert [text[:STEPS] for text in texts] == expected
    assert expected[0] != expected[1]
    if noise < 1:
        # The noise is shared, so a draft near the target's law hits its draw far more often than
        # an independent draw from the same law would (below one draft a round here).
        assert (accepted[:5] / rounds).min() > 2.0


def test_a_request_without_seed_gets_42_and_equal_seeds_agree() -> None:
    toy = Toy(VOCAB, DRAFTS, seed=5)
    reqs = [make_request(0, temperature=1.0), make_request(1, temperature=1.0, sampling_seed=42)]
    batch, sampler = Batch(reqs, VOCAB, seeded=True), toy.sampler()
    decision = toy.round(sampler, batch, toy.prefill(sampler, batch, START))
    first, second = decision.tokens.view(2, -1)
    assert torch.equal(first, second)


def test_without_deterministic_inference_a_seed_is_ignored() -> None:
    """As SGLang does: the batch then carries no seeds."""
    toy = Toy(VOCAB, DRAFTS, seed=5)
    reqs = [make_request(row, temperature=1.0, sampling_seed=1) for row in range(64)]
    batch, sampler = Batch(reqs, VOCAB), toy.sampler()
    plan = sampler.plan(batch)
    assert not plan.point_mass.any()
    assert len(set(plan.seed.tolist())) == 64
    again = sampler.plan(batch)
    assert not (again.seed == plan.seed).any()


def test_the_server_seed_reproduces_a_run() -> None:
    toy = Toy(VOCAB, DRAFTS, seed=5)

    def run(seed: int) -> list[int]:
        reqs = [make_request(row, temperature=1.0) for row in range(8)]
        batch, sampler = Batch(reqs, VOCAB), toy.sampler(seed=seed)
        anchors = toy.prefill(sampler, batch, START)
        return toy.round(sampler, batch, anchors).tokens.tolist()

    assert run(1) == run(1) != run(2)
