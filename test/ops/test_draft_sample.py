import math

import op_oracle
import pytest
import torch
from longspark_sglang.ops import markov_step
from op_cases import each_backend, generator, run
from test_markov_step import case_of as markov_case


def case_of(temperature, vocab=300, rank=16, dtype=torch.float32, seed=1, vocab_limit=None):
    batch = len(temperature)
    case = markov_case(batch, vocab, rank, dtype, dtype, seed)
    g = generator(seed + 1)
    case.update(
        temperature=torch.tensor(temperature, dtype=torch.float32),
        seed=torch.randint(-(2**62), 2**62, (batch,), generator=g),
        position=torch.randint(0, 2**17, (batch,), generator=g),
        vocab_limit=vocab if vocab_limit is None else vocab_limit,
    )
    return case


def corrected(case):
    names = ("base_logits", "prev", "markov_w1", "markov_w2")
    return markov_step(*(case[name] for name in names), backend="reference")


def assert_draw_is_right(backend, case):
    (token, logq), _ = run("draft_sample", backend, **case)
    logits = corrected(case)
    assert token.dtype == torch.int64 and logq.dtype == torch.float32
    for b in range(len(token)):
        # A backend may round one product the other way than plain torch: half a unit of the
        # logits' dtype, through both roundings and the division by the temperature.
        temperature = float(case["temperature"][b])
        spread = 2 * torch.finfo(case["base_logits"].dtype).eps * float(logits[b].abs().max())
        slack = 2 * spread / (temperature or 1.0) + 1e-5
        exact, exact_logq, margin = op_oracle.draft_sample(
            logits[b],
            temperature,
            int(case["seed"][b]),
            int(case["position"][b]),
            case["vocab_limit"],
        )
        if margin > slack:
            assert int(token[b]) == exact
            assert float(logq[b]) == pytest.approx(exact_logq, abs=slack)


@each_backend("draft_sample")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_mixed_temperatures(backend, dtype):
    assert_draw_is_right(backend, case_of([0.0, 1.0, 0.3, 2.0, 0.0, 0.7], dtype=dtype))


@each_backend("draft_sample")
@pytest.mark.parametrize("vocab", [1, 2, 31, 1025, 5000])
def test_vocabulary_sizes(backend, vocab):
    assert_draw_is_right(backend, case_of([0.0, 1.0], vocab=vocab))


@each_backend("draft_sample")
@pytest.mark.parametrize("limit", [1, 7, 299])
def test_ids_from_the_limit_on_are_never_proposed(backend, limit):
    case = case_of([0.0, 1.0, 5.0], vocab_limit=limit)
    case["base_logits"][:, limit:] = 1000.0
    (token, logq), _ = run("draft_sample", backend, **case)
    assert (token < limit).all() and (logq <= 0).all()
    assert_draw_is_right(backend, case)


@each_backend("draft_sample")
def test_greedy_ties_go_to_the_lowest_id(backend):
    case = case_of([0.0] * 3, vocab=2000)
    case["base_logits"].zero_()
    case["markov_w2"].zero_()
    case["base_logits"][0, [1999, 700, 701]] = 5.0
    case["base_logits"][1, [1024, 1023]] = 5.0
    (token, logq), _ = run("draft_sample", backend, **case)
    assert token.tolist() == [700, 1023, 0] and logq.tolist() == [0.0, 0.0, 0.0]


@each_backend("draft_sample")
def test_minus_infinity_logits_are_never_drawn(backend):
    case = case_of([0.0, 1.0, 3.0])
    case["base_logits"][:, 1:] = -math.inf
    (token, logq), _ = run("draft_sample", backend, **case)
    assert token.tolist() == [0, 0, 0]
    torch.testing.assert_close(logq, torch.zeros(3))


@each_backend("draft_sample")
@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_draws_follow_the_softmax(backend, temperature):
    """Chi-square over many draws of one distribution, each with its own position."""
    draws, vocab = (1000 if backend == "emulation" else 4000), 12
    case = case_of([temperature], vocab=vocab)
    case = {
        name: value.expand(draws, *value.shape[1:]).contiguous()
        if name in ("base_logits", "prev", "temperature", "seed")
        else value
        for name, value in case.items()
    }
    case["position"] = torch.arange(draws)
    (token, logq), _ = run("draft_sample", backend, **case)
    p = torch.softmax(corrected(case)[0].double() / temperature, dim=-1)
    torch.testing.assert_close(logq.double(), p.log()[token], rtol=1e-4, atol=1e-4)
    seen = torch.bincount(token, minlength=vocab).double()
    kept = p * draws >= 5
    expected = torch.cat([p[kept] * draws, (p[~kept].sum() * draws)[None]]).clamp(min=1e-9)
    observed = torch.cat([seen[kept], seen[~kept].sum()[None]])
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = int(kept.sum())
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 10


@each_backend("draft_sample")
def test_a_draw_depends_on_seed_position_and_nothing_else(backend):
    case = case_of([1.0] * 4)
    for name in ("base_logits", "prev", "seed"):
        case[name][2] = case[name][0]
    case["position"][2] = case["position"][0]
    (token, logq), _ = run("draft_sample", backend, **case)
    assert token[0] == token[2] and logq[0] == logq[2]
    alone = {
        name: value[2:3] if name not in ("markov_w1", "markov_w2", "vocab_limit") else value
        for name, value in case.items()
    }
    (single, _), _ = run("draft_sample", backend, **alone)
    assert single[0] == token[2]


@each_backend("draft_sample")
def test_without_requests(backend):
    (token, logq), _ = run("draft_sample", backend, **case_of([]))
    assert token.shape == (0,) and logq.shape == (0,)
