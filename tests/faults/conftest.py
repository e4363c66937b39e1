"""Crews: clusters whose workers are cheap to lose, for tests that lose one again and again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster


@contextlib.contextmanager
def _crew(size: int) -> Iterator[Cluster]:
    with Cluster(size, timeout_s=40, start_method="forkserver") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def _trio(_nursery: None) -> Iterator[Cluster]:
    with _crew(3) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def _quartet(_nursery: None) -> Iterator[Cluster]:
    with _crew(4) as cluster:
        yield cluster


@pytest.fixture
def trio(_trio: Cluster) -> Iterator[Cluster]:
    """A sender (rank 0), a receiver (rank 1), and a bystander with whom a survivor can go on (rank 2)."""
    yield _trio
    _trio.settle()


@pytest.fixture
def quartet(_quartet: Cluster) -> Iterator[Cluster]:
    """A sender (rank 0) and three receivers."""
    yield _quartet
    _quartet.settle()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long half of the matrix to `make faults`."""
    if os.environ.get("FAULTS") == "all":
        return
    slow = [item for item in items if item.get_closest_marker("slow_fault")]
    if slow:
        items[:] = [item for item in items if item not in set(slow)]
        config.hook.pytest_deselected(items=slow)
