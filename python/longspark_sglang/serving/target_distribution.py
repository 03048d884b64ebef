"""The distribution that the target's next token is drawn from, given its processed logits.

Temperature, top-k, top-p, min-p and per-request seeds as SGLang's own sampler applies them. Its two
sampling backends filter differently, and both are followed:

* ``pytorch`` ranks the temperature-scaled probabilities and keeps a token if its rank is below
  top_k, the mass ranked before it is at most top_p, and its probability is at least min_p times the
  highest; all three look at the unfiltered distribution.
* ``flashinfer`` keeps what survives top-k and top-p, each on the unfiltered distribution ("joint");
  for a request with min_p it filters one after the other, renormalising in between: top-k, top-p,
  min-p. Tokens tied at a cut all stay.

SGLang decides some of this per batch (one request with min_p makes its neighbours sequential, too);
here each request gets what it would get alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longspark_sglang.ops.gumbel import gumbel_noise

BACKENDS = ("pytorch", "flashinfer")
# Rows whose float64 noise exists at one time.
NOISE_ROWS = 16


def sampler_refusals(args: Any) -> list[str]:
    """Server arguments under which the plain sampler does something else than described above."""
    reasons = []
    backend = getattr(args, "sampling_backend", None)
    if backend is not None and backend not in BACKENDS:
        reasons.append(
            f"--sampling-backend {backend} samples by rules of its own that LONGSPARK does not "
            f"know; use one of {', '.join(BACKENDS)}"
        )
    if getattr(args, "enable_watermark", False):
        reasons.append(
            "a watermark picks each token from the tokens before it, which acceptance does not "
            "follow; drop --enable-watermark"
        )
    if getattr(args, "rl_on_policy_target", None) is not None:
        reasons.append("--rl-on-policy-target samples from bfloat16 log-probabilities; drop it")
    return reasons


def rank_filter(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor | None,
    widest: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``pytorch`` filter, in ranked order.

    Args:
        probs: [N, V] float32, after temperature.
        top_k: [N] int; top_p, min_p: [N] float32, min_p None where no request has one.
        widest: the largest top_k if the host knows one; then only so many ranks are looked at.
    Returns:
        weights [N, ranks] float32 (descending, 0 where filtered out, not renormalised) and the
        token ids [N, ranks] int64 of the ranks. Which of the tokens tied exactly at the top-k cut
        are kept is as open as in SGLang, whose sort isn't stable either.
    """
    if widest is not None and widest < probs.shape[-1]:
        weights, ids = probs.topk(widest, dim=-1, sorted=True)
    else:
        weights, ids = probs.sort(dim=-1, descending=True)
    above = weights.cumsum(dim=-1) - weights
    rank = torch.arange(weights.shape[-1], device=weights.device)
    dropped = (rank >= top_k[:, None]) | (above > top_p[:, None])
    if min_p is not None:
        dropped |= weights < weights[:, :1] * min_p[:, None]
    return weights.masked_fill(dropped, 0.0), ids


def filter_pytorch(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor | None,
    widest: int | None = None,
) -> torch.Tensor:
    """`rank_filter`, renormalised and back in vocabulary order: [N, V] float32."""
    weights, ids = rank_filter(probs, top_k, top_p, min_p, widest)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, ids, weights)


def renorm_kernels() -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """flashinfer's top-k and top-p kernels, as SGLang's sampler calls them."""
    from sgl_kernel import top_k_renorm_prob, top_p_renorm_prob

    return top_k_renorm_prob, top_p_renorm_prob


def filter_flashinfer(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """The ``flashinfer`` filter, renormalised: joint without min_p, sequential with it.

    Args and result as for `filter_pytorch`; top_k is int32, probs contiguous.
    """
    top_k_renorm, top_p_renorm = renorm_kernels()
    if min_p is None:
        kept = top_k_renorm(probs, top_k).masked_fill(top_p_renorm(probs, top_p) <= 0, 0.0)
    else:
        kept = top_p_renorm(top_k_renorm(probs, top_k), top_p)
        kept = kept.masked_fill(kept < kept.amax(dim=-1, keepdim=True) * min_p[:, None], 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def seeded_draw(
    log_weights: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """The seeded sampler's choice: argmax of log weight + the noise of (seed, position, column).

    Args:
        log_weights: [N, M]; seed: [N] int64; position: [N] int64, the position of the token whose
            logits these are (the drawn token comes after it).
    Returns:
        [N] int64 column.
    """
    column = torch.arange(log_weights.shape[-1], device=log_weights.device)
    parts = zip(
        log_weights.split(NOISE_ROWS),
        seed.split(NOISE_ROWS),
        position.split(NOISE_ROWS),
        strict=True,
    )
    return torch.cat(
        [(gumbel_noise(s, p, column) + w.double()).argmax(dim=-1) for w, s, p in parts]
    )


def seeded_tokens(probs: torch.Tensor, seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Seeded token of each row of probs [N, V] without filters; the noise goes by token id."""
    return seeded_draw(probs.log(), seed, position)


def seeded_filtered_tokens(
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    """Seeded token of each row of probs [N, V] with top-k or top-p; the noise goes by *rank*.

    SGLang's seeded sampler has no min-p.
    """
    weights, ids = rank_filter(probs, top_k, top_p, None)
    rank = seeded_draw(weights.double().log(), seed, position)
    return ids.gather(1, rank[:, None])[:, 0]
