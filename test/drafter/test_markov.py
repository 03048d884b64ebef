"""The Markov head: teacher forcing and slot-by-slot drafting are the same function."""

from __future__ import annotations

import pytest
import torch
from longspark_sglang.drafter.markov import MarkovHead
from tiny_targets import VOCAB, make_drafter, make_target

BATCH, SLOTS = 3, 7


@pytest.fixture(scope="module")
def head() -> MarkovHead:
    return make_drafter(make_target(heads=2, kv_heads=2), markov_rank=5).parallel_markov_head


def draft(head: MarkovHead, logits: torch.Tensor, temperature, seed: int = 0, limit: int = VOCAB):
    batch = len(logits)
    return head.draft(
        logits,
        torch.arange(batch),
        torch.full((batch,), 30),
        temperature,
        torch.arange(batch) + 1000 * seed,
        limit,
    )


def logits(batch: int = BATCH) -> torch.Tensor:
    return torch.randn(batch, SLOTS, VOCAB, generator=torch.Generator().manual_seed(1))


def test_greedy_is_the_argmax_under_teacher_forcing(head: MarkovHead) -> None:
    tokens, logprob = draft(head, logits(), None)
    previous = torch.cat((torch.arange(BATCH)[:, None], tokens[:, :-1]), dim=1)
    corrected = head(logits(), previous)
    assert torch.equal(tokens, corrected.argmax(-1))
    assert not logprob.any()
    assert not torch.equal(tokens, logits().argmax(-1))  # the correction does matter


def test_draws_carry_their_probability_under_teacher_forcing(head: MarkovHead) -> None:
    temperature = torch.tensor([0.0, 0.7, 1.5])
    tokens, logprob = draft(head, logits(), temperature)
    previous = torch.cat((torch.arange(BATCH)[:, None], tokens[:, :-1]), dim=1)
    law = (head(logits(), previous)[1:] / temperature[1:, None, None]).log_softmax(-1)
    wanted = law.gather(-1, tokens[1:, :, None])[..., 0]
    assert torch.allclose(logprob[1:], wanted, atol=1e-5)
    assert torch.equal(tokens[0], draft(head, logits(), None)[0][0])
    assert not logprob[0].any()


def test_draws_follow_their_law(head: MarkovHead) -> None:
    """Chi-square of the first slot over many seeds; the later slots only differ by their prev."""
    count = 4000
    same = logits(1).expand(count, -1, -1)
    anchor = torch.zeros(count, dtype=torch.int64)
    tokens, _ = head.draft(
        same, anchor, torch.full((count,), 9), torch.ones(count), torch.arange(count), VOCAB
    )
    law = head(same[:1, 0], anchor[:1]).softmax(-1)[0]
    seen = torch.bincount(tokens[:, 0], minlength=VOCAB)
    chi_square = ((seen - count * law) ** 2 / (count * law)).sum().item()
    assert chi_square < 160  # 95 degrees of freedom: 0.9999 quantile is 154


def test_padded_ids_are_never_drawn(head: MarkovHead) -> None:
    pushed = logits()
    pushed[..., 90:] += 50
    for temperature in (None, torch.full((BATCH,), 5.0)):
        tokens, logprob = draft(head, pushed, temperature, limit=90)
        assert (tokens < 90).all()
        assert torch.isfinite(logprob).all()


def test_product_is_rounded_before_the_sum(head: MarkovHead) -> None:
    """bfloat16 weights under float32 logits: the product carries bfloat16's rounding."""
    config = make_drafter(make_target(heads=2, kv_heads=2), markov_rank=5).config
    narrow = MarkovHead(config).bfloat16()
    narrow.load_state_dict(head.state_dict())
    base = logits()
    added = narrow(base, torch.zeros(BATCH, SLOTS, dtype=torch.int64)) - base
    exact = narrow.markov_w2.weight @ narrow.markov_w1.weight[0]
    assert torch.allclose(added[0, 0], exact.float(), atol=1e-6)
    assert narrow(base.bfloat16(), torch.zeros(BATCH, SLOTS, dtype=torch.int64)).dtype == (
        torch.bfloat16
    )
