"""The store's tags: what makes it rebuild, what it leaves alone, that its buffers never move."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang")

from longspark_sglang.serving.summary_store import SummaryStore

L, HQ, HKV, R, D, H = 2, 4, 2, 3, 8, 16
ROWS, WIDTH, POOL = 5, 64, 200


class World:
    """A request pool, K/V pools and a store over them."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.keys = [torch.randn(POOL, HKV, D) for _ in range(L)]
        self.values = [torch.randn(POOL, HKV, D) for _ in range(L)]
        self.table = torch.randperm(POOL)[: ROWS * 40].view(ROWS, 40).to(torch.int32)
        self.store = SummaryStore(torch.randn(L, HQ, R, D), ROWS, H, torch.float32)

    def pools(self) -> dict:
        return {"key_pools": self.keys, "value_pools": self.values}

    def extend(self, row: int, generation: int, prefix: int, new: int) -> torch.Tensor:
        boundary = torch.randn(1, L, H)
        self.store.extend(
            torch.tensor([row]),
            [row],
            [generation],
            [prefix],
            [new],
            boundary,
            self.table,
            **self.pools(),
        )
        return boundary

    def expected(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Summary of rows 0..length-1 in float64, written from the definition."""
        ids = self.table[row, :length].long()
        value = torch.empty(L, HQ, R, D, dtype=torch.float64)
        lse = torch.empty(L, HQ, R, dtype=torch.float64)
        for layer in range(L):
            for head in range(HQ):
                k = self.keys[layer][ids, head // (HQ // HKV)].double()
                v = self.values[layer][ids, head // (HQ // HKV)].double()
                scores = self.store.queries[layer, head].double() @ k.T / D**0.5
                lse[layer, head] = scores.logsumexp(-1)
                value[layer, head] = scores.softmax(-1) @ v
        return value, lse

    def assert_state(self, row: int, length: int) -> None:
        value, lse = self.expected(row, length)
        torch.testing.assert_close(self.store.value[row].double(), value, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(self.store.lse[row].double(), lse, atol=1e-5, rtol=1e-5)
        assert int(self.store.covered[row]) == length


def test_chunks_continue_and_nothing_is_rebuilt() -> None:
    world = World()
    world.extend(1, 7, 0, 10)
    boundary = world.extend(1, 7, 10, 5)
    world.assert_state(1, 15)
    assert world.store.counters.rebuilds == 0
    assert world.store.counters.merged_rows == 15
    torch.testing.assert_close(world.store.boundary[1], boundary[0])


@pytest.mark.parametrize("case", ["prefix hit", "reused row", "retracted row"])
def test_a_tag_that_disagrees_means_an_exact_rebuild(case: str) -> None:
    world = World()
    if case == "prefix hit":  # a fresh row that starts at 12
        world.extend(2, 1, 12, 3)
    elif case == "reused row":  # another request left 12 rows of its own in this row
        world.extend(2, 1, 0, 12)
        world.table[2] = world.table[3]
        world.extend(2, 2, 12, 3)
    else:  # the same request comes back with less cached than it had
        world.extend(2, 1, 0, 20)
        world.extend(2, 1, 12, 3)
    world.assert_state(2, 15)
    assert world.store.counters.rebuilds == 1
    assert world.store.counters.rebuilt_rows == 12


def test_a_released_or_flushed_row_starts_empty() -> None:
    world = World()
    world.extend(1, 4, 0, 6)
    world.store.release(1)
    world.extend(1, 4, 6, 2)  # same tag values, but released in between
    world.assert_state(1, 8)
    assert world.store.counters.rebuilds == 1
    world.store.clear()
    assert world.store.owned_rows([]) == 0
    world.extend(1, 5, 0, 3)
    world.assert_state(1, 3)


def test_commit_merges_the_accepted_rows_only_and_moves_no_buffer() -> None:
    world = World()
    store = world.store
    for row in (1, 3):
        world.extend(row, 1, 0, 9)
    pointers = [t.data_ptr() for t in (store.value, store.lse, store.boundary, store.covered)]
    untouched = store.value[4].clone()
    rows = torch.tensor([3, 1])
    block = torch.stack([world.table[3, 9:13], world.table[1, 9:13]])
    boundary = torch.randn(2, 4, L, H)
    store.commit(rows, block, torch.tensor([4, 1], dtype=torch.int32), boundary, **world.pools())
    world.assert_state(3, 13)
    world.assert_state(1, 10)
    torch.testing.assert_close(store.boundary[3], boundary[0, 3])
    torch.testing.assert_close(store.boundary[1], boundary[1, 0])
    torch.testing.assert_close(store.value[4], untouched)
    assert pointers == [
        t.data_ptr() for t in (store.value, store.lse, store.boundary, store.covered)
    ]


def test_padded_entries_that_accept_nothing_leave_the_padding_row_empty() -> None:
    world = World()
    store = world.store
    world.extend(1, 1, 0, 9)
    rows = torch.tensor([1, 0, 0])
    block = torch.zeros(3, 4, dtype=torch.int32)
    block[0] = world.table[1, 9:13]
    lens = torch.tensor([2, 0, 0], dtype=torch.int32)
    store.commit(rows, block, lens, torch.randn(3, 4, L, H), **world.pools())
    world.assert_state(1, 11)
    assert torch.all(store.value[0] == 0) and torch.all(store.lse[0] == float("-inf"))
    assert int(store.covered[0]) == 0


def test_state_bytes_are_those_of_the_formula() -> None:
    store = World().store
    assert store.bytes_per_row == 4 * (L * HQ * R * (D + 1) + L * H)
    assert store.total_bytes == ROWS * store.bytes_per_row
