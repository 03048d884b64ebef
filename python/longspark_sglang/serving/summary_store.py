"""Per-request drafter state on the device: summary, boundary row, and the tags that make it safe.

A row of state belongs to a row of SGLang's request pool. Two tags say what it describes: the
request generation (SGLang bumps it whenever a pool row changes hands) and `covered`, the number of
committed rows merged so far. Where a tag disagrees with what the scheduler is about to extend
(prefix hit, retraction, reused row) the summary is rebuilt from the target's cached K/V, which is
exact because the merge is (LongSpark spec, section 4). A snapshot of a prefix spares part of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longspark_sglang.ops.summary_merge import summary_merge, summary_merge_bulk
from longspark_sglang.serving.rows import device_tensor
from longspark_sglang.serving.snapshots import Crossing, PrefixSnapshots


@dataclass
class StoreCounters:
    """What the store did since the start (host integers, cheap to keep)."""

    rebuilds: int = 0
    rebuilt_rows: int = 0
    merged_rows: int = 0


class SummaryStore:
    """State of every request row.

    Args:
        queries: [L, Hq, R, d] learned queries of this rank's heads.
        num_rows: rows of SGLang's request pool; row 0 is the sacrificial row that padded batches
        use.
        hidden_size, dtype: of the boundary rows.
        snapshots: where rebuilds start from and block boundaries are kept, or None.

    Attributes (all on `device`, all allocated once):
        value: [num_rows, L, Hq, R, d] float32 summary values M.
        lse: [num_rows, L, Hq, R] float32 log-normalisers, natural log; -inf is the empty state.
        boundary: [num_rows, L, h] boundary rows of the last committed token.
        covered: [num_rows] int64 number of committed rows merged into the summary.
    """

    def __init__(
        self,
        queries: torch.Tensor,
        num_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        snapshots: PrefixSnapshots | None = None,
    ) -> None:
        layers, heads, slots, dim = queries.shape
        device = queries.device
        self.queries = queries
        self.snapshots = snapshots
        self.scale = dim**-0.5
        self.value = torch.zeros(num_rows, layers, heads, slots, dim, device=device)
        self.lse = torch.full((num_rows, layers, heads, slots), float("-inf"), device=device)
        self.boundary = torch.zeros(num_rows, layers, hidden_size, dtype=dtype, device=device)
        self.covered = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.generation = [-1] * num_rows  # host side: the scheduler's counter is on the host too
        self.counters = StoreCounters()

    @property
    def num_rows(self) -> int:
        """Request rows that have state."""
        return self.value.shape[0]

    @property
    def bytes_per_row(self) -> int:
        """State bytes of one request."""
        return sum(t[0].numel() * t.element_size() for t in (self.value, self.lse, self.boundary))

    @property
    def total_bytes(self) -> int:
        """State bytes of all request rows."""
        return self.bytes_per_row * self.num_rows

    def extend(
        self,
        rows: torch.Tensor,
        row_ids: Sequence[int],
        generations: Sequence[int],
        prefix_lens: Sequence[int],
        extend_lens: Sequence[int],
        boundary: torch.Tensor,
        req_to_token: torch.Tensor,
        key_pools: Sequence[torch.Tensor],
        value_pools: Sequence[torch.Tensor],
        keys: Sequence[Sequence[bytes]] | None = None,
    ) -> None:
        """Account a prefill pass whose K/V rows [prefix, prefix + extend) have just been written.

        Args:
            rows, row_ids: request pool rows, on the device [B] int64 and on the host.
            generations: the pool's generation counter of each row.
            prefix_lens, extend_lens: host lengths of the pass.
            boundary: [B, L, h] boundary rows of the last token of each request.
            req_to_token: [rows, width] int32, the pool's page table.
            keys: of each request's block boundaries (PrefixSnapshots.keys); with snapshots only.
        """
        # The one host read of the store: prefill passes are long and rare, and a tag that is wrong
        # costs acceptance silently.
        covered = self.covered[rows].tolist()
        keys = keys or [()] * len(row_ids)
        starts, ends = [], [p + n for p, n in zip(prefix_lens, extend_lens, strict=True)]
        for row, generation, done, prefix, names in zip(
            row_ids, generations, covered, prefix_lens, keys, strict=True
        ):
            start = prefix
            if self.generation[row] != generation or done != prefix:
                self._reset(row, generation)
                start = self._restore(row, prefix, names)
                if prefix:
                    self.counters.rebuilds += 1
                    self.counters.rebuilt_rows += prefix - start
            starts.append(start)
        self._merge_in_blocks(
            rows, row_ids, starts, ends, keys, req_to_token, key_pools, value_pools
        )
        self.covered[rows] = torch.tensor(ends, device=rows.device)
        self.boundary[rows] = boundary

    def _merge_in_blocks(
        self,
        rows: torch.Tensor,
        row_ids: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        keys: Sequence[Sequence[bytes]],
        req_to_token: torch.Tensor,
        key_pools: Sequence[torch.Tensor],
        value_pools: Sequence[torch.Tensor],
    ) -> None:
        """Merge rows [start, end) of each request, stopping where a snapshot is to be taken.

        All requests advance by one block at a time in one call; without snapshots, and for prompts
        shorter than a block, there is one call in all.
        """
        snapshots = self.snapshots
        stops = [
            [*(() if snapshots is None else snapshots.boundaries(start, end - 1)), end]
            for start, end in zip(starts, ends, strict=True)
        ]
        done = list(starts)
        for step in range(max(map(len, stops))):
            active = [i for i, of_request in enumerate(stops) if step < len(of_request)]
            segments = [req_to_token[row_ids[i], done[i] : stops[i][step]] for i in active]
            lengths = [len(segment) for segment in segments]
            summary_merge_bulk(
                self.queries,
                key_pools,
                value_pools,
                torch.cat(segments),
                torch.tensor([0, *lengths], device=rows.device).cumsum(0),
                self.value,
                self.lse,
                rows if len(active) == len(done) else rows[active],
                self.scale,
            )
            self.counters.merged_rows += sum(lengths)
            for i in active:
                done[i] = stops[i][step]
                if snapshots is not None and done[i] % snapshots.block == 0:
                    self._keep(snapshots, row_ids[i], done[i], keys[i])

    def _keep(
        self, snapshots: PrefixSnapshots, row: int, boundary: int, keys: Sequence[bytes]
    ) -> None:
        """Take a snapshot of a state that stands at a block boundary."""
        n = boundary // snapshots.block
        if n <= len(keys):
            snapshots.save(keys[n - 1], self.value[row], self.lse[row])
        else:
            # Mixed chunk: a request that rides along merges a token that the host does not know.
            snapshots.stage(row, boundary, self.value[row].clone(), self.lse[row].clone())

    def _restore(self, row: int, prefix: int, keys: Sequence[bytes]) -> int:
        """Start an empty state from a snapshot; returns how many rows it covers."""
        if self.snapshots is None:
            return 0
        self.snapshots.drop_row(row)
        return self.snapshots.restore(keys, prefix, self.value[row], self.lse[row])

    def commit(
        self,
        rows: torch.Tensor,
        block_rows: torch.Tensor,
        accept_lens: torch.Tensor,
        block_boundary: torch.Tensor,
        key_pools: Sequence[torch.Tensor],
        value_pools: Sequence[torch.Tensor],
        crossings: Sequence[Crossing] = (),
    ) -> None:
        """Merge the accepted rows of a verify pass; no host read, so it runs under overlap.

        Args:
            rows: [B] int64 request pool rows.
            block_rows: [B, K+1] K/V row ids that the verify pass wrote: its out_cache_loc, never
                the page table read again (after publishing, the scheduler may hand the row on).
            accept_lens: [B] int32 committed rows of the block, bonus excluded, anchor included.
            block_boundary: [B, K+1, L, h] boundary rows of the block.
            crossings: requests that may reach a block boundary (PrefixSnapshots.crossings).
        """
        block_rows, counts = block_rows.to(torch.int32), accept_lens.to(torch.int32)
        pools = (key_pools, value_pools)
        if crossings:
            block_rows, counts = self._merge_to_boundaries(
                rows, block_rows, counts, crossings, *pools
            )
        summary_merge(
            self.queries, *pools, block_rows, counts, self.value, self.lse, rows, self.scale
        )
        self.covered[rows] += accept_lens.to(torch.int64)
        # A padded entry commits nothing; its boundary goes to the padding row, which nobody reads.
        last = (accept_lens.to(torch.int64) - 1).clamp(min=0).view(-1, 1, 1, 1)
        self.boundary[rows] = block_boundary.gather(
            1, last.expand(-1, 1, *block_boundary.shape[2:])
        ).squeeze(1)

    def _merge_to_boundaries(
        self,
        rows: torch.Tensor,
        block_rows: torch.Tensor,
        counts: torch.Tensor,
        crossings: Sequence[Crossing],
        key_pools: Sequence[torch.Tensor],
        value_pools: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge accepted rows up to each boundary, copy those states, return what is left to merge.

        Returns block_rows [B, K+1] and counts [B] of the accepted rows behind the boundaries; all
        of them for the other requests.
        """
        assert self.snapshots is not None
        places = device_tensor([c.place for c in crossings], torch.int64, rows.device)
        boundaries = device_tensor([c.boundary for c in crossings], torch.int64, rows.device)
        crossing, accepted = rows[places], counts[places]
        left = boundaries - self.covered[crossing]  # negative: crossed, but the host lags
        reached = (left >= 0) & (accepted >= left)
        first = torch.where(reached, left, 0).to(torch.int32)
        summary_merge(
            self.queries,
            key_pools,
            value_pools,
            block_rows[places],
            first,
            self.value,
            self.lse,
            crossing,
            self.scale,
        )
        value, lse = self.value[crossing], self.lse[crossing]
        for i, c in enumerate(crossings):
            self.snapshots.stage(c.row, c.boundary, value[i], lse[i], reached[i])
        width = block_rows.shape[1]
        shift = torch.zeros_like(counts).index_copy(0, places, first)
        columns = torch.arange(width, device=rows.device) + shift[:, None]
        return block_rows.gather(1, columns.clamp(max=width - 1)), counts - shift

    def release(self, row: int) -> None:
        """The request of this row is finished: whoever gets the row next starts empty."""
        self.generation[row] = -1

    def owned_rows(self, free_rows: Sequence[int]) -> int:
        """Rows that hold the state of a live request; rows that SGLang has back do not count."""
        free = set(free_rows)
        return sum(
            generation != -1 and row not in free for row, generation in enumerate(self.generation)
        )

    def clear(self) -> None:
        """Forget every row (the KV pool was flushed)."""
        self.covered.zero_()
        self.generation = [-1] * len(self.generation)
        if self.snapshots is not None:
            self.snapshots.clear()

    def _reset(self, row: int, generation: int) -> None:
        self.generation[row] = generation
        self.value[row].zero_()
        self.lse[row].fill_(float("-inf"))
