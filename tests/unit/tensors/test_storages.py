"""Storages: every byte is sent once, and tensors that share memory still share it afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.equality import assert_same
from tests.support.transfer import transfer
from torchferry.core.extents import Extent
from torchferry.core.plan import make_plan
from torchferry.errors import StateError, StateMismatch
from torchferry.tensors.describe import describe
from torchferry.tensors.memory import CPU, Memory, gather, run_of


def test_views_of_one_storage_cost_each_byte_once_and_stay_views() -> None:
    base = torch.arange(24.0)
    state = {"left": base[2:8], "right": base[4:12], "matrix": base[:12].view(3, 4), "apart": base[20:22]}
    ferried = transfer(state)
    assert_same(state, ferried.state)
    assert ferried.payload_bytes == 12 * 4 + 2 * 4
    ferried.state["matrix"][1, 1] = 99
    assert ferried.state["left"][3] == ferried.state["right"][1] == 99


def test_views_of_different_dtypes_share_their_bytes() -> None:
    base = torch.arange(8.0)
    complex_view = torch.view_as_complex(base.view(4, 2))
    state = {
        "bytes": base.view(torch.uint8),
        "floats": base,
        "numbers": complex_view,
        "re": complex_view.real,
    }
    ferried = transfer(state)
    assert_same(state, ferried.state)
    assert ferried.payload_bytes == 32


def test_overlapping_views_that_nest_in_no_order_share_their_bytes() -> None:
    base = torch.arange(60.0)
    state = {"rows": base.view(6, 10)[1:3], "column": base.view(6, 10)[:, 4], "odd": base[1::2]}
    ferried = transfer(state)
    assert_same(state, ferried.state)
    used = set(range(10, 30)) | set(range(4, 60, 10)) | set(range(1, 60, 2))
    assert ferried.payload_bytes == 4 * len(used)


def test_tied_weights_are_sent_once_and_are_still_tied() -> None:
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(7, 5), "head": torch.nn.Linear(5, 7, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    ferried = transfer(model.state_dict())
    assert_same(model.state_dict(), ferried.state)
    assert ferried.payload_bytes == 7 * 5 * 4
    ferried.state["embed.weight"].fill_(3)
    assert ferried.state["head.weight"].eq(3).all()


def test_weights_tied_by_a_transpose_are_still_tied() -> None:
    weight = torch.randn(3, 5)
    ferried = transfer({"a": weight, "b": weight.t()})
    assert_same({"a": weight, "b": weight.t()}, ferried.state)
    assert ferried.payload_bytes == 60


def test_the_same_object_in_two_places_is_one_object_afterwards() -> None:
    weight = torch.nn.Parameter(torch.randn(4))
    state = {"a": weight, "b": [weight, weight.detach()]}
    ferried = transfer(state)
    assert_same(state, ferried.state)
    assert ferried.state["a"] is ferried.state["b"][0]
    assert ferried.state["a"] is not ferried.state["b"][1]
    assert ferried.payload_bytes == 16


def test_a_small_view_of_a_large_storage_costs_only_itself_on_both_sides() -> None:
    large = torch.zeros(10_000_000)
    ferried = transfer({"slice": large[5_000_000:5_000_004]})
    assert ferried.payload_bytes == 16
    assert ferried.state["slice"].untyped_storage().nbytes() == 16


def test_a_storage_whose_size_is_not_a_multiple_of_the_item_size_arrives() -> None:
    raw = torch.arange(11, dtype=torch.uint8)
    state = {"words": raw[:8].view(torch.int32), "raw": raw}
    ferried = transfer(state)
    assert_same(state, ferried.state)
    assert ferried.payload_bytes == 11


def test_an_array_and_the_tensor_made_from_it_share_their_bytes() -> None:
    array = numpy.arange(10.0)
    ferried = transfer({"array": array, "tensor": torch.from_numpy(array)})
    assert ferried.payload_bytes == 80
    ferried.state["tensor"][3] = 42
    assert ferried.state["array"][3] == 42


def test_memory_that_two_owners_view_from_different_addresses_is_sent_once() -> None:
    """The tail starts at byte 8, which is not a multiple of the largest item size."""
    array = numpy.arange(10.0)
    ferried = transfer({"array": array, "tail": torch.from_numpy(array[1:]), "bytes": array.view("u1")[3:9]})
    assert ferried.payload_bytes == 80
    ferried.state["tail"][0] = 42
    assert ferried.state["array"][1] == 42
    assert (
        ferried.state["bytes"].tobytes() == array.view("u1")[3:8].tobytes() + numpy.float64(42).tobytes()[:1]
    )


def test_overlapping_memory_whose_items_are_not_aligned_to_each_other_still_arrives() -> None:
    raw = numpy.arange(40, dtype=numpy.uint8)
    odd = torch.frombuffer(raw.data, dtype=torch.int64, offset=4, count=4)
    state = {"words": torch.from_numpy(raw.view("i8")), "odd": odd}
    received = transfer(state).state
    assert torch.equal(received["words"], state["words"])
    assert torch.equal(received["odd"], state["odd"])


def test_local_tensors_that_overlap_misaligned_are_not_written() -> None:
    """They are two storages, so nothing else finds that one would overwrite the other."""
    raw = bytearray(40)
    local = {
        "words": torch.frombuffer(raw, dtype=torch.int64, count=4),
        "odd": torch.frombuffer(raw, dtype=torch.int64, offset=4, count=4),
    }
    with pytest.raises(StateMismatch, match="overlaps that of another tensor") as raised:
        transfer(
            {"words": torch.ones(4, dtype=torch.int64), "odd": torch.zeros(4, dtype=torch.int64)}, into=local
        )
    assert [mismatch.path for mismatch in raised.value.mismatches] == ["words", "odd"]
    assert not any(raw)


def test_views_that_start_anywhere_in_shared_memory_share_it_for_every_item_size() -> None:
    """The first view starts at byte 8, where an item of 16 bytes can't start."""
    array = torch.arange(10.0, dtype=torch.float64).numpy()
    state = {"tail": torch.from_numpy(array[1:]), "pairs": torch.from_numpy(array[2:].view("c16"))}
    ferried = transfer(state)
    assert ferried.payload_bytes == 72
    ferried.state["tail"][1] = 42
    assert ferried.state["pairs"][0] == 42 + 3j


@pytest.mark.parametrize("first", ["array", "tensor"])
def test_an_array_that_is_not_aligned_and_its_tensor_share_their_bytes(first: str) -> None:
    array = numpy.frombuffer(bytearray(range(65)), "f8", offset=1)
    views: dict[str, Any] = {"array": array, "tensor": torch.from_numpy(array)}
    state = {first: views.pop(first), **views}
    ferried = transfer(state)
    assert ferried.payload_bytes == 64
    ferried.state["tensor"][3] = 42
    assert ferried.state["array"][3] == 42


def test_aligned_views_share_their_bytes_although_a_third_view_there_is_misaligned() -> None:
    raw = numpy.arange(64, dtype="u1")
    state = {
        "odd": torch.frombuffer(raw.data, dtype=torch.int64, offset=4, count=7),
        "one": torch.frombuffer(raw.data, dtype=torch.int64, offset=8, count=5),
        "two": torch.frombuffer(raw.data, dtype=torch.int64, offset=16, count=5),
    }
    ferried = transfer(state)
    assert ferried.payload_bytes == 56 + 48
    for name, tensor in state.items():
        assert torch.equal(ferried.state[name], tensor)
    ferried.state["one"][1] = 42
    assert ferried.state["two"][0] == 42


def test_an_aligned_array_arrives_aligned_whatever_shares_its_memory() -> None:
    raw = torch.arange(64, dtype=torch.uint8).numpy()
    alone = raw[3:][5:13].view("f8")
    state = {"bytes": raw[3:30], "words": raw[8:24].view("f8"), "tensor": torch.from_numpy(raw[5:40])}
    for sent in ({"alone": alone}, state):
        received = transfer(sent).state
        assert_same(sent, received)
        assert all(array.flags.aligned for array in received.values() if isinstance(array, numpy.ndarray))


@pytest.mark.parametrize("theirs", range(0, 32, 8))
@pytest.mark.parametrize("ours", range(0, 32, 8))
def test_shared_memory_lands_in_shared_memory_of_another_alignment(theirs: int, ours: int) -> None:
    def views(raw: Any, start: int) -> dict[str, Any]:
        within = raw[start : start + 32]
        return {"array": within.view("f8"), "tail": torch.from_numpy(within[3:]), "head": within[1:9]}

    source = torch.arange(64, dtype=torch.uint8).numpy()
    local = torch.full((64,), 255, dtype=torch.uint8).numpy()
    assert transfer(views(source, theirs), into=views(local, ours)).payload_bytes == 32
    assert local[ours : ours + 32].tolist() == list(range(theirs, theirs + 32))
    assert set(local[:ours]) | set(local[ours + 32 :]) == {255}


def test_a_local_storage_of_an_array_and_a_tensor_can_not_receive_two_values() -> None:
    """If both were written, one of the two values would be lost silently."""
    array = numpy.zeros(4)
    local = {"array": array, "tail": torch.from_numpy(array[1:])}
    with pytest.raises(StateMismatch, match="shares local memory"):
        transfer({"array": numpy.ones(4), "tail": torch.full((3,), 2.0, dtype=torch.float64)}, into=local)
    assert array.tolist() == [0, 0, 0, 0]


def test_an_empty_view_does_not_add_bytes_to_its_storage() -> None:
    base = torch.zeros(1000)
    ferried = transfer({"none": base[10:10], "some": base[20:22]})
    assert_same({"none": base[10:10], "some": base[20:22]}, ferried.state)
    assert ferried.state["some"].untyped_storage().nbytes() == 8


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_of_torch_makes_no_difference(device: str) -> None:
    state = {str(n): torch.full((10,), float(n)) for n in range(100)}
    with torch.device(device):
        described = describe(state)
    assert described.manifest == describe(state).manifest


@pytest.mark.parametrize("count", [1, 2, 100])
def test_memory_that_is_freed_after_describing_raises_and_stays_freed(count: int) -> None:
    state = [torch.full((1000,), float(n)) for n in range(count)]
    described = describe(state)
    pieces = make_plan(described.manifest).extents
    state[-1].untyped_storage().resize_(0)
    with pytest.raises(StateError, match="0 bytes of the 4000 that are used"):
        gather(described.memories, pieces, torch.empty(4000 * count, dtype=torch.uint8))
    with pytest.raises(StateError, match="freed during the transfer"):
        run_of(described.memories[-1], pieces[-1])
    assert state[-1].untyped_storage().nbytes() == 0


@pytest.mark.parametrize("device", [CPU, torch.device("cpu")], ids=["by address", "by torch"])
def test_a_run_has_its_bytes_and_raises_if_their_memory_was_freed(device: torch.device) -> None:
    tensor = torch.arange(100, dtype=torch.uint8)
    memory = Memory(tensor.untyped_storage(), 10, device)
    assert run_of(memory, Extent(0, 5, 4)).tolist() == [15, 16, 17, 18]
    assert run_of(memory, Extent(0, 0, 90)).tolist() == [*range(10, 100)]
    with pytest.raises(StateError, match="freed during the transfer"):
        run_of(memory, Extent(0, 0, 91))
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StateError, match="freed during the transfer"):
        run_of(memory, Extent(0, 5, 4))


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.ones(2, 3),
    "another plain": lambda: torch.zeros(2, 3),
    "shape": lambda: torch.ones(3, 2),
    "flat": lambda: torch.ones(6),
    "strides": lambda: torch.ones(3, 2).t(),
    "strides with gaps": lambda: torch.ones(2, 6)[:, ::2],
    "rows with gaps": lambda: torch.ones(2, 6)[:, :3],
    "expanded": lambda: torch.ones(1, 3).expand(2, 3),
    "offset": lambda: torch.ones(12)[6:].view(2, 3),
    "dtype": lambda: torch.ones(2, 3, dtype=torch.int32),
    "half": lambda: torch.ones(2, 3, dtype=torch.bfloat16),
    "bool": lambda: torch.ones(2, 3, dtype=torch.bool),
    "complex": lambda: torch.ones(2, 3, dtype=torch.complex64),
    "conj": lambda: torch.ones(2, 3, dtype=torch.complex64).conj(),
    "neg": lambda: torch._neg_view(torch.ones(2, 3)),
    "neg of complex": lambda: torch._neg_view(torch.ones(2, 3, dtype=torch.complex64)),
    "scalar": lambda: torch.ones(()),
    "empty": lambda: torch.ones(0, 3),
    "grad": lambda: torch.ones(2, 3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 3)),
    "frozen": lambda: torch.nn.Parameter(torch.ones(2, 3), requires_grad=False),
}


@given(st.lists(st.sampled_from(sorted(TENSORS)), min_size=1, max_size=40))
def test_tensors_that_are_described_together_are_described_as_each_alone(names: list[str]) -> None:
    tensors = [TENSORS[name]() for name in names]
    together = describe(tensors).manifest
    alone = [describe([tensor]).manifest for tensor in tensors]
    assert [replace(spec, storage=0) for spec in together.tensors] == [each.tensors[0] for each in alone]
    assert [spec.storage for spec in together.tensors] == list(range(len(tensors)))
    assert list(together.storages) == [each.storages[0] for each in alone]
    assert [replace(leaf, parts=(0,)) for leaf in together.leaves] == [each.leaves[0] for each in alone]


def test_two_empty_tensors_of_one_storage_still_have_one_storage() -> None:
    empty = torch.empty(0)
    assert len(describe([empty, empty.view(0, 3), torch.empty(0)]).manifest.storages) == 2
