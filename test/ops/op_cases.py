"""Random inputs for the operators, and running an operator on a chosen backend."""

import functools
import math

import emulation
import pytest
import torch
from longspark_sglang import ops
from longspark_sglang.ops import dispatch

EMULATED = (
    "accept_chain",
    "accept_greedy",
    "block_attention",
    "draft_sample",
    "markov_step",
    "summary_merge",
    "summary_merge_bulk",
    "window_gather",
    "window_index",
    "window_index_paged",
)
LAYOUTS = ("flat", "nhd", "hnd", "strided")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def make_pool(num_rows, kv_heads, dim, dtype, layout, page_size, g):
    """A random pool with at least `num_rows` rows in one of LAYOUTS."""
    pages = math.ceil(num_rows / page_size)
    if layout == "flat":
        return torch.randn(num_rows, kv_heads, dim, generator=g).to(dtype)
    if layout == "strided":  # K and V of several layers interleaved in one buffer
        return torch.randn(num_rows, 3, kv_heads, dim, generator=g).to(dtype)[:, 1]
    if layout == "nhd":
        return torch.randn(pages, page_size, kv_heads, dim, generator=g).to(dtype)
    pool = torch.randn(pages, kv_heads, page_size, dim, generator=g).to(dtype)
    return pool.permute(0, 2, 1, 3)


def num_pool_rows(pool):
    return pool.size(0) if pool.dim() == 3 else pool.size(0) * pool.size(1)


def poison_unused(pool, used_rows):
    """NaN in every row that no id in `used_rows` names: reading one must not show anywhere."""
    unused = torch.ones(num_pool_rows(pool), dtype=torch.bool)
    unused[torch.as_tensor(used_rows, dtype=torch.long)] = False
    ids = unused.nonzero()[:, 0]
    if pool.dim() == 3:
        pool[ids] = math.nan
    else:
        pool[ids // pool.size(1), ids % pool.size(1)] = math.nan


def distinct_rows(num_rows, lens, width, g):
    """[B, width] int32 row ids, distinct in the whole batch within lens, junk beyond them.

    The junk stays inside the pool (a padded table does too) but names rows of nobody.
    """
    order = torch.randperm(num_rows, generator=g).int()
    rows = torch.zeros(len(lens), width, dtype=torch.int32)
    taken = 0
    for b, length in enumerate(lens):
        rows[b, :length] = order[taken : taken + length]
        taken += length
    for b, length in enumerate(lens):
        rows[b, length:] = order[-1]
    assert taken < num_rows, "the last row of the order is left for junk"
    return rows


def listed(rows, lens):
    """The row ids that are in use, of rows [B, W] with lens[b] used entries each."""
    return [t for b, length in enumerate(lens) for t in rows[b, :length].tolist()]


def _clone(value, device):
    """Copy that keeps strides (a plain clone would make views dense)."""
    if isinstance(value, (list, tuple)):
        return [_clone(item, device) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage()
    storage = storage.clone() if device == "cpu" else storage.cuda()
    empty = torch.empty(0, dtype=value.dtype, device=device)
    return empty.set_(storage, value.storage_offset(), value.shape, value.stride())


def _to_cpu(value):
    if isinstance(value, (list, tuple)):
        return type(value)(_to_cpu(item) for item in value)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def run(op, backend, **arguments):
    """Run `op` on copies of the arguments; returns (result, the copies, now mutated) on the CPU."""
    device = "cuda" if backend == "cuda" else "cpu"
    copies = {name: _clone(value, device) for name, value in arguments.items()}
    if backend == "emulation":
        result = getattr(emulation.operators(), op).default(**copies)
    else:
        result = getattr(ops, op)(**copies, backend=backend)
    return _to_cpu(result), {name: _to_cpu(value) for name, value in copies.items()}


@functools.cache
def backends(op):
    """Backends that can run `op` here; "cuda" is listed always, marked gpu.

    "emulation" is the CUDA kernels' own source, run on the CPU (csrc/host_emulation).
    """
    found = ["reference"]
    if dispatch.is_compiled(op, "cpu"):
        found.append("cpu")
    if emulation.is_possible() and op in EMULATED:
        found.append("emulation")
    found.append(
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        )
    )
    return found


def each_backend(op):
    return pytest.mark.parametrize("backend", backends(op))


def assert_as_good_as(out, exact, plain, factor=2.0, floor=1e-6):
    """`out` is at most `factor` times as far from the exact float64 result as plain torch is.

    `floor` (absolute, plus the same relative to the largest value) keeps a lucky exact reference
    from demanding the impossible.
    """
    out, plain = out.double(), plain.double()
    assert not out.isnan().any(), "NaN in the result"
    error = (out - exact).abs().max() if out.numel() else torch.zeros(())
    allowed = (plain - exact).abs().max() if out.numel() else torch.zeros(())
    scale = exact.abs().max() if out.numel() else torch.zeros(())
    bound = factor * allowed + floor * (1 + scale)
    assert error <= bound, f"error {error:.3e}, plain torch has {allowed:.3e}, bound {bound:.3e}"
