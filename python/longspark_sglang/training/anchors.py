"""Anchors of a source sequence, and what each of them may see.

Many anchors share one sequence. An anchor at position p is the token x_p; the drafter predicts
x_{p+1} .. x_{p+K} from the rows 0..p-1, exactly as in serving, where the anchor's own row is not
committed yet (LongSpark spec, section 7). Nothing of one anchor's block is visible to another: the
blocks are a batch, so this needs no mask.
"""

from __future__ import annotations

import torch


def possible_anchors(response: torch.Tensor) -> torch.Tensor:
    """Positions [n] int64, ascending, that serving could use as anchors and that have a label.

    ``response`` [T] bool marks the tokens that the target itself produced. The anchor and its first
    label must both be such tokens, and at least one row must precede the anchor.
    """
    usable = response[:-1] & response[1:]
    usable[:1] = False
    return usable.nonzero().flatten()


def choose_anchors(response: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """At most ``count`` of `possible_anchors`, drawn without replacement, ascending."""
    possible = possible_anchors(response)
    drawn = torch.randperm(len(possible), generator=generator)[:count]
    return possible[drawn.to(possible.device)].sort().values


def window_rows(anchors: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The last min(p, window) rows before each anchor p, in position order.

    Returns rows [A, W'] int64 with W' = min(largest p, window), padded with 0, and lens [A].
    """
    lens = anchors.clamp(max=window)
    width = int(lens.max()) if len(anchors) else 0
    offset = torch.arange(width, device=anchors.device)
    rows = (anchors - lens)[:, None] + offset
    return torch.where(offset < lens[:, None], rows, 0), lens


def labels_of(
    input_ids: torch.Tensor, response: torch.Tensor, anchors: torch.Tensor, slots: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Teacher forcing of the block slots.

    Args:
        input_ids: [T] int64.
        response: [T] bool.
        anchors: [A] int64.
        slots: K.
    Returns:
        labels [A, K] (x_{p+1+j}), prev [A, K] (x_{p+j}, what the Markov term reads) and valid
        [A, K]: the label exists and it and all labels before it are response tokens. Ids at invalid
        slots are arbitrary but legal.
    """
    last = len(input_ids) - 1
    position = anchors[:, None] + 1 + torch.arange(slots, device=anchors.device)
    exists = position <= last
    position = position.clamp(max=last)
    valid = (exists & response[position]).cumprod(dim=1).bool()
    return input_ids[position], input_ids[(position - 1).clamp(min=0)], valid
