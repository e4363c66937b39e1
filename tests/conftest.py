"""Fixtures of all tests: clusters of real processes, and a check that no process outlives the session.

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
from tests.support.solo import Solos

# No deadline: an example that runs in real processes may be slow.
hypothesis.settings.register_profile("torchferry", deadline=None, print_blob=True)
hypothesis.settings.load_profile("torchferry")

# Modules that take seconds to import. Not torchferry: the server would search it on its own path.
PRELOADED = ["torch", "torch.distributed", "torch.distributed.tensor", "msgspec", "xxhash"]

_open_clusters: list[Cluster] = []


@pytest.fixture(scope="session", autouse=True)
def _no_process_outlives_the_session() -> Iterator[None]:
    """Check at the end that no process is left. It is set up first, so torn down last."""
    tag = processes.tag_session()
    yield
    strays = processes.left_behind(tag)
    for stray in strays:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stray.pid, signal.SIGKILL)
    assert not strays, "the tests left processes behind:\n" + "\n".join(
        f"  {stray.pid} {stray.command}" for stray in strays
    )


@pytest.fixture(scope="session")
def _fork_server(_no_process_outlives_the_session: None) -> Iterator[None]:
    """A server process that has imported torch. Workers are forked from it quickly."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def pytest_runtest_logfinish() -> None:
    """Mark clusters that lost a worker as broken; their next use replaces the workers."""
    for cluster in _open_clusters:
        cluster.mark_if_broken()


@pytest.fixture(scope="session")
def pair(_fork_server: None) -> Iterator[Cluster]:
    """Two workers in one gloo group."""
    with _cluster(2) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def quad(_fork_server: None) -> Iterator[Cluster]:
    """Four workers in one gloo group."""
    with _cluster(4) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def octet(_fork_server: None) -> Iterator[Cluster]:
    """Eight workers in one gloo group."""
    with _cluster(8) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def _solos(_fork_server: None) -> Iterator[Solos]:
    with Solos() as found:
        yield found


@pytest.fixture
def solos(_solos: Solos) -> Iterator[Solos]:
    """Processes without a group, by name. One that died is replaced when it is next asked for."""
    yield _solos
    # A test that failed may leave a process stopped or at work, which would fail the next tests too.
    _solos.discard_busy()


@pytest.fixture
def doomed(_fork_server: None) -> Iterator[Cluster]:
    """Two workers for a single test that loses one of them."""
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
