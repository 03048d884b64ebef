"""What the C++ bindings refuse by themselves, for callers that go round the Python functions."""

import emulation
import pytest
import test_block_attention
import test_draft_sample
import test_markov_step
import test_summary_merge
import test_window_gather
import torch

pytestmark = pytest.mark.skipif(not emulation.is_possible(), reason="needs a C++ compiler")


def refused(op, case, **changes):
    with pytest.raises(RuntimeError) as info:
        getattr(emulation.operators(), op).default(**{**case, **changes})
    return str(info.value).splitlines()[0]


def spread(tensor, dimension):
    """The same values with gaps along one dimension."""
    wide = torch.stack([tensor, tensor], dim=dimension + 1).flatten(dimension, dimension + 1)
    return wide[(slice(None),) * dimension + (slice(None, None, 2),)]


@pytest.mark.parametrize(
    "op, name, dimension",
    [
        ("summary_merge", "queries", 2),
        ("summary_merge", "state_value", 3),
        ("summary_merge", "state_lse", 3),
        ("block_attention", "summary_value", 2),
        ("block_attention", "summary_key", 1),
        ("window_gather", "out_key", 2),
    ],
)
def test_inner_dimensions_are_contiguous(op, name, dimension):
    case = {
        "summary_merge": lambda: test_summary_merge.case_of([3, 8]),
        "block_attention": lambda: test_block_attention.case_of([3, 8]),
        "window_gather": lambda: test_window_gather.gather_case(1, [3], [3], 8),
    }[op]()
    message = refused(op, case, **{name: spread(case[name], dimension)})
    assert message.startswith(f"{name} must be contiguous from dimension ")


def test_more_layers_than_a_launch_can_name():
    case = test_window_gather.gather_case(1, [3], [3], 8)
    case["key_pools"] = case["key_pools"][:1] * 65
    case["value_pools"] = case["value_pools"][:1] * 65
    for name in ("out_key", "out_value"):
        case[name] = case[name][:1].repeat(65, 1, 1, 1, 1)
    assert refused("window_gather", case) == "65 tapped layers; the kernels take at most 64"


def test_no_pools_or_different_layouts():
    case = test_window_gather.gather_case(1, [3], [3], 8)
    assert refused("window_gather", case, key_pools=[]) == "one key and value pool per layer"
    strided = test_window_gather.gather_case(1, [3], [3], 8, layout="strided")
    message = refused("window_gather", case, value_pools=strided["value_pools"])
    assert message == "pools of different layouts"
    attention = test_block_attention.case_of([3])
    wide = spread(attention["value_pool"], 0)
    assert refused("block_attention", attention, value_pool=wide) == "pools of different layouts"


def test_layers_and_heads_that_do_not_fit():
    case = test_summary_merge.case_of([3, 8])
    message = refused("summary_merge", case, queries=case["queries"][:1])
    assert message == "one pool per layer of queries"
    odd = case["queries"][:, :7].contiguous()
    assert refused("summary_merge", case, queries=odd) == "7 query heads on 2 KV heads"
    attention = test_block_attention.case_of([3])
    odd = attention["query"][:, :, :7].contiguous()
    assert refused("block_attention", attention, query=odd) == "7 query heads on 2 KV heads"


def test_dtypes():
    case = test_summary_merge.case_of([3, 8])
    message = refused("summary_merge", case, queries=case["queries"].half())
    assert message == "key_pools must have the dtype of queries"
    attention = test_block_attention.case_of([3])
    message = refused("block_attention", attention, block_key=attention["block_key"].half())
    assert message == "all dtypes must be the query's"
    markov = test_markov_step.case_of()
    message = refused("markov_step", markov, base_logits=markov["base_logits"].double())
    assert message == "base_logits must be float32, bfloat16 or float16, not Double"
    message = refused("markov_step", markov, markov_w2=markov["markov_w2"].half())
    assert message == "markov_w1 and markov_w2 differ"


def test_vocabulary():
    case = test_draft_sample.case_of([1.0])
    assert refused("draft_sample", case, vocab_limit=301) == "vocab_limit must be in 1..300"
    message = refused("draft_sample", case, markov_w2=case["markov_w2"][:200])
    assert message == "markov_w1 and markov_w2 must have a row for every token"


def test_values_out_of_range_are_caught_in_emulation():
    """Row ids and state rows are trusted on a GPU; the emulation shows what that would mean."""
    case = test_summary_merge.case_of([3, 8])
    rows = case["rows"].clone()
    rows[0, 1] = 10_000_000
    assert "out-of-bounds load" in refused("summary_merge", case, rows=rows)
    slots = torch.tensor([0, 40])
    assert "out-of-bounds" in refused("summary_merge", case, slots=slots)
