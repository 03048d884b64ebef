"""Fixtures shared by all tests: the cache of tiny pairs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(
    0, str(Path(__file__).parent)
)  # `import pairs`, `from serving.server import Server`

from pairs import FIFTY, PairCache

# Starting a server takes longer than most tests that talk to it. So these files run one after the
# other in one process, in an order in which a server that several of them use is started once: a
# pool keeps two alive, of which most want the identity tests' server and its plain twin.
SHARING = (
    "identity", "verify_widths", "lifecycle", "openai_api", "bench", "verify", "hostile_requests",
    "snapshots", "parity", "refusals", "observability", "weights",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests for `--dist loadgroup`: by file, but for those that share servers.

    Files with servers are the slow ones; they come first, so that the processes end together.
    """

    def place(item: pytest.Item) -> tuple[int, int]:
        name = item.path.stem.removeprefix("test_")
        if item.path.parent.name != "serving":
            return 2, 0
        return (0, SHARING.index(name)) if name in SHARING else (1, 0)

    items.sort(key=place)
    for item in items:
        group = "sharing" if place(item)[0] == 0 else f"{item.path.parent.name}-{item.path.stem}"
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def pair_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Makes targets and drafters on request; kept in pytest's cache folder between runs."""
    cache = getattr(request.config, "cache", None)  # absent under `-p no:cacheprovider`
    root = cache.mkdir("longspark-pairs") if cache else tmp_path_factory.mktemp("pairs")
    return PairCache(root)


@pytest.fixture(scope="session")
def tiny_target(pair_cache: PairCache) -> Path:
    """2048 tokens, 6 layers, hidden 256, untied, Qwen3."""
    return pair_cache.target()


@pytest.fixture(scope="session")
def tiny_drafter(pair_cache: PairCache, tiny_target: Path) -> Path:
    """Its drafter, right for most tokens but far from all."""
    return pair_cache.drafter(tiny_target)


@pytest.fixture(scope="session")
def fifty_target(pair_cache: PairCache) -> Path:
    """The 50-token target of the distribution tests."""
    return pair_cache.target(**FIFTY)
