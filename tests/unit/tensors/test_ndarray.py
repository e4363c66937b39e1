"""numpy arrays of every dtype and layout arrive bit for bit, fresh and in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.support.equality import assert_same
from tests.support.transfer import transfer
from tests.unit.tensors.refusing import refusal_at_a_path
from torchferry.errors import StateMismatch

FIELDS = numpy.dtype([("a", "i4"), ("b", "f8"), ("c", "S3"), ("d", "f4", (2, 3))])


class ArraySubclass(numpy.ndarray[Any, Any]):
    unit = "K"


def filled(dtype: Any, shape: Any = 6) -> Any:
    """Return an array of different bytes. None of them is zero, because zeros end a string."""
    array = numpy.empty(shape, dtype)
    array.view(numpy.ndarray).reshape(-1).view("u1")[...] = numpy.arange(array.nbytes) % 126 + 1
    return array


DTYPES = [
    "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", "c8", "c16", "G",
    ">i4", ">f8", ">c16", "S1", "S7", "V5", "M8[ns]", "M8[3D]", "m8[us]", FIELDS,
    numpy.dtype([("a", "i1"), ("b", "f8")], align=True), numpy.dtype([("in", [("x", "u2"), ("y", ">u2")])]),
    numpy.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [2, 0], "itemsize": 9}),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_without_references_arrives_bit_for_bit(dtype: Any) -> None:
    array = filled(dtype)
    ferried = transfer({"a": array})
    assert_same({"a": array}, ferried.state)
    assert ferried.payload_bytes == array.nbytes
    assert type(ferried.state["a"]) is numpy.ndarray


def test_arrays_of_text_arrive() -> None:
    state = {"words": numpy.array(["", "ferry", "fährt über"]), "one": numpy.array("x")}
    assert_same(state, transfer(state).state)


BASE = numpy.arange(48.0).reshape(6, 8)
LAYOUTS = {
    "0-dim": numpy.array(3.5),
    "0-dim view": BASE[2, 3, ...],
    "empty": numpy.zeros((0, 3)),
    "no bytes an item": numpy.zeros(3, "S0"),
    "transposed": BASE.T,
    "fortran": numpy.asfortranarray(BASE),
    "strided": BASE[::2, 1::3],
    "a column": BASE[:, 5],
    "backwards": BASE[::-1],
    "backwards in both axes": BASE[::-2, ::-1],
    "one row backwards": BASE[2:3, ::-1],
    "broadcast": numpy.broadcast_to(BASE[0], (3, 8)),
    "windows": numpy.lib.stride_tricks.sliding_window_view(BASE[0], 3),
    "a field of a record": filled(FIELDS)["b"],
    "not aligned": numpy.frombuffer(bytearray(range(17)), "f8", offset=1),
    "read-only": numpy.frombuffer(b"12345678", "f8"),
}


@pytest.mark.parametrize("own_buffers", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_arrives_with_its_strides(name: str, own_buffers: bool) -> None:
    state = {"a": LAYOUTS[name]}
    assert_same(state, transfer(state, own_buffers=own_buffers).state)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_can_be_received_into_an_array_with_the_same_reversed_axes(name: str) -> None:
    array = LAYOUTS[name]
    reversing = tuple(slice(None, None, -1 if step < 0 else None) for step in array.strides)
    local = numpy.zeros(array.shape, array.dtype)[reversing or ...]
    received = transfer({"a": array}, into={"a": local}).state
    assert received["a"] is local
    assert numpy.array_equal(local, array)


def test_views_of_one_array_send_each_byte_once_and_stay_views() -> None:
    base = numpy.arange(20.0)
    ferried = transfer({"a": base[2:8], "b": base[4:12], "c": base[11:3:-1]})
    assert ferried.payload_bytes == 10 * 8
    ferried.state["a"][3] = 99
    assert ferried.state["b"][1] == ferried.state["c"][6] == 99


def test_a_received_array_keeps_its_memory_alive() -> None:
    received = transfer({"a": numpy.arange(1000), "rest": torch.zeros(1000)}).state.pop("a")
    torch.full((1000,), -1)
    assert numpy.array_equal(received, numpy.arange(1000))
    received[0] = 5


def test_the_writeable_flag_arrives() -> None:
    fixed = numpy.arange(3)
    fixed.flags.writeable = False
    received = transfer({"fixed": fixed, "free": numpy.arange(3)}).state
    assert not received["fixed"].flags.writeable
    assert received["free"].flags.writeable


def test_in_place_items_outside_the_array_keep_their_values() -> None:
    whole = numpy.full((4, 4), -1)
    received = transfer({"a": numpy.arange(6).reshape(3, 2)}, into={"a": whole[1:, 1:3]}).state
    assert received["a"].base is whole
    assert whole.tolist() == [[-1, -1, -1, -1], [-1, 0, 1, -1], [-1, 2, 3, -1], [-1, 4, 5, -1]]


@pytest.mark.parametrize(
    ("local", "said"),
    [
        (numpy.zeros(3, "f4"), "dtype: incoming float64, local float32"),
        (numpy.zeros(3, ">f8"), "dtype: incoming float64, local >f8"),
        (numpy.zeros(4), "shape: incoming [3], local [4]"),
        (torch.zeros(3, dtype=torch.float64), "kind: incoming ndarray float64[3], local tensor float64[3]"),
        (numpy.float64(1), "kind: incoming ndarray float64[3], local a value"),
        (
            numpy.arange(3.0).view(ArraySubclass),
            "kind: incoming ndarray float64[3], local an array of the class",
        ),
    ],
)
def test_in_place_dtype_shape_and_kind_must_match(local: object, said: str) -> None:
    with pytest.raises(StateMismatch) as raised:
        transfer({"a": numpy.arange(3.0)}, into={"a": local})
    assert said in str(raised.value)
    assert raised.value.path == "a"


def test_in_place_a_read_only_array_is_not_overwritten() -> None:
    """Its memory may belong to a bytes object or to a file."""
    data = b"\x01" * 8
    local = numpy.frombuffer(data, "u1")
    with pytest.raises(
        StateMismatch, match=r"a: kind: incoming ndarray .* local a ndarray in read-only memory"
    ):
        transfer({"a": numpy.arange(8, dtype="u1")}, into={"a": local})
    assert data == b"\x01" * 8


def test_a_read_only_array_is_no_mismatch_if_nothing_arrives_for_it() -> None:
    fixed = numpy.frombuffer(b"12345678", "u1")
    received = transfer({"b": 2}, into={"a": fixed, "b": 1}, strict=False).state
    assert received["a"] is fixed
    assert received["b"] == 2


REFUSED = {
    "objects": (numpy.array([{}, None], dtype=object), ["dtype object", "references", "list"]),
    "objects in fields": (numpy.zeros(2, [("a", "i4"), ("b", "O")]), ["references"]),
    "strings outside the array": (
        numpy.array(["a"], dtype=numpy.dtypes.StringDType()),
        ["StringDType", "list"],
    ),
    "a subclass": (numpy.zeros(2).view(ArraySubclass), ["test_ndarray.ArraySubclass"]),
}


def test_subclasses_of_arrays_arrive_as_the_arrays_that_they_hold(tmp_path: Path) -> None:
    mapped = numpy.memmap(tmp_path / "array", "<f4", "w+", shape=(2, 3))
    mapped[:] = [[1, 2, 3], [4, 5, 6]]
    records = numpy.rec.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])
    state = {"mapped": mapped, "matrix": numpy.matrix([[1, 2]]), "records": records, "row": mapped[1, ::-1]}
    received = transfer(state).state
    plain = {name: numpy.asarray(array).view(numpy.ndarray) for name, array in state.items()}
    plain["records"] = plain["records"].view([("a", "i4"), ("b", "f8")])
    assert_same(plain, received)


def test_subclasses_of_arrays_are_written_in_place(tmp_path: Path) -> None:
    mapped = numpy.memmap(tmp_path / "array", "<f4", "w+", shape=(3,))
    records = numpy.rec.array([(0, 0.0)], dtype=[("a", "i4"), ("b", "f8")])
    state = {"mapped": numpy.arange(3, dtype="<f4"), "records": numpy.array([(1, 2.0)], records.dtype.descr)}
    received = transfer(state, into={"mapped": mapped, "records": records}).state
    assert received["mapped"] is mapped
    assert received["records"] is records
    mapped.flush()
    assert numpy.fromfile(tmp_path / "array", "<f4").tolist() == [0, 1, 2]
    assert (records.a[0], records.b[0]) == (1, 2.0)


MASKED: dict[str, Callable[[], Any]] = {
    "masked": lambda: numpy.ma.MaskedArray(
        [1.0, 2.0, 3.0], [False, True, False], fill_value=-7.0, hard_mask=True
    ),
    "without a mask": lambda: numpy.ma.array([[1, 2]]),
    "of structures": lambda: numpy.ma.array(
        [(1, 2.0)], mask=[(True, False)], dtype=[("a", "i4"), ("b", "f8")]
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_masked_array_arrives_with_its_mask_fill_value_and_hardness(name: str) -> None:
    array = MASKED[name]()
    received = transfer({"array": array}).state["array"]
    assert_same(array.data, received.data)
    assert type(received) is numpy.ma.MaskedArray
    assert (received.mask is numpy.ma.nomask) == (array.mask is numpy.ma.nomask)
    assert numpy.array_equal(received.mask, array.mask)
    assert received.fill_value == array.fill_value
    assert received.hardmask == array.hardmask


def test_the_data_and_the_mask_of_a_masked_array_are_written_in_place() -> None:
    local: Any = numpy.ma.MaskedArray([0.0, 0.0, 0.0], [True, False, False])
    data, mask = local.data, local.mask
    received = transfer({"array": MASKED["masked"]()}, into={"array": local}).state["array"]
    assert data.tolist() == [1, 2, 3]
    assert mask.tolist() == local.mask.tolist() == [False, True, False]
    assert numpy.shares_memory(received.data, data)
    assert numpy.shares_memory(received.mask, mask)


ALIGNED = numpy.dtype([("a", "i1"), (("title", "b"), "f8")], align=True)


@pytest.mark.parametrize(
    "dtype",
    ["<f4", ">i8", "S3", "<M8[ns]", [("a", "<i4"), ("b", "<f8", (2,))], object, [("a", object), ("b", "i1")],
     ALIGNED, [("in", ALIGNED, (2,)), ("x", "i1")]],
    ids=str,
)  # fmt: skip
def test_a_dtype_arrives(dtype: Any) -> None:
    def is_aligned(found: Any) -> list[bool]:
        inner = [found[name].base for name in found.base.names or ()]
        return [found.base.isalignedstruct, *(each.isalignedstruct for each in inner)]

    sent = numpy.dtype(dtype)
    received = transfer({"dtype": sent}).state["dtype"]
    assert isinstance(received, numpy.dtype)
    assert received == sent
    assert received.fields == sent.fields
    assert is_aligned(received.base) == is_aligned(sent.base)


def test_a_dtype_with_metadata_is_refused() -> None:
    assert "no exact description" in refusal_at_a_path(numpy.dtype("i4", metadata={"unit": "m"}))


def test_in_place_an_array_may_be_aligned_on_one_side_only() -> None:
    sent = filled(ALIGNED)
    local = numpy.zeros(6, numpy.lib.format.descr_to_dtype(numpy.lib.format.dtype_to_descr(ALIGNED)))
    assert not local.dtype.isalignedstruct
    received = transfer({"a": sent}, into={"a": local}).state["a"]
    assert received is local
    assert local.tobytes() == sent.tobytes()


@pytest.mark.parametrize("name", REFUSED)
def test_an_array_that_is_not_only_bytes_is_refused_with_its_path_and_advice(name: str) -> None:
    array, said = REFUSED[name]
    message = refusal_at_a_path(array)
    assert [words for words in said if words not in message] == []


def test_in_place_dtypes_that_differ_only_in_a_late_field_do_not_match() -> None:
    """The text of such a dtype is longer than an error shows."""
    fields = [(f"field{n:03}", "i4") for n in range(40)]
    renamed = [*fields[:-1], ("renamed", "i4")]
    local = numpy.zeros(3, renamed)
    with pytest.raises(StateMismatch, match="renamed"):
        transfer({"a": numpy.ones(3, fields)}, into={"a": local})
    assert not local.view("i4").any()
