"""Every CPU operator with every instruction set: lane counts, head dims, row counts, dtypes.

The other operator tests run with the best instruction set of the machine only.
"""

import os
import subprocess
import sys

import cpu_isas
import pytest
import test_accept_chain
import test_block_attention
import test_draft_sample
import test_markov_step
import test_summary_merge
import torch
from cpu_isas import each_isa
from longspark_sglang import ops
from op_cases import run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture
def chosen(isa):
    with cpu_isas.using(isa):
        yield


@each_isa
@each_dtype
@pytest.mark.parametrize(
    "group, block, kv_heads, dim",
    [
        (1, 1, 3, 64),  # 8 lanes
        (3, 7, 1, 64),  # 24
        (4, 7, 2, 128),  # 32
        (5, 7, 1, 80),  # 40
        (1, 16, 1, 16),  # 16
        (16, 7, 1, 32),  # 128
        (2, 3, 1, 256),
        (2, 9, 1, 20),
    ],
)
def test_attention_shapes(chosen, dtype, group, block, kv_heads, dim):
    case = test_block_attention.case_of(
        [0, 1, 33, 150], window=256, group=group, block=block, kv_heads=kv_heads, dim=dim,
        dtype=dtype, layout="hnd",
    )  # fmt: skip
    test_block_attention.assert_attention_is_right("cpu", case)


@each_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [1, 7, 33])
def test_odd_head_dims(chosen, dtype, dim):
    case = test_block_attention.case_of([5, 70], window=80, dim=dim, dtype=dtype)
    test_block_attention.assert_attention_is_right("cpu", case)
    merge = test_summary_merge.case_of([3, 8], dim=dim, dtype=dtype)
    test_summary_merge.assert_merge_is_right("summary_merge", "cpu", merge)


def test_an_odd_head_dim_in_bf16_is_refused():
    case = test_block_attention.case_of([5], dim=7, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="head dimension must be even in bfloat16, not 7"):
        run("block_attention", "cpu", **case)


@each_isa
@each_dtype
def test_window_lengths(chosen, dtype):
    lens = [0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257]
    case = test_block_attention.case_of(lens, window=257, kv_heads=1, group=2, dtype=dtype)
    test_block_attention.assert_attention_is_right("cpu", case)


@each_isa
@each_dtype
@pytest.mark.parametrize(
    "group, slots, kv_heads, dim",
    [
        (1, 16, 2, 64),
        (4, 16, 2, 128),
        (3, 16, 1, 64),
        (3, 5, 1, 36),
        (1, 1, 1, 16),
        (2, 16, 1, 256),
    ],
)
def test_merge_shapes(chosen, dtype, group, slots, kv_heads, dim):
    counts = [0, 1, 7, 8, 9, 24, 25, 40]  # both ways of merging, and where they meet
    case = test_summary_merge.case_of(
        counts, columns=40, group=group, slots=slots, kv_heads=kv_heads, dim=dim, dtype=dtype,
        layout="strided",
    )  # fmt: skip
    test_summary_merge.assert_merge_is_right("summary_merge", "cpu", case)


@each_isa
@each_dtype
def test_bulk_merge(chosen, dtype):
    case = test_summary_merge.case_of(
        [700, 0, 1, 255, 256, 257], columns=700, group=2, kv_heads=1, dtype=dtype, layout="nhd"
    )
    test_summary_merge.assert_merge_is_right("summary_merge_bulk", "cpu", case)


@each_isa
@pytest.mark.parametrize("logits", DTYPES)
@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("batch, rank", [(1, 256), (8, 32), (9, 33), (40, 1)])
def test_markov_shapes(chosen, logits, weights, batch, rank):
    case = test_markov_step.case_of(batch, 1500, rank, logits, weights)
    test_markov_step.assert_step_is_right("cpu", case)


@each_isa
@each_dtype
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 3000])
def test_draw_from_vocabularies(chosen, dtype, vocab):
    case = test_draft_sample.case_of([0.0, 1.0, 0.3, 2.0, 0.0], vocab=vocab, dtype=dtype)
    test_draft_sample.assert_draw_is_right("cpu", case)


@each_isa
@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0])
def test_draws_are_the_references(chosen, temperature):
    """The same tokens, not just the same law: 2000 draws from one set of logits.

    The product with W2 is 0, so that both add the noise to the same logits.
    """
    rows, vocab = 2000, 700
    g = torch.Generator().manual_seed(3)
    arguments = dict(
        base_logits=(2 * torch.randn(1, vocab, generator=g)).expand(rows, vocab),
        prev=torch.zeros(rows, dtype=torch.int64),
        markov_w1=torch.zeros(vocab, 4),
        markov_w2=torch.zeros(vocab, 4),
        temperature=torch.full((rows,), temperature),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
        position=torch.arange(rows),
        vocab_limit=vocab - 1,
    )
    token, logq = ops.draft_sample(**arguments, backend="cpu")
    plain_token, plain_logq = ops.draft_sample(**arguments, backend="reference")
    assert torch.equal(token, plain_token)
    torch.testing.assert_close(logq, plain_logq, rtol=1e-5, atol=1e-5)


@each_isa
@each_dtype
def test_acceptance(chosen, dtype):
    for vocab in (3, 2500):
        case = test_accept_chain.case_of(24, vocab=vocab, dtype=dtype)
        test_accept_chain.assert_acceptance_is_right("cpu", case)


# ---- The choice ----------------------------------------------------------------------------------


@pytest.mark.skipif(not cpu_isas.isas(), reason="needs the CPU operators")
def test_the_environment_names_the_instruction_set():
    code = (
        "import torch; from longspark_sglang.ops import dispatch; dispatch.load_extension(); "
        "print(torch.ops.longspark.cpu_isa())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LONGSPARK_CPU_ISA": "default"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "default", done.stderr


@pytest.mark.skipif(not cpu_isas.isas(), reason="needs the CPU operators")
def test_an_unknown_instruction_set_is_refused_with_the_ones_there_are():
    problem = "LONGSPARK_CPU_ISA: this CPU can't run 'mmx'; use one of default"
    with pytest.raises(RuntimeError, match=problem):
        torch.ops.longspark.cpu_isa("mmx")


def test_every_machine_can_run_the_plainest_one():
    assert cpu_isas.isas()[:1] in ([], ["default"])
