"""The kernels' results don't depend on the order in which threads and blocks run: same bits."""

import emulation
import pytest
import test_accept_chain
import test_block_attention
import test_draft_sample
import test_markov_step
import test_summary_merge
import test_window_gather
import torch
from op_cases import run

pytestmark = pytest.mark.skipif(not emulation.is_possible(), reason="needs a C++ compiler")

CASES = {
    "window_gather": lambda: test_window_gather.gather_case(1, [3, 8], [3, 20], 8),
    "summary_merge": lambda: test_summary_merge.case_of([3, 8, 0], kv_heads=1),
    "summary_merge_bulk": lambda: test_summary_merge.bulk(
        test_summary_merge.case_of([90, 3, 700], kv_heads=1, layers=1, columns=700)
    ),
    "block_attention": lambda: test_block_attention.case_of([3, 30], kv_heads=1),
    "markov_step": lambda: test_markov_step.case_of(3),
    "draft_sample": lambda: test_draft_sample.case_of([0.0, 1.0], vocab=1100),
    "accept_chain": lambda: test_accept_chain.case_of(5, vocab=1100),
}
# The plain kernels, for what the tensor cores don't take.
CASES |= {
    "summary_merge_bulk plain": lambda: test_summary_merge.bulk(
        test_summary_merge.case_of([90, 3], kv_heads=1, layers=1, columns=90, dim=80)
    ),
    "block_attention plain": lambda: test_block_attention.case_of([3, 30], kv_heads=1, dim=80),
    "markov_step plain": lambda: test_markov_step.case_of(3, rank=7),
}


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [leaf for item in value or () for leaf in leaves(item)] if value is not None else []


@pytest.mark.parametrize("name", CASES)
def test_same_bits_in_every_order(name):
    case = CASES[name]()
    results = []
    for seed, order in [(1, "forward"), (1, "reversed"), (1, "random"), (2, "random")]:
        emulation.set_order(seed, order)
        tensors = [case[k] for k in case if isinstance(case[k], torch.Tensor)]
        assert tensors
        result, after = run(name.split()[0], "emulation", **case)
        results.append(leaves(result) + [after[k] for k in after if k.startswith(("state", "out"))])
    emulation.set_order(1)
    assert results[0]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7))


BATCHED = {
    "block_attention": ("query", "slots", "rows", "lens", "block_key", "block_value"),
    "markov_step": ("base_logits", "prev"),
    "draft_sample": ("base_logits", "prev", "temperature", "seed", "position"),
    "accept_chain": (
        "target_probs",
        "draft_tokens",
        "draft_logq",
        "base_logits",
        "anchors",
        "temperature",
        "point_mass",
        "uniforms",
        "uniform_final",
        "limit",
    ),
}


@pytest.mark.parametrize("op", BATCHED)
def test_a_request_gets_the_same_bits_alone_as_in_a_batch(op):
    """Of 20 requests some share a tile of 16 with others and some do not."""
    case = {
        "block_attention": lambda: test_block_attention.case_of([5, 30, 0, 17], kv_heads=1),
        "markov_step": lambda: test_markov_step.case_of(20),
        "draft_sample": lambda: test_draft_sample.case_of([0.0, 1.0] * 10, rank=32),
        "accept_chain": lambda: test_accept_chain.case_of(20, rank=32, dtype=torch.bfloat16),
    }[op]()
    together = leaves(run(op, "emulation", **case)[0])
    for b in range(len(together[0])):
        alone = {k: v[b : b + 1] if k in BATCHED[op] else v for k, v in case.items()}
        for whole, part in zip(together, leaves(run(op, "emulation", **alone)[0]), strict=True):
            assert torch.equal(whole[b : b + 1], part)
