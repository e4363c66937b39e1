"""Clusters for tests that lose a worker: a lost worker is replaced before the next test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster


@contextlib.contextmanager
def _cluster(size: int) -> Iterator[Cluster]:
    with Cluster(size, timeout_s=40, start_method="forkserver") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def _trio(_fork_server: None) -> Iterator[Cluster]:
    with _cluster(3) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def _quartet(_fork_server: None) -> Iterator[Cluster]:
    with _cluster(4) as cluster:
        yield cluster


@pytest.fixture
def trio(_trio: Cluster) -> Iterator[Cluster]:
    """A sender (rank 0), a receiver (rank 1), and a rank with which a survivor forms a new group (rank 2)."""
    yield _trio
    _trio.mark_if_broken()


@pytest.fixture
def quartet(_quartet: Cluster) -> Iterator[Cluster]:
    """A sender (rank 0) and three receivers."""
    yield _quartet
    _quartet.mark_if_broken()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked slow_fault unless `make faults` runs (FAULTS=all)."""
    if os.environ.get("FAULTS") == "all":
        return
    slow = [item for item in items if item.get_closest_marker("slow_fault")]
    if slow:
        items[:] = [item for item in items if item not in set(slow)]
        config.hook.pytest_deselected(items=slow)
