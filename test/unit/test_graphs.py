"""The static half of CUDA graphs: nothing is read on the host, padding changes no bit, and a replay
is the function itself. What a GPU adds is in `make gpu-check`.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from longspark_sglang.serving import graphs
from longspark_sglang.serving.acceptance import (
    AcceptanceSampler,
    TargetChoice,
    decide,
    emitted_tokens,
)
from longspark_sglang.serving.graphs import RoundGraphs, capture_sizes
from longspark_sglang.serving.worker import LongSparkWorker
from recorded_ops import HostReads, RecordedOps
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from toy_round import VOCAB, ToyRound, one_rank, products_row_by_row
from toy_serving import Batch, make_request

SIZES = (1, 2, 4, 8)


@pytest.fixture(autouse=True)
def single_rank():
    with one_rank():
        yield


def graphs_of(world: ToyRound, capture: Any = None, sizes: tuple[int, ...] = SIZES) -> RoundGraphs:
    return RoundGraphs(
        world.drafter,
        world.store,
        world.taps,
        world.req_to_token,
        **world.pools,
        sizes=sizes,
        capture=capture or RecordedOps(),
    )


def choice_of(inputs: Any, kind: str) -> TargetChoice:
    """The target compares (greedy requests only), weighs, or does both."""
    weighed = (inputs.probs, inputs.uniforms, inputs.uniform_final)
    return TargetChoice(
        None if kind == "weigh" else inputs.tokens, *(weighed if kind != "compare" else [None] * 3)
    )


def plan_of(inputs: Any, kind: str) -> Any:
    point_mass = {"weigh": False, "compare": True}.get(kind)
    return SimpleNamespace(
        temperature=inputs.propose["temperature"],
        limit=inputs.limit,
        point_mass=inputs.point_mass
        if point_mass is None
        else torch.full_like(inputs.point_mass, point_mass),
    )


def make_likely(inputs: Any, drafts: torch.Tensor) -> None:
    """Targets that agree with some of the drafts, so that rounds accept some."""
    inputs.tokens[:, :-1] = torch.where(
        inputs.tokens[:, :-1] % 3 > 0, drafts, inputs.tokens[:, :-1]
    )
    likely = torch.zeros_like(inputs.probs[:, :-1]).scatter_(2, drafts[:, :, None], 1.0)
    inputs.probs[:, :-1] = 0.5 * inputs.probs[:, :-1] + 0.5 * likely


def eager_round(world: ToyRound, inputs: Any, kind: str) -> dict[str, torch.Tensor]:
    """The same round without buffers, padding or graphs."""
    proposal = world.drafter.propose(
        **inputs.propose, store=world.store, req_to_token=world.req_to_token, **world.pools
    )
    make_likely(inputs, proposal.draft_tokens)
    plan, batch = plan_of(inputs, kind), len(inputs.limit)
    accepted, next_token = decide(
        choice_of(inputs, kind),
        proposal.draft_tokens,
        inputs.propose["anchors"],
        proposal.draft_logq,
        proposal.base_logits,
        world.drafter.markov_w1,
        world.drafter.markov_w2,
        plan.temperature,
        plan.point_mass,
        plan.limit,
        VOCAB,
    )
    world.store.commit(
        inputs.propose["rows"],
        inputs.block_rows,
        accepted + 1,
        world.taps.kept(batch * world.width).unflatten(0, (batch, world.width)),
        **world.pools,
    )
    return {
        **vars(proposal),
        "accept_lens": accepted + 1,
        "next_token": next_token,
        "tokens": emitted_tokens(proposal.draft_tokens, accepted, next_token),
    }


def replayed_round(
    world: ToyRound, captured: RoundGraphs, inputs: Any, kind: str
) -> dict[str, torch.Tensor]:
    assert captured.can_run(len(inputs.limit), **world.pools)
    proposal = captured.propose(**inputs.propose)
    make_likely(inputs, proposal.draft_tokens)
    kept = {name: value.clone() for name, value in vars(proposal).items()}
    logits = torch.zeros(0)
    decision = captured.accept(
        plan_of(inputs, kind), logits, choice_of(inputs, kind), inputs.block_rows
    )
    assert decision.logits is logits
    assert torch.equal(decision.accepted + 1, decision.accept_lens)
    wanted = ("accept_lens", "next_token", "tokens")
    return {**kept, **{name: getattr(decision, name) for name in wanted}}


def state_of(world: ToyRound) -> dict[str, torch.Tensor]:
    """State of everybody's rows, without the sacrificial one."""
    names = ("value", "lse", "boundary", "covered")
    return {name: getattr(world.store, name)[1:].clone() for name in names}


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different
    assert not any(t.isnan().any() for t in a.values() if t.is_floating_point())


@pytest.fixture(scope="module")
def captured_world():
    with one_rank(), products_row_by_row():
        world = ToyRound()
        yield world, graphs_of(world)


@pytest.mark.parametrize("kind", ["compare", "weigh", "both"])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_replays_have_the_bits_of_eager_rounds(captured_world, batch: int, kind: str) -> None:
    """Three rounds with other inputs each; NaN wherever padding may look."""
    world, captured = captured_world
    plain = ToyRound()
    for name in ("value", "lse", "boundary", "covered"):
        getattr(plain.store, name).copy_(getattr(world.store, name))
    lengths = set()
    for seed in range(3):
        for tensor in (world.store.value, world.store.lse, world.store.boundary):
            tensor[0] = torch.nan
        for name in ("target_probs", "base_logits", "uniforms", "temperature", "draft_logq"):
            captured._buffers[name][batch:] = torch.nan
        inputs = world.inputs(batch, seed)
        same_inputs = plain.inputs(batch, seed)
        replayed = replayed_round(world, captured, inputs, kind)
        assert_same_bits(replayed, eager_round(plain, same_inputs, kind))
        assert_same_bits(state_of(world), state_of(plain))
        lengths |= set(replayed["accept_lens"].tolist())
    assert len(lengths) > 1 or batch == 1


def test_a_batch_takes_the_next_captured_size(captured_world) -> None:
    world, captured = captured_world
    for batch, size in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)):
        captured.propose(**world.inputs(batch, 0).propose)
        assert captured._size == size
    assert captured.can_run(8, **world.pools) and not captured.can_run(9, **world.pools)


def test_results_of_a_round_survive_the_next(captured_world) -> None:
    """The scheduler reads them while the next round runs."""
    world, captured = captured_world
    inputs = world.inputs(3, 0)
    captured.propose(**inputs.propose)
    choice = choice_of(inputs, "both")
    first = captured.accept(plan_of(inputs, "both"), torch.zeros(0), choice, inputs.block_rows)
    kept = first.tokens.clone(), first.accept_lens.clone(), first.next_token.clone()
    inputs = world.inputs(3, 9)
    captured.propose(**inputs.propose)
    captured.accept(plan_of(inputs, "both"), torch.zeros(0), choice_of(inputs, "both"),
                    inputs.block_rows)  # fmt: skip
    for tensor, copy in zip((first.tokens, first.accept_lens, first.next_token), kept, strict=True):
        assert torch.equal(tensor, copy)


def test_moved_pools_end_the_replays(captured_world, caplog) -> None:
    world, captured = captured_world
    moved = {**world.pools, "key_pools": [pool.clone() for pool in world.key_pools]}
    sizes = captured.sizes
    with caplog.at_level(logging.WARNING):
        assert not captured.can_run(1, **moved)
    assert "K/V pools have moved" in caplog.text
    assert not captured.can_run(1, **world.pools)
    captured.sizes = sizes


# -- what a graph can't hold -----------------------------------------------------------------------


class Watched:
    """Capture that runs the function under a guard."""

    def __init__(self) -> None:
        self.guards: list[HostReads] = []

    def __call__(self, function: Any) -> Any:
        with HostReads() as guard:
            function()
        self.guards.append(guard)
        return function


def test_nothing_is_read_on_the_host() -> None:
    watched = Watched()
    graphs_of(ToyRound(), watched, sizes=(2,))
    assert len(watched.guards) == 3
    for guard in watched.guards:
        assert guard.found == [] and guard.count > 10


def test_on_a_gpu_shapes_depend_on_no_value(monkeypatch) -> None:
    """Fake CUDA tensors hold no values: what needs one raises. The plain-torch operators run, which
    is what serves where no kernels were built.
    """
    # Fake parameters can't be moved, so they are made where they belong.
    monkeypatch.setattr(nn.Module, "to", lambda module, *args, **kwargs: module)
    with FakeTensorMode(), torch.device("cuda"):
        world = ToyRound(device="cuda", dtype=torch.bfloat16)
        captured = graphs_of(world, lambda function: function, sizes=(3,))
        for replay in captured._replay.values():
            replay()
        assert captured._buffers["tokens"].device.type == "cuda"
        assert captured._buffers["base_logits"].dtype == torch.bfloat16
        with pytest.raises(DynamicOutputShapeException):
            captured._buffers["tokens"].nonzero()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: bool((x > 0).any()),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
    ],
)
def test_the_guard_sees_host_reads(read: Any) -> None:
    with HostReads() as guard:
        read(torch.arange(5))
    assert guard.found


def test_the_stand_in_replays_memory_and_not_python() -> None:
    source, target, runs = torch.tensor([1.0, 2.0]), torch.zeros(2), []

    def function() -> None:
        runs.append(1)
        doubled = source * 2
        doubled[1:] += 1
        target.copy_(doubled.flip(0))

    replay = RecordedOps()(function)
    source.copy_(torch.tensor([10.0, 20.0]))
    replay()
    assert target.tolist() == [41.0, 20.0] and runs == [1]


# -- when there are graphs -------------------------------------------------------------------------


def test_sizes() -> None:
    wanted = [8, 1, 2, 4, 4, 0, 16, 512]
    assert capture_sizes(wanted, 8, 1000, 500) == (1, 2, 4, 8, 16)
    assert capture_sizes(wanted, 8, 1000, 9) == (1, 2, 4, 8)
    # 256 MiB hold the distributions of 55 requests at a vocabulary of 151,936.
    assert capture_sizes(range(1, 300), 8, 151936, 500)[-1] == 55
    assert capture_sizes([], 8, 1000, 500) == ()


def worker_of(world: ToyRound, sizes: list[int], device: str = "cuda", tp: Any = None) -> Any:
    return SimpleNamespace(
        target_worker=SimpleNamespace(get_decode_cuda_graph_bs=lambda: sizes),
        drafter=world.drafter,
        store=world.store,
        taps=world.taps,
        width=world.width,
        device=device,
        sampler=SimpleNamespace(tp_group=tp),
        req_to_token_pool=SimpleNamespace(req_to_token=world.req_to_token),
    )


def test_graphs_follow_sglangs_switch_device_and_ranks(captured_world, monkeypatch, caplog) -> None:
    world, _ = captured_world
    monkeypatch.setattr(graphs, "CudaCapture", RecordedOps)
    caplog.set_level(logging.INFO)
    assert graphs.make(worker_of(world, []), **world.pools) is None  # --disable-cuda-graph
    assert graphs.make(worker_of(world, [1, 2], device="cpu"), **world.pools) is None
    assert not caplog.records
    assert graphs.make(worker_of(world, [1, 2], tp=object()), **world.pools) is None
    assert "no CUDA graphs of the drafter with tensor parallelism" in caplog.text
    made = graphs.make(worker_of(world, [2, 1]), **world.pools)
    assert made is not None and made.sizes == (1, 2)
    assert "captured as CUDA graphs for batches of 1, 2 in" in caplog.text


def test_a_failed_capture_leaves_rounds_eager(captured_world, monkeypatch, caplog) -> None:
    def capture():
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(graphs, "CudaCapture", capture)
    world, _ = captured_world
    assert graphs.make(worker_of(world, [1]), **world.pools) is None
    assert "rounds run without CUDA graphs, for capturing failed: CUDA out of memory" in caplog.text


# -- the worker ------------------------------------------------------------------------------------


def worker_over(world: ToyRound, round_graphs: RoundGraphs | None) -> LongSparkWorker:
    """A worker as after start-up, whose target agrees with every other draft it is shown."""
    worker = LongSparkWorker.__new__(LongSparkWorker)
    for name in ("drafter", "store", "taps", "width"):
        setattr(worker, name, getattr(world, name))
    worker.device, worker.graphs, worker.simulation = "cpu", round_graphs, None
    worker.req_to_token_pool = SimpleNamespace(req_to_token=world.req_to_token)
    worker.self_check = SimpleNamespace(every=0)
    worker.metrics = SimpleNamespace(note_launch=lambda enabled: None)
    worker.sampler = AcceptanceSampler(7, VOCAB, "cpu", sampling_backend="pytorch", seed=4)
    worker._tapped_pools = lambda: world.pools
    worker._block_rows = lambda batch, seq_lens: batch.block_rows

    def verify(batch, candidates, *rest):
        logits = batch.logits.clone()
        agreed = candidates[:, 1::2].flatten()
        logits.view(len(candidates), 8, -1)[:, 0:7:2].flatten(0, 1)[
            torch.arange(len(agreed)), agreed
        ] = 12.0
        output = SimpleNamespace(next_token_logits=logits)
        return SimpleNamespace(logits_output=output, grammar_mask=None, can_run_cuda_graph=False)

    worker._verify = verify
    return worker


def batch_of(world: ToyRound, size: int, seed: int, **sampling: Any) -> Batch:
    inputs = world.inputs(size, seed)
    batch = Batch([make_request(1 + i, **sampling) for i in range(size)], VOCAB)
    batch.seq_lens = inputs.propose["seq_lens"]
    batch.req_pool_indices = inputs.propose["rows"]
    batch.spec_info = SimpleNamespace(bonus_tokens=inputs.propose["anchors"])
    batch.return_logprob = False
    batch.block_rows = inputs.block_rows
    batch.logits = inputs.probs.log().flatten(0, 1)
    return batch


SAMPLINGS = [
    dict(temperature=0.0),
    dict(temperature=1.0),
    dict(temperature=0.7, top_p=0.9, frequency_penalty=0.5),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
def test_the_worker_emits_the_same_with_and_without_graphs(captured_world, sampling: Any) -> None:
    world, captured = captured_world
    plain = ToyRound()
    for name in ("value", "lse", "boundary", "covered"):
        getattr(plain.store, name).copy_(getattr(world.store, name))
    with_graphs, without = worker_over(world, captured), worker_over(plain, None)
    for seed, size in enumerate((3, 1, 9, 4)):  # 9 are more than were captured
        results = []
        for worker, toy in ((with_graphs, world), (without, plain)):
            published: list[torch.Tensor] = []
            result = worker._round(batch_of(toy, size, seed, **sampling), published.append, None)
            assert torch.equal(published[0], result.new_seq_lens)
            results.append(result)
        for name in ("next_token_ids", "accept_lens", "new_seq_lens"):
            assert torch.equal(*(getattr(result, name) for result in results)), name
        assert torch.equal(*(r.next_draft_input.bonus_tokens for r in results))
        assert_same_bits(state_of(world), state_of(plain))


@pytest.mark.parametrize("reason", ["simulation", "snapshot"])
def test_rounds_that_no_graph_holds_commit_once(captured_world, monkeypatch, reason: str) -> None:
    """The proposal is replayed; acceptance and merge run eagerly."""
    world, captured = captured_world
    worker = worker_over(world, captured)
    if reason == "simulation":
        worker.simulation = SimpleNamespace(apply=lambda decision, *rest: decision)
    else:
        due = SimpleNamespace(crossings=lambda reqs, width: ["due"])
        monkeypatch.setattr(world.store, "snapshots", due)
    commits: list[Any] = []
    monkeypatch.setattr(world.store, "commit", lambda *args, **kw: commits.append(kw["crossings"]))
    monkeypatch.setattr(captured, "accept", None)
    worker._round(batch_of(world, 3, 0, temperature=1.0), None, None)
    assert commits == [["due"] if reason == "snapshot" else ()]
