"""Wrappers of process groups report rank 0 of 1; the link finds the rank of the wrapped group."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ProcessGroupBabyGloo,
    ProcessGroupGloo,
)

from tests.support.cluster import HOST, Cluster
from torchferry import BadArgument, PGTransport
from torchferry.links.process_group import ProcessGroupLink, innermost


class Wrapper(dist.ProcessGroup):
    """A wrapper like that of some libraries: it has the group as `_pg`."""

    def __init__(self, inner: Any) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._pg = inner

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._pg.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self._pg.recv(tensors, rank, tag)


def configured(store: str, rank: int) -> ProcessGroupGloo:
    group = ProcessGroupGloo()
    group.configure(store, f"replica-{rank}", rank, 2)
    return group


def wrap(kind: str, store: str, rank: int) -> Any:
    if kind == "plain":
        return Wrapper(dist.group.WORLD)
    if kind == "plain, twice":
        return Wrapper(Wrapper(dist.group.WORLD))
    group = configured(store, rank)
    if kind == "torchft's, error swallowing":
        return ErrorSwallowingProcessGroupWrapper(group)
    if kind == "torchft's, twice":
        return FakeProcessGroupWrapper(ErrorSwallowingProcessGroupWrapper(group))
    return group


CPU = torch.device("cpu")
KINDS = ["plain", "plain, twice", "torchft's", "torchft's, error swallowing", "torchft's, twice"]


def transfer_in_both_directions(rank: int, kind: str, store: str) -> dict[str, Any]:
    """Transfer from rank 1 to rank 0, and back."""
    group = wrap(kind, store, rank)
    here = PGTransport(group, 10, "cpu")
    link = ProcessGroupLink(group, CPU)
    found: dict[str, Any] = {"rank": link.rank, "size": link.size, "gloo": link.sends_short}
    for wrong in (rank, 2):
        with pytest.raises(BadArgument) as raised:
            here.send_checkpoint([wrong], {})
        found["itself" if wrong == rank else "outside"] = str(raised.value)
    for sender in (1, 0):
        if rank == sender:
            here.send_checkpoint([1 - rank], {"w": torch.full((3,), float(sender))}, step=sender)
        else:
            received: Any = here.recv_checkpoint(sender)
            found["received"] = received["w"].tolist()
            found["step"] = here.last_report.step  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_in_the_wrapped_group_is_found(kind: str, pair: Cluster) -> None:
    server = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    answers = pair.run(transfer_in_both_directions, kind, f"{HOST}:{server.port}/{uuid.uuid4()}")
    for rank, found in enumerate(answers):
        assert (found["rank"], found["size"], found["gloo"]) == (rank, 2, True)
        assert "this process itself" in found["itself"]
        assert "ranks 0 to 1" in found["outside"]
        assert found["received"] == [1.0 - rank] * 3
        assert found["step"] == 1 - rank


def test_a_wrapper_without_a_group_has_no_rank() -> None:
    for group in (ProcessGroupGloo(), ProcessGroupBabyGloo(), Wrapper(None)):
        assert innermost(group) is group
        assert ProcessGroupLink(group, CPU).rank is None


def test_a_wrapper_of_itself_is_unwrapped_once() -> None:
    group = Wrapper(None)
    group._pg = group
    assert innermost(group) is group


def test_a_group_of_another_type_is_not_unwrapped() -> None:
    class OtherGroup:
        parent = _pg = "no group"

        def rank(self) -> int:
            return 3

    link = ProcessGroupLink(OtherGroup(), CPU)
    assert (link.rank, link.size) == (3, None)
