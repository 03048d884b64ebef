"""The CPU platform's paged attention against a float64 loop written from the definition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from longspark_cpu_platform import paged_attention as module
from longspark_cpu_platform.paged_attention import paged_attention


@dataclass
class Case:
    """A ragged batch over one shuffled pool."""

    query: torch.Tensor
    key_pool: torch.Tensor
    value_pool: torch.Tensor
    req_to_token: torch.Tensor
    req_rows: torch.Tensor
    kv_lens: torch.Tensor
    query_indptr: torch.Tensor
    scale: float

    @property
    def tensors(self) -> tuple[torch.Tensor | float, ...]:
        return tuple(vars(self).values())


def make_case(
    lens: list[tuple[int, int]],
    *,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """`lens`: (prefix, new rows) of each request."""
    g = torch.Generator().manual_seed(seed)
    rows = sum(p + n for p, n in lens)
    table_rows = torch.randperm(len(lens) + 3, generator=g)[: len(lens)]
    table = torch.full((len(lens) + 3, max(p + n for p, n in lens) + 5), -1, dtype=torch.int32)
    slots = torch.randperm(rows + 7, generator=g)[:rows].int()
    start = 0
    for row, (prefix, new) in zip(table_rows.tolist(), lens, strict=True):
        table[row, : prefix + new] = slots[start : start + prefix + new]
        start += prefix + new
    new_rows = torch.tensor([0] + [n for _, n in lens])
    return Case(
        torch.randn(int(new_rows.sum()), kv_heads * group, dim, generator=g).to(dtype),
        torch.randn(rows + 7, kv_heads, dim, generator=g).to(dtype),
        torch.randn(rows + 7, kv_heads, value_dim or dim, generator=g).to(dtype),
        table,
        table_rows,
        torch.tensor([p + n for p, n in lens]),
        new_rows.cumsum(0),
        1 / math.sqrt(dim),
    )


def by_definition(
    case: Case, dtype: torch.dtype, causal: bool = True, window: int = -1, softcap: float = 0.0
) -> torch.Tensor:
    """One query row and one head at a time, everything in `dtype`."""
    q, k, v = (x.to(dtype) for x in (case.query, case.key_pool, case.value_pool))
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=dtype)
    for b, row in enumerate(case.req_rows.tolist()):
        first, last = case.query_indptr[b : b + 2].tolist()
        length = int(case.kv_lens[b])
        for t in range(first, last):
            position = length - (last - t)
            seen = [
                p
                for p in range(length)
                if (p <= position or not causal) and (window < 0 or p >= position - window)
            ]
            slots = case.req_to_token[row, seen].long()
            for head in range(q.shape[1]):
                score = (k[slots, head // group] @ q[t, head]) * case.scale
                if softcap:
                    score = softcap * torch.tanh(score / softcap)
                out[t, head] = score.softmax(0) @ v[slots, head // group]
    return out


def check(case: Case, **options) -> None:
    """At most twice the error of the same definition computed in the case's own dtype.

    By root mean square: the largest error of a few hundred numbers is a matter of luck.
    """
    exact = by_definition(case, torch.float64, **options)
    plain = by_definition(case, case.query.dtype, **options)
    ours = paged_attention(*case.tensors, **options)
    assert ours.dtype == case.query.dtype and ours.shape == exact.shape
    assert rms(ours - exact) <= 2 * rms(plain - exact) + 1e-9


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("prefix", [0, 1, 255, 256, 257])
def test_prefix_lengths(prefix, dtype):
    check(make_case([(prefix, 8)], dtype=dtype))
    check(make_case([(prefix, 1)], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5])
def test_head_groups_and_dims(group, dim, dtype):
    check(make_case([(19, 5), (0, 3)], group=group, dim=dim, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_ragged_batch(dtype):
    check(make_case([(0, 1), (40, 1), (7, 8), (0, 33), (100, 2)], dtype=dtype))


@pytest.mark.parametrize("window", [0, 1, 7, 300])
def test_sliding_window(window):
    check(make_case([(20, 5), (0, 12), (3, 1)]), window=window)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(softcap):
    check(make_case([(20, 5), (0, 12)]), softcap=softcap)


def test_block_without_mask():
    check(make_case([(20, 8), (0, 8)]), causal=False)


def test_value_dim_differs():
    check(make_case([(20, 5)], dim=64, value_dim=32))


@pytest.mark.parametrize(
    "options", [{}, {"window": 6}, {"causal": False}, {"softcap": 5.0}], ids=str
)
def test_tiles_do_not_change_the_result(monkeypatch, options):
    """Every tile border falls somewhere inside: many small tiles against one large."""
    case = make_case([(37, 21), (0, 30), (64, 1)])
    whole = paged_attention(*case.tensors, **options)
    monkeypatch.setattr(module, "QUERY_TILE", 7)
    monkeypatch.setattr(module, "KEY_TILE", 16)
    tiled = paged_attention(*case.tensors, **options)
    torch.testing.assert_close(tiled, whole, rtol=1e-5, atol=1e-6)


def test_result_does_not_depend_on_the_batch():
    """A request alone gives the very bits that it gives among others."""
    case = make_case([(30, 4), (9, 6), (0, 5)])
    together = paged_attention(*case.tensors)
    for b in range(3):
        first, last = case.query_indptr[b : b + 2].tolist()
        alone = paged_attention(
            case.query[first:last],
            case.key_pool,
            case.value_pool,
            case.req_to_token,
            case.req_rows[b : b + 1],
            case.kv_lens[b : b + 1],
            torch.tensor([0, last - first]),
            case.scale,
        )
        assert torch.equal(alone, together[first:last])


def test_reads_only_its_own_rows():
    """Neither pool rows that belong to nobody nor cells behind a request's end are touched."""
    case = make_case([(30, 4), (9, 6)])
    clean = paged_attention(*case.tensors)
    used = torch.zeros(case.key_pool.shape[0], dtype=torch.bool)
    for row, length in zip(case.req_rows.tolist(), case.kv_lens.tolist(), strict=True):
        used[case.req_to_token[row, :length].long()] = True
        case.req_to_token[row, length:] = 10**6
    case.key_pool[~used] = torch.nan
    case.value_pool[~used] = torch.nan
    assert torch.equal(paged_attention(*case.tensors), clean)


def test_strided_pool_views():
    """A pool may be a view into a larger buffer, with gaps between rows and heads."""
    case = make_case([(30, 4)])
    clean = paged_attention(*case.tensors)
    wide = torch.zeros(case.key_pool.shape[0], 2, 2, 64 + 16)
    wide[:, 0, :, :64], wide[:, 1, :, :64] = case.key_pool, case.value_pool
    case.key_pool, case.value_pool = wide[:, 0, :, :64], wide[:, 1, :, :64]
    torch.testing.assert_close(paged_attention(*case.tensors), clean, rtol=1e-6, atol=1e-7)


def test_padding_rows_are_zero():
    case = make_case([(3, 2)])
    case.query = torch.cat([case.query, torch.full_like(case.query, torch.nan)])
    out = paged_attention(*case.tensors)
    assert out[:2].isfinite().all() and not out[2:].any()


def test_the_compiled_operator_is_taken_where_it_exists(monkeypatch):
    def compiled(*args, **kwargs):
        raise AssertionError

    extension = SimpleNamespace(load_extension=lambda: True)
    modules = {
        module.COMPILED: SimpleNamespace(paged_attention=compiled),
        "longspark_sglang.ops.dispatch": extension,
    }
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(module.importlib, "import_module", modules.__getitem__)
    monkeypatch.setattr(torch.ops, "longspark", SimpleNamespace(paged_attention=compiled))
    monkeypatch.delenv("LONGSPARK_CPU_ATTENTION", raising=False)
    assert module.fastest() is compiled
    extension.load_extension = lambda: False
    assert module.fastest() is paged_attention
    extension.load_extension = lambda: True
    monkeypatch.setenv("LONGSPARK_CPU_ATTENTION", "torch")
    assert module.fastest() is paged_attention
    monkeypatch.delenv("LONGSPARK_CPU_ATTENTION")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert module.fastest() is paged_attention


def test_extreme_scores_stay_finite():
    case = make_case([(300, 8)])
    case.query *= 1e4
    assert paged_attention(*case.tensors).isfinite().all()
