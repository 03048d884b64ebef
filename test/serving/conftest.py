"""Fixtures of the tests that talk to a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.server import ServerPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder carries the `server` marker."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def servers() -> Iterator[ServerPool]:
    """Servers shared between tests: ``servers.get(tiny_target, tiny_drafter, page_size=16)``."""
    pool = ServerPool()
    yield pool
    pool.stop_all()
