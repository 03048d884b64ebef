"""What the CPU operators refuse by themselves: indices that lead out of a tensor, and what callers
that go round the Python functions may get wrong.
"""

import cpu_isas
import pytest
import torch
from test_op_checks import calls

pytestmark = pytest.mark.skipif(not cpu_isas.isas(), reason="needs the CPU operators")


def refused(op, **changes):
    """The first line of the error of `op` with some arguments replaced or made from the right."""
    arguments = calls()[op]
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    with pytest.raises((IndexError, RuntimeError)) as info:
        getattr(torch.ops.longspark, op).default(**arguments)
    return str(info.value).splitlines()[0]


def first_is(value):
    def change(tensor):
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    "op, name, value",
    [
        ("window_index", "req_rows", -1),
        ("window_index", "req_rows", 1000),
        ("window_index", "seq_lens", 10**6),
        ("window_index_paged", "kv_indptr", -1),
        ("window_index_paged", "kv_indptr", 3),
        ("window_gather", "lens", 9),
        ("window_gather", "rows", 10**6),
        ("summary_merge", "slots", -1),
        ("summary_merge", "rows", 10**6),
        ("summary_merge", "counts", 1000),
        ("summary_merge_bulk", "slots", 1000),
        ("summary_merge_bulk", "rows", -1),
        ("summary_merge_bulk", "indptr", 1000),
        ("block_attention", "slots", 1000),
        ("block_attention", "lens", 1000),
        ("block_attention", "rows", -1),
        ("accept_chain", "draft_tokens", 10**6),
        ("accept_chain", "draft_tokens", -1),
        ("accept_chain", "limit", 100),
        ("accept_greedy", "limit", -1),
    ],
)
def test_an_index_out_of_range_names_tensor_value_and_range(op, name, value):
    message = refused(op, **{name: first_is(value)})
    assert message.startswith(f"longspark.{op}: {name} holds {value}, allowed is 0..")


def test_lengths_that_contradict_each_other():
    message = refused("window_gather", seq_lens=first_is(1))
    assert message == "longspark.window_gather: seq_lens holds less than lens"
    message = refused("window_index_paged", kv_last_page_len=first_is(5))
    assert message == "longspark.window_index_paged: kv_last_page_len must be in 1..4"
    message = refused("summary_merge_bulk", indptr=torch.tensor([0, 5, 2]))
    assert message == "longspark.summary_merge_bulk: indptr must not decrease"


@pytest.mark.parametrize("op", ["draft_sample", "accept_chain"])
def test_vocab_limit(op):
    assert f"longspark.{op}: vocab_limit must be in 1.." in refused(op, vocab_limit=0)


def test_pools():
    message = refused("summary_merge", key_pools=lambda pools: pools[:-1])
    assert message == "longspark.summary_merge: one key and value pool per layer"
    message = refused("summary_merge", queries=lambda queries: queries.float())
    assert message == "longspark.summary_merge: queries and pools differ in dtype"
    message = refused("block_attention", key_pool=lambda pool: pool.flatten())
    assert message == "longspark: a pool has 3 or 4 dimensions"


def test_dtypes():
    message = refused("markov_step", base_logits=lambda logits: logits.double())
    assert message == "longspark: dtype must be float32, bfloat16 or float16, not Double"
