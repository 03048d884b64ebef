import op_oracle
import pytest
import torch
from op_cases import (
    LAYOUTS,
    assert_as_good_as,
    distinct_rows,
    each_backend,
    generator,
    listed,
    make_pool,
    num_pool_rows,
    poison_unused,
    run,
)


def case_of(
    lens,
    *,
    seed=1,
    block=7,
    group=4,
    kv_heads=2,
    dim=64,
    slots=16,
    window=32,
    dtype=torch.bfloat16,
    layout="flat",
    page_size=16,
    scale=None,
):
    g = generator(seed)
    batch, heads, num_rows = len(lens), group * kv_heads, sum(lens) + 20
    key_pool = make_pool(num_rows, kv_heads, dim, dtype, layout, page_size, g)
    value_pool = make_pool(num_rows, kv_heads, dim, dtype, layout, page_size, g)
    rows = distinct_rows(num_pool_rows(key_pool), lens, window, g)
    used = listed(rows, lens)
    for pool in (key_pool, value_pool):
        poison_unused(pool, used)
    layers = 3  # the state holds every layer; the operator gets a view of one
    state = torch.randn(batch + 2, layers, heads, slots, dim, generator=g)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    return dict(
        query=normal(batch, block, heads, dim),
        summary_key=normal(heads, slots, dim),
        summary_value=state[:, 1],
        slots=torch.randperm(batch + 2, generator=g)[:batch],
        key_pool=key_pool,
        value_pool=value_pool,
        rows=rows,
        lens=torch.tensor(lens, dtype=torch.int32),
        block_key=normal(batch, block, kv_heads, dim),
        block_value=normal(batch, block, kv_heads, dim),
        scale=dim**-0.5 if scale is None else scale,
    )


def assert_attention_is_right(backend, case):
    out, _ = run("block_attention", backend, **case)
    plain, _ = run("block_attention", "reference", **case)
    exact = op_oracle.block_attention(**case)
    assert out.shape == case["query"].shape and out.dtype == case["query"].dtype
    assert_as_good_as(out, exact, plain)


@each_backend("block_attention")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_layouts_and_dtypes(backend, layout, dtype):
    assert_attention_is_right(backend, case_of([0, 1, 31, 32], layout=layout, dtype=dtype))


@each_backend("block_attention")
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 63, 64, 65, 255, 256, 257])
def test_window_lengths(backend, length):
    assert_attention_is_right(backend, case_of([length], window=257, kv_heads=1))


@each_backend("block_attention")
@pytest.mark.parametrize(
    "group, dim", [(1, 64), (2, 64), (3, 64), (5, 128), (8, 64), (16, 64), (4, 256), (3, 80)]
)
def test_head_groups_and_dims(backend, group, dim):
    assert_attention_is_right(backend, case_of([5, 20], group=group, dim=dim, kv_heads=1))


@each_backend("block_attention")
@pytest.mark.parametrize("block", [1, 2, 7, 8, 16])
def test_block_sizes(backend, block):
    assert_attention_is_right(backend, case_of([20, 32], block=block))


@each_backend("block_attention")
@pytest.mark.parametrize("slots", [1, 3, 16, 40])
def test_summary_slots(backend, slots):
    assert_attention_is_right(backend, case_of([9], slots=slots))


@each_backend("block_attention")
@pytest.mark.parametrize("page_size", [1, 2, 64])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_page_sizes(backend, page_size, layout):
    assert_attention_is_right(backend, case_of([30, 3], layout=layout, page_size=page_size))


@each_backend("block_attention")
def test_without_requests(backend):
    out, _ = run("block_attention", backend, **case_of([]))
    assert out.shape == (0, 7, 8, 64)


@each_backend("block_attention")
def test_large_scores_stay_finite(backend):
    assert_attention_is_right(backend, case_of([32, 4], dtype=torch.float32, scale=40.0))


@each_backend("block_attention")
def test_requests_do_not_see_each_other(backend):
    case = case_of([12, 32, 7])
    together, _ = run("block_attention", backend, **case)
    per_request = ("query", "slots", "rows", "lens", "block_key", "block_value")
    for b in range(3):
        alone = {
            name: value[b : b + 1] if name in per_request else value for name, value in case.items()
        }
        out, _ = run("block_attention", backend, **alone)
        torch.testing.assert_close(out[0], together[b], rtol=1e-2, atol=1e-2)


@each_backend("block_attention")
def test_strided_queries_and_block_rows(backend):
    """Q, K and V come as slices of one projection."""
    case = case_of([12, 30])
    dense, _ = run("block_attention", backend, **case)
    for name in ("query", "block_key", "block_value"):
        tensor = case[name]
        wide = torch.full((*tensor.shape[:2], 5 * tensor.size(2), tensor.size(3)), torch.nan)
        wide = wide.to(tensor.dtype)
        wide[:, :, 1 : 1 + tensor.size(2)] = tensor
        case[name] = wide[:, :, 1 : 1 + tensor.size(2)]
    out, _ = run("block_attention", backend, **case)
    assert torch.equal(out, dense)
