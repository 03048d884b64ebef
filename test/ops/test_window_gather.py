import op_oracle
import pytest
import torch
from op_cases import (
    LAYOUTS,
    distinct_rows,
    each_backend,
    generator,
    listed,
    make_pool,
    num_pool_rows,
    poison_unused,
    run,
)


def index_case(seed, seq_lens, width=600):
    g = generator(seed)
    table = torch.randint(0, 10_000, (len(seq_lens) + 3, width), generator=g).int()
    req_rows = torch.randperm(len(seq_lens) + 3, generator=g)[: len(seq_lens)]
    return dict(
        req_to_token=table, req_rows=req_rows, seq_lens=torch.tensor(seq_lens, dtype=torch.int64)
    )


@each_backend("window_index")
@pytest.mark.parametrize("window", [1, 7, 256])
def test_window_index(backend, window):
    case = index_case(1, [0, 1, 5, 255, 256, 257, 599, 600])
    (rows, lens), _ = run("window_index", backend, **case, window=window)
    exact_rows, exact_lens = op_oracle.window_index(**case, window=window)
    assert rows.dtype == lens.dtype == torch.int32
    assert torch.equal(rows, exact_rows) and torch.equal(lens, exact_lens)


@each_backend("window_index")
def test_window_index_never_reads_past_the_committed_rows(backend):
    case = index_case(2, [3, 40])
    for request, length in zip(case["req_rows"], case["seq_lens"], strict=True):
        case["req_to_token"][request, length:] = -12345
    (rows, _), _ = run("window_index", backend, **case, window=16)
    assert (rows >= 0).all()


@each_backend("window_index")
def test_window_index_of_a_table_view(backend):
    case = index_case(3, [10, 20, 300])
    wide = torch.full((6, 900), -7, dtype=torch.int32)
    wide[:, 200:800] = case["req_to_token"]
    case["req_to_token"] = wide[:, 200:800]
    (rows, lens), _ = run("window_index", backend, **case, window=64)
    exact_rows, exact_lens = op_oracle.window_index(**case, window=64)
    assert torch.equal(rows, exact_rows) and torch.equal(lens, exact_lens)


@each_backend("window_index")
def test_window_index_without_requests(backend):
    (rows, lens), _ = run("window_index", backend, **index_case(4, []), window=5)
    assert rows.shape == (0, 5) and lens.shape == (0,)


@each_backend("window_index_paged")
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [1, 100, 256])
def test_window_index_paged(backend, page_size, window):
    g = generator(page_size)
    pages = torch.tensor([0, 1, 3, 0, 20])
    indptr = torch.cat([torch.zeros(1), pages.cumsum(0)]).int()
    indices = torch.randperm(200, generator=g)[: int(indptr[-1])].int()
    last = torch.randint(1, page_size + 1, (5,), generator=g).int()
    last[3] = 0  # FlashInfer leaves anything here for a request without pages
    arguments = (indptr, indices, last, page_size, window)
    names = ("kv_indptr", "kv_indices", "kv_last_page_len", "page_size", "window")
    (rows, lens), _ = run("window_index_paged", backend, **dict(zip(names, arguments, strict=True)))
    exact_rows, exact_lens = op_oracle.window_index_paged(*arguments)
    assert torch.equal(rows, exact_rows) and torch.equal(lens, exact_lens)


def gather_case(seed, lens, seq_lens, window, layout="flat", dtype=torch.bfloat16, page_size=16):
    g = generator(seed)
    layers, kv_heads, dim, num_rows = 3, 2, 16, 2 * sum(lens) + 40
    keys = [make_pool(num_rows, kv_heads, dim, dtype, layout, page_size, g) for _ in range(layers)]
    values = [
        make_pool(num_rows, kv_heads, dim, dtype, layout, page_size, g) for _ in range(layers)
    ]
    rows = distinct_rows(num_pool_rows(keys[0]), lens, window, g)
    used = listed(rows, lens)
    for pool in keys + values:
        poison_unused(pool, used)
    shape = (layers, len(lens), window, kv_heads, dim)
    return dict(
        key_pools=keys,
        value_pools=values,
        rows=rows,
        lens=torch.tensor(lens, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int64),
        out_key=torch.full(shape, 3.0, dtype=dtype),
        out_value=torch.full(shape, 4.0, dtype=dtype),
    )


def assert_gather_is_exact(backend, case):
    _, after = run("window_gather", backend, **case)
    op_oracle.window_gather(**case)
    assert torch.equal(after["out_key"], case["out_key"])
    assert torch.equal(after["out_value"], case["out_value"])


@each_backend("window_gather")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_window_gather(backend, layout, dtype):
    case = gather_case(5, [0, 1, 7, 32, 32], [0, 1, 7, 32, 1000], 32, layout, dtype)
    assert_gather_is_exact(backend, case)


@each_backend("window_gather")
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_window_gather_page_sizes(backend, page_size):
    case = gather_case(6, [5, 16], [5, 99], 16, "hnd", page_size=page_size)
    assert_gather_is_exact(backend, case)


@each_backend("window_gather")
def test_advancing_the_ring_equals_copying_the_whole_window(backend):
    window, length = 16, 50
    case = gather_case(7, [window], [length], window)
    _, whole = run("window_gather", backend, **case)
    ring = {**case, "out_key": case["out_key"].clone(), "out_value": case["out_value"].clone()}
    for step, (begin, end) in enumerate([(0, 9), (9, 10), (10, 16)]):
        rows = torch.zeros_like(case["rows"])
        rows[0, : end - begin] = case["rows"][0, begin:end]
        ring.update(
            rows=rows,
            lens=torch.tensor([end - begin], dtype=torch.int32),
            seq_lens=torch.tensor([length - window + end]),
        )
        _, ring = run("window_gather", backend, **ring)
        assert step < 2 or torch.equal(ring["out_key"], whole["out_key"])
    assert torch.equal(ring["out_value"], whole["out_value"])
