"""Fixtures for the tests of the benchmark."""

from __future__ import annotations

import pytest

from benchmarks.hosts import ClusterError, cluster


@pytest.fixture(scope="session")
def cluster_rights() -> None:
    """Skip the test where no cluster can be built."""
    try:
        with cluster(1):
            pass
    except ClusterError as refusal:
        pytest.skip(str(refusal))
