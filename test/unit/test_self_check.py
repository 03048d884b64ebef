"""Debug mode finds each kind of wrong state, names the row, and costs a bounded amount."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from longspark_sglang.serving import self_check
from longspark_sglang.serving.self_check import SelfCheck, StateError
from test_summary_store import POOL, World

WIDTH = 4


class Checked:
    """Two requests of 9 and 12 rows, about to run a round."""

    def __init__(self, every: int = 1, window: int = 5) -> None:
        self.world = World()
        self.world.extend(1, 7, 0, 9)
        self.world.extend(3, 8, 0, 12)
        self.check = SelfCheck(self.world.store, every, window)
        table = self.world.table
        self.arguments: dict[str, Any] = {
            "row_ids": [1, 3],
            "generations": [7, 8],
            "seq_lens": torch.tensor([9, 12]),
            "block_rows": torch.stack([table[1, 9:13], table[3, 12:16]]),
            "req_to_token": table,
        }

    def round(self, **changed: Any) -> None:
        self.check.round(**{**self.arguments, **changed}, **self.world.pools())


def test_a_right_state_passes_and_is_counted() -> None:
    checked = Checked()
    checked.round()
    assert checked.check.checks == 2
    assert checked.check.largest_difference < 1e-5


def test_every_kth_round_recomputes_and_the_others_look_at_tags() -> None:
    checked = Checked(every=3)
    checked.world.store.value[1, 0, 0, 0, 0] += 0.1
    checked.round()
    checked.round()
    assert checked.check.checks == 0
    with pytest.raises(
        StateError, match=r"summary of request row 1 differs from its rebuild by 0\.1"
    ):
        checked.round()
    assert 0.09 < checked.check.largest_difference < 0.11
    with pytest.raises(StateError, match="row 3 has 13 committed rows but its summary covers 12"):
        checked.round(seq_lens=torch.tensor([9, 13]))
    with pytest.raises(StateError, match="row 3 has stamp 9 but its state has 8"):
        checked.round(generations=[7, 9])


def test_all_problems_come_at_once() -> None:
    checked = Checked()
    with pytest.raises(StateError) as error:
        checked.round(seq_lens=torch.tensor([8, 11]), generations=[0, 0])
    assert str(error.value).count(";") == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"row_ids": [1, 1], "generations": [7, 7]}, "not distinct rows"),
        ({"block_rows": torch.tensor([[5, 6, 7, 8], [8, 9, 10, 11]])}, "written to K/V rows"),
        ({"block_rows": torch.tensor([[0, 6, 7, 8], [5, 9, 10, 11]])}, "0 being padding"),
        ({"block_rows": torch.tensor([[POOL, 6, 7, 8], [5, 9, 10, 11]])}, f"of {POOL}"),
    ],
)
def test_row_ids_outside_their_bounds(change: dict[str, Any], words: str) -> None:
    with pytest.raises(StateError, match=words):
        Checked().round(**change)


def test_a_block_that_ends_behind_the_page_table() -> None:
    checked = Checked()
    narrow = checked.world.table[:, :15]
    with pytest.raises(StateError, match=r"ends behind the page table \(15\)"):
        checked.round(req_to_token=narrow)


def test_a_wrong_window(monkeypatch: pytest.MonkeyPatch) -> None:
    real = self_check.window_index

    def off_by_one(table, rows, lens, window):
        return real(table, rows, lens - 1, window)

    monkeypatch.setattr(self_check, "window_index", off_by_one)
    with pytest.raises(StateError, match="window of request row 1 is not its last"):
        Checked().round()


def test_a_freed_state_is_poisoned_after_its_last_round_and_a_new_request_starts_clean() -> None:
    checked = Checked()
    store = checked.world.store
    store.release(1)
    checked.check.freed(1)
    assert store.value[1].isfinite().all()  # a round that was on its way still runs with it
    checked.check.before_forward()
    for tensor in (store.value, store.lse, store.boundary):
        assert tensor[1].isnan().all() and not tensor[3].isnan().any()
    assert (int(store.covered[1]), checked.check.poisoned) == (-1, 1)
    with pytest.raises(StateError, match="stamp 7 but its state has -1"):
        checked.round()
    store.generation[1], store.covered[1] = 7, 9
    with pytest.raises(StateError, match="by nan"):
        checked.round()
    checked.world.extend(1, 9, 4, 5)
    checked.world.assert_state(1, 9)
    checked.round(generations=[9, 8])


def test_nothing_is_poisoned_where_the_mode_is_off() -> None:
    checked = Checked(every=0)
    checked.check.freed(1)
    checked.check.before_forward()
    assert checked.world.store.value.isfinite().all()


def test_long_batches_are_recomputed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Checked()
    monkeypatch.setattr(self_check, "ROWS_PER_ROUND", 20)
    checked.round()
    assert checked.check.checks == 1
    checked.world.store.lse[3] += 1.0
    with pytest.raises(StateError, match="row 3 differs"):
        checked.round()
