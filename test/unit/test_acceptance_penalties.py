"""Penalties and min_new_tokens per position (user case 7), against SGLang's own penalizers.

The oracle decodes one token at a time with SGLang's penalizer classes, fed with every token, and
SGLang's own application of them; our side gets scripted drafts of a known accept length.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from toy_serving import EOS, Batch, Toy, make_request

VOCAB, DRAFTS, PROMPT_END = 40, 7, 9

SETTINGS: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 0.3},
    "presence": {"presence_penalty": 1.5},
    "repetition": {"repetition_penalty": 1.6},
    "reward": {"frequency_penalty": 0.25, "presence_penalty": -0.5, "repetition_penalty": 0.9},
    "minimum": {"min_new_tokens": 13, "stop_token_ids": [3, 17]},
    "all": {
        "frequency_penalty": 0.1,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.15,
        "min_new_tokens": 21,
        "logit_bias": {"4": 1.5, "11": -2.0},
    },
    "none": {},
}


class PlainDecoder:
    """SGLang's plain path, one token per step and request, without overlap's lag."""

    def __init__(self, toy: Toy, batch: Batch) -> None:
        self.toy = toy
        self.info = batch.sampling_info
        self.owner = batch  # the orchestrator holds its batch by a weak reference
        self.penalizers = batch.orchestrator(toy.vocab)

    def logits(self, previous: torch.Tensor) -> torch.Tensor:
        """Processed logits after `previous` [B]."""
        info = replace(self.info, penalizer_orchestrator=self.penalizers)
        info.update_penalties()
        logits = self.toy.table[previous].clone()
        with torch.compiler.set_stance("force_eager"):
            replace(info, penalizer_orchestrator=None).apply_logits_bias(logits)
        return logits

    def count(self, tokens: torch.Tensor) -> None:
        if self.penalizers.is_required:
            self.penalizers.cumulate_output_tokens(tokens)

    def decode(self, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy tokens [B, steps] and the logits [B, steps, V] each was chosen from."""
        previous = torch.full((len(self.owner.reqs),), PROMPT_END)
        tokens, seen = [], []
        for _ in range(steps):
            logits = self.logits(previous)
            previous = logits.argmax(-1)
            tokens.append(previous)
            seen.append(logits)
            self.count(previous)
        return torch.stack(tokens, 1), torch.stack(seen, 1)


@pytest.fixture(scope="module")
def toy() -> Toy:
    toy = Toy(VOCAB, DRAFTS, sharpness=0.5, seed=3)
    toy.table[:, EOS] += 2.0  # so that min_new_tokens has something to forbid
    toy.table[:, 17] += 1.0
    return toy


def plain_run(
    toy: Toy, settings: list[dict[str, Any]], steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens [B, steps] of plain decoding, and the logits each was chosen from."""
    return PlainDecoder(toy, Batch(greedy_requests(settings), VOCAB)).decode(steps)


def extend_logits(toy: Toy, batch: Batch, last: torch.Tensor | None = None) -> torch.Tensor:
    """What SGLang's sampler makes of a prefill's logits after `before_extend`."""
    last = torch.full((len(batch.reqs),), PROMPT_END) if last is None else last
    logits = toy.table[last].clone()
    with torch.compiler.set_stance("force_eager"):
        batch.sampling_info.apply_logits_bias(logits)
    return logits


def greedy_requests(settings: list[dict[str, Any]]) -> list[Any]:
    return [make_request(row, temperature=0.0, **s) for row, s in enumerate(settings)]


def scripted(truth: torch.Tensor, done: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Drafts [B, K] that are right up to accept length `lengths` and wrong from there on."""
    slot = torch.arange(DRAFTS)
    right = truth.gather(1, done[:, None] + slot)
    return torch.where(slot < lengths[:, None] - 1, right, (right + 1) % VOCAB)


@pytest.mark.parametrize("names", [[name] for name in SETTINGS] + [list(SETTINGS)])
def test_greedy_tokens_and_logits_are_those_of_plain_decoding(toy: Toy, names: list[str]) -> None:
    """Every accept length 1..8, constant or changing; bit for bit."""
    width, count = DRAFTS + 1, 24
    rhythms = [*((length,) for length in range(1, width + 1)), (1, 8, 3), (5, 2, 2, 7)]
    cases = list(itertools.product(names, rhythms))
    settings = [SETTINGS[name] for name, _ in cases]
    truth, plain_logits = plain_run(toy, settings, 1 + (count + 1) * width)

    batch, sampler = Batch(greedy_requests(settings), VOCAB), toy.sampler()
    sampler.before_extend(batch)
    first = extend_logits(toy, batch)
    assert torch.equal(first, plain_logits[:, 0])
    anchors = first.argmax(-1)
    sampler.after_extend(batch, anchors.int())

    each, done = torch.arange(len(cases)), torch.ones(len(cases), dtype=torch.int64)
    for turn in range(count):
        lengths = torch.tensor([rhythm[turn % len(rhythm)] for _, rhythm in cases])
        decision = toy.round(sampler, batch, anchors, scripted(truth, done, lengths))
        assert decision.accept_lens.tolist() == lengths.tolist()
        tokens = decision.tokens.view(-1, width)
        processed = decision.logits.view(-1, width, VOCAB)
        for slot in range(width):
            live = each[slot < lengths]
            at = (done + slot)[live]
            assert torch.equal(tokens[live, slot], truth[live, at])
            assert torch.equal(processed[live, slot], plain_logits[live, at])
        anchors, done = decision.next_token, done + lengths


def test_the_oracle_is_penalised(toy: Toy) -> None:
    """Each setting changes the greedy text, and min_new_tokens forbids all three stop tokens."""
    free, _ = plain_run(toy, [SETTINGS["none"]], 40)
    for name in set(SETTINGS) - {"none"}:
        tokens, _ = plain_run(toy, [SETTINGS[name]], 40)
        assert not torch.equal(tokens, free), name
    _, logits = plain_run(toy, [SETTINGS["minimum"]], 14)
    forbidden = logits[0].isinf().nonzero()
    assert forbidden.tolist() == [[step, token] for step in range(13) for token in (1, 3, 17)]


def test_retracted_requests_continue_where_they_were(toy: Toy) -> None:
    """Admission with generated tokens: the prefill's token and all later ones are as if nothing
    had happened, although SGLang's penalizers start from zero."""
    settings, before = list(SETTINGS.values()), 17
    truth, plain_logits = plain_run(toy, settings, 60)
    reqs = greedy_requests(settings)
    for req, tokens in zip(reqs, truth[:, :before].tolist(), strict=True):
        req.output_ids = tokens
    batch, sampler = Batch(reqs, VOCAB), toy.sampler()
    sampler.before_extend(batch)
    logits = extend_logits(toy, batch, truth[:, before - 1])
    assert torch.equal(logits, plain_logits[:, before])
    sampler.after_extend(batch, logits.argmax(-1))
    done = torch.full((len(reqs),), before + 1)
    lengths = torch.full((len(reqs),), 6)
    decision = toy.round(sampler, batch, truth[:, before].clone(), scripted(truth, done, lengths))
    assert torch.equal(decision.tokens.view(-1, 8)[:, :6], truth[:, before + 1 : before + 7])


def test_chunks_and_riding_requests(toy: Toy) -> None:
    """An unfinished chunk's token is forgotten; a request that decodes inside a mixed batch keeps
    its state, although the host's output_ids lag behind."""
    settings = [SETTINGS["all"], SETTINGS["all"]]
    truth, plain_logits = plain_run(toy, settings, 40)
    riding, chunked = greedy_requests(settings)
    sampler = toy.sampler()
    alone = Batch([riding], VOCAB)
    anchors = toy.prefill(sampler, alone, int(truth[0, 0]))
    decision = toy.round(
        sampler, alone, anchors, scripted(truth[:1], torch.tensor([1]), torch.tensor([5]))
    )
    assert riding.output_ids == []  # the host has heard of nothing yet

    garbage = torch.tensor([23])
    first_chunk = Batch([chunked], VOCAB)
    sampler.before_extend(first_chunk)
    sampler.after_extend(first_chunk, garbage)
    mixed = Batch([chunked, riding], VOCAB)
    mixed.decoding_reqs = [riding]
    sampler.before_extend(mixed)
    logits = extend_logits(toy, mixed, torch.tensor([PROMPT_END, int(decision.next_token)]))
    assert torch.equal(logits[0], plain_logits[1, 0])
    assert torch.equal(logits[1], plain_logits[0, 6])
    sampler.after_extend(mixed, logits.argmax(-1))

    together = Batch([riding, chunked], VOCAB)
    lengths = torch.tensor([4, 8])
    decision = toy.round(
        sampler,
        together,
        torch.stack((truth[0, 6], truth[1, 0])),
        scripted(truth, torch.tensor([7, 1]), lengths),
    )
    assert decision.accept_lens.tolist() == [4, 8]
    assert torch.equal(decision.tokens[:4], truth[0, 7:11])
    assert torch.equal(decision.tokens[8:], truth[1, 1:9])


def test_a_reused_pool_row_starts_empty_and_only_penalised_requests_take_memory(toy: Toy) -> None:
    sampler = toy.sampler()
    state = sampler.penalties
    toy.prefill(sampler, Batch([make_request(row) for row in range(50)], VOCAB), 4)
    assert state.frequency.shape[0] == 0

    old = Batch([make_request(row, frequency_penalty=1.0) for row in range(5)], VOCAB)
    toy.prefill(sampler, old, 4)
    assert state.frequency[:, 4].sum() == 5.0
    new = Batch([make_request(row, presence_penalty=1.0) for row in range(5)], VOCAB)
    new.req_to_token_pool.req_generation += 1
    toy.prefill(sampler, new, 6)
    rows = state.rows(new.reqs, range(5))
    assert rows is not None
    add, scale = state.next_adjustment(rows)
    expected = torch.zeros(5, VOCAB)
    expected[:, 6] = -1.0
    assert torch.equal(add, expected) and scale is None

    taken = state.frequency.shape[0]
    for generation in range(2, 40):  # rows come and go, with and without penalties
        penalty = 0.5 if generation % 2 else 0.0
        batch = Batch([make_request(r, frequency_penalty=penalty) for r in range(5)], VOCAB)
        batch.req_to_token_pool.req_generation += generation
        toy.prefill(sampler, batch, 4)
    assert state.frequency.shape[0] == taken


def test_state_of_a_request_first_met_while_decoding(toy: Toy) -> None:
    """No prefill passed by here (as after a transfer): the host's tokens are the state."""
    truth, plain_logits = plain_run(toy, [SETTINGS["all"]], 20)
    req = greedy_requests([SETTINGS["all"]])[0]
    req.output_ids = truth[0, :5].tolist()
    decision = toy.round(
        toy.sampler(),
        Batch([req], VOCAB),
        truth[:, 4].clone(),
        scripted(truth, torch.tensor([5]), torch.tensor([3])),
    )
    assert torch.equal(decision.logits[:3], plain_logits[0, 5:8])


def test_overflowing_requests_get_more_slots(toy: Toy) -> None:
    """Growing the state keeps what it holds."""
    sampler = toy.sampler()
    for row in range(40):
        toy.prefill(sampler, Batch([make_request(row, frequency_penalty=1.0)], VOCAB), row % 7)
    reqs = [make_request(row, frequency_penalty=1.0) for row in range(40)]
    rows = sampler.penalties.rows(reqs, range(40))
    assert rows is not None
    add, _ = sampler.penalties.next_adjustment(rows)
    assert add.argmin(-1).tolist() == [row % 7 for row in range(40)]
    assert add.sum() == -40
