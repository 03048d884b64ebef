import math

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

COLUMNS = 8


def case_of(
    counts,
    *,
    seed=1,
    group=4,
    kv_heads=2,
    dim=64,
    slots=16,
    layers=2,
    dtype=torch.bfloat16,
    layout="flat",
    page_size=16,
    filled=True,
    columns=COLUMNS,
):
    g = generator(seed)
    heads, num_rows = group * kv_heads, sum(counts) + 20
    pools = [
        make_pool(num_rows, kv_heads, dim, dtype, layout, page_size, g) for _ in range(2 * layers)
    ]
    rows = distinct_rows(num_pool_rows(pools[0]), counts, columns, g)
    used = listed(rows, counts)
    for pool in pools:
        poison_unused(pool, used)
    states = len(counts) + 2
    state_value = torch.zeros(states, layers, heads, slots, dim)
    state_lse = torch.full((states, layers, heads, slots), -math.inf)
    if filled:
        state_value[1:] = torch.randn(state_value[1:].shape, generator=g)
        state_lse[1:] = torch.randn(state_lse[1:].shape, generator=g) + 2
    return dict(
        queries=torch.randn(layers, heads, slots, dim, generator=g).to(dtype),
        key_pools=pools[:layers],
        value_pools=pools[layers:],
        rows=rows,
        counts=torch.tensor(counts, dtype=torch.int32),
        state_value=state_value,
        state_lse=state_lse,
        slots=torch.randperm(states, generator=g)[: len(counts)],
        scale=dim**-0.5,
    )


def bulk(case):
    """The same merge in the bulk form's arguments."""
    counts = case["counts"].tolist()
    rows = [case["rows"][b, :count] for b, count in enumerate(counts)]
    arguments = {name: case[name] for name in case if name != "counts"}
    arguments["rows"] = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int32)
    arguments["indptr"] = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]).int()
    return arguments


def exact(case):
    lists = [case["rows"][b, :count].tolist() for b, count in enumerate(case["counts"].tolist())]
    return op_oracle.summary_merge(
        case["queries"],
        case["key_pools"],
        case["value_pools"],
        lists,
        case["state_value"],
        case["state_lse"],
        case["slots"],
        case["scale"],
    )


def assert_merge_is_right(op, backend, case):
    arguments = case if op == "summary_merge" else bulk(case)
    _, after = run(op, backend, **arguments)
    _, plain = run(op, "reference", **arguments)
    value, lse = exact(case)
    assert_as_good_as(after["state_value"], value, plain["state_value"])
    touched = lse.isfinite()
    assert torch.equal(after["state_lse"].isfinite(), touched)
    assert_as_good_as(after["state_lse"][touched], lse[touched], plain["state_lse"][touched])
    # States of nobody and of requests without new rows stay exactly as they were.
    idle = torch.ones(len(case["state_lse"]), dtype=torch.bool)
    idle[case["slots"][case["counts"] > 0]] = False
    assert torch.equal(after["state_value"][idle], case["state_value"][idle])
    assert torch.equal(after["state_lse"][idle], case["state_lse"][idle])


BOTH = ("summary_merge", "summary_merge_bulk")
both_forms = pytest.mark.parametrize(
    "op, backend",
    [
        pytest.param(
            op, *(p.values if hasattr(p, "values") else (p,)), marks=getattr(p, "marks", ())
        )
        for op in BOTH
        for p in each_backend(op).args[1]
    ],
)


@both_forms
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(op, backend, layout):
    assert_merge_is_right(op, backend, case_of([0, 1, 8, 3], layout=layout))


@both_forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_and_empty_state(op, backend, dtype):
    assert_merge_is_right(op, backend, case_of([0, 1, 8], dtype=dtype, filled=False))


@both_forms
@pytest.mark.parametrize("group, dim", [(1, 64), (3, 64), (5, 128), (16, 64), (2, 256), (4, 80)])
def test_head_groups_and_dims(op, backend, group, dim):
    assert_merge_is_right(op, backend, case_of([8, 2], group=group, dim=dim, kv_heads=1))


@both_forms
@pytest.mark.parametrize("slots", [1, 5, 16, 32])
def test_summary_slots(op, backend, slots):
    assert_merge_is_right(op, backend, case_of([7, 8], slots=slots, kv_heads=1))


@both_forms
@pytest.mark.parametrize("page_size", [1, 64])
def test_page_sizes(op, backend, page_size):
    assert_merge_is_right(op, backend, case_of([7, 8], layout="hnd", page_size=page_size))


@both_forms
def test_without_requests(op, backend):
    assert_merge_is_right(op, backend, case_of([]))


@both_forms
def test_extreme_scores_stay_finite(op, backend):
    case = case_of([8, 8], dtype=torch.float32)
    case["scale"] = 60.0  # scores of several hundred: exp without a shift would overflow
    assert_merge_is_right(op, backend, case)


@each_backend("summary_merge_bulk")
@pytest.mark.parametrize("count", [255, 256, 257, 1500])
def test_bulk_lengths(backend, count):
    case = case_of([count, 1, 0, 40], columns=count, layers=1, kv_heads=1, group=2)
    assert_merge_is_right("summary_merge_bulk", backend, case)


@each_backend("summary_merge_bulk")
def test_bulk_takes_int64_bounds(backend):
    arguments = bulk(case_of([5, 0, 8]))
    _, small = run("summary_merge_bulk", backend, **arguments)
    arguments["indptr"] = arguments["indptr"].long()
    _, wide = run("summary_merge_bulk", backend, **arguments)
    assert torch.equal(small["state_value"], wide["state_value"])


@each_backend("summary_merge_bulk")
@pytest.mark.parametrize("piece", [1, 7, 8, 64, 4096])
def test_any_split_of_the_rows_gives_the_same_state(backend, piece):
    total = 4096 if piece > 8 else 512
    case = case_of(
        [total], columns=total, layers=1, kv_heads=1, group=1, dim=64, filled=False, slots=4
    )
    arguments = bulk(case)
    _, once = run("summary_merge_bulk", backend, **arguments)
    state = {name: arguments[name] for name in ("state_value", "state_lse")}
    for begin in range(0, total, piece):
        rows = arguments["rows"][begin : begin + piece]
        part = {**arguments, **state, "rows": rows, "indptr": torch.tensor([0, len(rows)]).int()}
        _, after = run("summary_merge_bulk", backend, **part)
        state = {name: after[name] for name in state}
    slot = case["slots"]
    torch.testing.assert_close(
        state["state_value"][slot], once["state_value"][slot], rtol=2e-5, atol=2e-5
    )
    torch.testing.assert_close(
        state["state_lse"][slot], once["state_lse"][slot], rtol=1e-5, atol=1e-5
    )


@each_backend("summary_merge")
def test_small_and_bulk_merges_agree(backend):
    case = case_of([8, 3, 0], filled=True)
    _, small = run("summary_merge", backend, **case)
    _, large = run("summary_merge_bulk", backend, **bulk(case))
    torch.testing.assert_close(small["state_value"], large["state_value"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(small["state_lse"], large["state_lse"], rtol=1e-5, atol=1e-5)


@both_forms
def test_padding_requests_may_share_a_state_row(op, backend):
    case = case_of([5, 0, 0, 0])
    case["slots"] = torch.tensor([2, 4, 4, 4])
    assert_merge_is_right(op, backend, case)
