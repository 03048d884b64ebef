"""A reduced vocabulary for training: softmaxes over the whole one cost more than the drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longspark_sglang.drafter import TargetParts
from longspark_sglang.training.data import PackedSequence


@dataclass(frozen=True)
class TrainVocabulary:
    """The tokens that the losses know.

    Attributes:
        tokens: [N] int64, ascending ids.
        place: [V] int64, where an id is in ``tokens``; -1 for the others.
        coverage: share of the answers' tokens that are known.
    """

    tokens: torch.Tensor
    place: torch.Tensor
    coverage: float

    @classmethod
    def most_frequent(
        cls, sequences: Sequence[PackedSequence], count: int, vocab_size: int
    ) -> TrainVocabulary:
        """The ``count`` most frequent tokens of the answers; of equally frequent ones the lowest.

        Fewer, if the answers do not have that many.
        """
        seen = torch.cat([s.ids[s.response_begin :] for s in sequences])
        frequency = torch.bincount(seen, minlength=vocab_size)
        order = frequency.argsort(descending=True, stable=True)[:count]
        tokens = order[frequency[order] > 0].sort().values
        place = torch.full((vocab_size,), -1)
        place[tokens] = torch.arange(len(tokens))
        known = int(frequency[tokens].sum())
        return cls(tokens, place, known / max(len(seen), 1))

    def to(self, device: torch.device) -> TrainVocabulary:
        """The same on another device."""
        return dataclasses.replace(self, tokens=self.tokens.to(device), place=self.place.to(device))

    def parts(self, target: TargetParts) -> TargetParts:
        """The target's parts with a head for these tokens only."""
        return dataclasses.replace(target, lm_head=target.lm_head[self.tokens], vocab_limit=None)
