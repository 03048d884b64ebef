"""Draw the draft token of one slot from its corrected logits (LongSpark spec, section 3.6)."""

import torch

from . import dispatch
from .checks import Checker
from .gumbel import gumbel_noise
from .markov_step import check_markov, markov_step_reference

# Rows of float64 noise the plain-torch draw holds at a time.
NOISE_ROWS = 16


def draft_sample(
    base_logits: torch.Tensor,
    prev: torch.Tensor,
    markov_w1: torch.Tensor,
    markov_w2: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    vocab_limit: int,
    *,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Markov correction and sampling of one slot, fused.

    Temperature 0: the argmax of z = base + W2 . W1[prev], ties to the lowest id. Temperature T >
    0: a draw from softmax(z / T), made as argmax(z / T + noise) with the Gumbel noise of
    `ops.gumbel`.

    Args:
        base_logits: [B, V], bf16, fp16 or fp32 (a view of one slot of [B, K, V] is fine).
        prev: [B] int64, the token before this slot.
        markov_w1, markov_w2: [V, r].
        temperature: [B] float32, 0 = greedy.
        seed: [B] int64 (its 64 bits are used as they are).
        position: [B] int64 (its low 32 bits are used).
        vocab_limit: ids from here on are never proposed and carry no probability; 1..V.
    Returns:
        token [B] int64 and logq [B] float32, the natural log of the drawn token's probability
        (0 where greedy).
    Raises:
        ArgumentError: shapes, dtypes or devices that don't fit.
    """
    check = Checker("draft_sample", base_logits.device)
    check_markov(check, base_logits, prev, markov_w1, markov_w2)
    check.tensor("temperature", temperature, "B", torch.float32)
    check.tensor("seed", seed, "B", torch.int64)
    check.tensor("position", position, "B", torch.int64)
    vocab = base_logits.size(-1)
    check.condition(
        1 <= vocab_limit <= vocab, f"vocab_limit must be in 1..{vocab}, not {vocab_limit}"
    )
    check.finish()
    run = dispatch.resolve("draft_sample", base_logits.device, backend)
    return run(base_logits, prev, markov_w1, markov_w2, temperature, seed, position, vocab_limit)


@dispatch.reference("draft_sample")
def draft_sample_reference(
    base_logits: torch.Tensor,
    prev: torch.Tensor,
    markov_w1: torch.Tensor,
    markov_w2: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    vocab_limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = markov_step_reference(
        base_logits[:, :vocab_limit], prev, markov_w1, markov_w2[:vocab_limit]
    )
    greedy_token = logits.argmax(dim=-1)
    greedy_logq = torch.zeros_like(temperature)
    # On the CPU this look is free and saves the float64 noise; on a GPU it would be a stop.
    if not temperature.is_cuda and not bool((temperature > 0).any()):
        return greedy_token, greedy_logq

    drawn = temperature > 0
    scaled = logits / torch.where(drawn, temperature, 1.0)[:, None]
    ids = torch.arange(vocab_limit, device=logits.device)
    tokens = [
        (part + gumbel_noise(part_seed, part_position, ids)).argmax(dim=-1)
        for part, part_seed, part_position in zip(
            scaled.split(NOISE_ROWS),
            seed.split(NOISE_ROWS),
            position.split(NOISE_ROWS),
            strict=True,
        )
    ]
    token = torch.where(drawn, torch.cat(tokens), greedy_token)
    logq = scaled.gather(1, token[:, None])[:, 0] - scaled.logsumexp(dim=-1)
    return token, torch.where(drawn, logq, greedy_logq)
