"""Per-request drafter state on the device: summary, boundary row, and the tags that make it safe.

A row of state belongs to a row of SGLang's request pool. Two tags say what it describes: the
request generation (SGLang bumps it whenever a pool row changes hands) and `covered`, the number of
committed rows merged so far. Where a tag disagrees with what the scheduler is about to extend
(prefix hit, retraction, reused row) the summary is rebuilt from the target's cached K/V, which is
exact because the merge is (LongSpark spec, section 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longspark_sglang.ops.summary_merge import summary_merge, summary_merge_bulk

# Summation order differs between merging chunk by chunk and rebuilding in one go.
CHECK_TOLERANCE = 1e-3


class StateError(RuntimeError):
    """State of a request does not describe its committed rows: our fault, never the user's."""


@dataclass
class StoreCounters:
    """What the store did since the start (host integers, cheap to keep)."""

    rebuilds: int = 0
    rebuilt_rows: int = 0
    merged_rows: int = 0
    checks: int = 0
    largest_difference: float = 0.0


class SummaryStore:
    """State of every request row.

    Args:
        queries: [L, Hq, R, d] learned queries of this rank's heads.
        num_rows: rows of SGLang's request pool; row 0 is the sacrificial row that padded batches
        use.
        hidden_size, dtype: of the boundary rows.

    Attributes (all on `device`, all allocated once):
        value: [num_rows, L, Hq, R, d] float32 summary values M.
        lse: [num_rows, L, Hq, R] float32 log-normalisers, natural log; -inf is the empty state.
        boundary: [num_rows, L, h] boundary rows of the last committed token.
        covered: [num_rows] int64 number of committed rows merged into the summary.
    """

    def __init__(
        self, queries: torch.Tensor, num_rows: int, hidden_size: int, dtype: torch.dtype
    ) -> None:
        layers, heads, slots, dim = queries.shape
        device = queries.device
        self.queries = queries
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
    ) -> None:
        """Account a prefill pass whose K/V rows [prefix, prefix + extend) have just been written.

        Args:
            rows, row_ids: request pool rows, on the device [B] int64 and on the host.
            generations: the pool's generation counter of each row.
            prefix_lens, extend_lens: host lengths of the pass.
            boundary: [B, L, h] boundary rows of the last token of each request.
            req_to_token: [rows, width] int32, the pool's page table.
        """
        # The one host read of the store: prefill passes are long and rare, and a tag that is wrong
        # costs acceptance silently.
        covered = self.covered[rows].tolist()
        segments, lengths = [], []
        for row, generation, done, prefix, new in zip(
            row_ids, generations, covered, prefix_lens, extend_lens, strict=True
        ):
            start = prefix
            if self.generation[row] != generation or done != prefix:
                self._reset(row, generation)
                start = 0
                if prefix:
                    self.counters.rebuilds += 1
                    self.counters.rebuilt_rows += prefix
            segments.append(req_to_token[row, start : prefix + new])
            lengths.append(prefix + new - start)
        indptr = torch.tensor([0, *lengths], device=rows.device).cumsum(0)
        summary_merge_bulk(
            self.queries,
            key_pools,
            value_pools,
            torch.cat(segments),
            indptr,
            self.value,
            self.lse,
            rows,
            self.scale,
        )
        self.counters.merged_rows += sum(lengths)
        self.covered[rows] = torch.tensor(
            [p + n for p, n in zip(prefix_lens, extend_lens, strict=True)], device=rows.device
        )
        self.boundary[rows] = boundary

    def commit(
        self,
        rows: torch.Tensor,
        block_rows: torch.Tensor,
        accept_lens: torch.Tensor,
        block_boundary: torch.Tensor,
        key_pools: Sequence[torch.Tensor],
        value_pools: Sequence[torch.Tensor],
    ) -> None:
        """Merge the accepted rows of a verify pass; no host read, so it runs under overlap and
        graphs.

        Args:
            rows: [B] int64 request pool rows.
            block_rows: [B, K+1] K/V row ids that the verify pass wrote: its out_cache_loc, never
                the page table read again (after publishing, the scheduler may hand the row on).
            accept_lens: [B] int32 committed rows of the block, bonus excluded, anchor included.
            block_boundary: [B, K+1, L, h] boundary rows of the block.
        """
        summary_merge(
            self.queries,
            key_pools,
            value_pools,
            block_rows.to(torch.int32),
            accept_lens.to(torch.int32),
            self.value,
            self.lse,
            rows,
            self.scale,
        )
        self.covered[rows] += accept_lens.to(torch.int64)
        # A padded entry commits nothing; its boundary goes to the padding row, which nobody reads.
        last = (accept_lens.to(torch.int64) - 1).clamp(min=0).view(-1, 1, 1, 1)
        self.boundary[rows] = block_boundary.gather(
            1, last.expand(-1, 1, *block_boundary.shape[2:])
        ).squeeze(1)

    def check(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        req_to_token: torch.Tensor,
        key_pools: Sequence[torch.Tensor],
        value_pools: Sequence[torch.Tensor],
    ) -> None:
        """Debug mode: compare each row's state with a rebuild from the cache; StateError if it
        differs.
        """
        covered, lens = self.covered[rows].tolist(), seq_lens.tolist()
        for row, have, want in zip(rows.tolist(), covered, lens, strict=True):
            self.counters.checks += 1
            if have != want:
                raise StateError(
                    f"request row {row} has {want} committed rows but its summary covers {have}"
                )
            value = torch.zeros_like(self.value[:1])
            lse = torch.full_like(self.lse[:1], float("-inf"))
            summary_merge_bulk(
                self.queries,
                key_pools,
                value_pools,
                req_to_token[row, :want].contiguous(),
                torch.tensor([0, want], device=rows.device),
                value,
                lse,
                torch.zeros(1, dtype=torch.int64, device=rows.device),
                self.scale,
            )
            difference = max(
                float((value[0] - self.value[row]).abs().max()),
                float((lse[0] - self.lse[row]).abs().max()),
            )
            self.counters.largest_difference = max(self.counters.largest_difference, difference)
            if not difference <= CHECK_TOLERANCE:
                raise StateError(
                    f"summary of request row {row} differs from its rebuild by {difference:.3g}"
                )

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

    def _reset(self, row: int, generation: int) -> None:
        self.generation[row] = generation
        self.value[row].zero_()
        self.lse[row].fill_(float("-inf"))
