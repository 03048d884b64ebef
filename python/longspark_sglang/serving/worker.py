"""One LONGSPARK round, as the scheduler drives it: propose, verify, accept, commit.

The worker owns no draft model runner and no draft KV pool. What a request needs between rounds is
one row of `SummaryStore`; the K/V window is read in place from the target's pool.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_parallel, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from longspark_sglang import checkpoint
from longspark_sglang.serving import compat, graphs
from longspark_sglang.serving.acceptance import AcceptanceSampler, is_enabled, request_refusals
from longspark_sglang.serving.algorithm import drafter_config
from longspark_sglang.serving.drafter_runner import DrafterRunner
from longspark_sglang.serving.metrics import Metrics, start_up_lines
from longspark_sglang.serving.self_check import SelfCheck
from longspark_sglang.serving.simulation import SimulatedAcceptance
from longspark_sglang.serving.snapshots import BLOCK, Crossing, PrefixSnapshots
from longspark_sglang.serving.summary_store import SummaryStore
from longspark_sglang.serving.taps import BoundaryTaps

logger = logging.getLogger(__name__)


class LongSparkWorker(BaseSpecWorker):
    """The draft worker that SGLang's scheduler calls in place of the target worker.

    Args: as SGLang passes them (scheduler.maybe_init_draft_worker).
    Raises ValueError with every reason why this target and drafter do not fit.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._draft_worker = None
        runner = target_worker.model_runner
        args = resolving_view(server_args)
        self.config = drafter_config(args)
        hf_config = runner.model_config.hf_text_config
        reasons = compat.target_refusals(hf_config, self.config)
        if reasons:
            raise ValueError(
                "this drafter does not fit this target:\n  - " + "\n  - ".join(reasons)
            )
        self.device = target_worker.device
        self.width = int(get_spec().speculative_num_draft_tokens)
        self.speculative_num_draft_tokens = self.width
        self.speculative_num_steps = 1
        parallel = get_parallel()
        state = checkpoint.load_state(
            args.speculative_draft_model_path,
            self.config,
            revision=getattr(args, "speculative_draft_model_revision", None),
        )
        self.drafter = DrafterRunner(
            self.config,
            state,
            runner.model,
            runner.dtype,
            self.device,
            parallel.attn_tp_rank,
            parallel.attn_tp_size,
            runner.model_config.vocab_size,
            self.width - 1,
        )
        self.taps = BoundaryTaps(runner.model, self.config.tapped_layers)
        self.sampler = AcceptanceSampler(
            num_draft_tokens=self.width - 1,
            vocab_size=runner.model_config.vocab_size,
            device=self.device,
            tp_group=parallel.tp_group if parallel.tp_size > 1 else None,
            seed=target_worker.random_seed,  # already agreed on by all ranks
        )
        self.simulation = SimulatedAcceptance.from_environment(runner.model_config.vocab_size)
        # Before the KV pool is sized, so that the state comes out of the memory that is still free.
        self._allocate_state(int(get_schedule().max_running_requests) + 1)
        self.offsets = torch.arange(self.width, device=self.device)
        self.graphs: graphs.RoundGraphs | None = None

    # -- start ------------------------------------------------------------------------------------

    def alloc_memory_pool(
        self,
        memory_pool_config=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
    ) -> None:
        """See the pools: check that K/V rows can be read, and that every request row has state."""
        super().alloc_memory_pool(
            memory_pool_config=memory_pool_config,
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
        )
        runner = self._target_worker.model_runner
        pool = runner.token_to_kv_pool
        if not hasattr(pool, "get_key_buffer") or getattr(pool, "use_hnd", False):
            raise ValueError(
                f"K/V pool {type(pool).__name__} has no per-head rows to read in place; "
                "LONGSPARK needs a plain (NHD) multi-head pool"
            )
        rows = req_to_token_pool.req_to_token.shape[0]
        if rows > self.store.num_rows:
            logger.info(
                "LONGSPARK: the request pool has %d rows, more than --max-running-requests; "
                "allocating state for all of them",
                rows,
            )
            self._allocate_state(rows)
        self._allocate_snapshots()
        every = compat.number("LONGSPARK_CHECK", 0)
        self.self_check = SelfCheck(self.store, every, self.config.window)
        self.metrics = Metrics(self, resolving_view(self._target_worker.server_args))
        for line in start_up_lines(self):
            logger.info(line)
        if self.simulation is not None:
            logger.warning(self.simulation.warning)

    def init_cuda_graphs(self) -> None:
        """Capture the round, after the target's graphs."""
        super().init_cuda_graphs()
        self.graphs = graphs.make(self, **self._tapped_pools())

    def _allocate_state(self, rows: int) -> None:
        """State for `rows` rows of the request pool (row 0 is SGLang's padding row)."""
        runner = self._target_worker.model_runner
        hidden = self.config.hidden_size
        self.store = SummaryStore(self.drafter.queries, rows, hidden, runner.dtype)
        self.taps.allocate(rows * self.width, hidden, runner.dtype, self.device)

    def _allocate_snapshots(self) -> None:
        """Host memory for prefix snapshots; none where SGLang keeps no prefixes."""
        if resolving_view(self._target_worker.server_args).disable_radix_cache:
            return
        each = PrefixSnapshots.bytes_each(self.drafter.queries)
        pool_blocks = -(-self._target_worker.model_runner.max_total_num_tokens // BLOCK)
        # One for each block of rows that the KV cache can hold, unless told otherwise.
        mib = compat.number("LONGSPARK_SNAPSHOT_MB", -1)
        capacity = pool_blocks if mib < 0 else (mib << 20) // each
        if capacity:
            self.store.snapshots = PrefixSnapshots(capacity, self.drafter.queries)

    # -- rounds -----------------------------------------------------------------------------------

    @torch.no_grad()
    def forward_batch_generation(
        self, batch, on_publish=None, grammar_barrier=None, pp_proxy_tensors=None
    ) -> GenerationBatchResult:
        """Run one scheduled batch: a prefill pass or one round of speculation."""
        if self.store.snapshots is not None:
            self.store.snapshots.settle()
        self.self_check.before_forward()
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish, grammar_barrier)
        if batch.forward_mode.is_idle():
            return self._idle(on_publish)
        return self._round(batch, on_publish, grammar_barrier)

    def _prefill(self, batch, on_publish, grammar_barrier) -> GenerationBatchResult:
        """The target's own prefill and first token; then the state of each request is extended."""
        extend_lens = torch.tensor(batch.extend_lens, device=self.device)
        self.taps.rows = extend_lens.cumsum(0) - 1
        self.sampler.before_extend(batch)
        if grammar_barrier is not None and batch.has_grammar and batch.decoding_reqs:
            # Mixed chunk: the requests that ride along still have a round in flight, and SGLang's
            # sampler masks their token by their grammars without waiting for it.
            grammar_barrier()
        result = self._target_worker.forward_batch_generation(batch)
        self.sampler.after_extend(batch, result.next_token_ids)
        row_ids = [req.kv.req_pool_idx for req in batch.reqs]
        snapshots = self.store.snapshots
        self.store.extend(
            rows=batch.req_pool_indices.to(torch.int64),
            row_ids=row_ids,
            generations=self.req_to_token_pool.req_generation[row_ids].tolist(),
            prefix_lens=batch.prefix_lens,
            extend_lens=batch.extend_lens,
            boundary=self.taps.kept(len(row_ids)),
            req_to_token=self.req_to_token_pool.req_to_token,
            keys=None if snapshots is None else [snapshots.keys(req) for req in batch.reqs],
            **self._tapped_pools(),
        )
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        result.next_draft_input = make_draft_input_v2(
            bonus_tokens=result.next_token_ids, new_seq_lens=batch.seq_lens
        )
        return result

    def _round(self, batch, on_publish, grammar_barrier) -> GenerationBatchResult:
        """propose -> verify -> accept -> commit."""
        rows = batch.req_pool_indices.to(torch.int64)
        seq_lens = batch.seq_lens.to(torch.int64)
        pools = self._tapped_pools()
        block_rows = self._block_rows(batch, seq_lens)
        if self.self_check.every:
            row_ids = [req.kv.req_pool_idx for req in batch.reqs]
            self.self_check.round(
                row_ids,
                self.req_to_token_pool.req_generation[row_ids].tolist(),
                seq_lens,
                block_rows,
                self.req_to_token_pool.req_to_token,
                **pools,
            )
        plan = self.sampler.plan(batch)
        self.metrics.note_launch([is_enabled(req) for req in batch.reqs])
        anchors = batch.spec_info.bonus_tokens.to(torch.int64)
        captured = self.graphs
        if captured is not None and captured.can_run(len(rows), **pools):
            proposal = captured.propose(
                anchors, rows, seq_lens, plan.temperature, plan.seed, plan.positions
            )
        else:
            captured = None
            proposal = self.drafter.propose(
                anchors,
                rows,
                seq_lens,
                plan.temperature,
                plan.seed,
                plan.positions,
                self.store,
                self.req_to_token_pool.req_to_token,
                **pools,
            )
        self.sampler.broadcast(proposal.draft_tokens)
        candidates = torch.cat((anchors[:, None], proposal.draft_tokens), dim=1)

        target = self._verify(batch, candidates, seq_lens, block_rows, grammar_barrier)
        crossings: Sequence[Crossing] = ()
        if self.store.snapshots is not None:
            crossings = self.store.snapshots.crossings(batch.reqs, self.width)
        if captured is not None and not crossings and self.simulation is None:
            logits, choice = self.sampler.target_choice(
                batch,
                plan,
                proposal.draft_tokens,
                target.logits_output.next_token_logits,
                target.grammar_mask,
            )
            decision = captured.accept(plan, logits, choice, block_rows)
            self.sampler.record(plan, decision)
        else:
            captured = None  # the merge is still to come
            decision = self.sampler.accept(
                batch,
                plan,
                candidates,
                target.logits_output.next_token_logits,
                proposal,
                self.drafter.markov_w1,
                self.drafter.markov_w2,
                target.grammar_mask,
            )
        if self.simulation is not None:
            decision = self.simulation.apply(
                decision, candidates, plan.limit, self.sampler.broadcast
            )
        new_seq_lens = seq_lens + decision.accept_lens
        if on_publish is not None:
            # As soon as the lengths are known: the scheduler prepares the next round meanwhile.
            on_publish(new_seq_lens)
        if batch.return_logprob:
            target.logits_output.next_token_logits = decision.logits
            compute_spec_logprobs(
                batch, target.logits_output, decision.tokens, chain_stride=self.width
            )
        if captured is None:
            self.store.commit(
                rows,
                block_rows,
                decision.accept_lens,
                self.taps.kept(len(rows) * self.width).unflatten(0, (len(rows), self.width)),
                crossings=crossings,
                **pools,
            )
        return GenerationBatchResult(
            logits_output=target.logits_output,
            next_token_ids=decision.tokens,
            accept_lens=decision.accept_lens,
            can_run_cuda_graph=target.can_run_cuda_graph,
            next_draft_input=make_draft_input_v2(
                bonus_tokens=decision.next_token, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=self.width,
            new_seq_lens=new_seq_lens,
        )

    def _block_rows(self, batch, seq_lens: torch.Tensor) -> torch.Tensor:
        """K/V row ids of positions L .. L+width-1 of each request, [B, width]."""
        locations = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self.req_to_token_pool.req_to_token,
            start_offset=batch.seq_lens,
            end_offset=batch.seq_lens + self.width,
            batch_size=len(seq_lens),
            draft_token_num=self.width,
            device=self.device,
        )
        return locations.view(-1, self.width)

    def _verify(self, batch, candidates, seq_lens, block_rows, grammar_barrier) -> Any:
        """The target's forward over the block; its logits are left unprocessed.

        Returns the target's GenerationBatchResult with `grammar_mask` (or None) attached.
        """
        # Starts its copy to the host here, so that the grammar's work overlaps the forward.
        tree = GrammarTree.from_linear_chain(candidates) if batch.has_grammar else None
        verify = DFlashVerifyInput(
            draft_token=candidates.reshape(-1),
            positions=(seq_lens[:, None] + self.offsets).reshape(-1),
            draft_token_num=self.width,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        self.taps.rows = None
        batch.out_cache_loc = block_rows.reshape(-1)
        kept = batch.seq_lens_cpu, batch.seq_lens_sum
        if batch.seq_lens_cpu is not None:
            # Backends that plan on the host size their work by these lengths, block included.
            batch.seq_lens_cpu = batch.seq_lens_cpu + self.width
            batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        forward_batch, _ = verify.prepare_for_verify(batch, self._target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = kept
        forward_batch.mark_forward_metadata_ready()
        result = self._target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        result.grammar_mask = None
        if tree is not None:
            result.grammar_mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=tree,
                sampling_info=batch.sampling_info,
                device=self.device,
                barrier=grammar_barrier,
            )
        return result

    def _idle(self, on_publish) -> GenerationBatchResult:
        """An empty round."""
        empty = DFlashDraftInputV2.create_idle_input(device=self.device)
        if on_publish is not None:
            on_publish(empty.new_seq_lens)
        return GenerationBatchResult(
            next_token_ids=torch.empty(0, dtype=torch.int64, device=self.device),
            accept_lens=torch.empty(0, dtype=torch.int32, device=self.device),
            next_draft_input=empty,
            speculative_num_draft_tokens=self.width,
            new_seq_lens=empty.new_seq_lens,
        )

    def _tapped_pools(self) -> dict[str, list[torch.Tensor]]:
        """The target's K and V pools of the tapped layers; asked anew, because it also waits for
        HiCache.
        """
        pool = self._target_worker.model_runner.token_to_kv_pool
        layers = self.config.tapped_layers
        return {
            "key_pools": [pool.get_key_buffer(i) for i in layers],
            "value_pools": [pool.get_value_buffer(i) for i in layers],
        }

    # -- what the scheduler tells us --------------------------------------------------------------

    def refuse_request(self, req) -> str | None:
        """Why this request cannot be served exactly, or None (hooked into the scheduler's
        admission).
        """
        reasons = request_refusals(req)
        if not reasons:
            return None
        self.metrics.refusals += 1
        return "LONGSPARK cannot serve this request: " + "; ".join(reasons)

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """Accept counts of a round, once they are on the host."""
        self.metrics.note_round(num_correct_drafts_per_req)

    def prepare_for_kv_cache_release(self, req) -> None:
        """A finished request is about to give its row back."""
        if self.store.snapshots is not None:
            self.store.snapshots.finish(req)
        self.store.release(req.kv.req_pool_idx)
        self.self_check.freed(req.kv.req_pool_idx)

    def weights_changing(self) -> None:
        """The target is about to get other weights (hooked into the scheduler's weight updates)."""
        if self.store.snapshots is not None:
            self.store.snapshots.suspend()

    def clear_cache_pool(self) -> None:
        """The KV cache was flushed: no state describes anything any more."""
        self.store.clear()
