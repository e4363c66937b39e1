"""The user's own types: registered by name on both sides, and rebuilt without running their code."""

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
from torchferry.engine.push import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.errors import BadArgument, BadManifest, UnknownType
from torchferry.tensors import registry
from torchferry.testing import MemoryNetwork


@pytest.fixture(autouse=True)
def _empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
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


def receive_with_types(state: object, **types: Any) -> Any:
    """Send a state, then receive it with only these types registered."""
    network = MemoryNetwork()
    send_state(network.link(0), [1], state, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    registry._types.clear()
    registry._types.update({f"{__name__}.{name}": cls for name, cls in types.items()})
    try:
        return receive_state(network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES))[0]
    finally:
        assert not any(network._boxes.values()), "the receiver left messages of the sender"


@pytest.mark.parametrize("value", [Loader(1), Point(1), Mode.TRAIN], ids=str)
def test_a_type_that_is_not_registered_at_the_receiver_is_refused_with_advice(value: object) -> None:
    register(type(value))
    with pytest.raises(UnknownType) as raised:
        receive_with_types({"a": value, "w": torch.ones(2)})
    assert f"{__name__}.{type(value).__name__}" in str(raised.value)
    assert f"torchferry.register({type(value).__name__})" in str(raised.value)


@pytest.mark.parametrize("fields", [["epoch"], ["seen", "epoch"], ["epoch", "seen", "more"]])
def test_a_type_with_other_fields_is_refused_and_both_lists_are_shown(fields: list[str]) -> None:
    register(Loader)
    with pytest.raises(UnknownType) as raised:
        receive_with_types(Loader(1), Loader=make_dataclass("Loader", fields))
    assert f"the fields {', '.join(fields)} here and epoch, seen at the peer" in str(raised.value)


def test_an_enum_without_the_member_is_refused() -> None:
    register(Mode)
    with pytest.raises(BadManifest, match="TRAIN"):
        receive_with_types({"mode": Mode.TRAIN}, Mode=Enum("Mode", "EVAL"))


def test_an_enum_member_of_a_class_that_is_no_enum_is_refused() -> None:
    register(Mode)
    with pytest.raises(BadManifest, match="not an enum"):
        receive_with_types({"mode": Mode.TRAIN}, Mode=Loader)


def test_no_method_of_a_type_is_called_on_arrival() -> None:
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


def test_register_returns_the_class() -> None:
    assert register(Loader) is Loader
    assert register(Loader) is Loader


def test_a_second_type_with_the_same_name_is_refused() -> None:
    register(Loader)
    with pytest.raises(BadArgument, match=r"registered as .*Loader: rename"):
        register(make_dataclass("Loader", ["epoch"], namespace={"__module__": __name__}))


@pytest.mark.parametrize("cls", [int, dict, torch.Tensor, torch.nn.Linear, type("Plain", (), {}), 3, None])
def test_a_class_that_can_not_be_rebuilt_from_what_it_holds_is_not_registered(cls: Any) -> None:
    with pytest.raises(BadArgument, match="only namedtuples, dataclasses, enums, subclasses of dict"):
        register(cls)


def test_a_subclass_of_a_registered_type_is_not_registered() -> None:
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


def test_a_class_of_the_main_script_matches_in_a_spawned_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNING)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if "main" in line]
    assert sorted(said) == ["0 __main__ 8", "1 __mp_main__ 7"]
