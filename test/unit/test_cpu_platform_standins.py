"""Torch stand-ins of the CPU platform against plain loops and against SGLang's own torch code."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from longspark_cpu_platform import eagle, slots, streams, threads
from longspark_cpu_platform.dflash import keep_embedding_dtype
from longspark_cpu_platform.rope import table_qk_norm_rope_
from longspark_cpu_platform.sampling import filter_min_p_before_seeded_draw

TABLE = torch.arange(60, dtype=torch.int32).view(3, 20)  # cell (row, position) = 20 row + position


def test_extend_cache_locs():
    got = slots.extend_cache_locs(
        req_pool_indices=torch.tensor([2, 0]),
        req_to_token=TABLE,
        start_offset=torch.tensor([5, 9], dtype=torch.int32),
        end_offset=torch.tensor([8, 12]),
        batch_size=2,
        draft_token_num=3,
        device="cpu",
    )
    assert got.dtype == torch.int64
    assert got.tolist() == [45, 46, 47, 9, 10, 11]


def test_assign_req_to_token():
    table = torch.zeros(3, 8, dtype=torch.int32)
    new = torch.arange(100, 105)
    slots.assign_req_to_token(
        torch.tensor([2, 1, 0]), table, torch.tensor([1, 4, 3]), torch.tensor([3, 4, 6]), new, 3
    )
    assert table.tolist() == [
        [0, 0, 0, 102, 103, 104, 0, 0],
        [0] * 8,
        [0, 100, 101, 0, 0, 0, 0, 0],
    ]


def test_assign_draft_cache_locs():
    out = torch.empty(6, dtype=torch.int64)
    eagle.assign_draft_cache_locs(torch.tensor([1, 2]), TABLE, torch.tensor([4, 0]), out, 1, 3)
    assert out.tolist() == [24, 25, 26, 40, 41, 42]


def test_packing_of_accepted_slots():
    window = torch.tensor([10, 11, 12, 20, 21, 22])
    front = torch.full((6,), -7)
    eagle.fill_front_out_cache_loc(torch.tensor([2, 3]), window, front)
    assert front.tolist() == [10, 11, 20, 21, 22, -7]

    accepted = torch.full((6,), -7)
    index = torch.tensor([[0, 1, -1], [3, -1, -1]])
    eagle.fill_accept_out_cache_loc(index, window, accepted, 6)
    assert accepted.tolist() == [10, 11, 20, -7, -7, -7]

    bonus = torch.empty(2, dtype=torch.int64)
    eagle.fill_bonus_tokens(torch.tensor([5, 6, 7, 8, 9, 1]), torch.tensor([3, 1]), bonus, 3, 2)
    assert bonus.tolist() == [7, 8]


def test_gather_spec_extras():
    rows = torch.tensor([2, 0])
    buffers = [torch.arange(6.0).view(3, 2), torch.arange(3).view(3, 1), torch.arange(3)]
    p, index, tokens, hidden = eagle.gather_spec_extras(rows, *buffers, None)
    assert p.tolist() == [[4, 5], [0, 1]] and index.tolist() == [[2], [0]]
    assert tokens.tolist() == [2, 0] and hidden is None
    assert eagle.gather_spec_extras(rows, *buffers, buffers[0])[3].tolist() == [[4, 5], [0, 1]]


def test_chain_and_greedy_verify():
    width = 4
    positions = torch.empty(2 * width, dtype=torch.int64)
    index, following, sibling = (torch.empty(2, width, dtype=torch.int64) for _ in range(3))
    eagle.build_tree(
        None, None, torch.tensor([7, 3]), None, positions, index, following, sibling, 1, 3, width, 0
    )
    assert positions.tolist() == [7, 8, 9, 10, 3, 4, 5, 6]
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert following.tolist() == [[1, 2, 3, -1]] * 2 and (sibling == -1).all()

    candidates = torch.tensor([[1, 5, 6, 9], [1, 2, 3, 4]])
    target = torch.tensor([[5, 6, 7, 8], [9, 3, 4, 5]])
    predicts = torch.zeros(8, dtype=torch.int32)
    accept_index = torch.full((2, width), -1, dtype=torch.int32)
    accepted = torch.empty(2, dtype=torch.int32)
    eagle.verify_tree_greedy(
        predicts, accept_index, accepted, candidates, index, following, sibling, target
    )
    assert accepted.tolist() == [2, 0]
    assert accept_index.tolist() == [[0, 1, 2, -1], [4, -1, -1, -1]]
    assert predicts[[0, 1, 2, 4]].tolist() == [5, 6, 7, 9]


def test_trees_are_refused():
    factory = SimpleNamespace(topk=4)
    with pytest.raises(NotImplementedError, match="--speculative-eagle-topk 1"):
        eagle.create_draft_backend(None, factory, "decode_attention_backend", {}, "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotation_equal_the_unfused_path(dtype):
    """Head by head with transformers' formula, in float64."""
    g = torch.Generator().manual_seed(0)
    tokens, q_heads, k_heads, d = 5, 4, 2, 64
    qkv = torch.randn(tokens, (q_heads + 2 * k_heads) * d, generator=g).to(dtype)
    weights = [torch.rand(d, generator=g).to(dtype) + 0.5 for _ in range(2)]
    positions = torch.tensor([0, 3, 17, 4000, 1])
    angle = positions.max().add(1).double() * 0 + torch.arange(4001)[:, None].double()
    angle = angle * 10000.0 ** (-torch.arange(d // 2, dtype=torch.float64) / (d // 2))
    table = torch.cat([angle.cos(), angle.sin()], 1).float()
    got = qkv.clone()
    table_qk_norm_rope_(got, positions, *weights, table, q_heads, k_heads, d, 1e-6)

    columns = (q_heads + k_heads) * d
    assert torch.equal(got[:, columns:], qkv[:, columns:])
    x = qkv[:, :columns].double().view(tokens, -1, d)
    gain = torch.stack([weights[0]] * q_heads + [weights[1]] * k_heads).double()
    x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain
    cos, sin = (f(angle[positions]).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))
    rotated = x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        got[:, :columns].double(), rotated.view(tokens, -1), rtol=tolerance, atol=tolerance
    )


def test_min_p_before_a_seeded_draw():
    seen = {}

    def original(probs, top_ks, top_ps, min_ps, need_min_p, seed, positions, **options):
        seen.update(probs=probs, need=need_min_p, options=options)

    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]])
    min_p = torch.tensor([0.4, 0.9])
    arguments = (None, None, min_p, True, torch.tensor([1, 2]), None)
    filter_min_p_before_seeded_draw(original, probs, *arguments, max_top_k=7)
    assert seen["probs"].tolist() == [[0.5, pytest.approx(0.3), 0, 0], [0.25] * 4]
    assert not seen["need"] and seen["options"] == {"max_top_k": 7}

    unseeded = (None, None, min_p, True, None, None)
    filter_min_p_before_seeded_draw(original, probs, *unseeded)
    assert seen["probs"] is probs and seen["need"]


def test_embeddings_keep_the_dtype_of_the_model():
    embeds = torch.randn(2, 4)
    kwargs = {"input_embeds": embeds.bfloat16()}
    batch = SimpleNamespace(input_embeds=embeds, replace_embeds=None)
    keep_embedding_dtype(kwargs, SimpleNamespace(dtype=torch.float32), batch)
    assert torch.equal(kwargs["input_embeds"], embeds)


def test_record_stream_is_a_no_op_on_the_cpu_only():
    calls = []
    streams.record_stream(lambda *a: calls.append(a), torch.zeros(1), None)
    streams.record_stream(lambda *a: calls.append(a), torch.zeros(1, device="meta"), None)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("world", "shares"), [(1, [8]), (2, [4, 4]), (3, [2, 2, 2]), (16, [1] * 16)]
)
def test_ranks_share_the_cores(monkeypatch, world, shares):
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10, 18)))
    threads_set: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads_set.append)
    cores = [
        threads.init_threads_binding(None, numa_index=rank, world_size=world).split(",")
        for rank in range(world)
    ]
    assert threads_set == shares == [len(mine) for mine in cores]
    if world <= 8:
        used = [core for mine in cores for core in mine]
        assert len(set(used)) == len(used)


def test_a_binding_of_the_user_is_honoured(monkeypatch):
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    got = threads.init_threads_binding(lambda **kwargs: kwargs, numa_index=1, world_size=2)
    assert got == {"numa_index": 1, "world_size": 2}
