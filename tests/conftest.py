"""What all tests share: clusters of real processes, and the rule that nothing outlives the session.

`pair`, `quad` and `octet` are clusters of 2, 4 and 8 workers (tests/support/cluster.py). Their
workers start when a test first uses them, serve every later test, and are replaced when broken.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing import forkserver

import hypothesis
import pytest

from tests.support import processes
from tests.support.cluster import Cluster

# Examples that go through real processes take as long as they take.
hypothesis.settings.register_profile("torchferry", deadline=None, print_blob=True)
hypothesis.settings.load_profile("torchferry")

# What takes seconds to import. Not torchferry itself: the server would look for it on its own path.
PRELOADED = ["torch", "torch.distributed", "torch.distributed.tensor", "msgspec", "xxhash"]

_open_clusters: list[Cluster] = []


@pytest.fixture(scope="session", autouse=True)
def _nothing_outlives_the_session() -> Iterator[None]:
    """Set up first, so torn down last, when every other fixture has ended what it started."""
    mark = processes.mark_session()
    yield
    strays = processes.left_behind(mark)
    for stray in strays:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stray.pid, signal.SIGKILL)
    assert not strays, "the tests left processes behind:\n" + "\n".join(
        f"  {stray.pid} {stray.command}" for stray in strays
    )


@pytest.fixture(scope="session")
def _nursery(_nothing_outlives_the_session: None) -> Iterator[None]:
    """A process that has imported torch and started nothing: workers are forked from it in no time."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def pytest_runtest_logfinish() -> None:
    """After each test."""
    for cluster in _open_clusters:
        cluster.settle()


@pytest.fixture(scope="session")
def pair(_nursery: None) -> Iterator[Cluster]:
    """Two workers in one gloo group."""
    with _cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def quad(_nursery: None) -> Iterator[Cluster]:
    """Four workers in one gloo group."""
    with _cluster(4) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def octet(_nursery: None) -> Iterator[Cluster]:
    """Eight workers in one gloo group."""
    with _cluster(8) as cluster:
        yield cluster


@pytest.fixture
def doomed(_nursery: None) -> Iterator[Cluster]:
    """Two workers for one test, which loses one of them."""
    with Cluster(2, start_method="forkserver") as cluster:
        yield cluster


@contextlib.contextmanager
def _cluster(world_size: int) -> Iterator[Cluster]:
    with Cluster(world_size, start_method="forkserver") as cluster:
        _open_clusters.append(cluster)
        try:
            yield cluster
        finally:
            _open_clusters.remove(cluster)
