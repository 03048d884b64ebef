import math

import op_oracle
import pytest
import torch
from longspark_sglang.ops import draft_sample, markov_step
from op_cases import each_backend, generator, run


def case_of(batch, *, block=7, vocab=200, rank=8, dtype=torch.float32, seed=1, agreement=3.0):
    """Drafts really drawn from the drafter, against a target that partly agrees with it."""
    g = generator(seed)
    base = 2 * torch.randn(batch, block, vocab, generator=g)
    w1 = (torch.randn(vocab, rank, generator=g) / 2).to(dtype)
    w2 = torch.randn(vocab, rank, generator=g).to(dtype) / 2
    anchors = torch.randint(0, vocab, (batch,), generator=g)
    temperature = torch.rand(batch, generator=g) + 0.4
    point_mass = torch.zeros(batch, dtype=torch.bool)
    point_mass[1::3] = True
    temperature[1::6] = 0.0
    base = base.to(dtype)
    prev, tokens, logqs, logits = anchors, [], [], []
    for slot in range(block):
        seeds = torch.randint(0, 2**60, (batch,), generator=g)
        position = torch.full((batch,), slot)
        logits.append(markov_step(base[:, slot], prev, w1, w2, backend="reference"))
        token, logq = draft_sample(
            base[:, slot], prev, w1, w2, temperature, seeds, position, vocab, backend="reference"
        )
        tokens.append(token)
        logqs.append(logq)
        prev = token
    shift = torch.randn(batch, block, vocab, generator=g) / agreement
    target = torch.stack(logits, dim=1) if block else torch.zeros(batch, 0, vocab)
    target = torch.cat([target + shift, torch.randn(batch, 1, vocab, generator=g)], dim=1)
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None, None]
    probs = torch.softmax(target / divisor, dim=-1)
    probs[:, :, ::5] *= (torch.rand(batch, 1, 1, generator=g) > 0.5).float()  # a top-k like cut
    probs /= probs.sum(dim=-1, keepdim=True)
    empty = torch.zeros(batch, 0)
    return dict(
        target_probs=probs,
        draft_tokens=torch.stack(tokens, dim=1) if block else empty.long(),
        draft_logq=torch.stack(logqs, dim=1) if block else empty,
        base_logits=base,
        anchors=anchors,
        markov_w1=w1,
        markov_w2=w2,
        temperature=temperature,
        point_mass=point_mass,
        uniforms=torch.rand(batch, block, generator=g),
        uniform_final=torch.rand(batch, generator=g),
        limit=torch.randint(0, block + 1, (batch,), generator=g).int(),
        vocab_limit=vocab,
    )


def draft_distribution(case, b):
    """q of every slot of request b, float64 [K, V]."""
    prev = torch.cat([case["anchors"][b : b + 1], case["draft_tokens"][b, :-1]])
    logits = markov_step(
        case["base_logits"][b], prev, case["markov_w1"], case["markov_w2"], backend="reference"
    )
    limit = case["vocab_limit"]
    temperature = float(case["temperature"][b]) or 1.0
    q = torch.zeros(logits.shape, dtype=torch.float64)
    q[:, :limit] = torch.softmax(logits[:, :limit].double() / temperature, dim=-1)
    return q


def assert_acceptance_is_right(backend, case):
    (accepted, token), _ = run("accept_chain", backend, **case)
    assert accepted.dtype == torch.int32 and token.dtype == torch.int64
    slack_allowed = 1e-5 if case["base_logits"].dtype == torch.float32 else 5e-3
    decided = 0
    for b in range(len(accepted)):
        exact_accepted, exact_token, slack = op_oracle.accept_chain(
            case["target_probs"][b],
            case["draft_tokens"][b],
            case["draft_logq"][b].double().exp(),
            draft_distribution(case, b) if case["draft_tokens"].size(1) else None,
            case["uniforms"][b],
            case["uniform_final"][b],
            int(case["limit"][b]),
            bool(case["point_mass"][b]) or float(case["temperature"][b]) == 0,
        )
        if slack > slack_allowed:
            assert (int(accepted[b]), int(token[b])) == (exact_accepted, exact_token), b
            decided += 1
        else:
            assert 0 <= int(accepted[b]) <= int(case["limit"][b])
            assert case["target_probs"][b, int(accepted[b]), int(token[b])] > 0
    return decided


@each_backend("accept_chain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [3, 200])
def test_against_the_loop(backend, dtype, vocab):
    decided = assert_acceptance_is_right(backend, case_of(200, dtype=dtype, vocab=vocab))
    assert decided > 10


@each_backend("accept_chain")
@pytest.mark.parametrize("block", [0, 1, 2, 15])
def test_block_sizes(backend, block):
    assert assert_acceptance_is_right(backend, case_of(30, block=block)) > 5


@each_backend("accept_chain")
def test_a_large_vocabulary(backend):
    assert_acceptance_is_right(backend, case_of(6, vocab=20_000, block=2))


@each_backend("accept_chain")
def test_without_requests(backend):
    (accepted, token), _ = run("accept_chain", backend, **case_of(0))
    assert accepted.shape == token.shape == (0,)


@each_backend("accept_chain")
def test_vocab_limit_bounds_the_draft_distribution(backend):
    """The corrected logits beyond the limit are huge; they must not take part in q."""
    case = case_of(60, block=1, vocab=40)
    case["vocab_limit"] = 30
    case["base_logits"][:, :, 30:] = 500.0
    case["draft_tokens"].clamp_(max=29)
    assert assert_acceptance_is_right(backend, case) > 10


@each_backend("accept_chain")
def test_rejects_a_token_of_target_probability_zero(backend):
    case = case_of(8, block=3)
    case["limit"].fill_(3)
    case["uniforms"].zero_()  # u * q = 0: only the strict comparison rejects
    for b in range(8):
        case["target_probs"][b, 1, case["draft_tokens"][b, 1]] = 0.0
    case["target_probs"][:, 0] = 1.0
    (accepted, token), _ = run("accept_chain", backend, **case)
    assert accepted.tolist() == [1] * 8
    assert (case["target_probs"][torch.arange(8), 1, token] > 0).all()


@each_backend("accept_chain")
@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-24, 1.0])
def test_the_ends_of_the_cumulative_sum_have_weight(backend, uniform):
    case = case_of(12, vocab=2048, block=2)
    case["target_probs"][:, :, :700] = 0.0
    case["target_probs"][:, :, 1500:] = 0.0
    case["uniform_final"].fill_(uniform)
    (accepted, token), _ = run("accept_chain", backend, **case)
    assert (case["target_probs"][torch.arange(12), accepted.long(), token] > 0).all()


@each_backend("accept_chain")
def test_equal_distributions_fall_back_to_the_target(backend):
    """p = q leaves no residual; a forced rejection then draws from p."""
    case = case_of(9, block=1)
    case["point_mass"].fill_(False)
    case["temperature"].fill_(1.0)
    for b in range(9):
        case["target_probs"][b, 0] = draft_distribution(case, b)[0].float()
    case["limit"].fill_(1)
    case["draft_logq"].fill_(0.0)  # pretend the token was certain: u * 1 >= p rejects
    case["uniforms"].fill_(0.999)
    (accepted, token), _ = run("accept_chain", backend, **case)
    assert accepted.tolist() == [0] * 9
    assert (case["target_probs"][torch.arange(9), 0, token] > 0).all()


@each_backend("accept_chain")
@pytest.mark.parametrize("point", [False, True])
def test_first_token_follows_the_target_distribution(backend, point):
    """Draw, accept, repeat: the first emitted token has law p_0, whatever q is (chi-square)."""
    trials, vocab = (400 if backend == "emulation" else 6000), 8
    one = case_of(1, block=1, vocab=vocab, seed=3, agreement=0.7)
    case = {
        name: value.expand(trials, *value.shape[1:]).clone()
        if isinstance(value, torch.Tensor) and name not in ("markov_w1", "markov_w2")
        else value
        for name, value in one.items()
    }
    g = generator(5)
    case["temperature"].fill_(0.0 if point else 1.0)
    case["point_mass"].fill_(point)
    case["limit"].fill_(1)
    seeds = torch.randint(0, 2**60, (trials,), generator=g)
    token, logq = draft_sample(
        case["base_logits"][:, 0],
        case["anchors"],
        case["markov_w1"],
        case["markov_w2"],
        case["temperature"],
        seeds,
        torch.zeros(trials, dtype=torch.int64),
        vocab,
        backend="reference",
    )
    case["draft_tokens"][:, 0], case["draft_logq"][:, 0] = token, logq
    case["uniforms"] = torch.rand(trials, 1, generator=g)
    case["uniform_final"] = torch.rand(trials, generator=g)
    (accepted, following), _ = run("accept_chain", backend, **case)
    first = torch.where(accepted > 0, token, following)
    assert 0 < int(accepted.sum()) < trials
    expected = one["target_probs"][0, 0].double() * trials
    observed = torch.bincount(first, minlength=vocab).double()
    assert observed[expected == 0].sum() == 0
    present = expected > 0
    statistic = float(((observed - expected)[present] ** 2 / expected[present]).sum())
    freedom = int(present.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@each_backend("accept_greedy")
@pytest.mark.parametrize("block", [0, 1, 7])
def test_accept_greedy(backend, block):
    g = generator(2)
    batch = 40
    target = torch.randint(0, 2, (batch, block + 1), generator=g)
    draft = torch.randint(0, 2, (batch, block), generator=g)
    draft[::4] = target[::4, :block]
    limit = torch.randint(0, block + 1, (batch,), generator=g).int()
    (accepted, token), _ = run(
        "accept_greedy", backend, target_tokens=target, draft_tokens=draft, limit=limit
    )
    for b in range(batch):
        exact = op_oracle.accept_greedy(target[b], draft[b], int(limit[b]))
        assert (int(accepted[b]), int(token[b])) == exact


@each_backend("accept_greedy")
def test_accept_greedy_without_requests(backend):
    (accepted, token), _ = run(
        "accept_greedy",
        backend,
        target_tokens=torch.zeros(0, 8).long(),
        draft_tokens=torch.zeros(0, 7).long(),
        limit=torch.zeros(0).int(),
    )
    assert accepted.shape == token.shape == (0,)
