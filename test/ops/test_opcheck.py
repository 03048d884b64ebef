"""Schemas, fakes and dispatch of the registered operators (torch.library.opcheck)."""

import emulation
import pytest
import test_accept_chain
import test_block_attention
import test_draft_sample
import test_markov_step
import test_summary_merge
import test_window_gather
import torch
from longspark_sglang.ops import dispatch
from op_cases import EMULATED


def case_of(op):
    if op == "window_index":
        return dict(**test_window_gather.index_case(1, [3, 0, 40]), window=8)
    if op == "window_index_paged":
        return dict(
            kv_indptr=torch.tensor([0, 1, 3]).int(),
            kv_indices=torch.tensor([3, 4, 7]).int(),
            kv_last_page_len=torch.tensor([1, 2]).int(),
            page_size=4,
            window=8,
        )
    if op == "accept_greedy":
        g = torch.Generator().manual_seed(1)
        return dict(
            target_tokens=torch.randint(0, 2, (3, 8), generator=g),
            draft_tokens=torch.randint(0, 2, (3, 7), generator=g),
            limit=torch.tensor([7, 3, 0]).int(),
        )
    return {
        "window_gather": lambda: test_window_gather.gather_case(1, [3, 4], [3, 9], 8),
        "summary_merge": lambda: test_summary_merge.case_of([3, 8]),
        "summary_merge_bulk": lambda: test_summary_merge.bulk(test_summary_merge.case_of([3, 8])),
        "block_attention": lambda: test_block_attention.case_of([3, 4]),
        "markov_step": lambda: test_markov_step.case_of(2),
        "draft_sample": lambda: test_draft_sample.case_of([0.0, 1.0]),
        "accept_chain": lambda: test_accept_chain.case_of(2),
    }[op]()


def without_nan(value):
    """opcheck compares with ==, under which NaN rows would seem to have changed."""
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        value.nan_to_num_(nan=0.25, posinf=1e6, neginf=-1e6)
    return value


# The bindings of the CUDA build, here in front of the emulated kernels; and the fast CPU operators.
NAMESPACES = [("longspark_emu", op) for op in EMULATED if emulation.is_possible()]
NAMESPACES += [("longspark", op) for op in EMULATED if dispatch.is_compiled(op, "cpu")]


@pytest.mark.parametrize("namespace, op", NAMESPACES)
def test_opcheck(namespace, op):
    operators = emulation.operators() if namespace == "longspark_emu" else torch.ops.longspark
    arguments = {name: without_nan(value) for name, value in case_of(op).items()}
    torch.library.opcheck(getattr(operators, op).default, (), arguments)


def test_every_operator_has_a_fake():
    from longspark_sglang.ops import fakes

    assert set(EMULATED) <= set(fakes._FAKES)
