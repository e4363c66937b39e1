"""Leaves with tensors: sparse, distributed, sharded and numpy's, with invalid metadata for their kind."""

from __future__ import annotations

import struct
from typing import Any

from msgspec.structs import replace

from tests.hostile.attacks.base import attack, attacks, frame_of, spec
from torchferry.core.codec import encode_value
from torchferry.core.manifest import FORM, Branch, Leaf, Manifest, Special, TensorSpec
from torchferry.errors import BadManifest

LONG = {"dtype": "int64", "itemsize": 8}
INDICES = spec((2, 2), (2, 1), **LONG)  # type: ignore[arg-type]
VALUES = spec((2,), storage=1)
BYTES = spec((4, 4), (4, 1), dtype="uint8", itemsize=1)

MESH: dict[str, Any] = {
    "device": "cpu",
    "ranks": [0, 1],
    "sizes": [[2]],
    "strides": [[1]],
    "coalesced": False,
    "names": None,
}
SPARSE = ({"layout": "torch.sparse_coo", "size": [2, 2]}, {"grad": 0, "coalesced": True})
CSR = ({"layout": "torch.sparse_csr", "size": [2, 2]}, {"grad": 0, "coalesced": False})
DTENSOR = (
    {"placements": [["Shard", 0]], "shape": [8], "mesh": [2], "position": "(0)", "local": []},
    {"grad": 0, "stride": [1], "mesh": MESH, "local": []},
)
SHARDED = (
    {"size": [8], "shards": [[[0], [4]]]},
    {
        "all": [[[0], [4], "rank:0/cpu"], [[4], [4], "rank:1/cpu"]],
        "dtype": "float32",
        "requires_grad": False,
        "memory_format": "torch.preserve_format",
    },
)
NDARRAY = ({"dtype": "<i4", "backwards": []}, True)

QUANTIZED: tuple[Any, Any] = (
    {"dtype": "qint8", "scheme": "torch.per_channel_affine", "size": [2, 3], "axis": 0},
    None,
)
QUANTIZED_PARTS = (
    spec((2, 3), (3, 1), dtype="int8", itemsize=1),
    spec((2,), dtype="float64", itemsize=8, storage=1),
    spec((2,), storage=2, **LONG),  # type: ignore[arg-type]
)
WRAPPER = "tests.hostile.attacks.values.Wrapper"
NODE = [WRAPPER, "float32", [4], [1], None, [["held", 0]]]
SUBCLASS = ({"nodes": [NODE]}, {"grad": [0, 0]})
BUFFER: tuple[Any, Any] = (None, {"type": "bytes", "position": 0, "typecode": "", "itemsize": 1})
ROW = spec((70_000,), dtype="uint8", itemsize=1)

CSR_PARTS = (
    spec((3,), **LONG),  # type: ignore[arg-type]
    spec((2,), storage=1, **LONG),  # type: ignore[arg-type]
    spec((2,), storage=2),
)


def leaf(kind: str, form: tuple[Any, Any], *specs: TensorSpec, storages: tuple[int, ...] = ()) -> bytes:
    """Return the frame of one leaf with its tensors."""
    ends = [0] * (1 + max((each.storage for each in specs), default=-1))
    for each in specs:
        last = sum((n - 1) * step for n, step in zip(each.shape, each.stride, strict=True))
        end = each.offset + (last + 1) * each.itemsize if 0 not in each.shape else 0
        ends[each.storage] = max(ends[each.storage], end)
    one = Leaf(kind, tuple(range(len(specs))), *map(packed, form))
    return frame_of(Manifest(-1, (Branch("list", (0,)),), (one,), specs, storages or tuple(ends)))


def packed(form: Any) -> Any:
    """Pack the form of a kind, unless it is a scalar."""
    return Special(FORM, encode_value(form)) if isinstance(form, (dict, list)) else form


def fixed(form: tuple[Any, Any], **changes: object) -> tuple[Any, Any]:
    return ({**form[0], **changes}, form[1])


def traits(form: tuple[Any, Any], **changes: object) -> tuple[Any, Any]:
    return (form[0], {**form[1], **changes})


def mesh(**changes: object) -> tuple[Any, Any]:
    return traits(DTENSOR, mesh={**MESH, **changes})


def quantized(**changes: object) -> tuple[Any, Any]:
    return fixed(QUANTIZED, **changes)


def nodes(*changed: list[Any], grad: tuple[int, ...] = (0, 0)) -> tuple[Any, Any]:
    return ({"nodes": changed}, {"grad": grad})


def node(place: int, value: object) -> tuple[Any, Any]:
    return nodes([*NODE[:place], value, *NODE[place + 1 :]])


def chain(count: int, back: int = 0) -> tuple[Any, Any]:
    """Return wrappers, each in the one before, and the last holds the tensor or an earlier wrapper."""
    links = [[*NODE[:5], [["held", ~(n + 1)]]] for n in range(count - 1)]
    return nodes(*links, [*NODE[:5], [["held", back]]], grad=(0,) * (count + 1))


def many_expanded() -> bytes:
    """Return leaves that are acceptable alone: together they have 2**32 indices, made of eight bytes."""
    one = Leaf("sparse", (0, 1), *map(packed, SPARSE))
    specs = (spec((2, 2**22), (0, 0), **LONG), spec((2**22,), (0,), storage=1))  # type: ignore[arg-type]
    tree = Branch("list", tuple(range(512)))
    return frame_of(Manifest(-1, (tree,), (one,) * 512, specs, (8, 4)))


VALID: dict[str, tuple[str, tuple[Any, Any], tuple[TensorSpec, ...]]] = {
    "tensor": ("tensor", (None, None), (spec(),)),
    "sparse": ("sparse", SPARSE, (INDICES, VALUES)),
    "compressed": ("sparse", CSR, CSR_PARTS),
    "dtensor": ("dtensor", DTENSOR, (spec(),)),
    "sharded": ("sharded", SHARDED, (spec(),)),
    "ndarray": ("ndarray", NDARRAY, (BYTES,)),
    "quantized": ("quantized", QUANTIZED, QUANTIZED_PARTS),
    "subclass": ("subclass", SUBCLASS, (spec(),)),
    "buffer": ("buffer", BUFFER, (ROW,)),
}
"""One valid leaf of each kind, of which each attack below changes one field."""

_WRONG: dict[str, Any] = {"none": None, "a_number": 7, "a_text": "x", "a_list": [1], "a_map": {"x": 1}}


def _with_wrong_fields() -> dict[str, Any]:
    """Return forms in which one field is missing or has a wrong type, for every field of every kind."""
    found: dict[str, Any] = {}
    for what, (kind, form, specs) in VALID.items():
        for place, part in enumerate(form):
            whole = ("fixed", "traits")[place]
            for name, wrong in _WRONG.items():
                if part is None and name in ("none", "a_number"):
                    continue
                spoilt = (wrong, form[1]) if place == 0 else (form[0], wrong)
                found[f"{what}_whose_{whole}_is_{name}"] = _later(kind, spoilt, specs)
            for key in part if isinstance(part, dict) else ():
                missing = {k: v for k, v in part.items() if k != key}
                spoilt = (missing, form[1]) if place == 0 else (form[0], missing)
                found[f"{what}_without_{key}"] = _later(kind, spoilt, specs)
                for name, wrong in _WRONG.items():
                    if type(wrong) is type(part[key]):
                        continue
                    spoilt = fixed(form, **{key: wrong}) if place == 0 else traits(form, **{key: wrong})
                    found[f"{what}_whose_{key}_is_{name}"] = _later(kind, spoilt, specs)
    return found


def _later(kind: str, form: tuple[Any, Any], specs: tuple[TensorSpec, ...]) -> Any:
    return lambda: leaf(kind, form, *specs)


attacks("kinds", _with_wrong_fields())
attacks(
    "kinds",
    {
        "tensor_of_no_parts": lambda: leaf("tensor", (None, None)),
        "tensor_of_two_parts": lambda: leaf("tensor", (None, None), spec(), spec()),
        "tensor_with_unknown_traits": lambda: leaf("tensor", (None, 2**60), spec()),
        "tensor_of_ints_that_requires_grad": lambda: leaf(
            "tensor",
            (None, 1),
            spec(dtype="int32"),
        ),
        "sparse_of_one_part": lambda: leaf("sparse", SPARSE, INDICES),
        "sparse_of_a_size_that_overflows": lambda: leaf(
            "sparse", fixed(SPARSE, size=[2**62, 2**62]), INDICES, VALUES
        ),
        "sparse_of_a_size_that_overflows_beside_a_zero": lambda: leaf(
            "sparse", fixed(SPARSE, size=[0, 2**62, 2**62]), INDICES, VALUES
        ),
        "sparse_of_very_many_dimensions": lambda: leaf(
            "sparse", fixed(SPARSE, size=[2**62] * 200_000), INDICES, VALUES
        ),
        "opaque_as_only_local_leaves_are": lambda: leaf("opaque", (None, None)),
        "sparse_of_indices_without_end": lambda: leaf(
            "sparse",
            SPARSE,
            spec((2, 2**50), (0, 0), **LONG),  # type: ignore[arg-type]
            spec((2**50,), (0,), storage=1),
        ),
        "sparse_of_indices_that_overlap": lambda: leaf(
            "sparse",
            SPARSE,
            spec((2, 2**30, 2**20), (1, 1, 1), **LONG),  # type: ignore[arg-type]
            VALUES,
        ),
        "sparse_of_indices_that_many_leaves_expand": many_expanded,
        "sparse_of_indices_that_are_complex": lambda: leaf(
            "sparse", SPARSE, spec((2, 2), (2, 1), dtype="complex64", itemsize=8), VALUES
        ),
        "compressed_of_indices_that_are_floats": lambda: leaf(
            "sparse", CSR, *(replace(part, dtype="float64") for part in CSR_PARTS[:-1]), CSR_PARTS[-1]
        ),
        "compressed_of_an_unknown_layout": lambda: leaf(
            "sparse", fixed(CSR, layout="torch.strided"), *CSR_PARTS
        ),
        "dtensor_on_a_mesh_of_more_than_its_ranks": lambda: leaf("dtensor", mesh(sizes=[[2**40]]), spec()),
        "dtensor_on_a_mesh_that_repeats_one_rank": lambda: leaf(
            "dtensor", mesh(sizes=[[2**40]], strides=[[0]]), spec()
        ),
        "dtensor_on_a_mesh_with_huge_strides": lambda: leaf("dtensor", mesh(strides=[[2**40]]), spec()),
        "dtensor_on_a_mesh_of_no_ranks": lambda: leaf("dtensor", mesh(ranks=[]), spec()),
        "dtensor_on_a_mesh_of_nothing": lambda: leaf("dtensor", mesh(sizes=[[0]]), spec()),
        "dtensor_on_a_mesh_of_huge_ranks": lambda: leaf("dtensor", mesh(ranks=[0, 2**40]), spec()),
        "dtensor_on_a_mesh_of_two_dimensions": lambda: leaf(
            "dtensor", mesh(sizes=[[1], [2]], strides=[[1], [1]]), spec()
        ),
        "dtensor_on_a_mesh_on_a_module": lambda: leaf("dtensor", mesh(device="hub"), spec()),
        "dtensor_on_a_mesh_on_one_device": lambda: leaf("dtensor", mesh(device="cpu:0"), spec()),
        "dtensor_on_a_mesh_with_too_many_names": lambda: leaf("dtensor", mesh(names=["a", "b"]), spec()),
        "dtensor_of_an_unknown_placement": lambda: leaf(
            "dtensor", fixed(DTENSOR, placements=[["exec", 0]]), spec()
        ),
        "dtensor_of_an_unknown_reduction": lambda: leaf(
            "dtensor", fixed(DTENSOR, placements=[["Partial", "system"]]), spec()
        ),
        "dtensor_sharded_along_no_dimension": lambda: leaf(
            "dtensor", fixed(DTENSOR, placements=[["Shard", 10**9]]), spec()
        ),
        "dtensor_sharded_along_a_negative_dimension": lambda: leaf(
            "dtensor", fixed(DTENSOR, placements=[["Shard", -7]]), spec()
        ),
        "dtensor_of_a_shape_that_overflows": lambda: leaf(
            "dtensor",
            (
                fixed(DTENSOR, shape=[2**62, 2**62])[0],
                {**DTENSOR[1], "stride": [1, 1]},
            ),
            spec(),
        ),
        "dtensor_of_ints_that_requires_grad": lambda: leaf(
            "dtensor", traits(DTENSOR, grad=1), spec(dtype="int32")
        ),
        "sharded_of_more_shards_than_parts": lambda: leaf(
            "sharded", fixed(SHARDED, shards=[[[0], [4]], [[4], [4]]]), spec()
        ),
        "sharded_with_placements_that_are_none": lambda: leaf(
            "sharded", traits(SHARDED, all=[[[0], [8], "rank:x/warp"]]), spec()
        ),
        "sharded_of_tensors_of_another_shape": lambda: leaf("sharded", SHARDED, spec((2, 2), (2, 1))),
        "sharded_of_an_unknown_memory_format": lambda: leaf(
            "sharded", traits(SHARDED, memory_format="torch.strided"), spec()
        ),
        "sharded_of_no_shards": lambda: leaf("sharded", traits(SHARDED, all=[]), spec()),
        "sharded_of_a_shard_outside": lambda: leaf("sharded", fixed(SHARDED, shards=[[[6], [4]]]), spec()),
        "sharded_of_shards_of_other_dimensions": lambda: leaf(
            "sharded", traits(SHARDED, all=[[[0, 0], [4, 4], "rank:0/cpu"]]), spec()
        ),
        "sharded_of_an_unknown_dtype": lambda: leaf("sharded", traits(SHARDED, dtype="strided"), spec()),
        "sharded_of_another_dtype": lambda: leaf("sharded", traits(SHARDED, dtype="int8"), spec()),
        "ndarray_of_objects": lambda: leaf("ndarray", fixed(NDARRAY, dtype="|O"), BYTES),
        "ndarray_of_another_item_size": lambda: leaf("ndarray", fixed(NDARRAY, dtype="<i8"), BYTES),
        "ndarray_of_two_gigabytes_an_item": lambda: leaf(
            "ndarray", fixed(NDARRAY, dtype="|V2147483647"), BYTES
        ),
        "ndarray_backwards_along_no_axis": lambda: leaf("ndarray", fixed(NDARRAY, backwards=[1]), BYTES),
        "ndarray_over_floats": lambda: leaf("ndarray", NDARRAY, spec()),
        "quantized_of_another_dtype": lambda: leaf("quantized", quantized(dtype="int8"), *QUANTIZED_PARTS),
        "quantized_of_no_scheme": lambda: leaf("quantized", quantized(scheme="torch.x"), *QUANTIZED_PARTS),
        "quantized_along_no_axis": lambda: leaf("quantized", quantized(axis=2), *QUANTIZED_PARTS),
        "quantized_of_another_shape": lambda: leaf("quantized", quantized(size=[3, 2]), *QUANTIZED_PARTS),
        "quantized_of_a_shape_that_overflows": lambda: leaf(
            "quantized", quantized(size=[0, 2**62, 2**62]), *QUANTIZED_PARTS
        ),
        "quantized_as_a_whole_with_two_scales": lambda: leaf(
            "quantized", quantized(scheme="torch.per_tensor_affine"), *QUANTIZED_PARTS
        ),
        "quantized_of_bytes_that_hold_more_items": lambda: leaf(
            "quantized", quantized(dtype="quint4x2"), *QUANTIZED_PARTS
        ),
        "quantized_of_scales_without_end": lambda: leaf(
            "quantized",
            quantized(size=[2**50], axis=0),
            spec((2**50,), (0,), dtype="int8", itemsize=1),
            spec((2**50,), (0,), dtype="float64", itemsize=8, storage=1),
            spec((2**50,), (0,), storage=2, **LONG),  # type: ignore[arg-type]
        ),
        "quantized_that_requires_grad": lambda: leaf("quantized", (QUANTIZED[0], 1), *QUANTIZED_PARTS),
        "quantized_of_one_part": lambda: leaf("quantized", QUANTIZED, QUANTIZED_PARTS[0]),
        "subclass_of_no_nodes": lambda: leaf("subclass", nodes(grad=(0,)), spec()),
        "subclass_that_is_an_enum": lambda: leaf(
            "subclass", node(0, "tests.hostile.attacks.values.Mode"), spec()
        ),
        "subclass_of_an_unknown_dtype": lambda: leaf("subclass", node(1, "strided"), spec()),
        "subclass_of_a_size_that_overflows": lambda: leaf("subclass", node(2, [2**62]), spec()),
        "subclass_of_a_negative_size": lambda: leaf("subclass", node(2, [-4]), spec()),
        "subclass_of_a_stride_that_overflows": lambda: leaf("subclass", node(3, [2**63 - 1]), spec()),
        "subclass_of_more_strides_than_sizes": lambda: leaf("subclass", node(3, [1, 1]), spec()),
        "subclass_with_a_context_of_unknown_code": lambda: leaf("subclass", node(4, [99, b"\xc0"]), spec()),
        "subclass_with_a_bare_list_as_context": lambda: leaf("subclass", node(4, [1, 2, 3]), spec()),
        "subclass_of_a_tensor_that_is_not_there": lambda: leaf("subclass", node(5, [["held", 1]]), spec()),
        "subclass_of_no_tensors": lambda: leaf("subclass", node(5, []), spec()),
        "subclass_of_two_tensors_of_one_name": lambda: leaf(
            "subclass", node(5, [["held", 0], ["held", 0]]), spec()
        ),
        "subclass_that_contains_itself": lambda: leaf("subclass", node(5, [["held", -1]]), spec()),
        "subclass_that_contains_itself_later": lambda: leaf("subclass", chain(3, back=-2), spec()),
        "subclass_of_very_many_nodes": lambda: leaf("subclass", chain(10_000), spec()),
        "subclass_of_a_node_in_two_nodes": lambda: leaf(
            "subclass",
            nodes([*NODE[:5], [["a", -2], ["b", -2]]], NODE, grad=(0, 0, 0)),
            spec(),
        ),
        "subclass_of_a_node_in_no_node": lambda: leaf("subclass", nodes(NODE, NODE, grad=(0, 0, 0)), spec()),
        "subclass_with_too_few_flags": lambda: leaf("subclass", nodes(NODE, grad=(0,)), spec()),
        "subclass_of_ints_that_requires_grad": lambda: leaf(
            "subclass", ({"nodes": [[WRAPPER, "int32", *NODE[2:]]]}, {"grad": [1, 0]}), spec(dtype="int32")
        ),
        "dtensor_of_two_parts": lambda: leaf("dtensor", DTENSOR, spec(), spec()),
        "dtensor_of_a_subclass_that_is_an_enum": lambda: leaf(
            "dtensor",
            (
                {**DTENSOR[0], "local": [["tests.hostile.attacks.values.Mode", *NODE[1:]]]},
                {**DTENSOR[1], "local": [0, 0]},
            ),
            spec(),
        ),
        "buffer_of_floats": lambda: leaf("buffer", BUFFER, spec()),
        "buffer_of_expanded_bytes": lambda: leaf(
            "buffer", BUFFER, spec((2**40,), (0,), dtype="uint8", itemsize=1)
        ),
        "buffer_of_no_tensor": lambda: leaf("buffer", BUFFER),
        "buffer_of_an_unknown_type": lambda: leaf("buffer", traits(BUFFER, type="mmap"), ROW),
        "buffer_of_an_array_of_objects": lambda: leaf(
            "buffer", traits(BUFFER, type="array", typecode="O", itemsize=8), ROW
        ),
        "buffer_of_an_array_of_half_an_item": lambda: leaf(
            "buffer",
            traits(BUFFER, type="array", typecode="d", itemsize=8),
            spec((70_001,), dtype="uint8", itemsize=1),
        ),
        "buffer_that_is_fixed": lambda: leaf("buffer", (True, BUFFER[1]), ROW),
        "ndarray_without_dimensions": lambda: leaf(
            "ndarray", NDARRAY, spec((), (), dtype="uint8", itemsize=1)
        ),
        "ndarray_of_more_dimensions_than_numpy_has": lambda: leaf(
            "ndarray", NDARRAY, spec((1,) * 70 + (4,), (1,) * 71, dtype="uint8", itemsize=1)
        ),
    },
)


@attack(BadManifest, payload=[struct.pack("<4q", 0, 9, 0, 9), b"\x00" * 8])
def sparse_with_indices_out_of_range() -> bytes:
    """The metadata is valid, but the received indices are out of range. torch would not check them."""
    return leaf("sparse", SPARSE, INDICES, VALUES)


@attack(BadManifest, payload=[struct.pack("<4q", 0, -1, 0, -1), b"\x00" * 8])
def sparse_with_negative_indices() -> bytes:
    """The same with negative indices."""
    return leaf("sparse", SPARSE, INDICES, VALUES)


@attack(BadManifest, payload=[struct.pack("<3q", 0, 2**40, 2), struct.pack("<2q", 0, 1), b"\x00" * 8])
def compressed_with_rows_of_a_terabyte() -> bytes:
    """Row pointers that point far beyond the columns."""
    return leaf("sparse", CSR, *CSR_PARTS)


@attack(None)
def sharded_with_thousands_of_shards() -> bytes:
    """torch would compare all pairs of shards."""
    size = [2**40, 2**10]
    everybody = [[[0, n], [2**40, 1], f"rank:{n}/cpu"] for n in range(2000)]
    return leaf("sharded", ({"size": size, "shards": []}, {**SHARDED[1], "all": everybody}))


@attack(BadManifest, payload=[b"\0" * 16])
def subclass_of_tensors_of_other_names() -> bytes:
    """Only the class knows which tensors it needs, when it is built."""
    return leaf("subclass", node(5, [["__class__", 0]]), spec())


@attack(BadManifest, payload=[b"\0" * 16])
def subclass_that_is_built_with_another_dtype() -> bytes:
    """The class decides which dtype it has, and the flags were checked for another."""
    return leaf("subclass", node(1, "int32"), spec())
