"""Summaries of prompt prefixes, kept in host memory under a name made of the prefix's tokens.

A prefix hit brings back the target's K/V rows but not the summary over them: the store would have
to read all of them again. A snapshot is the summary (value and log-normaliser) after exactly
n * BLOCK rows, under a hash of the tokens of those rows; a hit starts from the deepest one at or
below it and reads the rest, less than a block where the prefix was computed here.

Names say nothing about where K/V rows lie or how the prefix tree is cut: both change under a
running request (SGLang replaces duplicate rows by the tree's, splits nodes, evicts), tokens do not.
K/V rows of the same tokens computed in another batch differ by rounding, and so may a summary from
a snapshot; drafts may then differ, the output cannot, for the target verifies.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

# Rows between two snapshots. A snapshot of the released 8B drafter takes as much memory as 9 rows
# of its target's K/V cache.
BLOCK = 512


@dataclass
class SnapshotCounters:
    """What the snapshots did since the start."""

    taken: int = 0
    hits: int = 0
    rows_saved: int = 0  # K/V rows that a rebuild did not have to read
    evictions: int = 0


class Crossing(NamedTuple):
    """A request of a round whose accepted rows may reach past a block boundary."""

    place: int  # in the batch
    row: int  # of the request pool
    boundary: int


@dataclass
class _Staged:
    """State of a running request at the boundary that its next rounds may cross (device tensors).

    Only rounds know where a boundary falls between accepted rows, and the host learns the tokens
    one round later: so the state is copied in the round, and named once its tokens are known.
    """

    boundary: int
    value: torch.Tensor
    lse: torch.Tensor


class PrefixSnapshots:
    """A bounded set of snapshots; the longest unused goes first.

    Every copy is queued on the stream of the forward passes, so that no host read is needed and
    memory is never reused under a copy. Ranks see the same requests in the same order, so each
    rank's set, of its own heads, holds the same prefixes.

    Args:
        capacity: snapshots that are kept.
        queries: [L, Hq, R, d] learned queries of this rank's heads (their shape and device).

    Attributes:
        value, lse: [capacity, L, Hq, R, d] and [capacity, L, Hq, R] float32 on the host; allocated
            once, so the bound holds by construction.
    """

    def __init__(self, capacity: int, queries: torch.Tensor, block: int = BLOCK) -> None:
        layers, heads, slots, dim = queries.shape
        pinned = queries.device.type == "cuda"
        self.block = block
        self.value = torch.empty(capacity, layers, heads, slots, dim, pin_memory=pinned)
        self.lse = torch.empty(capacity, layers, heads, slots, pin_memory=pinned)
        self.counters = SnapshotCounters()
        self._places: OrderedDict[bytes, int] = OrderedDict()  # the longest unused first
        self._free = list(range(capacity))
        self._keys: WeakKeyDictionary[Any, list[bytes]] = WeakKeyDictionary()
        self._staged: dict[int, _Staged] = {}
        self._finished: list[tuple[bytes, _Staged]] = []
        self._suspended = False

    @staticmethod
    def bytes_each(queries: torch.Tensor) -> int:
        """Host bytes of one snapshot."""
        layers, heads, slots, dim = queries.shape
        return 4 * layers * heads * slots * (dim + 1)

    @property
    def count(self) -> int:
        """Snapshots that are kept now."""
        return len(self._places)

    @property
    def used_bytes(self) -> int:
        """Host bytes that hold snapshots now."""
        return self.count * self.bytes_each(self.value[0])

    # -- names ------------------------------------------------------------------------------------

    def keys(self, req: Any) -> list[bytes]:
        """Names of this request's boundaries: the n-th is that of its first (n + 1) * block tokens.

        Only whole blocks of tokens that the host knows have one. A request whose K/V rows do not
        follow from its tokens has none.
        """
        if req.input_embeds is not None:
            return []
        chain = self._keys.setdefault(req, [])
        known = len(req.origin_input_ids) + len(req.output_ids)
        if known // self.block > len(chain):
            tokens = array("q", req.origin_input_ids) + array("q", req.output_ids)
            for begin in range(len(chain) * self.block, known - self.block + 1, self.block):
                before = chain[-1] if chain else _salt(req)
                block = tokens[begin : begin + self.block].tobytes()
                chain.append(blake2b(before + block, digest_size=16).digest())
        return chain[: known // self.block]

    # -- use --------------------------------------------------------------------------------------

    def restore(
        self, keys: Sequence[bytes], rows: int, value: torch.Tensor, lse: torch.Tensor
    ) -> int:
        """Copy the deepest snapshot of at most `rows` rows into a state; returns its rows, or 0.

        Args:
            keys: of the request. value: [L, Hq, R, d]; lse: [L, Hq, R], overwritten by a hit.
        """
        for n in range(min(len(keys), rows // self.block), 0, -1):
            place = self._places.get(keys[n - 1])
            if place is not None:
                self._places.move_to_end(keys[n - 1])
                value.copy_(self.value[place], non_blocking=True)
                lse.copy_(self.lse[place], non_blocking=True)
                self.counters.hits += 1
                self.counters.rows_saved += n * self.block
                return n * self.block
        return 0

    # -- taking -----------------------------------------------------------------------------------

    def boundaries(self, start: int, end: int) -> list[int]:
        """Block boundaries b with start < b <= end."""
        first = (start // self.block + 1) * self.block
        return list(range(first, end + 1, self.block))

    def save(self, key: bytes, value: torch.Tensor, lse: torch.Tensor) -> None:
        """Keep a state under a name; one that is there is only marked as used."""
        if key in self._places:
            self._places.move_to_end(key)
            return
        if self._suspended or not self.value.shape[0]:
            return
        if self._free:
            place = self._free.pop()
        else:
            _, place = self._places.popitem(last=False)
            self.counters.evictions += 1
        self._places[key] = place
        self.value[place].copy_(value, non_blocking=True)
        self.lse[place].copy_(lse, non_blocking=True)
        self.counters.taken += 1

    def crossings(self, reqs: Sequence[Any], width: int) -> list[Crossing]:
        """Requests of a round that may cross a boundary in it.

        The host's count of committed rows lags by a round under overlap, hence twice the width.
        """
        found = []
        for place, req in enumerate(reqs):
            committed = req.kv.kv_committed_len
            staged = self._staged.get(req.kv.req_pool_idx)
            if staged is not None and staged.boundary <= committed:
                key = self._key(req, staged.boundary)
                if key is not None:
                    self.save(key, staged.value, staged.lse)
                    del self._staged[req.kv.req_pool_idx]
            boundary = (committed // self.block + 1) * self.block
            if boundary <= committed + 2 * width and req.input_embeds is None:
                found.append(Crossing(place, req.kv.req_pool_idx, boundary))
        return found

    def stage(
        self,
        row: int,
        boundary: int,
        value: torch.Tensor,
        lse: torch.Tensor,
        reached: torch.Tensor | None = None,
    ) -> None:
        """Keep a copy of a running request's state until its tokens are known.

        Args:
            row: request pool row. value: [L, Hq, R, d], lse: [L, Hq, R]: not aliased by the state.
            reached: bool scalar on the device: is this the state at `boundary`? None: it is. The
                copies of earlier rounds stay where it is false.
        """
        staged = self._staged.get(row)
        if reached is not None and staged is not None and staged.boundary == boundary:
            value = torch.where(reached, value, staged.value)
            lse = torch.where(reached, lse, staged.lse)
        self._staged[row] = _Staged(boundary, value, lse)

    def finish(self, req: Any) -> None:
        """The request gives its row back: name what it crossed and owns; the rest is dropped.

        Under overlap the round after a request's last one has run already, so a boundary may have
        been crossed by rows that nobody owns.
        """
        staged = self._staged.pop(req.kv.req_pool_idx, None)
        if staged is not None and staged.boundary <= req.owned_kv_len():
            key = self._key(req, staged.boundary)
            if key is not None:
                # Not copied here: this is not the stream that wrote it.
                self._finished.append((key, staged))

    def settle(self) -> None:
        """Before a forward pass: keep what finished requests left."""
        for key, staged in self._finished:
            self.save(key, staged.value, staged.lse)
        self._finished.clear()

    def drop_row(self, row: int) -> None:
        """The row starts anew; what was staged for it describes nothing that will be named."""
        self._staged.pop(row, None)

    # -- what ends them ---------------------------------------------------------------------------

    def clear(self) -> None:
        """The cache was flushed: forget everything and start afresh."""
        self._free.extend(self._places.values())
        self._places.clear()
        self._staged.clear()
        self._finished.clear()
        self._suspended = False

    def suspend(self) -> None:
        """The target's weights change: none is used or taken until the cache is flushed.

        SGLang flushes after an update unless told otherwise; where it does not, rows of the old and
        of the new weights lie side by side, and tokens alone no longer say which.
        """
        self.clear()
        self._suspended = True

    def _key(self, req: Any, boundary: int) -> bytes | None:
        """Name of a boundary, or None while the host lacks its tokens."""
        keys, n = self.keys(req), boundary // self.block
        return keys[n - 1] if n <= len(keys) else None


def _salt(req: Any) -> bytes:
    """What beside the tokens decides which K/V rows SGLang lets a request share."""
    parts = repr((req.extra_key, req.cache_salt, req.lora_id))
    return blake2b(parts.encode(), digest_size=16).digest()
