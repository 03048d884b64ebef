"""Fixtures shared by all tests: the cache of tiny pairs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(
    0, str(Path(__file__).parent)
)  # `import pairs`, `from serving.server import Server`

from pairs import FIFTY, PairCache
from sharing import SHARING


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with servers come first: they are the slow ones, and the processes end together."""

    def place(item: pytest.Item) -> tuple[int, int]:
        if item.path.parent.name != "serving":
            return 2, 0
        name = item.path.stem.removeprefix("test_")
        return (0, SHARING.index(name)) if name in SHARING else (1, 0)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, with the files that share servers as one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from by_server import ByServer  # imports xdist, which a GPU box without SGLang need not have

    return ByServer(config, log)


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
