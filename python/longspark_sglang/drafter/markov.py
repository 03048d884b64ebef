"""The Markov head: a low-rank bigram term on the logits, and the slot-by-slot draft it allows."""

from __future__ import annotations

import torch
from torch import nn

from longspark_sglang.config import LongSparkConfig
from longspark_sglang.ops import draft_sample


class MarkovHead(nn.Module):
    """z_j = b_j + W2 . W1[token before slot j] (LongSpark spec, section 3.6)."""

    def __init__(self, config: LongSparkConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def forward(self, base_logits: torch.Tensor, prev: torch.Tensor) -> torch.Tensor:
        """Corrected logits where the previous tokens are known (teacher forcing).

        base_logits [..., V], prev [...] int64 -> [..., V] in the logits' dtype. The product is
        rounded to the weights' dtype before the sum.
        """
        return base_logits + self.markov_w2(self.markov_w1(prev)).to(base_logits.dtype)

    @torch.no_grad()
    def draft(
        self,
        base_logits: torch.Tensor,
        anchor: torch.Tensor,
        positions: torch.Tensor,
        temperature: torch.Tensor | None,
        seed: torch.Tensor,
        vocab_limit: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw the block's tokens one after the other; slot j's previous token is draft j - 1.

        Args:
            base_logits: [B, K, V].
            anchor: [B] int64, the previous token of slot 0.
            positions: [B] int64, the anchor's position; slot j draws for position + 1 + j.
            temperature: [B] float32, 0 = greedy; None = all greedy.
            seed: [B] int64 of the draws; with the position it determines them.
            vocab_limit: ids from here on are never drawn.
        Returns:
            draft tokens [B, K] int64 and the natural log of the probability with which each was
            drawn, [B, K] float32 (0 where greedy).
        """
        if temperature is None:
            temperature = torch.zeros(len(anchor), device=anchor.device)
        # The sampling operator knows the dtypes of serving; float64 is for comparisons only.
        narrow = torch.float32 if base_logits.dtype == torch.float64 else base_logits.dtype
        w1, w2 = self.markov_w1.weight, self.markov_w2.weight
        if w1.dtype == torch.float64:
            w1, w2 = w1.float(), w2.float()
        tokens, logprobs = [], []
        prev = anchor.contiguous()
        for slot in range(base_logits.size(1)):
            prev, logprob = draft_sample(
                base_logits[:, slot].to(narrow),
                prev,
                w1,
                w2,
                temperature,
                seed,
                positions + 1 + slot,
                vocab_limit,
            )
            tokens.append(prev)
            logprobs.append(logprob)
        return torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1)
