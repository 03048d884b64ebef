"""Exact acceptance: what a round emits follows the distribution that plain decoding would follow.

For every position of a verified block the target's logits go through what plain decoding applies
at that position given the draft tokens before it, in SGLang's order: penalties and min_new_tokens,
grammar, logit bias, (custom logit processors,) temperature, top-k, top-p, min-p. Then

* greedy requests take the argmax, ties to the lowest id;
* on a server with --enable-deterministic-inference every other request is *seeded*: the target's
  token at each position is the one SGLang's seeded sampler draws there, whatever was drafted;
* all others are decided by speculative rejection sampling (`ops.accept_chain`).

For the first two kinds a draft token is accepted if it equals the target's choice.

SGLang ignores a request's seed on any other server, and gives unseeded requests the seed 42 on a
deterministic one; both are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.utils.async_probe import sanitize_nan_logits

from longspark_sglang.ops.accept_chain import accept_chain, accept_greedy
from longspark_sglang.serving.penalties import PenaltyRows, PenaltyState, has_penalties
from longspark_sglang.serving.rows import RowSet, device_tensor
from longspark_sglang.serving.target_distribution import (
    BACKENDS,
    filter_flashinfer,
    filter_pytorch,
    seeded_filtered_tokens,
    seeded_tokens,
)

# The key of `custom_params` under which a request talks to us.
REQUEST_KEY = "longspark"
# Seeds are 63-bit: torch draws no more from one call, and the sign carries no meaning.
SEED_RANGE = 2**63 - 1
_LARGEST_INT32 = 2**31 - 1


def is_enabled(req: Any) -> bool:
    """Does this request speculate? Off by custom_params={"longspark": {"enabled": false}}."""
    choice = _request_choice(req)
    return not isinstance(choice, dict) or bool(choice.get("enabled", True))


def _request_choice(req: Any) -> Any:
    params = req.sampling_params.custom_params
    return params.get(REQUEST_KEY) if isinstance(params, dict) else None


def request_refusals(req: Any, deterministic: bool | None = None) -> list[str]:
    """Why this request can't be answered exactly, each with what to change; empty if it can.

    Args:
        req: SGLang's Req.
        deterministic: whether the server runs with --enable-deterministic-inference; None asks it.
    """
    if deterministic is None:
        from sglang.srt.runtime_context import get_exec

        deterministic = bool(get_exec().deterministic.enable_deterministic_inference)
    params, choice = req.sampling_params, _request_choice(req)
    reasons = []
    if not len(req.origin_input_ids):
        # SGLang lets an empty text through; a prefill of no rows has no last row to draft from.
        reasons.append("the prompt has no token; send at least one")
    elif not _all_in_vocabulary(req):
        reasons.append(
            f"the prompt has token ids outside 0..{req.vocab_size - 1}, the target's vocabulary"
        )
    if choice is not None and not (
        isinstance(choice, dict)
        and set(choice) <= {"enabled"}
        and all(isinstance(value, bool) for value in choice.values())
    ):
        reasons.append(
            f'custom_params["{REQUEST_KEY}"] must be {{"enabled": true}} or {{"enabled": false}}, '
            f"not {choice!r}"
        )
    if req.custom_logit_processor is not None and is_enabled(req):
        reasons.append(
            "a custom logit processor may depend on the tokens generated so far, which it can't "
            "see inside a block of drafts; use logit_bias or a grammar, or decode this request "
            f'plainly with custom_params={{"{REQUEST_KEY}": {{"enabled": false}}}}'
        )
    if req.return_hidden_states:
        reasons.append(
            "hidden states are not kept while drafts are verified; drop return_hidden_states"
        )
    if getattr(req, "return_sampling_mask", False):
        reasons.append("the sampling mask is not recorded; drop return_sampling_mask")
    if deterministic and params.min_p > 0:
        reasons.append(
            "SGLang's seeded sampler (--enable-deterministic-inference) has no min_p; drop min_p"
        )
    return reasons + _values_out_of_range(params, getattr(req, "vocab_size", None))


def _all_in_vocabulary(req: Any) -> bool:
    """Can every id of the prompt be embedded? SGLang lets others through, which end its scheduler.

    Ids of images and the like are hashes that SGLang replaces before it embeds.
    """
    size = getattr(req, "vocab_size", None)
    if size is None or req.multimodal_inputs is not None:
        return True
    return min(req.origin_input_ids) >= 0 and max(req.origin_input_ids) < size


def _values_out_of_range(params: Any, vocab_size: int | None) -> list[str]:
    """Values that SGLang's checks let through and that end its scheduler in a batch's tensors."""
    reasons = []
    if params.top_k > _LARGEST_INT32:
        reasons.append(f"top_k {params.top_k} is no 32-bit number; use -1 for all tokens")
    if vocab_size is not None and params.min_new_tokens > 0:
        outside = sorted(t for t in params.stop_token_ids or () if not 0 <= t < vocab_size)
        if outside:
            reasons.append(
                f"stop_token_ids {outside} lie outside 0..{vocab_size - 1}, which min_new_tokens "
                "can't hold back; drop them"
            )
    for token, bias in (params.logit_bias or {}).items():
        if not isinstance(bias, int | float) or math.isnan(bias) or bias == math.inf:
            reasons.append(f"logit_bias {bias!r} of token {token} is no number; use finite numbers")
    return reasons


@dataclass(frozen=True)
class Layout:
    """What the host knows about a batch's requests; the same until the batch's make-up changes.

    Each RowSet is None where it would be empty.

    Attributes:
        reqs: the batch's requests, in order.
        limit: [B] int32, 0 where speculation is switched off, else K.
        compared, weighed: are there requests whose drafts are compared with the target's own choice
            (greedy or seeded), and others, that go through rejection sampling?
        seeded, seeded_filtered: seeded requests without and with top-k or top-p.
        joint, sequential: unseeded requests whose filters apply jointly / one after the other.
        widest_top_k: largest top_k among joint and sequential ones, None if one has no top_k.
        penalised: requests with penalties.
        processed: requests with a custom logit processor (their limit is 0).
    """

    reqs: list[Any]
    limit: torch.Tensor
    compared: bool
    weighed: bool
    seeded: RowSet | None
    seeded_filtered: RowSet | None
    joint: RowSet | None
    sequential: RowSet | None
    widest_top_k: int | None
    penalised: PenaltyRows | None
    processed: RowSet | None


@dataclass
class RoundPlan:
    """What a round needs before it drafts. All tensors are new each round except `limit`.

    Attributes:
        temperature: [B] float32 to draft with, 0 where the draft should be greedy.
        seed: [B] int64 of the draft's noise: the request's own where it is seeded, else random.
        positions: [B] int64 of the anchors; slot j drafts with the noise of position + j.
        point_mass: [B] bool, drafts are compared with the target's own choice, not weighed.
        limit: [B] int32, the most drafts to accept, 0..K. A worker that must stop earlier *assigns*
            a smaller one; it must not write into this one.
    """

    temperature: torch.Tensor
    seed: torch.Tensor
    positions: torch.Tensor
    point_mass: torch.Tensor
    limit: torch.Tensor
    layout: Layout


@dataclass
class Decision:
    """What a round emits.

    Attributes:
        accepted: [B] int32 drafts accepted; accept_lens: [B] int32 = accepted + 1 tokens emitted.
        next_token: [B] int64, the token after the accepted drafts, the next anchor.
        tokens: [B * (K+1)] int64: per request the drafts, with next_token at index `accepted`.
        logits: [B * (K+1), V] float32 as plain decoding would have them just before temperature,
            the input of `compute_spec_logprobs`; the tensor passed in if that was float32.
    """

    accepted: torch.Tensor
    accept_lens: torch.Tensor
    next_token: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor


@dataclass
class TargetChoice:
    """What the target says about a block of drafts.

    Attributes:
        tokens: [B, K+1] int64, its own tokens after the anchor and each draft; None if no request
            is compared.
        probs: [B, K+1, V] float32, its distributions there; None if no request is weighed.
        uniforms, uniform_final: [B, K] and [B] float32 in [0, 1), with probs.
    """

    tokens: torch.Tensor | None
    probs: torch.Tensor | None
    uniforms: torch.Tensor | None
    uniform_final: torch.Tensor | None


def decide(
    choice: TargetChoice,
    drafts: torch.Tensor,
    anchors: torch.Tensor,
    draft_logq: torch.Tensor,
    base_logits: torch.Tensor,
    markov_w1: torch.Tensor,
    markov_w2: torch.Tensor,
    temperature: torch.Tensor,
    point_mass: torch.Tensor,
    limit: torch.Tensor,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """accepted [B] int32 and next_token [B] int64 of a block.

    Reads nothing on the host, and which operators run depends only on which parts of `choice` are
    there: a CUDA graph can hold it (serving/graphs.py). Arguments as in Decision, RoundPlan and
    `ops.accept_chain`.
    """
    if choice.probs is None:
        assert choice.tokens is not None
        return accept_greedy(choice.tokens, drafts, limit)
    assert choice.uniforms is not None and choice.uniform_final is not None
    accepted, next_token = accept_chain(
        choice.probs,
        drafts,
        draft_logq,
        base_logits,
        anchors,
        markov_w1,
        markov_w2,
        temperature,
        point_mass,
        choice.uniforms,
        choice.uniform_final,
        limit,
        vocab_size,
    )
    if choice.tokens is not None:
        same, own = accept_greedy(choice.tokens, drafts, limit)
        accepted = torch.where(point_mass, same, accepted)
        next_token = torch.where(point_mass, own, next_token)
    return accepted, next_token


def emitted_tokens(
    drafts: torch.Tensor, accepted: torch.Tensor, next_token: torch.Tensor
) -> torch.Tensor:
    """Decision.tokens: the drafts [B, K], with next_token [B] at index `accepted` [B]."""
    tokens = torch.cat((drafts, next_token[:, None]), dim=1)
    tokens.scatter_(1, accepted[:, None].to(torch.int64), next_token[:, None])
    return tokens.view(-1)


class AcceptanceSampler:
    """Decides which drafts the target accepts and draws the next token.

    One instance per worker. `plan` and `accept` make a decode round; `before_extend` and
    `after_extend` go round the target's own prefill, whose token SGLang's sampler draws.

    Args:
        num_draft_tokens: K, drafts per round.
        vocab_size: real vocabulary of the target.
        device: of the target.
        tp_group: SGLang's GroupCoordinator of the ranks that decide together, None if alone.
        sampling_backend: "pytorch" or "flashinfer"; None asks the running server.
        seed: of everything random here; None takes the server's random seed. Ranks of one tp_group
            must agree on it.
    Raises:
        ValueError: a sampling backend whose rules are unknown.
    """

    def __init__(
        self,
        num_draft_tokens: int,
        vocab_size: int,
        device: torch.device | str,
        tp_group: Any = None,
        sampling_backend: str | None = None,
        seed: int | None = None,
    ) -> None:
        if sampling_backend is None:
            from sglang.srt.runtime_context import get_exec

            sampling_backend = get_exec().kernel.sampling_backend
        if sampling_backend not in BACKENDS:
            raise ValueError(
                f"sampling backend {sampling_backend!r} is unknown to LONGSPARK; "
                f"use --sampling-backend {' or '.join(BACKENDS)}"
            )
        if seed is None:
            from sglang.srt.runtime_context import get_server_args

            seed = int(get_server_args().random_seed)
        self.num_draft_tokens = num_draft_tokens
        self.vocab_size = vocab_size
        self.device = device
        self.tp_group = tp_group
        self.sampling_backend = sampling_backend
        self.penalties = PenaltyState(vocab_size, device)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._layout: Layout | None = None
        self._extending: PenaltyRows | None = None

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's values of `tensor`, in place, on every rank."""
        if self.tp_group is not None and self.tp_group.world_size > 1:
            self.tp_group.broadcast(tensor, src=0)
        return tensor

    # -- prefill ----------------------------------------------------------------------------------

    def before_extend(self, batch: Any) -> None:
        """Make the penalties of SGLang's own sampler exact for the token after this prefill.

        A new request has generated nothing. One that was retracted has: its state starts from the
        tokens the host has, which is all of them, as nothing of it is in flight. Decoding requests
        that ride along (mixed chunk) keep the state they have.
        """
        self._layout = None
        riding = {id(req) for req in (batch.decoding_reqs or ())}
        pool_rows = self._track(batch, fresh=lambda req: id(req) not in riding)
        self._extending = rows = self.penalties.rows(batch.reqs, pool_rows)
        if rows is None:
            return
        add, scale = self.penalties.next_adjustment(rows)
        info, size = batch.sampling_info, (len(batch.reqs), self.vocab_size)
        info.acc_additive_penalties = add.new_zeros(size)
        rows.which.put(info.acc_additive_penalties, add)
        info.acc_scaling_penalties = None
        if scale is not None:
            info.acc_scaling_penalties = scale.new_ones(size)
            rows.which.put(info.acc_scaling_penalties, scale)

    def after_extend(self, batch: Any, next_token_ids: torch.Tensor) -> None:
        """Count the token [B] that the prefill emitted, after `before_extend` of the same batch.

        The token of an unfinished chunk is counted too; `before_extend` of the next chunk starts
        that request's state anew.
        """
        rows = self._extending
        if rows is not None:
            tokens = rows.which.take(next_token_ids.to(torch.int64))[:, None]
            self.penalties.record(tokens, torch.ones_like(tokens[:, 0], dtype=torch.int32), rows)

    def _track(self, batch: Any, fresh: Any) -> list[int]:
        """Make every penalised request's state exist; restart those for which fresh(req).

        A request whose prefill did not pass through here is met at its first round, when the host
        still knows all of its tokens. Returns the requests' pool rows.
        """
        pool_rows = _pool_rows(batch)
        generation = batch.req_to_token_pool.req_generation
        for req, row in zip(batch.reqs, pool_rows, strict=True):
            if not has_penalties(req):
                self.penalties.forget(row)
            elif fresh(req) or not self.penalties.knows(row, int(generation[row])):
                self.penalties.rebuild(row, int(generation[row]), req)
        return pool_rows

    # -- a decode round ---------------------------------------------------------------------------

    def plan(self, batch: Any) -> RoundPlan:
        """Temperatures, seeds and limits for the drafter; call it before drafting."""
        if self._layout is None or self._layout.reqs != batch.reqs:
            self._layout = self._make_layout(batch)
        layout, info = self._layout, batch.sampling_info
        greedy = info.top_ks <= 1
        temperature = torch.where(greedy, 0.0, info.temperatures[:, 0])
        if info.sampling_seed is not None:
            seed, point_mass = info.sampling_seed, torch.ones_like(greedy)
            if layout.seeded_filtered is not None:
                # Their target noise goes by rank, which a draft can't share: its best guess is the
                # most likely token.
                temperature.index_fill_(0, layout.seeded_filtered.index, 0.0)
        else:
            seed, point_mass = torch.empty_like(greedy, dtype=torch.int64), greedy
            seed.random_(SEED_RANGE, generator=self._generator)
        return RoundPlan(
            temperature=temperature,
            seed=seed,
            positions=batch.seq_lens.to(torch.int64),
            point_mass=point_mass,
            limit=layout.limit,
            layout=layout,
        )

    def accept(
        self,
        batch: Any,
        plan: RoundPlan,
        candidates: torch.Tensor,
        logits: torch.Tensor,
        proposal: Any,
        markov_w1: torch.Tensor,
        markov_w2: torch.Tensor,
        grammar_mask: Any = None,
    ) -> Decision:
        """Decide a round.

        Args:
            batch: the ScheduleBatch in its forward (its sampling_info is read).
            plan: this round's plan.
            candidates: [B, K+1] int64, anchors and drafts.
            logits: [B * (K+1), V] of the verify pass, unprocessed; changed in place if float32.
            proposal: has base_logits [B, K, V] and draft_logq [B, K] float32.
            markov_w1, markov_w2: [V, r], the drafter's Markov matrices.
            grammar_mask: SGLang's GrammarMask of the block, or None.
        """
        drafts = candidates[:, 1:].contiguous()
        logits, choice = self.target_choice(batch, plan, drafts, logits, grammar_mask)
        accepted, next_token = decide(
            choice,
            drafts,
            candidates[:, 0].contiguous(),
            proposal.draft_logq,
            proposal.base_logits,
            markov_w1,
            markov_w2,
            plan.temperature,
            plan.point_mass,
            plan.limit,
            self.vocab_size,
        )
        agreed = self.broadcast(torch.stack((accepted.to(torch.int64), next_token)))
        accepted, next_token = agreed[0].to(torch.int32), agreed[1]
        decision = Decision(
            accepted=accepted,
            accept_lens=accepted + 1,
            next_token=next_token,
            tokens=emitted_tokens(drafts, accepted, next_token),
            logits=logits,
        )
        self.record(plan, decision)
        return decision

    def target_choice(
        self,
        batch: Any,
        plan: RoundPlan,
        drafts: torch.Tensor,
        logits: torch.Tensor,
        grammar_mask: Any = None,
    ) -> tuple[torch.Tensor, TargetChoice]:
        """What the target says about a block [B, K] of drafts, after Decision.logits.

        Everything about a round that depends on what its requests asked for happens here.
        Arguments as for `accept`.
        """
        layout = plan.layout
        batch_size, width = drafts.shape[0], drafts.shape[1] + 1
        logits = self._process(batch, layout, drafts, logits, grammar_mask)
        blocks = logits.view(batch_size, width, -1)
        return logits, TargetChoice(
            tokens=self._chosen(batch, plan, blocks) if layout.compared else None,
            probs=self._distribution(batch, layout, blocks) if layout.weighed else None,
            uniforms=self._uniform(batch_size, width - 1) if layout.weighed else None,
            uniform_final=self._uniform(batch_size) if layout.weighed else None,
        )

    def record(self, plan: RoundPlan, decision: Decision) -> None:
        """Count the emitted tokens of requests with penalties."""
        penalised = plan.layout.penalised
        if penalised is not None:
            tokens = decision.tokens.view(len(decision.accepted), -1)
            self.penalties.record(
                penalised.which.take(tokens),
                penalised.which.take(decision.accept_lens),
                penalised,
            )

    def _make_layout(self, batch: Any) -> Layout:
        """Sort a batch's requests by what they need."""
        reqs, params = list(batch.reqs), [req.sampling_params for req in batch.reqs]
        info = batch.sampling_info
        pool_rows = self._track(batch, fresh=lambda req: False)
        random = {i for i, p in enumerate(params) if p.top_k > 1}
        filtered = {
            i
            for i in random
            if params[i].top_k != TOP_K_ALL or params[i].top_p != 1.0 or params[i].min_p > 0
        }
        ordered = {
            i for i in filtered if self.sampling_backend == "flashinfer" and params[i].min_p > 0
        }
        processed = {
            i
            for i, req in enumerate(reqs)
            if info.has_custom_logit_processor and req.custom_logit_processor is not None
        }
        is_seeded = info.sampling_seed is not None
        seeded, weighed = (random, set()) if is_seeded else (set(), random)

        def rows(chosen: set[int]) -> RowSet | None:
            return RowSet.of(sorted(chosen), len(reqs), self.device)

        widest = max((params[i].top_k for i in filtered), default=TOP_K_ALL)
        limit = [self.num_draft_tokens if is_enabled(req) else 0 for req in reqs]
        return Layout(
            reqs=reqs,
            limit=device_tensor(limit, torch.int32, self.device),
            compared=len(weighed) < len(reqs),
            weighed=bool(weighed),
            seeded=rows(seeded - filtered),
            seeded_filtered=rows(seeded & filtered),
            joint=rows(weighed & filtered - ordered),
            sequential=rows(weighed & ordered),
            widest_top_k=None if widest == TOP_K_ALL else widest,
            penalised=self.penalties.rows(reqs, pool_rows),
            processed=rows(processed),
        )

    def _process(
        self,
        batch: Any,
        layout: Layout,
        drafts: torch.Tensor,
        logits: torch.Tensor,
        grammar_mask: Any,
    ) -> torch.Tensor:
        """Logits of the block [B * (K+1), V] as plain decoding has them before temperature."""
        logits = logits.float()
        info, width = batch.sampling_info, drafts.shape[1] + 1
        blocks = logits.view(len(drafts), width, -1)
        if layout.penalised is not None:
            which = layout.penalised.which
            part = which.take(blocks)
            self.penalties.apply(part, which.take(drafts), layout.penalised)
            which.put(blocks, part)
        if grammar_mask is not None:
            grammar_mask.apply(logits)
        if info.logit_bias is not None:
            blocks.add_(info.logit_bias[:, None])
        if layout.processed is not None:
            # These requests accept no draft, so only the first position counts; a processor that
            # keeps a state of its own must not be called for the others.
            first = blocks[:, 0].contiguous()
            apply_custom_logit_processor(first, info)
            blocks[:, 0] = first
        sanitize_nan_logits(logits, "LONGSPARK verify: target logits")
        return logits

    def _chosen(self, batch: Any, plan: RoundPlan, blocks: torch.Tensor) -> torch.Tensor:
        """The target's own tokens [B, K+1]: its argmax, or its seeded draw."""
        layout, info, width = plan.layout, batch.sampling_info, blocks.shape[1]
        chosen = blocks.argmax(dim=-1)
        for rows in (layout.seeded, layout.seeded_filtered):
            if rows is None:
                continue
            slot = torch.arange(width, device=blocks.device)
            position = (rows.take(plan.positions)[:, None] + slot).flatten()
            seed = _each(rows, plan.seed, width)
            probs = _scaled_probs(rows.take(blocks), rows.take(info.temperatures)).flatten(0, 1)
            if rows is layout.seeded:
                drawn = seeded_tokens(probs, seed, position)
            else:
                top_k, top_p = (_each(rows, x, width) for x in (info.top_ks, info.top_ps))
                drawn = seeded_filtered_tokens(probs, top_k, top_p, seed, position)
            rows.put(chosen, drawn.view(-1, width))
        return chosen

    def _distribution(self, batch: Any, layout: Layout, blocks: torch.Tensor) -> torch.Tensor:
        """Target probabilities [B, K+1, V] float32 after temperature and filters."""
        info, width = batch.sampling_info, blocks.shape[1]
        probs = _scaled_probs(blocks, info.temperatures)
        for rows in (layout.joint, layout.sequential):
            if rows is None:
                continue
            part = rows.take(probs).flatten(0, 1)
            top_k, top_p, min_p = (
                _each(rows, x, width) for x in (info.top_ks, info.top_ps, info.min_ps)
            )
            if self.sampling_backend == "pytorch":
                kept = filter_pytorch(part, top_k, top_p, min_p, layout.widest_top_k)
            else:
                one_by_one = rows is layout.sequential
                kept = filter_flashinfer(part, top_k, top_p, min_p if one_by_one else None)
            rows.put(probs, kept.view(-1, width, kept.shape[-1]))
        return probs

    def _uniform(self, *size: int) -> torch.Tensor:
        return torch.rand(size, device=self.device, generator=self._generator)


def _pool_rows(batch: Any) -> list[int]:
    """Request pool rows of a batch, on the host."""
    return [req.kv.req_pool_idx for req in batch.reqs]


def _each(rows: RowSet, per_request: torch.Tensor, width: int) -> torch.Tensor:
    """A value per request [B] as one per position [n * width] of these rows."""
    return rows.take(per_request).repeat_interleave(width)


def _scaled_probs(blocks: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """softmax(blocks [n, width, V] / temperatures [n, 1])."""
    return (blocks / temperatures[:, :, None]).softmax(dim=-1)
