"""Debug mode (LONGSPARK_CHECK=k): is every state what its tags say, and every row id in its bounds?

A wrong summary costs acceptance and nothing else, so without this nobody would notice. Each round
looks at tags and row ids; every k-th round also recomputes states and windows from the target's
cache. States of finished requests are overwritten with NaN, so that a use of one can't pass for
anything else. The first difference ends the server with a StateError that names the row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longspark_sglang.ops.summary_merge import summary_merge_bulk
from longspark_sglang.ops.window_gather import window_index
from longspark_sglang.serving.summary_store import SummaryStore

# Cached rows recomputed in one round at most (one state at least): bounds the cost of k = 1.
ROWS_PER_ROUND = 4096
# Merging in another order rounds differently. In half precision SGLang may also have replaced rows
# of a running request by those of an equal prefix, which another batch had computed.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class StateError(RuntimeError):
    """State of a request does not describe its committed rows: our fault, never the user's."""


class SelfCheck:
    """The checks of one worker.

    Args:
        store: the states. every: k; 0 switches everything off.
        window: W of the drafter's config.
    """

    def __init__(self, store: SummaryStore, every: int, window: int) -> None:
        self.store = store
        self.every = every
        self.window = window
        self.checks = 0  # states recomputed
        self.poisoned = 0
        self.largest_difference = 0.0
        self._rounds = 0
        self._turn = 0  # which of a batch is recomputed next
        self._freed: list[int] = []

    def before_forward(self) -> None:
        """Overwrite what finished requests left; here, because their last round has run by now."""
        for row in self._freed:
            for tensor in (self.store.value, self.store.lse, self.store.boundary):
                tensor[row].fill_(float("nan"))
            self.store.covered[row] = -1
            self.poisoned += 1
        self._freed.clear()

    def freed(self, row: int) -> None:
        """The request of this row is finished."""
        if self.every:
            self._freed.append(row)

    def round(
        self,
        row_ids: Sequence[int],
        generations: Sequence[int],
        seq_lens: torch.Tensor,
        block_rows: torch.Tensor,
        req_to_token: torch.Tensor,
        key_pools: Sequence[torch.Tensor],
        value_pools: Sequence[torch.Tensor],
    ) -> None:
        """Check a round that is about to run (with `every` > 0 only). Raises StateError with
        everything that is wrong.

        Args:
            row_ids, generations: request rows of the batch and SGLang's present stamps of them.
            seq_lens: [B] committed rows. block_rows: [B, K+1] row ids that the verify pass writes.
            req_to_token: [rows, width] int32. key_pools, value_pools: of the tapped layers.
        """
        lens = seq_lens.tolist()
        pool_rows = key_pools[0].shape[:-2].numel()
        problems = self._tags(row_ids, generations, lens)
        problems += _bounds(row_ids, lens, block_rows, req_to_token, pool_rows)
        self._rounds += 1
        if not problems and self._rounds % self.every == 0:
            problems += self._windows(row_ids, lens, seq_lens, req_to_token, pool_rows)
            for place in self._chosen(lens):
                problems += self._rebuild(
                    row_ids[place], lens[place], req_to_token, key_pools, value_pools
                )
        if problems:
            raise StateError("LONGSPARK_CHECK: " + "; ".join(problems))

    def _tags(
        self, row_ids: Sequence[int], generations: Sequence[int], lens: Sequence[int]
    ) -> list[str]:
        """The state belongs to this request and covers its committed rows."""
        problems = []
        covered = self.store.covered[list(row_ids)].tolist()
        for row, stamp, want, have in zip(row_ids, generations, lens, covered, strict=True):
            own = self.store.generation[row]
            if own != stamp:
                problems.append(f"request row {row} has stamp {stamp} but its state has {own}")
            if have != want:
                problems.append(
                    f"request row {row} has {want} committed rows but its summary covers {have}"
                )
        return problems

    def _windows(
        self,
        row_ids: Sequence[int],
        lens: Sequence[int],
        seq_lens: torch.Tensor,
        req_to_token: torch.Tensor,
        pool_rows: int,
    ) -> list[str]:
        """The window that the drafter reads is the end of the page table's row."""
        problems = []
        rows = torch.tensor(row_ids, dtype=torch.int64, device=seq_lens.device)
        found, counts = window_index(req_to_token, rows, seq_lens, self.window)
        for i, (row, length) in enumerate(zip(row_ids, lens, strict=True)):
            committed = req_to_token[row, :length]
            expected = committed[-self.window :]
            if int(counts[i]) != len(expected) or not torch.equal(
                found[i, : len(expected)], expected
            ):
                problems.append(f"the window of request row {row} is not its last committed rows")
            if bool(((committed < 0) | (committed >= pool_rows)).any()):
                problems.append(f"request row {row} has committed rows outside the K/V pool")
        return problems

    def _chosen(self, lens: Sequence[int]) -> list[int]:
        """Places of the batch to recompute, in turn."""
        chosen: list[int] = []
        rows = 0
        for step in range(len(lens)):
            place = (self._turn + step) % len(lens)
            rows += lens[place]
            if chosen and rows > ROWS_PER_ROUND:
                break
            chosen.append(place)
        self._turn = (self._turn + len(chosen)) % len(lens)
        return chosen

    def _rebuild(
        self,
        row: int,
        length: int,
        req_to_token: torch.Tensor,
        key_pools: Sequence[torch.Tensor],
        value_pools: Sequence[torch.Tensor],
    ) -> list[str]:
        """Compare one state with its recomputation."""
        store, device = self.store, req_to_token.device
        value = torch.zeros_like(store.value[:1])
        lse = torch.full_like(store.lse[:1], float("-inf"))
        summary_merge_bulk(
            store.queries,
            key_pools,
            value_pools,
            req_to_token[row, :length].contiguous(),
            torch.tensor([0, length], device=device),
            value,
            lse,
            torch.zeros(1, dtype=torch.int64, device=device),
            store.scale,
        )
        difference = max(
            float((value[0] - store.value[row]).abs().max()),
            float((lse[0] - store.lse[row]).abs().max()),
        )
        self.checks += 1
        self.largest_difference = max(self.largest_difference, difference)
        if difference <= TOLERANCE[key_pools[0].dtype]:
            return []
        # Also where it is NaN.
        return [f"summary of request row {row} differs from its rebuild by {difference:.3g}"]


def _bounds(
    row_ids: Sequence[int],
    lens: Sequence[int],
    block_rows: torch.Tensor,
    req_to_token: torch.Tensor,
    pool_rows: int,
) -> list[str]:
    """Row ids lie in their tables, and no two requests write the same row."""
    problems = []
    table_rows, table_width = req_to_token.shape
    width = block_rows.shape[1]
    if len(set(row_ids)) < len(row_ids) or not all(0 < row < table_rows for row in row_ids):
        problems.append(
            f"request rows {list(row_ids)} are not distinct rows of 1..{table_rows - 1}"
        )
    if max(lens) + width > table_width:
        problems.append(
            f"a block after {max(lens)} committed rows ends behind the page table ({table_width})"
        )
    written = block_rows.flatten().tolist()
    if len(set(written)) < len(written) or not all(0 < row < pool_rows for row in written):
        problems.append(
            f"the block is written to K/V rows {written} of {pool_rows}, 0 being padding"
        )
    return problems
