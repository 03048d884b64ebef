"""Exact acceptance of a chain of draft tokens (LongSpark spec, section 5, step 4).

Speculative sampling: the tokens that come out follow the target's distribution, whatever the
drafter proposed. Natural logarithms; "accepted" doesn't count the token drawn after the accepted
ones.
"""

import torch

from . import dispatch
from .checks import FLOATS, Checker
from .markov_step import markov_step_reference

# Below this residual mass p and q are equal up to rounding, and p itself is drawn from.
RESIDUAL_FLOOR = 1e-8
_BELOW_ONE = 1.0 - 2.0**-24


def accept_chain(
    target_probs: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logq: torch.Tensor,
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    markov_w1: torch.Tensor,
    markov_w2: torch.Tensor,
    temperature: torch.Tensor,
    point_mass: torch.Tensor,
    uniforms: torch.Tensor,
    uniform_final: torch.Tensor,
    limit: torch.Tensor,
    vocab_limit: int,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept draft tokens against the target's distribution and draw the next token.

    Draft token j is accepted while uniforms[j] * q_j < p_j(token), strictly. At the first
    rejection, slot n, the next token is drawn from max(p_n - q_n, 0) renormalised (from p_n if
    that mass is at most 1e-8), where q_n = softmax(z_n / temperature) is recomputed for this slot
    alone from z_n = base_logits[n] + W2 . W1[token before n]. If all `limit` tokens were accepted
    the next one is drawn from p_limit. The draw inverts the cumulative sum at uniform_final and
    never returns a token of weight 0.

    Args:
        target_probs: [B, K+1, V] float32, the target's processed distribution after the anchor and
            after each draft token; rows need not sum to exactly 1.
        draft_tokens: [B, K] int64.
        draft_logq: [B, K] float32, log probability each token was drawn with.
        base_logits: [B, K, V], bf16, fp16 or fp32, the drafter's uncorrected logits.
        anchors: [B] int64, token before draft token 0.
        markov_w1, markov_w2: [V, r].
        temperature: [B] float32, what the draft was sampled with; 0 means the draft was greedy.
        point_mass: [B] bool, q is 1 at the draft token and 0 elsewhere (greedy or copied drafts).
        uniforms: [B, K] float32 in [0, 1).
        uniform_final: [B] float32 in [0, 1).
        limit: [B] int32, 0..K, the most draft tokens that may be accepted.
        vocab_limit: ids from here on have no draft probability; 1..V.
    Returns:
        accepted [B] int32 in 0..limit and next_token [B] int64.
    Raises:
        ArgumentError: shapes, dtypes or devices that don't fit.
    """
    check = Checker("accept_chain", target_probs.device)
    check.tensor("draft_tokens", draft_tokens, "B K", torch.int64)
    check.tensor("target_probs", target_probs, "B K+1 V", torch.float32)
    check.tensor("draft_logq", draft_logq, "B K", torch.float32)
    check.tensor("base_logits", base_logits, "B K V", FLOATS)
    check.tensor("anchors", anchors, "B", torch.int64)
    check.tensor("markov_w1", markov_w1, "V r", FLOATS)
    check.tensor("markov_w2", markov_w2, "V r", markov_w1.dtype)
    check.tensor("temperature", temperature, "B", torch.float32)
    check.tensor("point_mass", point_mass, "B", torch.bool)
    check.tensor("uniforms", uniforms, "B K", torch.float32)
    check.tensor("uniform_final", uniform_final, "B", torch.float32)
    check.tensor("limit", limit, "B", torch.int32)
    vocab = target_probs.size(-1)
    check.condition(
        1 <= vocab_limit <= vocab, f"vocab_limit must be in 1..{vocab}, not {vocab_limit}"
    )
    check.finish()
    run = dispatch.resolve("accept_chain", target_probs.device, backend)
    return run(
        target_probs,
        draft_tokens,
        draft_logq,
        base_logits,
        anchors,
        markov_w1,
        markov_w2,
        temperature,
        point_mass,
        uniforms,
        uniform_final,
        limit,
        vocab_limit,
    )


@dispatch.reference("accept_chain")
def accept_chain_reference(
    target_probs: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logq: torch.Tensor,
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    markov_w1: torch.Tensor,
    markov_w2: torch.Tensor,
    temperature: torch.Tensor,
    point_mass: torch.Tensor,
    uniforms: torch.Tensor,
    uniform_final: torch.Tensor,
    limit: torch.Tensor,
    vocab_limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, block = draft_tokens.shape
    if batch == 0:
        return limit.clone(), anchors.clone()
    each = torch.arange(batch, device=draft_tokens.device)
    point = point_mass | (temperature <= 0)

    draft_p = target_probs[:, :block].gather(2, draft_tokens[:, :, None])[:, :, 0]
    draft_q = torch.where(point[:, None], 1.0, draft_logq.exp())
    slot = torch.arange(block, device=draft_tokens.device)
    accept = (uniforms * draft_q < draft_p) & (slot < limit[:, None])
    accepted = accept.int().cumprod(dim=1).sum(dim=1)

    rejected = accepted < limit
    at = accepted.clamp(max=max(block - 1, 0))
    weight = target_probs[each, accepted].to(torch.float64)
    if block:
        before = torch.cat([anchors[:, None], draft_tokens], dim=1)[each, at]
        logits = markov_step_reference(base_logits[each, at], before, markov_w1, markov_w2)
        scaled = logits / torch.where(point, 1.0, temperature)[:, None]
        scaled[:, vocab_limit:] = float("-inf")
        one_hot = torch.zeros_like(scaled).scatter_(1, draft_tokens[each, at][:, None], 1.0)
        q = torch.where(point[:, None], one_hot, scaled.softmax(dim=-1))
        residual = (weight - q).clamp_(min=0)
        from_residual = rejected & (residual.sum(dim=-1) > RESIDUAL_FLOOR)
        weight = torch.where(from_residual[:, None], residual, weight)

    # float64: in fp32 a running sum over 150,000 tokens would lose the tail's weights.
    cumulative = weight.cumsum(dim=-1)
    aim = uniform_final.double().clamp(max=_BELOW_ONE) * cumulative[:, -1]
    next_token = torch.searchsorted(cumulative, aim[:, None], right=True)[:, 0]
    return accepted.int(), next_token.clamp(max=weight.size(-1) - 1)


def accept_greedy(
    target_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    limit: torch.Tensor,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept the longest prefix of draft tokens that the target would have chosen itself.

    Args:
        target_tokens: [B, K+1] int64, the target's choice after the anchor and each draft token.
        draft_tokens: [B, K] int64.
        limit: [B] int32, 0..K, the most draft tokens that may be accepted.
    Returns:
        accepted [B] int32 in 0..limit and next_token [B] int64 = target_tokens[accepted].
    Raises:
        ArgumentError: shapes, dtypes or devices that don't fit.
    """
    check = Checker("accept_greedy", draft_tokens.device)
    check.tensor("draft_tokens", draft_tokens, "B K", torch.int64)
    check.tensor("target_tokens", target_tokens, "B K+1", torch.int64)
    check.tensor("limit", limit, "B", torch.int32)
    check.finish()
    run = dispatch.resolve("accept_greedy", draft_tokens.device, backend)
    return run(target_tokens, draft_tokens, limit)


@dispatch.reference("accept_greedy")
def accept_greedy_reference(
    target_tokens: torch.Tensor, draft_tokens: torch.Tensor, limit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    slot = torch.arange(draft_tokens.size(1), device=draft_tokens.device)
    same = (target_tokens[:, :-1] == draft_tokens) & (slot < limit[:, None])
    accepted = same.int().cumprod(dim=1).sum(dim=1)
    return accepted.int(), target_tokens.gather(1, accepted[:, None])[:, 0]
