"""The Markov correction: a low-rank bigram term on one slot's logits (LongSpark spec, 3.6)."""

import torch

from . import dispatch
from .checks import FLOATS, Checker


def markov_step(
    base_logits: torch.Tensor,
    prev: torch.Tensor,
    markov_w1: torch.Tensor,
    markov_w2: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Corrected logits z = base + W2 . W1[prev] of one slot.

    The product is rounded to the weights' dtype and cast to the logits' dtype, and the sum is
    rounded to the logits' dtype, as the published drafters were evaluated.

    Args:
        base_logits: [B, V], bf16, fp16 or fp32.
        prev: [B] int64, token before this slot (the anchor at slot 0), 0..V-1.
        markov_w1: [V, r], embedding of the previous token.
        markov_w2: [V, r], projection to the vocabulary, the dtype of markov_w1.
    Returns:
        [B, V] float32.
    Raises:
        ArgumentError: shapes, dtypes or devices that don't fit.
    """
    check = Checker("markov_step", base_logits.device)
    check_markov(check, base_logits, prev, markov_w1, markov_w2)
    check.finish()
    run = dispatch.resolve("markov_step", base_logits.device, backend)
    return run(base_logits, prev, markov_w1, markov_w2)


def check_markov(
    check: Checker,
    base_logits: torch.Tensor,
    prev: torch.Tensor,
    markov_w1: torch.Tensor,
    markov_w2: torch.Tensor,
) -> None:
    """The arguments that every operator with a Markov correction shares."""
    check.tensor("base_logits", base_logits, "B V", FLOATS)
    check.tensor("prev", prev, "B", torch.int64)
    check.tensor("markov_w1", markov_w1, "V r", FLOATS)
    check.tensor("markov_w2", markov_w2, "V r", markov_w1.dtype)


@dispatch.reference("markov_step")
def markov_step_reference(
    base_logits: torch.Tensor,
    prev: torch.Tensor,
    markov_w1: torch.Tensor,
    markov_w2: torch.Tensor,
) -> torch.Tensor:
    product = markov_w1[prev] @ markov_w2.T
    return (base_logits + product.to(base_logits.dtype)).float()
