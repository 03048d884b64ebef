"""Penalties and min_new_tokens, exact at every position of a block.

SGLang's own penalizers are fed one token per step: the last one. A speculative step emits up to
K+1 tokens, so there penalties fade as acceptance grows. This state is fed every token, on the
device, and adds the draft tokens before a position while it processes that position.

What is counted is what SGLang counts: generated tokens, not the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from longspark_sglang.serving.rows import RowSet, device_tensor

# Index 0 of the state takes the writes of tokens that were not accepted; nobody reads it.
SINK = 0
FIRST_SLOTS = 8


def has_penalties(req: Any) -> bool:
    """Does this request use anything that depends on the tokens generated so far?"""
    params = req.sampling_params
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def stop_tokens(req: Any, vocab_size: int) -> list[int]:
    """The token ids that min_new_tokens forbids, ascending."""
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        ids |= set(getattr(req.tokenizer, "additional_stop_token_ids", None) or ())
        ids.add(req.tokenizer.eos_token_id)
    return sorted(i for i in ids if i is not None and 0 <= i < vocab_size)


@dataclass(frozen=True)
class PenaltyRows:
    """The penalised requests of one batch, as the host knows them.

    Attributes:
        which: their rows in the batch, n of them; slots: [n] int64, their rows in the state.
        frequency, presence, repetition: [n, 1] float32; min_new: [n, 1] int32.
        stop_ids: [n, s] int64, a request's stop tokens, filled up by repeating its first one.
    """

    which: RowSet
    slots: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
    min_new: torch.Tensor
    stop_ids: torch.Tensor
    any_repetition: bool
    any_min_new: bool


class PenaltyState:
    """Per-request counts of generated tokens, for the requests that need them.

    A request is known by its row of SGLang's request pool and that row's generation, which changes
    whenever the row is handed out again. Only penalised requests take memory: 5 bytes per
    vocabulary entry.
    """

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._owners: dict[int, tuple[int, int]] = {}  # pool row -> generation, slot
        self._free: list[int] = []
        # What a token's frequency penalties add up to, and whether it was generated at all. The sum
        # is kept, not a count, because n additions of x do not round like n * x.
        self.frequency = torch.zeros(0, vocab_size, device=device)
        self.seen = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.generated = torch.zeros(0, dtype=torch.int32, device=device)

    def knows(self, row: int, generation: int) -> bool:
        """Is this request's state here?"""
        owner = self._owners.get(row)
        return owner is not None and owner[0] == generation

    def rebuild(self, row: int, generation: int, req: Any) -> None:
        """Start this request's state from the tokens that the host knows it has generated."""
        slot = self._owners[row][1] if row in self._owners else self._new_slot()
        self._owners[row] = (generation, slot)
        tokens = list(req.output_ids)
        self.frequency[slot].zero_()
        self.seen[slot].zero_()
        self.generated[slot].fill_(len(tokens))
        if tokens:
            ids = device_tensor(tokens, torch.int64, self.device)
            step = torch.full_like(ids, req.sampling_params.frequency_penalty, dtype=torch.float32)
            self.frequency[slot].scatter_add_(0, ids, step)
            self.seen[slot, ids] = True

    def forget(self, row: int) -> None:
        """Another request without penalties has this pool row now."""
        owner = self._owners.pop(row, None)
        if owner is not None:
            self._free.append(owner[1])

    def _new_slot(self) -> int:
        if not self._free:
            old = self.frequency.shape[0]
            added = max(FIRST_SLOTS, old)
            self.frequency = _grown(self.frequency, added)
            self.seen = _grown(self.seen, added)
            self.generated = _grown(self.generated, added)
            self._free = list(range(max(old, SINK + 1), old + added))
        return self._free.pop()

    def rows(self, reqs: Sequence[Any], pool_rows: Sequence[int]) -> PenaltyRows | None:
        """The penalised ones among a batch's requests (all known), or None if there are none."""
        index = [i for i, req in enumerate(reqs) if has_penalties(req)]
        which = RowSet.of(index, len(reqs), self.device)
        if which is None:
            return None
        params = [reqs[i].sampling_params for i in index]
        stops = [stop_tokens(reqs[i], self.vocab_size) for i in index]
        # A request without any stop token has nothing to forbid.
        min_new = [p.min_new_tokens if s else 0 for p, s in zip(params, stops, strict=True)]
        width = max(1, max(len(s) for s in stops))
        padded = [s + [s[0] if s else 0] * (width - len(s)) for s in stops]

        def column(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
            return device_tensor(values, dtype, self.device)[:, None]

        return PenaltyRows(
            which=which,
            slots=device_tensor(
                [self._owners[pool_rows[i]][1] for i in index], torch.int64, self.device
            ),
            frequency=column([p.frequency_penalty for p in params], torch.float32),
            presence=column([p.presence_penalty for p in params], torch.float32),
            repetition=column([p.repetition_penalty for p in params], torch.float32),
            min_new=column(min_new, torch.int32),
            stop_ids=device_tensor(padded, torch.int64, self.device),
            any_repetition=any(p.repetition_penalty != 1.0 for p in params),
            any_min_new=any(m > 0 for m in min_new),
        )

    def next_adjustment(self, rows: PenaltyRows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the next token's logits need: first add [n, V], then scale by [n, V] (or None).

        Scaling divides positive logits and multiplies negative ones.
        """
        seen = self.seen[rows.slots]
        add = -(self.frequency[rows.slots] + torch.where(seen, rows.presence, 0.0))
        if rows.any_min_new:
            short = self.generated[rows.slots][:, None] < rows.min_new
            add.scatter_(
                1,
                rows.stop_ids,
                torch.where(short, float("-inf"), add.gather(1, rows.stop_ids)),
            )
        scale = torch.where(seen, rows.repetition, 1.0) if rows.any_repetition else None
        return add, scale

    def apply(self, logits: torch.Tensor, drafts: torch.Tensor, rows: PenaltyRows) -> None:
        """Penalise a block's logits in place.

        Args:
            logits: [n, K+1, V] float32 of the penalised requests; position j follows j drafts.
            drafts: [n, K] int64, their draft tokens.

        The same float32 operations in the same order as plain decoding, so greedy choices agree bit
        for bit. Every position gets the penalties of the tokens generated before the block; only
        the at most K entries of a position that the drafts before it change are computed again.
        """
        _, width, _ = logits.shape
        before = drafts[:, None, :].expand(-1, width, -1)
        raw = logits.gather(2, before)

        frequency, seen = self.frequency[rows.slots], self.seen[rows.slots]
        logits.sub_((frequency + torch.where(seen, rows.presence, 0.0))[:, None])
        if rows.any_repetition:
            _scale(logits, torch.where(seen, rows.repetition, 1.0)[:, None])

        # precedes[n, j, m, i]: draft m comes before position j and is the same token as draft i.
        slot = torch.arange(width, device=logits.device)
        precedes = (slot[:, None] > slot[None, :-1])[None, :, :, None] & (
            drafts[:, None, :, None] == drafts[:, None, None, :]
        )
        sums = frequency.gather(1, drafts)[:, None].expand(-1, width, -1)
        for m in range(width - 1):  # one addition for each occurrence, as plain decoding adds them
            sums = sums + torch.where(precedes[:, :, m], rows.frequency[:, :, None], 0.0)
        seen_here = seen.gather(1, drafts)[:, None] | precedes.any(dim=2)
        changed = raw - (sums + torch.where(seen_here, rows.presence[:, :, None], 0.0))
        if rows.any_repetition:
            _scale(changed, torch.where(seen_here, rows.repetition[:, :, None], 1.0))
        # A token drafted twice is written twice, with the same value.
        logits.scatter_(2, before, changed)

        if rows.any_min_new:
            length = self.generated[rows.slots][:, None] + slot
            stops = rows.stop_ids[:, None, :].expand(-1, width, -1)
            short = (length < rows.min_new)[:, :, None]
            logits.scatter_(2, stops, torch.where(short, float("-inf"), logits.gather(2, stops)))

    def record(self, tokens: torch.Tensor, counts: torch.Tensor, rows: PenaltyRows) -> None:
        """Count emitted tokens: of tokens [n, T] int64 the first counts[i] (int32) of each row."""
        emitted = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
        slots = torch.where(emitted, rows.slots[:, None], SINK)
        flat = (slots * self.vocab_size + tokens).flatten()
        # All additions to one entry are of one value, so their order does not matter.
        self.frequency.view(-1).scatter_add_(0, flat, rows.frequency.expand_as(tokens).reshape(-1))
        self.seen.view(-1)[flat] = True
        self.generated[rows.slots] += counts


def _grown(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat((tensor, tensor.new_zeros(rows, *tensor.shape[1:])))


def _scale(logits: torch.Tensor, factor: torch.Tensor) -> None:
    # Two operations on purpose: x / f and x * (1 / f) round differently.
    logits.copy_(torch.where(logits < 0, logits * factor, logits / factor))
