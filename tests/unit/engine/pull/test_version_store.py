"""The versions that a source holds: when `withdraw` and `publish` may say that nobody reads a state."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torchferry.core.leases import Lease
from torchferry.core.pull import LeaseRequest, Result
from torchferry.engine.pull.published import Published, SnapshotMemory, publish
from torchferry.engine.pull.version_store import Readers, VersionStore
from torchferry.engine.workspace import Workspace
from torchferry.errors import ReadersRemain
from torchferry.tensors.memory import CPU


def test_withdraw_leaves_the_readers_of_a_version_that_another_thread_published_meanwhile() -> None:
    def put(version: int) -> Published:
        published = publish({}, version, Workspace(CPU), SnapshotMemory(), snapshot=True)
        versions.put("state", published, 1.0, "wait")
        return published

    def lease() -> Lease[Published]:
        found = versions.lease(LeaseRequest("state", "reader"), 0.0, 1, "127.0.0.1")
        assert found is not None
        return found[0]

    versions = VersionStore(lambda connection: None)
    put(1)
    earlier = lease()
    with ThreadPoolExecutor(1) as pool:
        withdrawn = pool.submit(versions.withdraw, "state", 5.0, "wait")
        while versions.status()[0]:
            time.sleep(0.001)
        put(2)
        later = lease()
        versions.finish(earlier, Result("confirmed"))
        withdrawn.result(timeout=10)
    assert later.is_open


@pytest.mark.parametrize("readers", ["wait", "drop"])
def test_a_live_state_is_withdrawn_only_when_no_thread_reads_it_although_its_lease_has_ended(
    readers: Readers,
) -> None:
    """The reader reported a failure on one connection while another still received a chunk."""
    versions = VersionStore(lambda connection: None)
    live = publish({"w": torch.ones(1 << 19)}, 1, Workspace(CPU), SnapshotMemory(), snapshot=False)
    versions.put("state", live, 1.0, "wait")
    found = versions.lease(LeaseRequest("state", "reader"), 0.0, 1, "127.0.0.1")
    assert found is not None
    lease, _ = found
    sent = versions.read(lease, 0, 2)
    next(sent)
    versions.finish(lease, Result("failed", "the receiver has no memory"))
    with pytest.raises(ReadersRemain, match="reader: state version 1, failed"):
        versions.withdraw("state", 0.01, readers)
    assert list(sent) == [], "a thread that sends finds that the lease has ended"
    versions.withdraw("state", 0.01, readers)
    assert live.source is None, "its tensors are not read any more"
