"""Rejection sampling of a chain of draft tokens, for the in-tree algorithms' verify step.

Both functions have SGLang's calling convention: B requests, n = verify width, candidates [B, n]
with the last committed token in column 0 and the drafts after it; target_probs [B, n, V], row j =
law of the token after column j. Written in place: accept_token_num [B] = accepted drafts;
accept_index [B, n] = flat indices of the accepted columns, -1 behind them; predicts [B*n], at each
accepted column the token that follows it. `retrive_index` [B, n] holds each column's flat index.
"""

from __future__ import annotations

from typing import Any

import torch


def chain_speculative_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    *,
    block_verification: bool = False,
) -> None:
    """Accept drafts drawn from draft_probs [B, >= n-1, V]: u * q(token) < p(token) (DSPARK).

    Stands in for kernels.ops.speculative.reject_sampling.chain_speculative_sampling_triton.
    """
    if block_verification:
        raise NotImplementedError("block verification needs a GPU; drop the flag")
    drafts = candidates[:, 1:].long()
    width = drafts.shape[1]
    p = target_probs[:, :width].gather(2, drafts[..., None])[..., 0]
    q = draft_probs[:, :width].gather(2, drafts[..., None])[..., 0]
    # A token that its own draft law cannot propose is a broken draft; it is never accepted.
    keep = (uniform_samples[:, :width] * q < p) & (q > 0)
    accepted = keep.int().cumprod(1).sum(1)

    requests = torch.arange(candidates.shape[0])
    residual = target_probs[requests, accepted].double()
    rejected = accepted < width
    rows = requests[rejected]
    residual[rows] = (residual[rows] - draft_probs[rows, accepted[rows]].double()).clamp_min(0)
    _commit(
        predicts, accept_index, accept_token_num, candidates, retrive_index, accepted,
        _draw(residual, target_probs[requests, accepted], uniform_samples_for_final_sampling),
    )  # fmt: skip


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
    **_: Any,
) -> None:
    """Accept drafts that were proposed for certain (argmax drafts: DFLASH, EAGLE with topk 1).

    The draft law is a point mass, so a token is accepted with its target probability and the
    residual is the target law without it. The thresholds relax this as SGLang's options say; at 1.0
    sampling is exact. `draft_probs` is scratch space that the CUDA kernel needs.

    Stands in for kernels.ops.speculative.sampling.tree_speculative_sampling_target_only (CUDA JIT).
    """
    if bool((retrive_next_sibling != -1).any()):
        raise NotImplementedError("trees are not verified here; use --speculative-eagle-topk 1")
    drafts = candidates[:, 1:].long()
    width = drafts.shape[1]
    p = target_probs[:, :width].gather(2, drafts[..., None])[..., 0]
    keep = (uniform_samples[:, :width] * threshold_acc < p) | (p >= threshold_single)
    accepted = keep.int().cumprod(1).sum(1)

    requests = torch.arange(candidates.shape[0])
    residual = target_probs[requests, accepted].double()
    rejected = accepted < width
    rows = requests[rejected]
    residual[rows, drafts[rows, accepted[rows]]] = 0
    _commit(
        predicts, accept_index, accept_token_num, candidates, retrive_index, accepted,
        _draw(residual, target_probs[requests, accepted], uniform_samples_for_final_sampling),
    )  # fmt: skip


def _draw(weights: torch.Tensor, fallback: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw from weights [B, V] float64; from `fallback` where all of them vanished.

    The search looks for the first cumulative weight *above* the threshold, so a token of weight
    zero is never drawn.
    """
    vanished = weights.sum(-1) <= 0
    weights = torch.where(vanished[:, None], fallback.double(), weights)
    cumulative = weights.cumsum(-1)
    threshold = uniform.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


def _commit(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    accepted: torch.Tensor,
    last_token: torch.Tensor,
) -> None:
    """Write the outputs: drafts up to `accepted` [B], then `last_token` [B]."""
    columns = torch.arange(candidates.shape[1])
    taken = columns <= accepted[:, None]
    following = candidates.roll(-1, dims=1).to(predicts.dtype)
    following[torch.arange(accepted.numel()), accepted] = last_token.to(predicts.dtype)
    predicts[retrive_index[taken].long()] = following[taken]
    accept_index.fill_(-1)
    accept_index[:, : columns.numel()][taken] = retrive_index[taken].to(accept_index.dtype)
    accept_token_num.copy_(accepted)
