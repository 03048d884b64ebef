"""A round as two CUDA graphs: the proposal is one, acceptance and merge are another.

A proposal is some hundreds of small kernels, which a GPU finishes sooner than Python launches
them. Captured once, they are launched by one call. A captured graph reads and writes the addresses
it was captured with, so whatever changes from round to round is copied into buffers that live as
long as the server, and a batch is padded to the next captured size. Padding names the sacrificial
request row 0, has no committed rows and commits none; what else its buffers hold reaches nobody.

Not in the graphs:
  * what a request may ask for (penalties, grammar, bias, filters, seeds): it ends in a
    `TargetChoice`, which is where the second graph starts;
  * rounds in which a prefix snapshot is due, and simulated acceptance;
  * tensor parallelism: rank 0's drafts and decision are broadcast through torch.distributed, which
    can't be captured;
  * batches beyond the largest captured size.
All of these run the same functions eagerly.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from longspark_sglang.serving.acceptance import (
    Decision,
    RoundPlan,
    TargetChoice,
    decide,
    emitted_tokens,
)
from longspark_sglang.serving.drafter_runner import DrafterRunner, Proposal
from longspark_sglang.serving.summary_store import SummaryStore
from longspark_sglang.serving.taps import BoundaryTaps

logger = logging.getLogger(__name__)

# The most that the target's distributions of a captured batch may take. Larger batches are not
# bound by launches anyway.
MOST_BYTES = 256 << 20

# Records what a function does on the device; the result does it again.
Capture = Callable[[Callable[[], None]], Callable[[], None]]


class CudaCapture:
    """Captures functions as CUDA graphs that share their temporary memory.

    They may share it because they never run at the same time and leave nothing in it: results are
    copied out by the captured function itself.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # what libraries set up at first use must not be captured
                function()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the server may use CUDA meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            function()
        return graph.replay


def capture_sizes(
    wanted: Iterable[int], width: int, vocab_size: int, most_rows: int
) -> tuple[int, ...]:
    """The batch sizes to capture, ascending: SGLang's own, as far as memory and rows allow."""
    largest = min(MOST_BYTES // (4 * width * vocab_size), most_rows)
    return tuple(sorted({size for size in wanted if 1 <= size <= largest}))


class RoundGraphs:
    """The captured functions, their buffers, and the way in and out.

    Args:
        drafter, store, taps: the worker's.
        req_to_token: [rows, width] int32, the request pool's page table.
        key_pools, value_pools: of the tapped layers.
        sizes: batch sizes to capture, ascending, at least one.
        capture: how; None captures CUDA graphs.
    """

    def __init__(
        self,
        drafter: DrafterRunner,
        store: SummaryStore,
        taps: BoundaryTaps,
        req_to_token: torch.Tensor,
        key_pools: Sequence[torch.Tensor],
        value_pools: Sequence[torch.Tensor],
        sizes: Sequence[int],
        capture: Capture | None = None,
    ) -> None:
        self.drafter, self.store, self.taps = drafter, store, taps
        self.req_to_token = req_to_token
        self.key_pools, self.value_pools = key_pools, value_pools
        self.sizes: tuple[int, ...] = tuple(sizes)
        self.width = drafter.num_drafts + 1
        self._addresses = _addresses(key_pools, value_pools)
        self._size = 0  # of the round that `propose` began
        started = time.monotonic()
        self._buffers = self._allocate(self.sizes[-1])
        capture = CudaCapture() if capture is None else capture
        self._replay: dict[tuple[str, int], Callable[[], None]] = {}
        gc.collect()
        gc.freeze()  # each capture collects garbage first; the model need not be looked through
        try:
            for size in reversed(self.sizes):  # the largest sizes the memory that all share
                buffers = self._views(size)
                for name, function in (
                    ("propose", self._propose),
                    ("compare", self._compare),
                    ("weigh", self._weigh),
                ):
                    self._replay[name, size] = capture(partial(function, buffers))
        finally:
            gc.unfreeze()
        self.seconds = time.monotonic() - started

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    # -- a round ----------------------------------------------------------------------------------

    def can_run(
        self,
        batch_size: int,
        key_pools: Sequence[torch.Tensor],
        value_pools: Sequence[torch.Tensor],
    ) -> bool:
        """Whether a batch of this size, with the K/V pools where they are now, can be replayed."""
        if not self.sizes or batch_size > self.sizes[-1]:
            return False
        if _addresses(key_pools, value_pools) != self._addresses:
            logger.warning("LONGSPARK: the K/V pools have moved; rounds run without CUDA graphs")
            self.sizes = ()
            return False
        return True

    def propose(
        self,
        anchors: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        positions: torch.Tensor,
    ) -> Proposal:
        """`DrafterRunner.propose` of a batch for which `can_run`; the result is overwritten by the
        next round's.
        """
        batch = len(anchors)
        self._size = self.sizes[bisect_left(self.sizes, batch)]
        self._fill(
            batch,
            anchors=anchors,
            rows=rows,
            seq_lens=seq_lens,
            temperature=temperature,
            seed=seed,
            positions=positions,
        )
        self._buffers["is_real"][:batch] = 1
        for name in ("rows", "seq_lens", "is_real"):
            self._buffers[name][batch : self._size] = 0
        self._replay["propose", self._size]()
        buffers = self._buffers
        return Proposal(
            buffers["draft_tokens"][:batch],
            buffers["draft_logq"][:batch],
            buffers["base_logits"][:batch],
        )

    def accept(
        self,
        plan: RoundPlan,
        logits: torch.Tensor,
        choice: TargetChoice,
        block_rows: torch.Tensor,
    ) -> Decision:
        """Decide the round that `propose` began and merge its accepted rows.

        Args:
            plan: the round's plan.
            logits, choice: what the target says about the proposal (`target_choice`).
            block_rows: [B, K+1] as for `SummaryStore.commit`.
        """
        batch = len(block_rows)
        self._fill(
            batch,
            block_rows=block_rows,
            limit=plan.limit,
            point_mass=plan.point_mass,
            target_tokens=choice.tokens,
            target_probs=choice.probs,
            uniforms=choice.uniforms,
            uniform_final=choice.uniform_final,
        )
        self._replay["compare" if choice.probs is None else "weigh", self._size]()
        # Copies: the scheduler may read them while the next round replays.
        accept_lens, next_token, tokens = (
            self._buffers[name][:batch].clone() for name in ("accept_lens", "next_token", "tokens")
        )
        return Decision(accept_lens - 1, accept_lens, next_token, tokens.view(-1), logits)

    # -- what is captured -------------------------------------------------------------------------

    def _propose(self, b: dict[str, torch.Tensor]) -> None:
        proposal = self._proposal(b)
        b["draft_tokens"].copy_(proposal.draft_tokens)
        b["draft_logq"].copy_(proposal.draft_logq)
        b["base_logits"].copy_(proposal.base_logits)

    def _proposal(self, b: dict[str, torch.Tensor]) -> Proposal:
        return self.drafter.propose(
            b["anchors"],
            b["rows"],
            b["seq_lens"],
            b["temperature"],
            b["seed"],
            b["positions"],
            self.store,
            self.req_to_token,
            self.key_pools,
            self.value_pools,
        )

    def _compare(self, b: dict[str, torch.Tensor]) -> None:
        self._accept(b, TargetChoice(b["target_tokens"], None, None, None))

    def _weigh(self, b: dict[str, torch.Tensor]) -> None:
        # The tokens of requests that are weighed are left over from another round: point_mass
        # says which ones count.
        self._accept(
            b,
            TargetChoice(b["target_tokens"], b["target_probs"], b["uniforms"], b["uniform_final"]),
        )

    def _accept(self, b: dict[str, torch.Tensor], choice: TargetChoice) -> None:
        drafter, drafts = self.drafter, b["draft_tokens"]
        accepted, next_token = decide(
            choice,
            drafts,
            b["anchors"],
            b["draft_logq"],
            b["base_logits"],
            drafter.markov_w1,
            drafter.markov_w2,
            b["temperature"],
            b["point_mass"],
            b["limit"],
            drafter.vocab_size,
        )
        accept_lens = (accepted + 1) * b["is_real"]
        block = self.taps.kept(len(drafts) * self.width)
        self.store.commit(
            b["rows"],
            b["block_rows"],
            accept_lens,
            block.unflatten(0, (len(drafts), self.width)),
            self.key_pools,
            self.value_pools,
        )
        b["tokens"].copy_(emitted_tokens(drafts, accepted, next_token).view_as(b["tokens"]))
        b["accept_lens"].copy_(accept_lens)
        b["next_token"].copy_(next_token)

    # -- buffers ----------------------------------------------------------------------------------

    def _allocate(self, capacity: int) -> dict[str, torch.Tensor]:
        """Zeros for everything: a whole batch of padding."""
        width, drafts = self.width, self.drafter.num_drafts
        i64, i32, f32 = torch.int64, torch.int32, torch.float32

        def buffer(dtype: torch.dtype, *size: int) -> torch.Tensor:
            return torch.zeros(capacity, *size, dtype=dtype, device=self.req_to_token.device)

        made = {
            "anchors": buffer(i64),
            "rows": buffer(i64),
            "seq_lens": buffer(i64),
            "is_real": buffer(i32),
            "temperature": buffer(f32),
            "seed": buffer(i64),
            "positions": buffer(i64),
            "draft_tokens": buffer(i64, drafts),
            "draft_logq": buffer(f32, drafts),
            "block_rows": buffer(i64, width),
            "limit": buffer(i32),
            "point_mass": buffer(torch.bool),
            "target_tokens": buffer(i64, width),
            "uniforms": buffer(f32, drafts),
            "uniform_final": buffer(f32),
            "accept_lens": buffer(i32),
            "next_token": buffer(i64),
            "tokens": buffer(i64, width),
        }
        # The target's head says in what dtype and over how many ids.
        one = self._proposal({name: tensor[:1] for name, tensor in made.items()}).base_logits
        vocab = one.shape[-1]
        made["base_logits"] = buffer(one.dtype, drafts, vocab)
        made["target_probs"] = buffer(f32, width, vocab)
        return made

    def _views(self, size: int) -> dict[str, torch.Tensor]:
        return {name: tensor[:size] for name, tensor in self._buffers.items()}

    def _fill(self, batch: int, **values: torch.Tensor | None) -> None:
        """Copy a batch's tensors into the buffers; padding behind it keeps what it holds."""
        for name, value in values.items():
            if value is not None:
                self._buffers[name][:batch].copy_(value)


def _addresses(*pools: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(pool.data_ptr() for group in pools for pool in group)


def make(
    worker: Any, key_pools: Sequence[torch.Tensor], value_pools: Sequence[torch.Tensor]
) -> RoundGraphs | None:
    """The graphs of a LongSparkWorker; None where rounds run eagerly.

    SGLang captures the target's verify pass first: the same sizes are taken, and none where the
    server runs with --disable-cuda-graph (or --cuda-graph-backend-decode=disabled).
    """
    wanted = worker.target_worker.get_decode_cuda_graph_bs()
    vocab, rows = worker.drafter.vocab_size, worker.store.num_rows
    sizes = capture_sizes(wanted, worker.width, vocab, rows)
    if torch.device(worker.device).type != "cuda" or not sizes:
        return None
    if worker.sampler.tp_group is not None:
        logger.info("LONGSPARK: no CUDA graphs of the drafter with tensor parallelism")
        return None
    try:
        graphs = RoundGraphs(
            worker.drafter,
            worker.store,
            worker.taps,
            worker.req_to_token_pool.req_to_token,
            key_pools,
            value_pools,
            sizes,
        )
    except RuntimeError as error:  # out of memory included; eager rounds need none of this
        logger.warning("LONGSPARK: rounds run without CUDA graphs, for capturing failed: %s", error)
        return None
    logger.info(
        "LONGSPARK: proposals and acceptance captured as CUDA graphs for batches of %s in %.1f s, "
        "%.0f MiB of buffers",
        ", ".join(map(str, sizes)),
        graphs.seconds,
        graphs.buffer_bytes / (1 << 20),
    )
    return graphs
