"""Random shapes, layouts and dtypes: every operator, every backend, against the float64 loops."""

import test_accept_chain
import test_block_attention
import test_draft_sample
import test_markov_step
import test_summary_merge
import test_window_gather
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_cases import LAYOUTS, each_backend, run

# The same examples in every run; the shapes are small, so that loops can judge them.
bounded = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
dims = st.sampled_from([8, 24, 64, 128])
seeds = st.integers(0, 2**31)
layouts = st.fixed_dictionaries(
    {"layout": st.sampled_from(LAYOUTS), "page_size": st.sampled_from([1, 2, 16, 64])}
)


@each_backend("block_attention")
@bounded
@given(
    lens=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    shape=st.fixed_dictionaries(
        {
            "block": st.integers(1, 16),
            "group": st.integers(1, 6),
            "kv_heads": st.integers(1, 2),
            "dim": dims,
            "slots": st.integers(1, 20),
            "dtype": dtypes,
            "seed": seeds,
        }
    ),
    layout=layouts,
)
def test_any_attention(backend, lens, shape, layout):
    case = test_block_attention.case_of(lens, window=40, **shape, **layout)
    test_block_attention.assert_attention_is_right(backend, case)


@test_summary_merge.both_forms
@bounded
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    shape=st.fixed_dictionaries(
        {
            "group": st.integers(1, 6),
            "kv_heads": st.integers(1, 2),
            "dim": dims,
            "slots": st.integers(1, 20),
            "layers": st.integers(1, 3),
            "filled": st.booleans(),
            "dtype": dtypes,
            "seed": seeds,
        }
    ),
    layout=layouts,
)
def test_any_merge(op, backend, counts, shape, layout):
    case = test_summary_merge.case_of(counts, columns=12, **shape, **layout)
    test_summary_merge.assert_merge_is_right(op, backend, case)


@each_backend("summary_merge_bulk")
@bounded
@given(data=st.data(), counts=st.lists(st.integers(0, 30), min_size=1, max_size=4), seed=seeds)
def test_merging_in_any_two_calls_equals_one(backend, data, counts, seed):
    """Any cut of the rows of all requests: first parts in one call, the rest in a second."""
    case = test_summary_merge.case_of(
        counts, columns=30, layers=1, kv_heads=1, slots=4, filled=False, seed=seed
    )
    cuts = [data.draw(st.integers(0, count)) for count in counts]
    _, once = run("summary_merge_bulk", backend, **test_summary_merge.bulk(case))
    first = {**case, "counts": torch.tensor(cuts, dtype=torch.int32)}
    _, half = run("summary_merge_bulk", backend, **test_summary_merge.bulk(first))
    rest = torch.zeros_like(case["rows"])
    for b, (cut, count) in enumerate(zip(cuts, counts, strict=True)):
        rest[b, : count - cut] = case["rows"][b, cut:count]
    second = {**case, "rows": rest, "counts": case["counts"] - first["counts"]}
    second.update(state_value=half["state_value"], state_lse=half["state_lse"])
    _, twice = run("summary_merge_bulk", backend, **test_summary_merge.bulk(second))
    for name in ("state_value", "state_lse"):
        torch.testing.assert_close(twice[name], once[name], rtol=1e-5, atol=1e-5)


@each_backend("window_gather")
@bounded
@given(
    data=st.data(),
    lens=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    dtype=dtypes,
    seed=seeds,
    layout=layouts,
)
def test_any_gather(backend, data, lens, dtype, seed, layout):
    seq_lens = [length + data.draw(st.integers(0, 100_000)) for length in lens]
    case = test_window_gather.gather_case(seed, lens, seq_lens, 9, dtype=dtype, **layout)
    test_window_gather.assert_gather_is_exact(backend, case)


@each_backend("window_index")
@bounded
@given(seq_lens=st.lists(st.integers(0, 600), max_size=5), window=st.integers(1, 300), seed=seeds)
def test_any_index(backend, seq_lens, window, seed):
    case = dict(test_window_gather.index_case(seed, seq_lens), window=window)
    (rows, lens), _ = run("window_index", backend, **case)
    exact_rows, exact_lens = test_window_gather.op_oracle.window_index(**case)
    assert torch.equal(rows, exact_rows) and torch.equal(lens, exact_lens)


@each_backend("markov_step")
@bounded
@given(
    batch=st.integers(1, 20),
    vocab=st.integers(1, 300),
    rank=st.sampled_from([1, 8, 32, 33, 64]),
    logits=dtypes,
    weights=dtypes,
    seed=seeds,
)
def test_any_markov_step(backend, batch, vocab, rank, logits, weights, seed):
    case = test_markov_step.case_of(batch, vocab, rank, logits, weights, seed)
    test_markov_step.assert_step_is_right(backend, case)


@each_backend("draft_sample")
@bounded
@given(
    temperature=st.lists(st.sampled_from([0.0, 0.2, 1.0, 1.7]), min_size=1, max_size=18),
    vocab=st.integers(1, 1500),
    rank=st.sampled_from([4, 32]),
    dtype=dtypes,
    seed=seeds,
    share=st.floats(0.0, 1.0),
)
def test_any_draw(backend, temperature, vocab, rank, dtype, seed, share):
    limit = max(1, round(vocab * share))
    case = test_draft_sample.case_of(temperature, vocab, rank, dtype, seed, limit)
    test_draft_sample.assert_draw_is_right(backend, case)


@each_backend("accept_chain")
@bounded
@given(
    batch=st.integers(1, 18),
    block=st.integers(0, 16),
    vocab=st.integers(2, 1500),
    rank=st.sampled_from([4, 32]),
    dtype=dtypes,
    seed=seeds,
)
def test_any_acceptance(backend, batch, block, vocab, rank, dtype, seed):
    case = test_accept_chain.case_of(
        batch, block=block, vocab=vocab, rank=rank, dtype=dtype, seed=seed
    )
    test_accept_chain.assert_acceptance_is_right(backend, case)
