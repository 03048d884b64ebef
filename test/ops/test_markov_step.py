import op_oracle
import pytest
import torch
from op_cases import each_backend, generator, run

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def case_of(batch=3, vocab=500, rank=32, logits=torch.bfloat16, weights=torch.bfloat16, seed=1):
    g = generator(seed)
    return dict(
        base_logits=(4 * torch.randn(batch, vocab, generator=g)).to(logits),
        prev=torch.randint(0, vocab, (batch,), generator=g),
        markov_w1=(torch.randn(vocab, rank, generator=g) / rank**0.5).to(weights),
        markov_w2=torch.randn(vocab, rank, generator=g).to(weights),
    )


def rounding(dtype, size):
    """Half a unit in the last place of `dtype` at `size`, float64."""
    return size.abs().double().clamp(min=torch.finfo(dtype).tiny) * torch.finfo(dtype).eps / 2


def assert_step_is_right(backend, case):
    weights, logits = case["markov_w1"].dtype, case["base_logits"].dtype
    out, _ = run("markov_step", backend, **case)
    exact = op_oracle.markov_step(**case)
    assert out.dtype == torch.float32 and out.shape == exact.shape
    # Product rounded to the weights' dtype, then to the logits' dtype, then the sum rounded: at
    # most three half units, plus the fp32 accumulation of the product.
    product = exact - case["base_logits"].double()
    bound = rounding(weights, product) + rounding(logits, product) + rounding(logits, exact)
    magnitude = case["markov_w1"][case["prev"]].double().abs() @ case["markov_w2"].double().abs().T
    bound = 1.01 * bound + case["markov_w1"].size(1) * 2.0**-24 * magnitude + 1e-7
    assert ((out.double() - exact).abs() <= bound).all()


@each_backend("markov_step")
@pytest.mark.parametrize("logits", DTYPES)
@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize(
    "batch, vocab, rank", [(3, 500, 32), (1, 1, 1), (2, 257, 256), (4, 129, 7)]
)
def test_markov_step(backend, logits, weights, batch, vocab, rank):
    assert_step_is_right(backend, case_of(batch, vocab, rank, logits, weights))


@each_backend("markov_step")
def test_the_sum_has_the_precision_of_the_logits(backend):
    case = case_of(logits=torch.bfloat16)
    out, _ = run("markov_step", backend, **case)
    assert torch.equal(out, out.bfloat16().float())


@each_backend("markov_step")
def test_logits_of_one_slot_as_a_view(backend):
    case = case_of()
    dense, _ = run("markov_step", backend, **case)
    whole = torch.full((3, 7, 500), torch.nan, dtype=torch.bfloat16)
    whole[:, 4] = case["base_logits"]
    out, _ = run("markov_step", backend, **{**case, "base_logits": whole[:, 4]})
    assert torch.equal(out, dense)


@each_backend("markov_step")
@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("rank", [1, 7, 32])
def test_nothing_behind_a_row_is_read(backend, weights, rank):
    """W1 and W2 are columns of wider matrices that hold NaN elsewhere."""
    case = case_of(rank=rank, weights=weights)
    for name in ("markov_w1", "markov_w2"):
        wide = torch.full((500, rank + 3), torch.nan, dtype=weights)
        wide[:, :rank] = case[name]
        case[name] = wide[:, :rank]
    assert_step_is_right(backend, case)


@each_backend("markov_step")
def test_without_requests(backend):
    out, _ = run("markov_step", backend, **case_of(batch=0))
    assert out.shape == (0, 500)
