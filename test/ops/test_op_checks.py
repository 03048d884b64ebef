"""Wrong arguments: one error per call that names every wrong tensor."""

import pytest
import test_accept_chain
import test_block_attention
import test_draft_sample
import test_markov_step
import test_summary_merge
import test_window_gather
import torch
from longspark_sglang import ops


def calls():
    greedy = dict(
        target_tokens=torch.zeros(2, 8).long(),
        draft_tokens=torch.zeros(2, 7).long(),
        limit=torch.zeros(2).int(),
    )
    paged = dict(
        kv_indptr=torch.tensor([0, 1, 2]).int(),
        kv_indices=torch.tensor([3, 4]).int(),
        kv_last_page_len=torch.tensor([1, 1]).int(),
        page_size=4,
        window=8,
    )
    return {
        "window_index": dict(**test_window_gather.index_case(1, [3, 4]), window=8),
        "window_index_paged": paged,
        "window_gather": test_window_gather.gather_case(1, [3, 4], [3, 4], 8),
        "summary_merge": test_summary_merge.case_of([3, 4]),
        "summary_merge_bulk": test_summary_merge.bulk(test_summary_merge.case_of([3, 4])),
        "block_attention": test_block_attention.case_of([3, 4]),
        "markov_step": test_markov_step.case_of(2),
        "draft_sample": test_draft_sample.case_of([0.0, 1.0]),
        "accept_chain": test_accept_chain.case_of(2),
        "accept_greedy": greedy,
    }


TENSORS = [
    (op, name)
    for op, arguments in calls().items()
    for name, value in arguments.items()
    if isinstance(value, torch.Tensor)
]


def refused(op, arguments):
    with pytest.raises(ops.ArgumentError) as info:
        getattr(ops, op)(**arguments)
    assert str(info.value).startswith(f"longspark.{op}: ")
    return str(info.value)


@pytest.mark.parametrize("op, name", TENSORS)
def test_wrong_dtype_names_the_tensor(op, name):
    arguments = calls()[op]
    arguments[name] = arguments[name].to(torch.complex64)
    assert f"{name} must be " in refused(op, arguments)
    assert "not complex64" in refused(op, arguments)


@pytest.mark.parametrize("op, name", TENSORS)
def test_wrong_number_of_dimensions_names_the_tensor(op, name):
    arguments = calls()[op]
    # A pool may have 3 or 4 dimensions.
    arguments[name] = arguments[name][(None,) * (2 if "pool" in name else 1)]
    assert f"{name} has shape {list(arguments[name].shape)}, expected [" in refused(op, arguments)


@pytest.mark.parametrize("op, name", TENSORS)
def test_wrong_device_names_the_tensor(op, name):
    arguments = calls()[op]
    arguments[name] = arguments[name].to("meta")
    others = [other for other, value in arguments.items() if isinstance(value, torch.Tensor)]
    message = refused(op, arguments)
    # Where the odd one out is the tensor that decides the device, all the others are named.
    assert f"{name} is on meta, expected cpu" in message or all(
        f"{other} is on cpu, expected meta" in message for other in others if other != name
    )


@pytest.mark.parametrize(
    "op, name, dimension, symbol",
    [
        ("window_index", "seq_lens", 0, "B"),
        ("window_index_paged", "kv_indptr", 0, "B+1"),
        ("window_gather", "lens", 0, "B"),
        ("window_gather", "out_key", 2, "W"),
        ("window_gather", "out_value", 0, "L"),
        ("summary_merge", "counts", 0, "B"),
        ("summary_merge", "state_value", 3, "R"),
        ("summary_merge", "state_lse", 2, "Hq"),
        ("summary_merge_bulk", "indptr", 0, "B+1"),
        ("block_attention", "summary_value", 2, "R"),
        ("block_attention", "block_key", 1, "K"),
        ("block_attention", "lens", 0, "B"),
        ("markov_step", "markov_w2", 1, "r"),
        ("draft_sample", "temperature", 0, "B"),
        ("accept_chain", "target_probs", 1, "K+1"),
        ("accept_chain", "uniforms", 1, "K"),
        ("accept_greedy", "target_tokens", 1, "K+1"),
    ],
)
def test_sizes_that_disagree(op, name, dimension, symbol):
    arguments = calls()[op]
    arguments[name] = arguments[name].narrow(dimension, 0, arguments[name].size(dimension) - 1)
    message = refused(op, arguments)
    assert name in message and f"with {symbol} = " in message
    assert f"(dimension {dimension})" in message


def test_all_problems_are_listed_at_once():
    arguments = calls()["draft_sample"]
    arguments.update(
        temperature=arguments["temperature"].double(),
        seed=arguments["seed"].int(),
        position=arguments["position"][:1],
        vocab_limit=0,
    )
    message = refused("draft_sample", arguments)
    assert message == (
        "longspark.draft_sample: temperature must be float32, not float64; "
        "seed must be int64, not int32; "
        "position has shape [1], expected [B] with B = 2 (dimension 0); "
        "vocab_limit must be in 1..300, not 0"
    )


@pytest.mark.parametrize("op", ["draft_sample", "accept_chain"])
@pytest.mark.parametrize("limit", [0, -1, 301])
def test_vocab_limit(op, limit):
    arguments = calls()[op]
    arguments["vocab_limit"] = limit
    assert "vocab_limit must be in 1.." in refused(op, arguments)


@pytest.mark.parametrize(
    "op, name", [("window_index", "window"), ("window_index_paged", "page_size")]
)
def test_counts_must_be_positive(op, name):
    arguments = calls()[op]
    arguments[name] = 0
    assert f"{name} must be at least 1, not 0" in refused(op, arguments)


@pytest.mark.parametrize("op", ["window_gather", "summary_merge", "summary_merge_bulk"])
def test_pools(op):
    arguments = calls()[op]
    keys = arguments["key_pools"]
    message = refused(op, {**arguments, "key_pools": keys[:-1]})
    assert f"one pool per tapped layer, not {len(keys) - 1} and {len(keys)}" in message
    message = refused(op, {**arguments, "key_pools": [], "value_pools": []})
    assert "one pool per tapped layer, not 0 and 0" in message
    wrong = [pool.double() for pool in keys]
    message = refused(op, {**arguments, "key_pools": wrong})
    assert "key_pools[0] must be bfloat16" in message and "value_pools[0] must be" in message
    message = refused(op, {**arguments, "key_pools": [keys[0], keys[1].half(), *keys[2:]]})
    assert "key_pools[1] must be bfloat16, not float16" in message
    message = refused(op, {**arguments, "key_pools": [keys[0], keys[1][:, :1], *keys[2:]]})
    assert "key_pools[1] has shape" in message
    wide = torch.cat([keys[1], keys[1]], dim=1)[:, : keys[1].size(1)]
    message = refused(op, {**arguments, "key_pools": [keys[0], wide, *keys[2:]]})
    assert f"key_pools[1] has strides {wide.stride()}, expected those of key_pools[0]" in message


def test_query_heads_are_whole_groups():
    arguments = calls()["block_attention"]
    for name in ("key_pool", "value_pool"):
        arguments[name] = torch.cat([arguments[name]] * 2, dim=1)[:, :3]
    for name in ("block_key", "block_value"):
        arguments[name] = torch.cat([arguments[name]] * 2, dim=2)[:, :, :3]
    assert "8 query heads are not a multiple of 3 KV heads" in refused("block_attention", arguments)


def test_the_last_dimension_is_contiguous():
    arguments = calls()["block_attention"]
    arguments["query"] = torch.cat([arguments["query"]] * 2, dim=-1)[..., ::2]
    message = refused("block_attention", arguments)
    assert "query must be contiguous in its last dimension (stride 2)" in message
