"""The summary is one softmax over all committed rows, however they arrive."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from longspark_sglang.drafter import merge, summary_of
from longspark_sglang.drafter import summary as summary_module
from longspark_sglang.drafter.summary import equicorrelated_bank
from tiny_targets import make_drafter, make_target

LAYERS, HEADS, KV_HEADS, SLOTS, DIM = 2, 6, 2, 3, 8
N = 60


def rows(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(LAYERS, HEADS, SLOTS, DIM, generator=generator)
    keys = torch.randn(LAYERS, N, KV_HEADS, DIM, generator=generator) * 3
    values = torch.randn(LAYERS, N, KV_HEADS, DIM, generator=generator)
    return queries.to(dtype), keys.to(dtype), values.to(dtype)


def test_definition() -> None:
    queries, keys, values = rows()
    value, lse = summary_of(queries, keys, values)
    for layer, head, slot in ((0, 0, 0), (0, 2, 1), (1, 3, 2), (1, 5, 0)):
        kv = head // (HEADS // KV_HEADS)
        score = keys[layer, :, kv] @ queries[layer, head, slot] / math.sqrt(DIM)
        wanted_lse = score.exp().sum().log()
        wanted = ((score - wanted_lse).exp()[:, None] * values[layer, :, kv]).sum(0)
        assert torch.allclose(lse[layer, head, slot], wanted_lse, atol=1e-12)
        assert torch.allclose(value[layer, head, slot], wanted, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, N), max_size=6))
def test_any_split_equals_one_shot(cuts: list[int]) -> None:
    """Empty pieces included; also in a different order of the pieces."""
    queries, keys, values = rows()
    edges = [0, *sorted(cuts), N]
    pieces = list(pairwise(edges))
    for order in (pieces, pieces[::-1]):
        value = torch.zeros(LAYERS, HEADS, SLOTS, DIM, dtype=torch.float64)
        lse = torch.full((LAYERS, HEADS, SLOTS), -math.inf, dtype=torch.float64)
        for begin, end in order:
            new = summary_of(queries, keys[:, begin:end], values[:, begin:end])
            value, lse = merge(value, lse, *new)
        whole_value, whole_lse = summary_of(queries, keys, values)
        assert torch.allclose(value, whole_value, atol=1e-13)
        assert torch.allclose(lse, whole_lse, atol=1e-13)


def test_chunks_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, values = rows()
    whole = summary_of(queries, keys, values)
    monkeypatch.setattr(summary_module, "CHUNK_ROWS", 7)
    for found, wanted in zip(summary_of(queries, keys, values), whole, strict=True):
        assert torch.allclose(found, wanted, atol=1e-13)


def test_batches_broadcast() -> None:
    queries, keys, values = rows()
    batch = summary_of(queries, torch.stack([keys, keys[:, :].flip(1)]), torch.stack([values] * 2))
    one = summary_of(queries, keys.flip(1), values)
    assert torch.allclose(batch[0][1], one[0], atol=1e-13)
    assert torch.allclose(batch[1][1], one[1], atol=1e-13)


def test_empty_state() -> None:
    queries, keys, values = rows(torch.float32)
    value, lse = summary_of(queries, keys[:, :0], values[:, :0])
    assert value.shape == (LAYERS, HEADS, SLOTS, DIM) and not value.any()
    assert (lse == -math.inf).all()
    both_value, both_lse = merge(value, lse, value, lse)
    assert not both_value.any() and (both_lse == -math.inf).all()
    some = summary_of(queries, keys, values)
    for merged in (merge(value, lse, *some), merge(*some, value, lse)):
        assert torch.equal(merged[0], some[0]) and torch.equal(merged[1], some[1])


def test_large_scores_neither_overflow_nor_vanish() -> None:
    queries, keys, values = rows(torch.float32)
    value, lse = summary_of(queries * 100, keys, values)
    assert torch.isfinite(value).all() and torch.isfinite(lse).all()
    best = (queries[0, 0, 0] * 100) @ keys[0, :, 0].T
    assert torch.allclose(value[0, 0, 0], values[0, best.argmax(), 0], atol=1e-3)


def test_half_precision_rows_are_summed_in_float32() -> None:
    queries, keys, values = (x.bfloat16() for x in rows())
    value, lse = summary_of(queries, keys, values)
    exact = summary_of(queries.double(), keys.double(), values.double())
    assert value.dtype == lse.dtype == torch.float32
    assert (value - exact[0]).abs().max() < 1e-5
    assert (lse - exact[1]).abs().max() < 1e-5


def test_gradients_reach_the_queries_through_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary_module, "CHUNK_ROWS", 5)
    queries, keys, values = rows()
    queries = queries[:, :2, :2, :4].contiguous().requires_grad_()
    keys, values = keys[:, :12, :1, :4], values[:, :12, :1, :4]
    assert torch.autograd.gradcheck(lambda q: summary_of(q, keys, values), (queries,))


def test_fixed_bank_has_its_gram_matrix() -> None:
    target = make_target(heads=4, kv_heads=2)
    drafter = make_drafter(target, global_query_mode="fixed_equicorrelated")
    bank = equicorrelated_bank(drafter.config)
    gram = bank.double() @ bank.double().transpose(-1, -2)
    wanted = torch.full((16, 16), 0.4, dtype=torch.float64).fill_diagonal_(1.0)
    assert (gram - wanted).abs().max() < 1e-6
    assert not torch.allclose(bank[0, 0], bank[0, 1])
    assert not drafter.summary_queries.requires_grad
    assert make_drafter(target).summary_queries.requires_grad
