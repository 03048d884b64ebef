"""At a request's limits: the last token of the context, and the memory that the pool gets."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from longspark_sglang.config import LongSparkConfig

from serving.server import Server, ServerError, ServerPool
from serving.workload import free_counts, words

CONTEXT = 256
# SGLang keeps one token back for the answer's end and five for the prompt's: these are its numbers.
LONGEST_TOTAL = CONTEXT - 2
LONGEST_PROMPT = LONGEST_TOTAL - 5

# The target's own table of positions ends where the context does: a step past it is an error and
# not a number.
TARGET = {"max_positions": CONTEXT}
# SGLang leaves 4 + width cells at the end of a row and reserves 2 * width past the committed ones,
# of which there are at most CONTEXT - 4. A width of 8 just fits; so these drafters draft more.
DRAFTS = 15
BYTES_PER_TOKEN = 2 * 6 * 2 * 64 * 4  # key and value, layers, heads, head dim, float32
REQUESTS = 40

# SGLang reads the free memory before and after the weights are loaded and takes the difference for
# theirs. On a shared machine other processes come and go in between; so here the machine is one
# whose memory holds the tensors of the asking process and nothing else, as a GPU's does.
FREE_MEMORY = """
import gc, sys
import psutil

real = psutil.virtual_memory

def virtual_memory():
    torch, storages = sys.modules.get("torch"), {}
    for item in gc.get_objects() if hasattr(torch, "Tensor") else ():
        if issubclass(type(item), torch.Tensor) and item.device.type == "cpu":
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return real()._replace(total=6 << 30, available=(6 << 30) - sum(storages.values()))

psutil.virtual_memory = virtual_memory
"""
# What SGLang's imports leave in tensors here and there.
SLACK = 1 << 20


@pytest.fixture(scope="module")
def pair(pair_cache) -> tuple[Path, Path]:
    target = pair_cache.target(**TARGET)
    return target, pair_cache.drafter(target, K=DRAFTS)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One setting for all servers of this file, so that three starts do for all of its tests."""
    folder = tmp_path_factory.mktemp("memory")
    (folder / "sitecustomize.py").write_text(FREE_MEMORY)
    path = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "context_length": CONTEXT,
        "max_total_tokens": None,
        "env": {"PYTHONPATH": os.pathsep.join(path)},
        "extra_args": (
            *("--max-running-requests", REQUESTS),
            *("--mem-fraction-static", 0.05),
        ),
    }


def neighbours() -> list[tuple[list[int], int]]:
    """Pairs of (prompt, tokens): one that ends at the limit, next to it one that does not."""
    requests = []
    for i, length in enumerate((200, 225, LONGEST_PROMPT - 1, LONGEST_PROMPT)):
        requests.append((words(length, 100 + i), CONTEXT - length))
        requests.append((words(5, 200 + i), 90))
    return requests


def answer(server: Server, request: tuple[list[int], int]) -> dict[str, Any]:
    return server.generate(request[0], max_new_tokens=request[1], ignore_eos=True)


@pytest.mark.parametrize("page_size", [16, 1])  # the other tests share the latter
def test_a_request_at_the_context_limit_leaves_its_neighbour_alone(
    servers: ServerPool, pair: tuple[Path, Path], options: dict[str, Any], page_size: int
) -> None:
    """User case: the reserve of a step spilled over the end of a row into the next row."""
    target, draft = pair
    requests = neighbours()
    plain = servers.get(target, **options)
    expected = [answer(plain, request)["output_ids"] for request in requests]
    server = servers.get(target, draft, page_size=page_size, **options)
    before = free_counts(server)
    with ThreadPoolExecutor(len(requests)) as threads:  # all in flight, in neighbouring rows
        replies = list(threads.map(lambda request: answer(server, request), requests))
    assert [reply["output_ids"] for reply in replies] == expected
    for (ids, _), reply in zip(requests[::2], replies[::2], strict=True):
        assert len(ids) + len(reply["output_ids"]) == LONGEST_TOTAL, "did not run into the limit"
        assert reply["meta_info"]["finish_reason"]["type"] == "length"
    rounds = sum(reply["meta_info"]["spec_verify_ct"] for reply in replies)
    assert sum(len(ids) for ids in expected) > 1.5 * rounds, "hardly a draft was accepted"
    # Which rows a request gets is chance: once more, one of the two always after the other.
    for at_limit, beside in zip(requests[::2], requests[1::2], strict=True):
        with ThreadPoolExecutor(2) as threads:
            both = list(threads.map(lambda request: answer(server, request), (at_limit, beside)))
        index = requests.index(at_limit)
        assert [reply["output_ids"] for reply in both] == expected[index : index + 2]
    assert free_counts(server) == before
    assert "leak" not in re.sub("server_args=.*", "", server.log).lower()


def test_prompts_round_the_limit_are_served_or_refused_as_without_speculation(
    servers: ServerPool, pair: tuple[Path, Path], options: dict[str, Any]
) -> None:
    target, draft = pair
    plain, server = servers.get(target, **options), servers.get(target, draft, **options)
    served = []
    for length in range(LONGEST_PROMPT - 2, CONTEXT + 2):
        wanted = _answer_or_refusal(plain, words(length, length))
        assert _answer_or_refusal(server, words(length, length)) == wanted, length
        served.append(isinstance(wanted, list))
    assert served == [True] * 3 + [False] * (len(served) - 3)
    assert server.alive
    assert free_counts(server)["owned_rows"] == 0


def _answer_or_refusal(server: Server, ids: list[int]) -> list[int] | str:
    try:
        return server.generate(ids, max_new_tokens=2, ignore_eos=True)["output_ids"]
    except ServerError as error:
        status = re.search(r": (\d{3}) ", str(error))
        assert status and status.group(1) == "400", error
        return str(error)


def test_the_pool_is_smaller_by_weights_and_state_and_no_more(
    servers: ServerPool, pair: tuple[Path, Path], options: dict[str, Any]
) -> None:
    """User case: memory that was let go after the pool had been sized is missing for good."""
    target, draft = pair
    plain, server = servers.get(target, **options), servers.get(target, draft, **options)
    lost = (
        plain.server_info()["max_total_num_tokens"] - server.server_info()["max_total_num_tokens"]
    )
    weights, state, taps = _reported_memory(server.log)
    assert lost * BYTES_PER_TOKEN == pytest.approx(weights + state + taps, abs=SLACK)
    stored = (draft / "model.safetensors").stat().st_size  # two bytes a number
    assert weights == pytest.approx(2 * stored, rel=0.01)
    assert weights > 4 * SLACK, "these weights are too light to show anything"
    config = LongSparkConfig.from_json_file(draft / "config.json")
    # SGLang keeps one more row, for padding.
    per_request = config.state_bytes_per_request(tp_size=1, boundary_itemsize=4)
    assert state == pytest.approx((REQUESTS + 1) * per_request, abs=1e5)


def _reported_memory(log: str) -> tuple[float, float, float]:
    """Bytes of weights, state and taps as the start-up line gives them."""
    found = re.search(
        r"LONGSPARK: drafter weights ([\d.]+) MiB on this rank; state [\d.]+ MiB a request, "
        r"([\d.]+) MiB for \d+ request rows; taps ([\d.]+) MiB",
        log,
    )
    assert found, "no line about memory at start-up"
    weights, state, taps = (float(value) * (1 << 20) for value in found.groups())
    return weights, state, taps
