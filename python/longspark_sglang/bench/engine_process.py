"""SGLang's own scheduler in a process without HTTP, stepped round by round (see `engine.Engine`).

    python -m longspark_sglang.bench.engine_process --model-path ... [SGLang's server arguments]

Commands are JSON lines on stdin, answers JSON lines on the stdout that the process was started
with; whatever SGLang prints goes to stderr. Requests, scheduling, pools, workers and kernels are
those of a server. Two things are not: there is no tokenizer process, and a *synthetic* context is
not prefilled by the target: the whole K/V pool holds random rows, and the scheduler's prefill
passes skip the target's forward. A round cannot tell, since its cost does not depend on values.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from array import array
from collections.abc import Sequence
from typing import Any, TextIO

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, prepare_server_args

from longspark_sglang.bench.phases import (
    EVICTION,
    GRAPH_PHASES,
    LONGSPARK_PHASES,
    PLAIN_PHASES,
    PhaseClock,
)

COLD_BYTES = 256 << 20  # more than any cache of the machines that this runs on
POOL_TILE = 1 << 22  # random numbers drawn; the pool repeats them
IDLE_STEPS = 64


class EngineProcess:
    """One scheduler and the commands it understands.

    Args:
        arguments: SGLang's server arguments, as on its command line.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        load_plugins()
        args = prepare_server_args(list(arguments))
        args.resolve_once()
        args.check_server_args()
        ports = PortArgs.init_new(args)
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        self.scheduler = Scheduler(args, ports)
        self.algorithm = getattr(self.scheduler.spec_algorithm, "name", "NONE")
        self.speculates = self.algorithm == "LONGSPARK"
        self.device = str(self.scheduler.tp_worker.device)
        self.clock = PhaseClock(self.device)
        self._synthetic = self._cold = False
        self._others_data: torch.Tensor | None = None
        self._submitted = 0
        target = self.scheduler.tp_worker
        self._target_forward = target.forward_batch_generation
        target.forward_batch_generation = self._forward
        if self.speculates:
            worker = self.scheduler.draft_worker
            self.clock.attach(worker, LONGSPARK_PHASES)
            if worker.graphs is not None:
                self.clock.attach(worker, GRAPH_PHASES)
            self._verify = worker._verify
            worker._verify = self._verify_and_leave_caches_cold
            self.clock.wrap(self, "_leave_caches_cold", EVICTION)
        elif self.algorithm == "NONE":
            self.clock.attach(target, PLAIN_PHASES)

    # -- commands ----------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """What was loaded and allocated."""
        scheduler = self.scheduler
        answer: dict[str, Any] = {
            "algorithm": self.algorithm,
            "device": self.device,
            "max_total_tokens": scheduler.max_total_num_tokens,
            "vocab_size": scheduler.model_config.vocab_size,
            "dtype": str(scheduler.tp_worker.model_runner.dtype).removeprefix("torch."),
            **self._draft_pools(),
        }
        if self.speculates:
            answer["longspark"] = scheduler.draft_worker.metrics.snapshot()
            answer["width"] = scheduler.draft_worker.width
        return answer

    def fill_pool(self, seed: int = 0) -> dict[str, Any]:
        """Random rows (deviation 1) in every layer of the K/V pool, for synthetic contexts."""
        pool = self.scheduler.tp_worker.model_runner.token_to_kv_pool
        generator = torch.Generator().manual_seed(seed)
        tile = torch.randn(POOL_TILE, generator=generator).to(self.device)
        layers = range(self.scheduler.model_config.num_hidden_layers)
        for layer in layers:
            for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
                flat = buffer.view(-1)
                for start in range(0, len(flat), POOL_TILE):
                    part = flat[start : start + POOL_TILE]
                    part.copy_(tile[: len(part)])
        return {"layers": len(layers), "rows": self.scheduler.max_total_num_tokens}

    def rounds(
        self,
        context: int,
        batch: int,
        count: int,
        warmup: int = 3,
        temperature: float = 0.0,
        cold: bool = False,
        clock: str = "wall",
    ) -> dict[str, Any]:
        """Times of `count` rounds of `batch` requests that start with `context` synthetic rows.

        With `cold` the caches hold nothing of ours when drafting and when the summary update begin,
        as they do after the pass of any target that is larger than they are.
        """
        draw = random.Random(self._submitted)
        vocab = self.scheduler.model_config.vocab_size
        prompts = [[draw.randrange(vocab) for _ in range(context)] for _ in range(batch)]
        # More than the rounds can emit; nobody finishes while the clock runs.
        tokens = (count + warmup + 2) * 16
        self._synthetic = True
        try:
            reqs = [self._submit(prompt, tokens, temperature) for prompt in prompts]
            self._prefill(batch)
            self._synthetic = False
            taken = []
            self._cold = cold
            self.clock.use(clock)
            for number in range(warmup + count):
                self._leave_caches_cold()
                started = self.clock.start_round()
                ran = self._step()
                times = self.clock.end_round(started)
                if len(ran.reqs) != batch:
                    raise RuntimeError(f"a round ran {len(ran.reqs)} of {batch} requests")
                if number >= warmup:
                    taken.append(times)
            emitted = [len(req.output_ids) for req in reqs]
        finally:
            self._synthetic = self._cold = False
            self.clock.use("wall")
            self._abort_all()
        return {"rounds": taken, "emitted": emitted}

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float = 0.0
    ) -> dict[str, Any]:
        """Answer real prompts together; times of the rounds in which all of them were decoding."""
        reqs = [self._submit(list(prompt), tokens, temperature) for prompt in prompts]
        before = self._per_slot()
        self._prefill(len(prompts))
        taken = []
        while not all(req.finished() for req in reqs):
            started = self.clock.start_round()
            self._step()
            times = self.clock.end_round(started)
            if not any(req.finished() for req in reqs):
                taken.append(times)
        self._drain()
        answer: dict[str, Any] = {
            "output_ids": [list(req.output_ids) for req in reqs],
            "rounds": taken,
        }
        if self.speculates:
            after = self._per_slot()
            answer["proposals"] = after[0] - before[0]
            answer["accepted_per_slot"] = [b - a for a, b in zip(before[1], after[1], strict=True)]
        self._flush()
        return answer

    def _draft_pools(self) -> dict[str, int]:
        """Bytes and rows of every K/V pool that is not the target's, found by looking."""
        targets = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        pools = [x for x in gc.get_objects() if isinstance(x, KVCache) and x is not targets]
        buffers = [
            tensor
            for pool in pools
            for name in ("k_buffer", "v_buffer", "kv_buffer")
            for tensor in getattr(pool, name, None) or ()
        ]
        distinct = {tensor.data_ptr(): tensor for tensor in buffers}.values()
        return {
            "draft_pool_bytes": sum(tensor.nbytes for tensor in distinct),
            "draft_pool_rows": max((pool.size for pool in pools), default=0),
        }

    # -- driving the scheduler ---------------------------------------------------------------------

    def _submit(self, prompt: list[int], tokens: int, temperature: float) -> Any:
        params = SamplingParams(max_new_tokens=tokens, temperature=temperature, ignore_eos=True)
        params.normalize(None)
        self._submitted += 1
        request = TokenizedGenerateReqInput(
            rid=f"bench-{self._submitted}",
            input_text=None,
            input_ids=array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        self.scheduler.handle_generate_request(request)
        if not self.scheduler.waiting_queue:
            raise RuntimeError("the scheduler refused the request; its reason is in the log")
        return self.scheduler.waiting_queue[-1]

    def _step(self) -> Any:
        """One turn of the scheduler's loop without overlap; the batch it ran, or None."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
        return batch

    def _prefill(self, count: int) -> None:
        """Steps until `count` requests are prefilled and the first of their rounds has run."""
        while True:
            batch = self._step()
            if batch is None:
                raise RuntimeError(
                    f"{len(self.scheduler.waiting_queue)} requests do not fit: raise "
                    "--max-total-tokens or --max-running-requests"
                )
            if not batch.forward_mode.is_extend() and len(batch.reqs) == count:
                return

    def _abort_all(self) -> None:
        self.scheduler.abort_request(AbortReq(abort_all=True))
        self._drain()
        self._flush()

    def _drain(self) -> None:
        for _ in range(IDLE_STEPS):
            if self._step() is None:
                return
        raise RuntimeError(f"requests are still running after {IDLE_STEPS} steps")

    def _flush(self) -> None:
        self.scheduler.flush_cache()

    def _per_slot(self) -> tuple[int, list[int]]:
        if not self.speculates:
            return 0, []
        metrics = self.scheduler.draft_worker.metrics
        return metrics.proposals, list(metrics.accepted_per_slot)

    def _verify_and_leave_caches_cold(self, *args: Any, **kwargs: Any) -> Any:
        result = self._verify(*args, **kwargs)
        self._leave_caches_cold()
        return result

    def _leave_caches_cold(self) -> None:
        """Read more than the caches hold, where that was asked for."""
        if self._cold:
            if self._others_data is None:
                self._others_data = torch.ones(COLD_BYTES // 4, device=self.device)
            self._others_data.sum()

    def _forward(self, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The target worker's forward, except for the prefill passes of a synthetic context."""
        if not self._synthetic or batch is None or not batch.forward_mode.is_extend():
            return self._target_forward(batch, *args, **kwargs)
        first = torch.zeros(len(batch.reqs), dtype=torch.int64, device=self.device)
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=first + 5,
            can_run_cuda_graph=False,
        )


def serve(engine: EngineProcess, commands: TextIO, answers: TextIO) -> None:
    """Answer commands {"do": name, ...} until the input ends."""
    for line in commands:
        command = json.loads(line)
        try:
            answer = {"answer": getattr(engine, command.pop("do"))(**command)}
        except Exception as error:  # the caller raises it; the process may go on
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main(argv: Sequence[str]) -> None:
    """Entry of the process."""
    # SGLang prints to stdout; the answers get a descriptor of their own before it can.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        engine = EngineProcess(argv)
        answers.write(json.dumps({"answer": engine.info()}) + "\n")
        answers.flush()
        serve(engine, sys.stdin, answers)
    # SGLang's threads and queues have nobody left to talk to.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
