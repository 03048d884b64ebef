"""What the acceptance sampler decides, beside laws, penalties and seeds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from longspark_sglang.serving import acceptance, target_distribution
from longspark_sglang.serving.acceptance import AcceptanceSampler, is_enabled, request_refusals
from longspark_sglang.serving.target_distribution import (
    filter_flashinfer,
    rank_filter,
    sampler_refusals,
)
from toy_serving import Batch, Toy, make_request, make_requests

VOCAB, DRAFTS, START = 50, 7, 5


@pytest.fixture
def toy() -> Toy:
    return Toy(VOCAB, DRAFTS, seed=1)


def run_round(toy: Toy, reqs: list[Any], **options: Any) -> tuple[Any, Batch, AcceptanceSampler]:
    batch, sampler = Batch(reqs, VOCAB), toy.sampler(**options.pop("sampler", {}))
    decision = toy.round(sampler, batch, toy.prefill(sampler, batch, START), **options)
    return decision, batch, sampler


# -- user case 8: settings that leave one choice must be reproducible ------------------------------


@pytest.mark.parametrize("only", [{"top_p": 1e-4}, {"top_k": 1}, {"min_p": 0.99}])
def test_a_setting_that_leaves_one_token_is_greedy(toy: Toy, only: dict[str, Any]) -> None:
    reqs = [make_request(row, temperature=1.0, **only) for row in range(200)]
    decision, _, _ = run_round(toy, reqs)
    greedy, token = [], START
    for _ in range(DRAFTS + 1):
        token = int(toy.table[token].argmax())
        greedy.append(token)
    for tokens, count in zip(decision.tokens.view(200, -1), decision.accept_lens, strict=True):
        assert tokens[:count].tolist() == greedy[: int(count)]


# -- greedy ----------------------------------------------------------------------------------------


def test_greedy_ties_go_to_the_lowest_id(toy: Toy) -> None:
    toy.table[:, [9, 30]] = 100.0
    decision, _, _ = run_round(toy, [make_request(0, temperature=0.0)])
    assert set(decision.tokens[: int(decision.accept_lens[0])].tolist()) == {9}


def test_an_all_greedy_batch_computes_no_probabilities(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a greedy batch needs no distribution")

    monkeypatch.setattr(acceptance, "_scaled_probs", fail)
    run_round(toy, [make_request(row, temperature=0.0) for row in range(3)])
    with pytest.raises(AssertionError, match="no distribution"):
        run_round(toy, [make_request(0, temperature=0.0), make_request(1, temperature=1.0)])


def test_sampling_is_never_greedy_by_accident(toy: Toy) -> None:
    decision, _, _ = run_round(toy, make_requests(200, temperature=1.0))
    assert len(set(decision.tokens.view(200, -1)[:, 0].tolist())) > 5


# -- layout of the result --------------------------------------------------------------------------


def test_tokens_are_the_drafts_with_the_next_token_at_its_place(toy: Toy) -> None:
    drafts = torch.randint(0, VOCAB, (30, DRAFTS), generator=torch.Generator().manual_seed(0))
    drafts[:10, 0] = toy.table[START].argmax()
    decision, _, _ = run_round(toy, make_requests(30, temperature=0.0), drafts=drafts)
    for row, tokens in enumerate(decision.tokens.view(30, DRAFTS + 1)):
        n = int(decision.accepted[row])
        assert tokens[:n].tolist() == drafts[row, :n].tolist()
        assert int(tokens[n]) == int(decision.next_token[row])
        assert int(decision.accept_lens[row]) == n + 1
    assert decision.accept_lens.dtype == torch.int32
    assert decision.next_token.dtype == torch.int64
    assert (decision.accepted[:10] >= 1).all()


def test_a_changed_batch_is_laid_out_anew(toy: Toy) -> None:
    sampler = toy.sampler()
    greedy, random = make_request(0, temperature=0.0), make_request(1, temperature=1.0)
    for reqs, expected in (
        ([greedy], [0.0]),
        ([greedy, random], [0.0, 1.0]),
        ([random, greedy], [1.0, 0.0]),
        ([random], [1.0]),
    ):
        plan = sampler.plan(Batch(reqs, VOCAB))
        assert plan.temperature.tolist() == expected
        assert plan.point_mass.tolist() == [t == 0.0 for t in expected]
        assert plan.limit.tolist() == [DRAFTS] * len(reqs)
        assert plan.positions.tolist() == [10] * len(reqs)


def test_half_precision_logits_are_processed_in_float32(toy: Toy) -> None:
    batch, sampler = Batch(make_requests(4, temperature=0.0), VOCAB), toy.sampler()
    plan = sampler.plan(batch)
    proposal = toy.propose(plan, torch.full((4,), START))
    candidates = torch.cat((torch.full((4, 1), START), proposal.draft_tokens), 1)
    logits = toy.table[candidates].flatten(0, 1).bfloat16()
    decision = sampler.accept(
        batch, plan, candidates, logits, proposal, toy.markov_w1, toy.markov_w2
    )
    assert decision.logits.dtype == torch.float32
    assert torch.equal(decision.logits, logits.float())


# -- order of processing ---------------------------------------------------------------------------


class Mask:
    """A grammar mask that leaves the given tokens."""

    def __init__(self, allowed: list[int]) -> None:
        self.blocked = torch.ones(VOCAB, dtype=torch.bool)
        self.blocked[allowed] = False

    def apply(self, logits: torch.Tensor) -> None:
        logits.masked_fill_(self.blocked, float("-inf"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_binds_every_position(toy: Toy, temperature: float) -> None:
    reqs = [make_request(row, temperature=temperature) for row in range(300)]
    allowed = [3, 8, 21]
    decision, _, _ = run_round(toy, reqs, grammar_mask=Mask(allowed))
    for tokens, count in zip(decision.tokens.view(300, -1), decision.accept_lens, strict=True):
        assert set(tokens[:count].tolist()) <= set(allowed)


def test_logit_bias_can_not_lift_what_a_grammar_forbids(toy: Toy) -> None:
    reqs = [make_request(0, temperature=0.0, logit_bias={"4": 1000.0, "8": 50.0})]
    decision, _, _ = run_round(toy, reqs, grammar_mask=Mask([3, 8]))
    assert set(decision.tokens[: int(decision.accept_lens[0])].tolist()) == {8}
    assert decision.logits[0, 4] == float("-inf")


def test_logits_are_left_as_plain_decoding_has_them_before_temperature(toy: Toy) -> None:
    """What logprobs are computed from: biased and penalised, temperature still to come."""
    reqs = [make_request(0, temperature=0.5, top_p=0.5, logit_bias={"4": 2.0})]
    decision, _, _ = run_round(toy, reqs)
    expected = toy.table[START].clone()
    expected[4] += 2.0
    assert torch.equal(decision.logits[0], expected)


# -- switched-off requests and custom logit processors ---------------------------------------------

OFF = {"longspark": {"enabled": False}}


def test_a_switched_off_request_decodes_plainly_beside_others(toy: Toy) -> None:
    reqs = [
        make_request(0, temperature=0.0, custom_params=OFF),
        make_request(1, temperature=0.0),
    ]
    right = torch.stack([toy.table[START].argmax()] * 2)
    drafts = torch.full((2, DRAFTS), -1)
    for slot in range(DRAFTS):
        drafts[:, slot] = right
        right = toy.table[right].argmax(-1)
    decision, _, _ = run_round(toy, reqs, drafts=drafts)
    assert decision.accept_lens.tolist() == [1, DRAFTS + 1]
    assert int(decision.next_token[0]) == int(drafts[0, 0])


def test_a_custom_logit_processor_sees_one_position_of_a_switched_off_request(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def processor(logits: torch.Tensor, info: Any) -> None:
        seen.append(logits.shape)
        logits[0, 17] = 1000.0

    monkeypatch.setattr(acceptance, "apply_custom_logit_processor", processor)
    reqs = [make_request(row, temperature=0.0, custom_params=OFF) for row in range(2)]
    reqs[0].custom_logit_processor = "a processor"
    batch, sampler = Batch(reqs, VOCAB), toy.sampler()
    batch.sampling_info.has_custom_logit_processor = True
    decision = toy.round(sampler, batch, toy.prefill(sampler, batch, START))
    assert seen == [(2, VOCAB)]
    assert decision.next_token.tolist() == [17, int(toy.table[START].argmax())]


# -- refusals --------------------------------------------------------------------------------------


def test_what_can_be_exact_is_not_refused() -> None:
    request = make_request(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        frequency_penalty=1.0,
        min_new_tokens=4,
        sampling_seed=3,
        logit_bias={"4": 1.0},
        json_schema="{}",
        custom_params={"mine": 1, "longspark": {"enabled": True}},
    )
    assert request_refusals(request, deterministic=False) == []
    assert is_enabled(request)


def test_every_reason_is_listed_at_once() -> None:
    request = make_request(min_p=0.1, custom_params={"longspark": {"enable": True}})
    request.custom_logit_processor = "a processor"
    request.return_hidden_states = True
    request.return_sampling_mask = True
    reasons = request_refusals(request, deterministic=True)
    assert len(reasons) == 5
    for word in ("custom_params", "logit processor", "hidden", "sampling mask", "min_p"):
        assert any(word in reason for reason in reasons), word


@pytest.mark.parametrize("choice", [True, {"enabled": 1}, {"enabled": None}, {"on": False}, "off"])
def test_a_misspelt_switch_is_refused(choice: Any) -> None:
    request = make_request(custom_params={"longspark": choice})
    (reason,) = request_refusals(request, deterministic=False)
    assert '{"enabled": false}' in reason and repr(choice) in reason


def test_a_custom_logit_processor_is_welcome_where_speculation_is_off() -> None:
    request = make_request(custom_params=OFF)
    request.custom_logit_processor = "a processor"
    assert request_refusals(request, deterministic=False) == []
    assert not is_enabled(request)


def test_server_arguments_that_change_sampling_are_refused() -> None:
    fine = SimpleNamespace(
        sampling_backend="flashinfer", enable_watermark=False, rl_on_policy_target=None
    )
    assert sampler_refusals(fine) == []
    assert sampler_refusals(SimpleNamespace(sampling_backend=None)) == []
    bad = SimpleNamespace(
        sampling_backend="ascend", enable_watermark=True, rl_on_policy_target="fsdp"
    )
    assert len(sampler_refusals(bad)) == 3
    with pytest.raises(ValueError, match="sampling backend 'ascend'"):
        AcceptanceSampler(3, VOCAB, "cpu", sampling_backend="ascend", seed=0)


# -- tensor parallelism ----------------------------------------------------------------------------


class Rank:
    """A rank of a group of two: rank 0 speaks, rank 1 hears."""

    world_size = 2

    def __init__(self, said: list[torch.Tensor], speaks: bool) -> None:
        self.said, self.speaks = said, speaks

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        assert src == 0
        if self.speaks:
            self.said.append(tensor.clone())
        else:
            tensor.copy_(self.said.pop(0))
        return tensor


def test_rank_zero_decides(toy: Toy) -> None:
    """The other rank has other random numbers, and still emits and counts the same tokens."""
    said: list[torch.Tensor] = []
    decisions, samplers = [], []
    for speaks, seed in ((True, 1), (False, 2)):
        reqs = [make_request(row, temperature=1.0, frequency_penalty=0.5) for row in range(20)]
        options = {"tp_group": Rank(said, speaks), "seed": seed}
        drafts = torch.arange(20 * DRAFTS).view(20, DRAFTS) % VOCAB
        decision, _, sampler = run_round(toy, reqs, drafts=drafts, sampler=options)
        decisions.append(decision)
        samplers.append(sampler)
    assert not said
    first, second = decisions
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.accept_lens, second.accept_lens)
    counted = [s.penalties.frequency[1:] for s in samplers]
    assert torch.equal(*counted) and counted[0].sum() > 0


def test_broadcast_alone_says_nothing(toy: Toy) -> None:
    tensor = torch.arange(3)
    assert toy.sampler().broadcast(tensor) is tensor


# -- flashinfer's filters (its kernels replaced by their definition) -------------------------------


def renorm_by_definition() -> tuple[Any, Any]:
    """top-k and top-p renormalisation as flashinfer documents them, ties at the cut kept."""

    def top_k_renorm(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
        rank = (probs[:, None, :] > probs[:, :, None]).sum(-1)
        kept = probs * (rank < top_k[:, None])
        return kept / kept.sum(-1, keepdim=True)

    def top_p_renorm(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        above = (probs[:, None, :] * (probs[:, None, :] > probs[:, :, None])).sum(-1)
        kept = probs * (above < top_p[:, None])
        return kept / kept.sum(-1, keepdim=True)

    return top_k_renorm, top_p_renorm


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_distribution, "renorm_kernels", renorm_by_definition)


@pytest.mark.parametrize("top_k", [1, 3, 40, 199])
def test_looking_at_the_first_ranks_only_keeps_the_same_probabilities(top_k: int) -> None:
    """Also where logits tie, as bfloat16 ones often do."""
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(0)).mul(4).round()
    logits[:, 150:] = -torch.inf
    probs = logits.softmax(dim=-1)
    top_ks, top_ps = torch.full((6,), top_k), torch.full((6,), 0.97)
    weights, ids = rank_filter(probs, top_ks, top_ps, None, widest=top_k)
    whole, _ = rank_filter(probs, top_ks, top_ps, None)
    assert torch.equal(weights, whole[:, :top_k])
    assert torch.equal(weights, probs.gather(1, ids).masked_fill(weights == 0, 0))
    assert not whole[:, top_k:].any()


@pytest.mark.usefixtures("flashinfer")
def test_flashinfer_filters_jointly_and_with_min_p_in_sequence() -> None:
    probs = torch.tensor([[0.4, 0.2, 0.15, 0.1, 0.1, 0.05]])
    top_k, top_p = torch.tensor([3], dtype=torch.int32), torch.tensor([0.7])
    joint = filter_flashinfer(probs, top_k, top_p, None)
    # Mass above the third token is 0.6 < 0.7, so all three stay.
    expected = np.array([0.4, 0.2, 0.15, 0, 0, 0]) / 0.75
    np.testing.assert_allclose(joint[0].numpy(), expected, rtol=1e-6)
    # In sequence the three are 0.533, 0.267, 0.2 when top-p looks at them: the third goes.
    ordered = filter_flashinfer(probs, top_k, top_p, torch.tensor([0.0]))
    np.testing.assert_allclose(ordered[0].numpy(), [2 / 3, 1 / 3, 0, 0, 0, 0], rtol=1e-6)
    # And min-p looks at the result.
    last = filter_flashinfer(probs, top_k, top_p, torch.tensor([0.6]))
    np.testing.assert_allclose(last[0].numpy(), [1, 0, 0, 0, 0, 0], rtol=1e-6)


@pytest.mark.usefixtures("flashinfer")
def test_flashinfer_requests_are_filtered_by_what_they_ask_for_themselves(toy: Toy) -> None:
    """A neighbour's min_p does not change the order of another request's filters."""
    kinds = [
        {"temperature": 1.0, "top_k": 3, "top_p": 0.7},
        {"temperature": 1.0, "top_k": 3, "top_p": 0.7, "min_p": 1e-6},
        {"temperature": 1.0},
        {"temperature": 0.0},
    ]
    probs = torch.tensor([0.4, 0.2, 0.15, 0.1, 0.1, 0.05])
    toy.table[:] = -100.0
    toy.table[:, :6] = probs.log()
    reqs = [make_request(row, **kinds[row % 4]) for row in range(4000)]
    decision, _, _ = run_round(toy, reqs, sampler={"sampling_backend": "flashinfer"})
    first = decision.tokens.view(1000, 4, -1)[:, :, 0]
    sets = [set(first[:, kind].tolist()) for kind in range(4)]
    assert sets == [{0, 1, 2}, {0, 1}, {0, 1, 2, 3, 4, 5}, {0}]
