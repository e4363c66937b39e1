"""PGTransport's arguments: an invalid argument raises a ValueError before anything is sent."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.cluster import Cluster
from tests.unit.pg_transport.fake_group import Group, Mailboxes, SizedGroup, TransportPair
from torchferry import BadArgument, PGTransport, StateError


def transport(timeout: Any = 10, device: Any = "cpu", group: Any = None) -> PGTransport:
    return PGTransport(group or SizedGroup(Mailboxes(), 1), timeout, device)


@pytest.mark.parametrize("timeout", [timedelta(seconds=30), timedelta(milliseconds=5), 30, 0.5, 1e6])
def test_a_timeout_is_a_timedelta_or_seconds(timeout: timedelta | float) -> None:
    transport(timeout=timeout)


@pytest.mark.parametrize(
    "timeout",
    [0, -1, 0.0, timedelta(0), timedelta(seconds=-3), float("inf"), float("nan"), float("-inf"), 1e300],
    ids=str,
)
def test_a_timeout_that_is_not_positive_and_finite_is_refused(timeout: timedelta | float) -> None:
    with pytest.raises(ValueError, match="positive and finite") as raised:
        transport(timeout=timeout)
    assert repr(timeout) in str(raised.value)


@pytest.mark.parametrize("timeout", [None, "soon", "30", b"30", True, [5]], ids=str)
def test_a_timeout_that_is_neither_a_timedelta_nor_a_number_is_refused(timeout: Any) -> None:
    with pytest.raises(ValueError, match="timedelta or a number of seconds"):
        transport(timeout=timeout)


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), torch.device("cpu", 0)], ids=repr)
def test_a_device_is_a_torch_device_or_its_name(device: Any) -> None:
    transports = TransportPair()
    transports.sender = PGTransport(Group(transports.mailboxes, 0), 10, device)
    transports.receiver = PGTransport(transports.group, 10, device)
    assert torch.equal(transports.transfer({"w": torch.arange(3)})["w"], torch.arange(3))


@pytest.mark.parametrize("device", ["gpu!", "", None, 3.5], ids=repr)
def test_an_invalid_device_name_is_refused(device: Any) -> None:
    with pytest.raises(ValueError, match=r"device must be a torch\.device or its name"):
        transport(device=device)


def test_a_device_that_this_machine_lacks_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ValueError, match="there is no cuda on this machine"):
        transport(device="cuda")


def test_a_group_from_before_init_process_group_is_refused() -> None:
    with pytest.raises(ValueError, match="init_process_group first"):
        PGTransport(None, 10, "cpu")


def test_a_value_that_is_not_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="pg must be a process group, not 'gloo'"):
        PGTransport("gloo", 10, "cpu")


def test_a_group_without_this_process_is_refused(pair: Cluster) -> None:
    member, other = pair.run(create_transport_on_a_group_of_rank_0)
    assert member == ""
    assert "this process is not a member of the group" in other
    assert "-100" not in other


def create_transport_on_a_group_of_rank_0(rank: int) -> str:
    group = dist.new_group([0])
    try:
        PGTransport(group, 10, "cpu")
    except BadArgument as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", [{"w": 1}, torch.nn.Linear(1, 1)], ids=["a state", "a module"])
def test_a_state_where_a_function_is_needed_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"pass model\.state_dict, not model\.state_dict\(\)"):
        PGTransport(SizedGroup(Mailboxes(), 1), 10, "cpu", value)


@pytest.mark.parametrize("limit", ["x", 0, -1, 1.5, True, None], ids=repr)
def test_a_limit_that_is_not_a_positive_int_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match="max_metadata_bytes must be a positive number of bytes"):
        PGTransport(SizedGroup(Mailboxes(), 1), 10, "cpu", max_metadata_bytes=limit)


@pytest.mark.parametrize("name", ["strict", "verify", "allow_pickle", "relay"])
@pytest.mark.parametrize("value", ["no", 0, 1, [True]], ids=repr)
def test_a_flag_that_is_not_a_bool_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be True or False, not"):
        PGTransport(SizedGroup(Mailboxes(), 1), 10, "cpu", **{name: value})


BAD_RANKS = [
    (4, "rank 4 is not in the group, which has ranks 0 to 3"),
    (100, "get_group_rank converts global ranks"),
    (-1, "rank -1 is not in the group"),
    (1, "rank 1 is this process itself"),
    (1.0, "a rank must be an int, not 1.0"),
    ("0", "a rank must be an int, not '0'"),
    (True, "a rank must be an int, not True"),
    (None, "a rank must be an int, not None"),
]


@pytest.mark.parametrize(("rank", "message"), BAD_RANKS)
def test_a_rank_that_is_not_another_member_of_the_group_is_refused_on_both_sides(
    rank: Any, message: str
) -> None:
    mailboxes = Mailboxes()
    here = transport(group=SizedGroup(mailboxes, 1))
    with pytest.raises(ValueError, match="rank") as sending:
        here.send_checkpoint([0, rank], {"a": 1})
    with pytest.raises(ValueError, match="rank") as receiving:
        here.recv_checkpoint(rank)
    assert message in str(sending.value)
    assert message in str(receiving.value)
    assert mailboxes.unread() == 0


def test_a_rank_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[0, 2, 0\] lists a rank twice"):
        transport().send_checkpoint([0, 2, 0], {"a": 1})


@pytest.mark.parametrize("ranks", [2, None, "2", b"2"], ids=repr)
def test_ranks_that_are_not_a_list_are_refused(ranks: Any) -> None:
    with pytest.raises(ValueError, match="dst_ranks must be a list of ranks, not") as raised:
        transport().send_checkpoint(ranks, {"a": 1})
    assert repr(ranks) in str(raised.value)


def test_a_bad_argument_is_also_a_state_error() -> None:
    with pytest.raises(BadArgument) as raised:
        transport(timeout=0)
    assert isinstance(raised.value, StateError)


@pytest.mark.parametrize("step", [1.0, "3", True, torch.tensor(3), 2**63, -(2**63) - 1], ids=repr)
def test_a_step_that_is_not_a_64_bit_int_is_refused(step: Any) -> None:
    mailboxes = Mailboxes()
    here = transport(group=Group(mailboxes, 1))
    with pytest.raises(ValueError, match="step"):
        here.send_checkpoint([0], {"a": 1}, step=step)
    with pytest.raises(ValueError, match="step"):
        here.recv_checkpoint(0, step=step)
    assert mailboxes.unread() == 0


def test_a_group_needs_only_send_recv_and_rank() -> None:
    transports = TransportPair()
    state: dict[str, Any] = {"w": torch.randn(3, 4), "step": 7}
    received = transports.transfer(state)
    assert torch.equal(received["w"], state["w"])
    assert received["step"] == 7
    with pytest.raises(ValueError, match="itself"):
        transports.receiver.recv_checkpoint(1)
    with pytest.raises(ValueError, match="rank -1"):
        transports.receiver.recv_checkpoint(-1)


def test_nothing_is_sent_without_destinations() -> None:
    transports = TransportPair()
    transports.sender.send_checkpoint([], {"w": torch.ones(3)})
    assert transports.mailboxes.unread() == 0


def transfer_with_the_longest_timeout(rank: int) -> float | None:
    here = PGTransport(dist.group.WORLD, timedelta.max, "cpu")
    if rank == 0:
        here.send_checkpoint([1], {"w": torch.ones(1 << 18)})
        return None
    received: Any = here.recv_checkpoint(0)
    return float(received["w"].sum())


def test_a_timeout_that_exceeds_the_range_of_the_backend_works(pair: Cluster) -> None:
    assert pair.run(transfer_with_the_longest_timeout) == [None, 1 << 18]


def errors_for_wrong_ranks(rank: int) -> list[str]:
    """Return the errors for ranks outside a real group of two, and for the own rank."""
    here = PGTransport(dist.group.WORLD, 5, "cpu")
    messages = []
    for wrong in (2, -1, rank):
        with pytest.raises(ValueError, match="rank") as raised:
            here.send_checkpoint([wrong], {})
        messages.append(str(raised.value))
    return messages


def test_the_ranks_of_a_real_group_are_checked(pair: Cluster) -> None:
    for rank, (outside, negative, own) in enumerate(pair.run(errors_for_wrong_ranks)):
        assert outside.startswith("rank 2 is not in the group, which has ranks 0 to 1")
        assert negative.startswith("rank -1 is not in the group")
        assert own == f"rank {rank} is this process itself: pass another rank"
