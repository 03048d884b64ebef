"""Attention over a paged pool: against float64, and bit for bit against itself."""

import math

import cpu_isas
import pytest
import torch
import torch.nn.functional as F
from longspark_sglang import ops
from op_cases import (
    LAYOUTS,
    assert_as_good_as,
    distinct_rows,
    generator,
    listed,
    make_pool,
    num_pool_rows,
    poison_unused,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# "reference", or an instruction set of the compiled operator.
each_way = pytest.mark.parametrize("way", ["reference", *cpu_isas.isas()])
each_isa = pytest.mark.parametrize("way", cpu_isas.isas())


def case_of(
    kv_lens,
    query_lens,
    *,
    seed=1,
    group=3,
    kv_heads=2,
    dim=64,
    value_dim=None,
    dtype=torch.float32,
    layout="flat",
    page_size=16,
    padding=0,
    **options,
):
    """Requests with `kv_lens` positions, the last `query_lens` of which ask."""
    g = generator(seed)
    value_dim = value_dim or dim
    key_pool = make_pool(sum(kv_lens) + 9, kv_heads, dim, dtype, layout, page_size, g)
    value_pool = make_pool(sum(kv_lens) + 9, kv_heads, value_dim, dtype, layout, page_size, g)
    rows = distinct_rows(num_pool_rows(key_pool), kv_lens, max(kv_lens, default=0) + 3, g)
    for pool in (key_pool, value_pool):
        poison_unused(pool, listed(rows, kv_lens))
    request_rows = torch.randperm(len(kv_lens) + 2, generator=g)[: len(kv_lens)]
    req_to_token = torch.full((len(kv_lens) + 2, rows.size(1)), -1, dtype=torch.int32)
    req_to_token[request_rows] = rows
    query_rows = sum(query_lens) + padding
    return dict(
        query=torch.randn(query_rows, group * kv_heads, dim, generator=g).to(dtype),
        key_pool=key_pool,
        value_pool=value_pool,
        req_to_token=req_to_token,
        req_rows=request_rows,
        kv_lens=torch.tensor(kv_lens, dtype=torch.int64),
        query_indptr=torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()]),
        scale=dim**-0.5,
        **options,
    )


def attend(way, **case):
    if way == "reference":
        return ops.paged_attention(**case, backend="reference")
    with cpu_isas.using(way):
        return ops.paged_attention(**case, backend="cpu")


def requests_of(case):
    """(query rows, keys [n, Hq, d], values [n, Hq, dv], query slice) of every request."""
    indptr, kv_heads = case["query_indptr"].tolist(), case["key_pool"].size(-2)
    group = case["query"].size(1) // kv_heads
    for b, length in enumerate(case["kv_lens"].tolist()):
        ids = case["req_to_token"][case["req_rows"][b], :length].tolist()
        rows = slice(indptr[b], indptr[b + 1])
        if rows.start == rows.stop:
            continue
        keys, values = (
            torch.stack([row_of(pool, t) for t in ids]).repeat_interleave(group, dim=1)
            for pool in (case["key_pool"], case["value_pool"])
        )
        yield case["query"][rows], keys, values, rows


def row_of(pool, t):
    return pool[t] if pool.dim() == 3 else pool[t // pool.size(1), t % pool.size(1)]


def visible(asking, length, causal=True, window=-1):
    own = torch.arange(length - asking, length)[:, None]
    position = torch.arange(length)
    seen = torch.ones(asking, length, dtype=torch.bool)
    if causal:
        seen &= position <= own
    if window >= 0:
        seen &= position >= own - window
    return seen


def exact(case):
    """Float64, one request at a time."""
    out = torch.zeros(*case["query"].shape[:2], case["value_pool"].size(-1), dtype=torch.float64)
    softcap = case.get("softcap", 0.0)
    for query, keys, values, rows in requests_of(case):
        score = torch.einsum("qhd,khd->hqk", query.double(), keys.double()) * case["scale"]
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        seen = visible(len(query), len(keys), case.get("causal", True), case.get("window", -1))
        weight = score.masked_fill(~seen, -math.inf).softmax(dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weight, values.double())
    return out


def gather_and_sdpa(case):
    """What one does without this operator, in the same dtype."""
    out = case["query"].new_zeros(*case["query"].shape[:2], case["value_pool"].size(-1))
    for query, keys, values, rows in requests_of(case):
        seen = visible(len(query), len(keys), case.get("causal", True), case.get("window", -1))
        attended = F.scaled_dot_product_attention(
            *(x.transpose(0, 1).unsqueeze(0) for x in (query, keys, values)),
            attn_mask=seen,
            scale=case["scale"],
        )
        out[rows] = attended[0].transpose(0, 1)
    return out


def assert_right(way, case):
    out = attend(way, **case)
    assert out.dtype == case["query"].dtype
    plain = attend("reference", **case) if case.get("softcap") else gather_and_sdpa(case)
    assert_as_good_as(out, exact(case), plain, floor=2e-6)


@each_way
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(way, dtype, layout):
    """A prefill, a decode, a verify and an idle request in one batch, in every pool layout."""
    assert_right(way, case_of([40, 70, 100, 5], [40, 1, 8, 0], dtype=dtype, layout=layout))


@each_way
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_page_sizes(way, page_size):
    assert_right(way, case_of([130, 7], [8, 1], layout="nhd", page_size=page_size))


@each_way
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 2100])
def test_lengths(way, length):
    """Around the blocks and chunks of the compiled operator."""
    for asking in {1, min(length, 8)}:
        assert_right(way, case_of([length], [asking], kv_heads=1))


@each_way
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "group, asking", [(1, 1), (2, 8), (3, 8), (4, 8), (5, 8), (8, 8), (16, 8), (32, 8), (3, 150)]
)
def test_lanes(way, dtype, group, asking):
    assert_right(way, case_of([200], [asking], group=group, kv_heads=1, dim=32, dtype=dtype))


@each_way
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim, value_dim", [(16, 16), (80, 80), (96, 32), (128, 128), (256, 256)])
def test_head_dims(way, dtype, dim, value_dim):
    assert_right(way, case_of([90], [8], dim=dim, value_dim=value_dim, kv_heads=1, dtype=dtype))


@each_way
@pytest.mark.parametrize("dim, value_dim", [(1, 3), (33, 7)])
def test_odd_head_dims(way, dim, value_dim):
    assert_right(way, case_of([90], [8], dim=dim, value_dim=value_dim, dtype=torch.float16))


@each_way
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 63, 64, 100, 5000])
def test_windows(way, dtype, window):
    assert_right(way, case_of([1300, 90], [8, 90], window=window, kv_heads=1, dtype=dtype))


@each_way
def test_soft_cap(way):
    assert_right(way, case_of([150], [8], softcap=2.0))
    case = case_of([150], [8], softcap=2.0)
    assert_right(way, {**case, "query": case["query"] * 1000})


@each_way
def test_without_causal_mask(way):
    assert_right(way, case_of([150, 30], [8, 30], causal=False))


@each_way
def test_rows_of_no_request_are_zero(way):
    out = attend(way, **case_of([20, 10], [8, 2], padding=3))
    assert out[10:].eq(0).all() and out[:10].ne(0).any()


@each_way
def test_without_requests(way):
    case = case_of([], [])
    assert attend(way, **case).shape == (0, 6, 64)
    assert attend(way, **{**case, "query": torch.ones(4, 6, 64)}).eq(0).all()


@each_way
def test_large_scores_stay_finite(way):
    case = case_of([700], [8])
    assert_right(way, {**case, "query": case["query"] * 100})


@each_way
def test_query_that_is_a_view(way):
    """Queries cut out of one q|k|v projection."""
    case = case_of([50], [8])
    wide = torch.randn(8, 10, 64)
    wide[:, :6] = case["query"]
    assert torch.equal(attend(way, **{**case, "query": wide[:, :6]}), attend(way, **case))


@each_isa
def test_random_batches(way):
    for seed in range(12):
        g = generator(seed)
        draw = lambda low, high: int(torch.randint(low, high + 1, (), generator=g))  # noqa: B023, E731
        kv_lens = [draw(1, 1400) for _ in range(draw(1, 4))]
        query_lens = [draw(0, min(n, 80)) for n in kv_lens]
        assert_right(
            way,
            case_of(
                kv_lens,
                query_lens,
                seed=seed,
                group=draw(1, 6),
                kv_heads=draw(1, 2),
                dim=8 * draw(1, 12),
                dtype=DTYPES[draw(0, 2)],
                layout=LAYOUTS[draw(0, 3)],
                window=draw(-1, 200),
            ),
        )


# ---- The same bits, however the work is cut ------------------------------------------------------


def rows_of_request(case, b, asking):
    """The case of request `b` alone, with its last `asking` rows."""
    end = int(case["query_indptr"][b + 1])
    return {
        **case,
        "query": case["query"][end - asking : end],
        "req_rows": case["req_rows"][b : b + 1],
        "kv_lens": case["kv_lens"][b : b + 1],
        "query_indptr": torch.tensor([0, asking]),
    }


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_prefill_verify_and_decode(way, dtype):
    """What makes greedy speculative decoding reproduce plain decoding exactly."""
    case = case_of([1100, 1300], [100, 300], kv_heads=1, dtype=dtype)
    whole = attend(way, **case)
    verify = attend(way, **rows_of_request(case, 1, 8))
    assert torch.equal(verify, whole[-8:])
    for row in range(8):  # as if the positions after it didn't exist yet
        decode = rows_of_request(case, 1, 8 - row)
        decode["query"], decode["query_indptr"] = decode["query"][:1], torch.tensor([0, 1])
        decode["kv_lens"] = decode["kv_lens"] - (7 - row)
        assert torch.equal(attend(way, **decode)[0], verify[row])


@each_isa
def test_threads_do_not_change_bits(way):
    case = case_of([5000], [8], kv_heads=2, dim=32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = attend(way, **case)
        torch.set_num_threads(4)
        assert torch.equal(attend(way, **case), alone)
    finally:
        torch.set_num_threads(threads)


# ---- Refusals ------------------------------------------------------------------------------------


def test_all_problems_of_the_arguments_at_once():
    case = case_of([20], [4])
    case.update(
        req_to_token=case["req_to_token"].long(), scale=0.0, value_pool=case["value_pool"].half()
    )
    with pytest.raises(ops.ArgumentError) as info:
        ops.paged_attention(**case)
    for part in (
        "req_to_token must be int32, not int64",
        "scale must be greater than 0",
        "value_pool must be float32, not float16",
    ):
        assert part in str(info.value)


@each_isa
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(kv_lens=torch.tensor([3])), "request 0 has 4 query rows, but kv_lens is 3"),
        (dict(kv_lens=torch.tensor([24])), r"kv_lens holds 24, allowed is 0..23"),
        (dict(req_rows=torch.tensor([3])), r"req_rows holds 3, allowed is 0..2"),
        (dict(req_rows=torch.tensor([-1])), r"req_rows holds -1"),
        (dict(query_indptr=torch.tensor([0, 5])), r"query_indptr holds 5, allowed is 0..4"),
        (
            dict(req_to_token=torch.full((3, 23), 29, dtype=torch.int32)),
            r"req_to_token holds 29, allowed is 0..28",
        ),
    ],
)
def test_indices_that_lead_out_of_a_tensor(way, change, message):
    with pytest.raises(IndexError, match=message):
        attend(way, **{**case_of([20], [4]), **change})


@pytest.mark.skipif(not cpu_isas.isas(), reason="needs the CPU operators")
def test_opcheck():
    case = case_of([40, 9], [8, 1])
    arguments = (*case.values(), True, -1, 0.0)
    torch.library.opcheck(torch.ops.longspark.paged_attention.default, arguments)
