"""What the tests of the benchmark share."""

from __future__ import annotations

import pytest

from benchmarks.hosts import ClusterRefused, cluster


@pytest.fixture(scope="session")
def the_rights() -> None:
    """Skip, saying why, where no cluster can be built."""
    try:
        with cluster(1):
            pass
    except ClusterRefused as refusal:
        pytest.skip(str(refusal))
