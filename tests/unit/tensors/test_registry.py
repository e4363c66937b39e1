"""Types of the user's own: registered by name on both sides, and made without calling anything of theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.transfer import TIMEOUT_S, transfer
from torchferry import register
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.engine import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.errors import BadArgument, BadManifest, UnknownType
from torchferry.tensors import registry
from torchferry.testing import MemoryNetwork


@pytest.fixture(autouse=True)
def _registry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", {})


@dataclass
class Loader:
    epoch: int
    seen: object = None


class Point(NamedTuple):
    x: int
    y: object = 0


class Mode(Enum):
    TRAIN = 1


def received_elsewhere(state: object, **known_there: Any) -> Any:
    """Send from here, and receive where other types are registered."""
    network = MemoryNetwork()
    send_state(network.link(0), [1], state, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    registry._types.clear()
    registry._types.update({f"{__name__}.{name}": cls for name, cls in known_there.items()})
    try:
        return receive_state(network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES))[0]
    finally:
        assert not any(network._boxes.values()), "the sender was left with messages that nobody took"


@pytest.mark.parametrize("value", [Loader(1), Point(1), Mode.TRAIN], ids=str)
def test_a_type_that_is_not_registered_at_the_receiver_is_named_with_what_to_do(value: object) -> None:
    register(type(value))
    with pytest.raises(UnknownType) as raised:
        received_elsewhere({"a": value, "w": torch.ones(2)})
    assert f"{__name__}.{type(value).__name__}" in str(raised.value)
    assert f"torchferry.register({type(value).__name__})" in str(raised.value)


@pytest.mark.parametrize("fields", [["epoch"], ["seen", "epoch"], ["epoch", "seen", "more"]])
def test_a_type_with_other_fields_at_the_receiver_is_refused_with_both(fields: list[str]) -> None:
    register(Loader)
    with pytest.raises(UnknownType) as raised:
        received_elsewhere(Loader(1), Loader=make_dataclass("Loader", fields))
    assert f"the fields {', '.join(fields)} here and epoch, seen at the peer" in str(raised.value)


def test_an_enum_that_lost_a_member_at_the_receiver_is_refused() -> None:
    register(Mode)
    with pytest.raises(BadManifest, match="TRAIN"):
        received_elsewhere({"mode": Mode.TRAIN}, Mode=Enum("Mode", "EVAL"))


def test_an_enum_that_is_something_else_at_the_receiver_is_refused() -> None:
    register(Mode)
    with pytest.raises(BadManifest, match="not an enum"):
        received_elsewhere({"mode": Mode.TRAIN}, Mode=Loader)


def test_nothing_of_a_type_is_called_on_arrival() -> None:
    called: list[str] = []

    @dataclass
    class Watching:
        value: int

        def __new__(cls, *args: Any, **keywords: Any) -> Any:
            called.append("__new__")
            return super().__new__(cls)

        def __post_init__(self) -> None:
            called.append("__post_init__")

        def __setattr__(self, name: str, value: object) -> None:
            called.append("__setattr__")
            super().__setattr__(name, value)

        def __setstate__(self, state: object) -> None:
            called.append("__setstate__")

    register(Watching)
    original = Watching(3)
    called.clear()
    received = transfer({"w": original}).state["w"]
    assert received.value == 3
    assert called == []


def test_registering_gives_the_class_back_so_that_it_can_decorate() -> None:
    assert register(Loader) is Loader
    assert register(Loader) is Loader


def test_two_types_can_not_have_one_name() -> None:
    register(Loader)
    with pytest.raises(BadArgument, match=r"registered as .*Loader already"):
        register(make_dataclass("Loader", ["epoch"], namespace={"__module__": __name__}))


@pytest.mark.parametrize("cls", [int, dict, torch.nn.Linear, type("Plain", (), {}), 3, None])
def test_only_what_can_be_made_of_its_fields_can_be_registered(cls: Any) -> None:
    with pytest.raises(BadArgument, match="namedtuples, dataclasses and enums"):
        register(cls)


def test_a_subclass_of_a_registered_type_is_another_type() -> None:
    register(Loader)

    @dataclass
    class Child(Loader):
        pass

    assert not registry.is_registered(Child)


SPAWNING = """
import os, sys, tempfile
from dataclasses import dataclass
import torch, torch.distributed as dist, torch.multiprocessing as mp
import torchferry

@torchferry.register
@dataclass
class Position:
    epoch: int

def worker(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ferry = torchferry.PGTransport(dist.group.WORLD, 30, "cpu")
    for sender in (0, 1):
        if rank == sender:
            ferry.send_checkpoint([1 - rank], {"at": Position(7 + rank)})
        else:
            got = ferry.recv_checkpoint(sender)["at"]
            assert type(got) is Position and got.epoch == 7 + sender, got
            print(rank, Position.__module__, got.epoch, flush=True)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        other = mp.get_context("spawn").Process(target=worker, args=(1, folder))
        other.start()
        worker(0, folder)
        other.join()
        sys.exit(other.exitcode)
"""


def test_a_class_of_the_script_is_the_same_in_a_process_that_the_script_has_spawned(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNING)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "main" in line]
    assert sorted(said) == ["0 __main__ 8", "1 __mp_main__ 7"]
