"""Prefix snapshots: names, bound, and that a state from one is the state of its rows."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from longspark_sglang.serving.snapshots import PrefixSnapshots
from longspark_sglang.serving.summary_store import SummaryStore

L, HQ, HKV, R, D, H = 2, 4, 2, 3, 8, 16
ROWS, LENGTH, BLOCK, WIDTH = 5, 60, 8, 4


class Request:
    """What the snapshots read of SGLang's Req; `committed` is what the host knows."""

    def __init__(self, row: int, prompt: Any, **fields: Any) -> None:
        self.origin_input_ids = array("q", prompt)
        self.output_ids = array("q")
        self.kv = SimpleNamespace(req_pool_idx=row, kv_committed_len=len(prompt))
        self.input_embeds = self.extra_key = self.cache_salt = self.lora_id = None
        self.owned = None
        self.__dict__.update(fields)

    def owned_kv_len(self) -> int:
        return self.kv.kv_committed_len if self.owned is None else self.owned


class World:
    """Rows whose K and V follow from their token and position, as a target's would."""

    def __init__(self, capacity: int = 20) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(2, L, LENGTH, 100, HKV, D, generator=generator)
        self.keys = [torch.zeros(ROWS * LENGTH, HKV, D) for _ in range(L)]
        self.values = [torch.zeros(ROWS * LENGTH, HKV, D) for _ in range(L)]
        shuffled = torch.randperm(ROWS * LENGTH, generator=generator)
        self.table = shuffled.view(ROWS, LENGTH).to(torch.int32)
        queries = torch.randn(L, HQ, R, D, generator=generator)
        self.snapshots = PrefixSnapshots(capacity, queries, BLOCK)
        self.store = SummaryStore(queries, ROWS, H, torch.float32, self.snapshots)
        self.generation = 0

    def pools(self) -> dict[str, Any]:
        return {"key_pools": self.keys, "value_pools": self.values}

    def write(self, row: int, tokens: Any, begin: int = 0) -> None:
        """The target's forward pass over tokens[begin:]."""
        for position in range(begin, len(tokens)):
            place = int(self.table[row, position])
            for layer in range(L):
                self.keys[layer][place] = self.rows[0, layer, position, tokens[position]]
                self.values[layer][place] = self.rows[1, layer, position, tokens[position]]

    def prefill(self, req: Request, cached: int = 0, fresh: bool = True) -> None:
        """A prefill pass of a request whose first `cached` rows come from the prefix cache."""
        self.snapshots.settle()
        row, tokens = req.kv.req_pool_idx, [*req.origin_input_ids, *req.output_ids]
        self.generation += fresh
        self.write(row, tokens)
        self.store.extend(
            torch.tensor([row]),
            [row],
            [self.generation],
            [cached],
            [len(tokens) - cached],
            torch.zeros(1, L, H),
            self.table,
            keys=[self.snapshots.keys(req)],
            **self.pools(),
        )

    def round(self, req: Request, tokens: list[int], accepted: int, lag: int = 0) -> None:
        """A round that writes `tokens` and accepts some; with a lag the host does not know yet."""
        self.snapshots.settle()
        row = req.kv.req_pool_idx
        begin = int(self.store.covered[row])
        self.write(row, [0] * begin + tokens, begin)
        self.store.commit(
            torch.tensor([row]),
            self.table[row : row + 1, begin : begin + len(tokens)],
            torch.tensor([accepted], dtype=torch.int32),
            torch.zeros(1, len(tokens), L, H),
            crossings=self.snapshots.crossings([req], WIDTH),
            **self.pools(),
        )
        req.output_ids.extend(tokens[:accepted])
        if not lag:
            req.kv.kv_committed_len = begin + accepted

    def assert_state(self, row: int, tokens: Any) -> None:
        """The row's state is that of these tokens, from the definition in float64."""
        assert int(self.store.covered[row]) == len(tokens)
        places = torch.arange(len(tokens))
        for layer in range(L):
            k, v = (self.rows[i, layer, places, list(tokens)].double() for i in (0, 1))
            for head in range(HQ):
                query = self.store.queries[layer, head].double()
                scores = query @ k[:, head // (HQ // HKV)].T / D**0.5
                torch.testing.assert_close(
                    self.store.lse[row, layer, head].double(),
                    scores.logsumexp(-1),
                    rtol=1e-5,
                    atol=1e-5,
                )
                value = scores.softmax(-1) @ v[:, head // (HQ // HKV)]
                torch.testing.assert_close(
                    self.store.value[row, layer, head].double(), value, rtol=1e-5, atol=1e-5
                )


PROMPT = [(7 * i) % 100 for i in range(37)]


@pytest.mark.parametrize(("cached", "saved"), [(7, 0), (8, 8), (20, 16), (32, 32), (36, 32)])
def test_a_hit_starts_from_the_deepest_boundary_below_it(cached: int, saved: int) -> None:
    world = World()
    world.prefill(Request(1, PROMPT))
    world.assert_state(1, PROMPT)
    assert world.snapshots.count == 4
    world.prefill(Request(2, PROMPT), cached)
    world.assert_state(2, PROMPT)
    assert world.snapshots.counters.rows_saved == saved
    assert world.store.counters.rebuilt_rows == cached - saved
    assert world.store.counters.rebuilds == 1


def test_chunks_that_end_anywhere_leave_every_boundary() -> None:
    world = World()
    req = Request(1, PROMPT[:13])
    world.prefill(req)
    for end in (16, 31, 37):
        begin = len(req.origin_input_ids)
        req.origin_input_ids = array("q", PROMPT[:end])
        world.prefill(req, begin, fresh=False)
    world.assert_state(1, PROMPT)
    assert (world.snapshots.counters.taken, world.store.counters.rebuilds) == (4, 0)


def test_branches_share_what_they_share_and_no_more() -> None:
    world = World()
    world.prefill(Request(1, PROMPT))
    branch = [*PROMPT[:20], *range(50, 70)]
    world.prefill(Request(2, branch), 20)  # the hit of a prefix tree
    world.assert_state(2, branch)
    assert world.snapshots.counters.rows_saved == 16
    assert world.snapshots.count == 4 + 3  # of the branch: 24, 32 and 40
    world.prefill(Request(3, branch), 39)
    world.assert_state(3, branch)
    assert world.snapshots.counters.rows_saved == 16 + 32


def test_a_short_prompt_takes_none_and_many_requests_go_in_one_pass() -> None:
    world = World()
    world.prefill(Request(1, PROMPT[:7]))
    assert world.snapshots.count == 0
    reqs = [Request(row, PROMPT[row:]) for row in (2, 3, 4)]
    for req in reqs:
        world.write(req.kv.req_pool_idx, req.origin_input_ids)
    lengths = [9, 30, 16]
    world.store.extend(
        torch.tensor([2, 3, 4]),
        [2, 3, 4],
        [1, 1, 1],
        [0, 0, 0],
        lengths,
        torch.zeros(3, L, H),
        world.table,
        keys=[world.snapshots.keys(req) for req in reqs],
        **world.pools(),
    )
    for req, length in zip(reqs, lengths, strict=True):
        world.assert_state(req.kv.req_pool_idx, req.origin_input_ids[:length])
    assert world.snapshots.count == 1 + 3 + 2


@pytest.mark.parametrize("field", ["extra_key", "cache_salt", "lora_id"])
def test_what_separates_prefixes_for_sglang_separates_snapshots(field: str) -> None:
    world = World()
    world.prefill(Request(1, PROMPT, **{field: "a"}))
    world.prefill(Request(2, PROMPT, **{field: "b"}), 32)
    assert world.snapshots.counters.hits == 0
    world.assert_state(2, PROMPT)
    world.prefill(Request(3, PROMPT, **{field: "a"}), 32)
    assert world.snapshots.counters.hits == 1


def test_equal_keys_mean_equal_prefixes_not_equal_blocks() -> None:
    snapshots = World().snapshots
    one = snapshots.keys(Request(1, [*range(8), *range(8)]))
    other = snapshots.keys(Request(1, [*range(8, 16), *range(8)]))
    assert len({*one, *other}) == 4
    assert snapshots.keys(Request(1, range(8)))[0] == one[0]
    # Two processes (ranks) must agree, so no randomised hash.
    assert one[0].hex() == "fc797fcdac8df82bce523b10badfa09a"


def test_embeddings_have_no_name() -> None:
    world = World()
    world.prefill(Request(1, PROMPT, input_embeds=[[0.0]]))
    assert world.snapshots.count == 0


def test_the_bound_holds_and_the_longest_unused_goes_first() -> None:
    world = World(capacity=3)
    pointers = world.snapshots.value.data_ptr(), world.snapshots.lse.data_ptr()
    world.prefill(Request(1, PROMPT[:24]))
    world.prefill(Request(2, PROMPT[:9]), 8)  # uses the first of the three
    other = [99, *PROMPT[:9]]
    world.prefill(Request(3, other))
    assert (world.snapshots.count, world.snapshots.counters.evictions) == (3, 1)
    assert world.snapshots.used_bytes == 3 * PrefixSnapshots.bytes_each(world.store.queries)
    world.prefill(Request(4, PROMPT[:24]), 23)  # 16 rows are gone, 8 rows are not
    world.assert_state(4, PROMPT[:24])
    assert world.snapshots.counters.rows_saved == 8 + 8
    assert pointers == (world.snapshots.value.data_ptr(), world.snapshots.lse.data_ptr())


# -- while decoding -------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("accepts", [[1] * 14, [4, 3, 4, 3], [3, 4, 4, 3], [2, 4, 1, 3, 4]])
def test_boundaries_crossed_by_rounds_are_exact_and_named_when_known(
    accepts: list[int], lag: int
) -> None:
    world = World()
    req = Request(1, PROMPT[:10])
    world.prefill(req)
    draw = torch.Generator().manual_seed(1)
    text = list(PROMPT[:10])
    for accepted in accepts:
        known = len(text)
        tokens = torch.randint(100, (WIDTH,), generator=draw).tolist()
        world.round(req, tokens, accepted, lag)
        text += tokens[:accepted]
        if lag:  # as under overlap: the host has seen all rounds but the last
            req.kv.kv_committed_len = known
        world.assert_state(1, text)
    assert len(text) == 24
    req.kv.kv_committed_len = 24
    world.snapshots.finish(req)
    world.snapshots.settle()
    assert world.snapshots.count == 3
    world.prefill(Request(2, text), 23)
    assert world.store.counters.rebuilt_rows == 23 - 16
    world.prefill(Request(3, [*text, 5]), 24)
    assert world.store.counters.rebuilt_rows == 23 - 16
    world.assert_state(3, [*text, 5])


def test_what_a_finished_request_crossed_but_does_not_own_is_dropped() -> None:
    """Under overlap one more round has run by the time that a request's end is known."""
    world = World()
    req = Request(1, PROMPT[:14])
    world.prefill(req)
    world.round(req, [1, 2, 3, 4], 4, lag=1)  # 18 rows on the device
    req.owned = 15  # a stop token after the first
    world.snapshots.finish(req)
    world.snapshots.settle()
    assert world.snapshots.count == 1
    req.owned = 16
    world.prefill(req_again := Request(2, PROMPT[:14]))
    world.round(req_again, [1, 2, 3, 4], 4, lag=1)
    req_again.owned = 16
    world.snapshots.finish(req_again)
    world.snapshots.settle()
    assert world.snapshots.count == 2


def test_a_row_that_starts_anew_takes_nothing_along() -> None:
    world = World()
    req = Request(1, PROMPT[:14])
    world.prefill(req)
    world.round(req, [1, 2, 3, 4], 4, lag=1)
    successor = Request(1, PROMPT[20:34])  # retraction: the row changes hands without a word
    world.prefill(successor)
    successor.kv.kv_committed_len = 16
    successor.output_ids.extend([9, 9, 9])
    world.snapshots.finish(successor)
    world.snapshots.settle()
    assert world.snapshots.count == 2  # 8 rows of each prompt


def test_a_request_that_rides_along_a_prefill_is_named_later() -> None:
    """Mixed chunk: one decoded row merges through a prefill pass, its token not yet on the host."""
    world = World()
    req = Request(1, PROMPT[:15])
    world.prefill(req)
    world.write(1, [*PROMPT[:15], 3], 15)
    world.store.extend(
        torch.tensor([1]),
        [1],
        [world.generation],
        [15],
        [1],
        torch.zeros(1, L, H),
        world.table,
        keys=[world.snapshots.keys(req)],
        **world.pools(),
    )
    assert world.snapshots.count == 1
    req.output_ids.append(3)
    req.kv.kv_committed_len = 16
    world.round(req, [4, 5, 6, 7], 1)
    assert world.snapshots.count == 2
    world.prefill(Request(2, [*PROMPT[:15], 3, 4]), 16)
    world.assert_state(2, [*PROMPT[:15], 3, 4])
    assert world.store.counters.rebuilt_rows == 0


# -- flushes and weights --------------------------------------------------------------------------


def test_a_flush_forgets_and_new_weights_without_one_switch_off() -> None:
    world = World(capacity=6)
    world.prefill(Request(1, PROMPT))
    world.store.clear()
    assert world.snapshots.count == 0
    world.prefill(Request(1, PROMPT))
    assert world.snapshots.count == 4
    world.snapshots.suspend()
    world.prefill(Request(2, PROMPT), 32)
    world.assert_state(2, PROMPT)
    assert (world.snapshots.count, world.snapshots.counters.hits) == (0, 0)
    world.store.clear()
    world.prefill(Request(2, PROMPT))
    assert (world.snapshots.count, world.snapshots.counters.evictions) == (4, 0)


# -- how many -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mib", "radix", "expected"),
    [
        (None, True, 20),  # 10,000 rows of cache, begun blocks counted
        ("1", True, (1 << 20) // (4 * L * HQ * R * (D + 1))),
        ("0", True, None),
        (None, False, None),
    ],
)
def test_the_bound_comes_from_the_cache_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, mib: str | None, radix: bool, expected: int | None
) -> None:
    from longspark_sglang.serving import worker

    monkeypatch.delenv("LONGSPARK_SNAPSHOT_MB", raising=False)
    if mib is not None:
        monkeypatch.setenv("LONGSPARK_SNAPSHOT_MB", mib)
    monkeypatch.setattr(worker, "resolving_view", lambda args: args)
    store = SimpleNamespace(snapshots=None)
    fake: Any = SimpleNamespace(
        store=store,
        drafter=SimpleNamespace(queries=torch.zeros(L, HQ, R, D)),
        _target_worker=SimpleNamespace(
            server_args=SimpleNamespace(disable_radix_cache=not radix),
            model_runner=SimpleNamespace(max_total_num_tokens=10_000),
        ),
    )
    worker.LongSparkWorker._allocate_snapshots(fake)
    assert (store.snapshots and len(store.snapshots.value)) == expected
