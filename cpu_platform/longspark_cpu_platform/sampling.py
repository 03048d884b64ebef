"""Seeded sampling (SGLang's deterministic mode) without sgl-kernel and without a compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

_MASK = 0xFFFFFFFF


def enable_batch_invariant_mode(enable_bmm: bool = True) -> None:
    """Say what deterministic mode gives on a CPU, and leave torch's matmuls alone.

    Stands in for srt.batch_invariant_ops.enable_batch_invariant_mode, which replaces torch.bmm, for
    every device, by a Triton kernel.
    """
    logger.warning(
        "deterministic inference on the CPU: seeds are honoured, and attention does not depend on "
        "the batch, but matrix products may round differently in batches of different size"
    )


def filter_min_p_before_seeded_draw(
    original: Callable[..., Any],
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor | None,
    positions: torch.Tensor,
    **options: Any,
) -> Any:
    """Let min-p and seeds go together, probs [B, V] -> token ids [B].

    Corrects srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch, which asserts that they
    do not: one such request ends the scheduler. Removing the unlikely tokens beforehand is the same
    filter: they are the tail of the order in which top-k and top-p count.
    """
    if need_min_p_sampling and sampling_seed is not None:
        threshold = probs.amax(dim=-1, keepdim=True) * min_ps.view(-1, 1)
        probs = probs.masked_fill(probs < threshold, 0.0)
        need_min_p_sampling = False
    return original(
        probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **options
    )


def multinomial_with_seed(
    logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Gumbel-max draw per row with noise hashed from (seed, position, column).

    logprobs [B, V] (any float, need not be normalised, -inf = never), seed [B] int64, positions [B]
    integer -> [B, 1] int64.

    Stands in for srt.layers.sampler.multinomial_with_seed, which reaches an sgl-kernel CPU operator
    that is not there. Same hash, same arithmetic in float64: a seed gives the tokens it gives on a
    GPU, up to rounding of the logits.
    """
    columns = torch.arange(logprobs.shape[1], device=logprobs.device)
    hashed = murmur_hash32(seed, positions, columns)
    uniform = hashed.double() / _MASK
    # At uniform = 1 the noise would be +inf, and NaN together with a forbidden token's -inf.
    exponential = -uniform.log().clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32))
    return (logprobs.double() - exponential.log()).argmax(dim=1, keepdim=True)


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """32-bit MurmurHash3 of the blocks (seed low, seed high, position, column), [B, C] int64.

    seed [B] int64 bit pattern, positions [B], columns [C]. int64 wraps on overflow, so the low 32
    bits of every product are the ones of unsigned arithmetic.
    """
    seed = seed.long()
    state = torch.zeros_like(seed)
    for block in (seed & _MASK, (seed >> 32) & _MASK, positions.long() & _MASK):
        state = _mix(state, block)
    state = _mix(state[:, None], columns.long()[None] & _MASK)
    state = state ^ 16  # length in bytes
    state = state ^ (state >> 16)
    state = (state * 0x85EBCA6B) & _MASK
    state = state ^ (state >> 13)
    state = (state * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _rotate((block * 0xCC9E2D51) & _MASK, 15)
    block = (block * 0x1B873593) & _MASK
    state = _rotate(state ^ block, 13)
    return (state * 5 + 0xE6546B64) & _MASK


def _rotate(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _MASK
