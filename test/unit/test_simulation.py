"""SGLANG_SIMULATE_ACC_*: rounds of a chosen length, with SGLang's names and meaning."""

from __future__ import annotations

import pytest
import torch
from longspark_sglang.serving.simulation import FIXED_TOKEN, SimulatedAcceptance
from toy_serving import Batch, Toy, make_request, make_requests

VOCAB, DRAFTS = 128, 7


def round_of(
    simulation: SimulatedAcceptance, reqs: list, toy: Toy, seed: int = 0
) -> tuple[torch.Tensor, object]:
    """Drafts [B, K] and the simulated decision of one round."""
    sampler = toy.sampler(seed=seed)
    batch = Batch(reqs, VOCAB)
    anchors = toy.prefill(sampler, batch, 5)
    plan = sampler.plan(batch)
    proposal = toy.propose(plan, anchors)
    candidates = torch.cat((anchors[:, None], proposal.draft_tokens), dim=1)
    logits = toy.table[candidates].flatten(0, 1)
    decision = sampler.accept(
        batch, plan, candidates, logits, proposal, toy.markov_w1, toy.markov_w2
    )
    forced = simulation.apply(decision, candidates, plan.limit, sampler.broadcast)
    return proposal.draft_tokens, forced


def test_off_unless_the_length_is_above_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_SIMULATE_ACC_LEN", raising=False)
    assert SimulatedAcceptance.from_environment(VOCAB) is None
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "-1")
    assert SimulatedAcceptance.from_environment(VOCAB) is None
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "2.5")
    assert SimulatedAcceptance.from_environment(VOCAB) == SimulatedAcceptance(
        2.5, "match-expected", "fixed"
    )


def test_everything_wrong_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_METHOD", "always")
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_TOKEN_MODE", "any")
    with pytest.raises(ValueError, match=r"'always'; use match-expected or .*'any'; use fixed or"):
        SimulatedAcceptance.from_environment(VOCAB)
    monkeypatch.delenv("SGLANG_SIMULATE_ACC_METHOD")
    monkeypatch.delenv("SGLANG_SIMULATE_ACC_TOKEN_MODE")
    with pytest.raises(ValueError, match="50 tokens and mode fixed emits token 100"):
        SimulatedAcceptance.from_environment(50)


@pytest.mark.parametrize(
    ("length", "method", "allowed"),
    [
        (1.0, "match-expected", {1}),
        (2.25, "match-expected", {2, 3}),
        (50.0, "match-expected", {DRAFTS + 1}),
        (4.0, "multinomial", set(range(1, DRAFTS + 2))),
    ],
)
def test_lengths(length: float, method: str, allowed: set[int]) -> None:
    torch.manual_seed(0)
    toy = Toy(VOCAB, DRAFTS)
    simulation = SimulatedAcceptance(length, method, "real-draft-token")
    lengths = []
    for _ in range(200):
        _, decision = round_of(simulation, [make_request(0, temperature=0.0)], toy)
        lengths.append(int(decision.accept_lens[0]))
    assert set(lengths) <= allowed
    # 200 draws of a deviation of at most 1: three standard errors.
    assert abs(sum(lengths) / 200 - min(length, DRAFTS + 1)) < 0.22


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0}])
def test_real_draft_tokens_are_the_drafts_and_the_targets_best(sampling: dict) -> None:
    toy = Toy(VOCAB, DRAFTS)
    simulation = SimulatedAcceptance(4.0, "match-expected", "real-draft-token")
    drafts, decision = round_of(simulation, make_requests(3, **sampling), toy)
    assert decision.accept_lens.tolist() == [4, 4, 4]
    assert decision.accepted.tolist() == [3, 3, 3]
    tokens = decision.tokens.view(3, DRAFTS + 1)
    assert tokens[:, :3].equal(drafts[:, :3])
    assert tokens[:, 3].equal(toy.table[drafts[:, 2]].argmax(-1))
    assert decision.next_token.equal(tokens[:, 3])


def test_fixed_tokens() -> None:
    simulation = SimulatedAcceptance(2.0, "match-expected", "fixed")
    _, decision = round_of(simulation, make_requests(2), Toy(VOCAB, DRAFTS))
    assert set(decision.tokens.tolist()) == set(decision.next_token.tolist()) == {FIXED_TOKEN}


def test_a_request_that_does_not_speculate_still_gets_one_token() -> None:
    plain = make_request(1, custom_params={"longspark": {"enabled": False}})
    simulation = SimulatedAcceptance(6.0, "match-expected", "real-draft-token")
    _, decision = round_of(simulation, [make_request(0), plain], Toy(VOCAB, DRAFTS))
    assert decision.accept_lens.tolist() == [6, 1]


def test_the_warning_says_that_the_output_is_not_the_targets() -> None:
    text = SimulatedAcceptance(3.5, "match-expected", "fixed").warning
    assert "SGLANG_SIMULATE_ACC_LEN=3.5" in text and "NOT the target's" in text
