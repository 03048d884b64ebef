"""A toy target and what SGLang's scheduler would hand to the sampler, for the acceptance tests.

The toy target is a table: the logits after a token depend on that token only. Everything that
makes a law depend on the history (penalties, min_new_tokens) comes from the sampling parameters.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from longspark_sglang.ops.draft_sample import draft_sample
from longspark_sglang.serving.acceptance import AcceptanceSampler, Decision
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

EOS = 1
PENALIZERS = {
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
}


def make_request(row: int = 0, output: tuple[int, ...] = (), **sampling: Any) -> Any:
    """What the sampler reads of SGLang's Req; `output` are the tokens generated so far."""
    return _request(row, SamplingParams(**sampling), output)


def make_requests(count: int, **sampling: Any) -> list[Any]:
    """Many requests with the same parameters."""
    params = SamplingParams(**sampling)
    return [_request(row, params, ()) for row in range(count)]


def _request(row: int, params: SamplingParams, output: tuple[int, ...]) -> Any:
    return SimpleNamespace(
        rid=f"request-{row}",
        sampling_params=params,
        origin_input_ids=[5, 6, 7],
        output_ids=list(output),
        eos_token_ids={EOS},
        tokenizer=SimpleNamespace(eos_token_id=EOS, additional_stop_token_ids=None),
        kv=SimpleNamespace(req_pool_idx=row),
        custom_logit_processor=None,
        return_hidden_states=False,
        return_sampling_mask=False,
    )


class Batch:
    """What the sampler reads of SGLang's ScheduleBatch during a forward."""

    def __init__(
        self, reqs: list[Any], vocab: int, *, seeded: bool = False, seq_len: int = 10
    ) -> None:
        params = [req.sampling_params for req in reqs]
        self.reqs = reqs
        self.device = "cpu"
        self.decoding_reqs: list[Any] | None = None
        self.req_to_token_pool = SimpleNamespace(
            req_generation=torch.ones(1 + max(r.kv.req_pool_idx for r in reqs), dtype=torch.int64)
        )
        self.seq_lens = torch.full((len(reqs),), seq_len, dtype=torch.int64)
        bias = None
        if any(p.logit_bias for p in params):
            bias = torch.zeros(len(reqs), vocab)
            for i, p in enumerate(params):
                for token, value in (p.logit_bias or {}).items():
                    bias[i, int(token)] = value
        self.sampling_info = SamplingBatchInfo(
            temperatures=torch.tensor([[p.temperature] for p in params]),
            top_ps=torch.tensor([p.top_p for p in params]),
            top_ks=torch.tensor([p.top_k for p in params], dtype=torch.int32),
            min_ps=torch.tensor([p.min_p for p in params]),
            is_all_greedy=all(p.top_k <= 1 for p in params),
            is_any_greedy=any(p.top_k <= 1 for p in params),
            need_top_p_sampling=any(p.top_p != 1.0 for p in params),
            need_top_k_sampling=any(p.top_k != TOP_K_ALL for p in params),
            need_min_p_sampling=any(p.min_p > 0 for p in params),
            vocab_size=vocab,
            sampling_seed=torch.tensor(
                [42 if p.sampling_seed is None else p.sampling_seed for p in params]
            )
            if seeded
            else None,
            logit_bias=bias,
            device="cpu",
        )

    def orchestrator(self, vocab: int) -> BatchedPenalizerOrchestrator:
        """SGLang's own penalizers for these requests, as they are before the first token."""
        return BatchedPenalizerOrchestrator(vocab, self, PENALIZERS)


class Toy:
    """A table target with a drafter whose Markov term is the table plus noise.

    Args:
        vocab: V. sharpness: standard deviation of the target's logits.
        noise: what the drafter's logits are off by; 0 is a perfect drafter at equal settings.
        fast: draft without the noise that goes by seed and position.
    """

    def __init__(
        self,
        vocab: int,
        drafts: int,
        *,
        sharpness: float = 1.5,
        noise: float = 0.5,
        seed: int = 0,
        fast: bool = False,
    ) -> None:
        self.generator = generator = torch.Generator().manual_seed(seed)
        self.fast = fast
        self.vocab, self.drafts = vocab, drafts
        self.table = torch.randn(vocab, vocab, generator=generator) * sharpness
        # Some tokens are likely everywhere, so that texts repeat and penalties matter.
        self.table += torch.randn(vocab, generator=generator) * sharpness
        self.markov_w1 = torch.eye(vocab)
        self.markov_w2 = self.table.T.contiguous()
        self.base_logits = torch.randn(drafts, vocab, generator=generator) * noise

    def sampler(self, **options: Any) -> AcceptanceSampler:
        options = {"sampling_backend": "pytorch", "seed": 0} | options
        return AcceptanceSampler(self.drafts, self.vocab, "cpu", **options)

    def propose(self, plan: Any, anchors: torch.Tensor) -> Any:
        """Draft slot by slot, by the plan."""
        base = self.base_logits.expand(len(anchors), -1, -1)
        draw = self._draw_fast if self.fast else self._draw
        previous, tokens, logqs = anchors, [], []
        for slot in range(self.drafts):
            previous, logq = draw(base[:, slot], previous, plan, slot)
            tokens.append(previous)
            logqs.append(logq)
        return SimpleNamespace(
            draft_tokens=torch.stack(tokens, 1), draft_logq=torch.stack(logqs, 1), base_logits=base
        )

    def _draw(self, base: torch.Tensor, previous: torch.Tensor, plan: Any, slot: int) -> Any:
        """As the worker does."""
        return draft_sample(
            base,
            previous,
            self.markov_w1,
            self.markov_w2,
            plan.temperature,
            plan.seed,
            plan.positions + slot,
            self.vocab,
        )

    def _draw_fast(self, base: torch.Tensor, previous: torch.Tensor, plan: Any, slot: int) -> Any:
        """The same law, all at a positive temperature, without the hashed noise."""
        logq = ((base + self.table[previous]) / plan.temperature[:, None]).log_softmax(-1)
        token = torch.multinomial(logq.exp(), 1, generator=self.generator)
        return token[:, 0], logq.gather(1, token)[:, 0]

    def round(
        self,
        sampler: AcceptanceSampler,
        batch: Any,
        anchors: torch.Tensor,
        drafts: torch.Tensor | None = None,
        grammar_mask: Any = None,
        limit: torch.Tensor | None = None,
    ) -> Decision:
        """One round; `drafts` [B, K] replaces the tokens that the drafter proposes."""
        plan = sampler.plan(batch)
        if limit is not None:
            plan.limit = limit
        proposal = self.propose(plan, anchors)
        if drafts is not None:
            proposal.draft_tokens = drafts
        candidates = torch.cat((anchors[:, None], proposal.draft_tokens), dim=1)
        decision = sampler.accept(
            batch,
            plan,
            candidates,
            self.table[candidates].flatten(0, 1),
            proposal,
            self.markov_w1,
            self.markov_w2,
            grammar_mask,
        )
        batch.seq_lens = batch.seq_lens + decision.accept_lens
        return decision

    def prefill(self, sampler: AcceptanceSampler, batch: Any, token: int) -> torch.Tensor:
        """An extend step that emits `token` for every request; returns the anchors."""
        sampler.before_extend(batch)
        anchors = torch.full((len(batch.reqs),), token)
        sampler.after_extend(batch, anchors)
        return anchors
