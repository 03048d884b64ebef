"""The CPU platform's torch stand-ins for SGLang's samplers: laws, not just shapes."""

from __future__ import annotations

import struct

import pytest
import torch
from longspark_cpu_platform.filters import top_k_renorm_prob, top_p_renorm_prob
from longspark_cpu_platform.rejection import (
    chain_speculative_sampling,
    tree_speculative_sampling_target_only,
)
from longspark_cpu_platform.sampling import multinomial_with_seed, murmur_hash32


def murmur3_by_the_book(data: bytes) -> int:
    """MurmurHash3_x86_32 of whole 4-byte blocks with seed 0, on Python integers."""
    h, mask = 0, 0xFFFFFFFF

    def rotate(x: int, r: int) -> int:
        return ((x << r) | (x >> (32 - r))) & mask

    for (k,) in struct.iter_unpack("<I", data):
        h ^= rotate(k * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
        h = (rotate(h, 13) * 5 + 0xE6546B64) & mask
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16


def test_hash_is_murmur3():
    seeds = [0, 1, 42, -1, -(2**63), 2**63 - 1, 0x123456789ABCDEF0]
    positions = [0, 1, 7, 4096, 131071, 2**31 - 1, 5]
    columns = [0, 1, 151935]
    ours = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    book = [
        [murmur3_by_the_book(struct.pack("<qII", s, p, c)) for c in columns]
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert ours.tolist() == book


def test_seeded_draw_repeats_and_follows_its_law():
    rows = 40_000
    law = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    logprobs = law.log().expand(rows, -1)
    seeds = torch.arange(rows)
    drawn = multinomial_with_seed(logprobs, seeds, torch.full((rows,), 3))[:, 0]
    again = multinomial_with_seed(logprobs, seeds, torch.full((rows,), 3))[:, 0]
    elsewhere = multinomial_with_seed(logprobs, seeds, torch.full((rows,), 4))[:, 0]
    assert torch.equal(drawn, again) and not torch.equal(drawn, elsewhere)
    assert_law(drawn, law)


def assert_law(drawn: torch.Tensor, law: torch.Tensor) -> None:
    """Chi-square within 5 standard deviations of its mean, and no impossible token."""
    seen = torch.bincount(drawn, minlength=law.numel()).double()
    assert not seen[law == 0].any()
    expected = law[law > 0].double() * drawn.numel()
    degrees = expected.numel() - 1
    chi2 = ((seen[law > 0] - expected).square() / expected).sum().item()
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5


def laws(vocab: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Target [3, V] and draft [2, V] laws with zeros where the other has mass."""
    g = torch.Generator().manual_seed(seed)
    target = torch.randn(3, vocab, generator=g).mul(1.5).softmax(-1)
    draft = torch.randn(2, vocab, generator=g).mul(1.5).softmax(-1)
    target[:, 2], draft[:, 3] = 0, 0
    return target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)


def verify(sampler, candidates, target, draft, seed=0, **options):
    """Run a sampler for B requests: (accepted [B], tokens [B, n] with -1 behind the last)."""
    requests, width = candidates.shape
    g = torch.Generator().manual_seed(seed)
    index = torch.arange(requests * width).view(requests, width)
    predicts = torch.full((requests * width,), -1, dtype=torch.int32)
    accept_index = torch.full((requests, width), 99, dtype=torch.int32)
    accepted = torch.empty(requests, dtype=torch.int32)
    sampler(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accepted,
        candidates=candidates,
        retrive_index=index,
        retrive_next_token=index,
        retrive_next_sibling=torch.full_like(index, -1),
        uniform_samples=torch.rand(requests, width, generator=g),
        uniform_samples_for_final_sampling=torch.rand(requests, generator=g),
        target_probs=target.expand(requests, -1, -1),
        draft_probs=draft.expand(requests, -1, -1),
        deterministic=True,
        **{"threshold_single": 1.0, "threshold_acc": 1.0, **options},
    )
    column = torch.arange(width)
    inside = column <= accepted[:, None]
    assert torch.equal(accept_index[inside].long(), index[inside])
    assert (accept_index[~inside] == -1).all()
    assert (predicts.view(requests, width)[~inside] == -1).all()
    return accepted, predicts.view(requests, width).long()


def test_chain_emits_the_target_law():
    """First token, and second token given each first one, whatever the draft law is."""
    requests, vocab = 60_000, 6
    target, draft = laws(vocab, 1)
    g = torch.Generator().manual_seed(5)
    drafts = torch.stack(
        [torch.multinomial(draft[j], requests, replacement=True, generator=g) for j in range(2)], 1
    )
    candidates = torch.cat([torch.zeros(requests, 1, dtype=torch.long), drafts], 1)
    accepted, tokens = verify(chain_speculative_sampling, candidates, target, draft)
    assert set(accepted.tolist()) == {0, 1, 2}
    for j in range(3):
        assert_law(tokens[accepted >= j, j], target[j])
    for first in range(vocab):
        here = (accepted >= 1) & (tokens[:, 0] == first)
        if here.sum() > 500:
            assert_law(tokens[here, 1], target[1])


def test_chain_without_overlap_rejects_everything():
    """Disjoint laws: no draft survives, the residual is the target itself."""
    target = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.5, 0.5]])
    draft = torch.tensor([[1.0, 0.0, 0.0]])
    candidates = torch.zeros(2000, 2, dtype=torch.long)
    accepted, tokens = verify(chain_speculative_sampling, candidates, target, draft)
    assert not accepted.any()
    assert_law(tokens[:, 0], target[0])


def test_chain_of_equal_laws_accepts_everything():
    target = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.9, 0.0]])
    drafts = torch.multinomial(target[0], 2000, replacement=True)
    candidates = torch.stack([torch.zeros_like(drafts), drafts], 1)
    accepted, tokens = verify(chain_speculative_sampling, candidates, target, target[:1])
    assert accepted.all() and torch.equal(tokens[:, 0], drafts)
    assert_law(tokens[:, 1], target[1])


def test_point_mass_emits_the_target_law():
    requests = 40_000
    target, _ = laws(6, 2)
    candidates = torch.tensor([[0, 1, 4]]).expand(requests, -1)
    accepted, tokens = verify(
        tree_speculative_sampling_target_only, candidates, target, torch.zeros_like(target)
    )
    assert set(accepted.tolist()) == {0, 1, 2}
    assert_law(tokens[:, 0], target[0])
    for j in (1, 2):
        assert_law(tokens[accepted >= j, j], target[j])


def test_point_mass_of_an_impossible_token():
    target = torch.tensor([[0.0, 0.4, 0.6], [1.0, 0.0, 0.0]])
    candidates = torch.zeros(2000, 2, dtype=torch.long)
    accepted, tokens = verify(
        tree_speculative_sampling_target_only, candidates, target, torch.zeros_like(target)
    )
    assert not accepted.any()
    assert_law(tokens[:, 0], target[0])


def test_threshold_accepts_likely_drafts_at_once():
    target = torch.tensor([[0.6, 0.4], [0.5, 0.5]])
    candidates = torch.zeros(500, 2, dtype=torch.long)
    options = {"threshold_single": 0.55}
    accepted, _ = verify(
        tree_speculative_sampling_target_only,
        candidates,
        target,
        torch.zeros_like(target),
        **options,
    )
    assert accepted.all()


def test_trees_and_block_verification_are_refused():
    one = torch.zeros(1, 2, dtype=torch.long)
    names = (
        "predicts accept_index accept_token_num retrive_index retrive_next_token uniform_samples"
    )
    names += " uniform_samples uniform_samples_for_final_sampling target_probs draft_probs"
    shared = dict.fromkeys(names.split(), one)
    with pytest.raises(NotImplementedError, match="topk 1"):
        tree_speculative_sampling_target_only(candidates=one, retrive_next_sibling=one, **shared)
    with pytest.raises(NotImplementedError, match="GPU"):
        chain_speculative_sampling(
            candidates=one, retrive_next_sibling=one, block_verification=True, **shared
        )


def test_filters_keep_what_the_plain_sampler_keeps():
    g = torch.Generator().manual_seed(0)
    probs = torch.randn(6, 40, generator=g).mul(2).softmax(-1)
    top_k = torch.tensor([1, 2, 5, 39, 40, 1 << 30])
    kept = top_k_renorm_prob(probs.clone(), top_k)
    for row, k in zip(range(6), top_k.tolist(), strict=True):
        best = probs[row].topk(min(k, 40)).indices
        expected = torch.zeros(40).scatter_(0, best, probs[row, best])
        torch.testing.assert_close(kept[row], expected / expected.sum())

    top_p = torch.tensor([1e-6, 0.2, 0.5, 0.9, 0.999, 1.0])
    kept = top_p_renorm_prob(probs.clone(), top_p)
    for row, p in zip(range(6), top_p.tolist(), strict=True):
        mass, expected = 0.0, torch.zeros(40)
        for token in probs[row].argsort(descending=True).tolist():
            if mass > p:
                break
            expected[token] = probs[row, token]
            mass += probs[row, token].item()
        torch.testing.assert_close(kept[row], expected / expected.sum())
    assert (kept[0] > 0).sum() == 1
