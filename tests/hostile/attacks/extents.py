"""Tensors: outside their storage, with invalid shapes, with countless overlaps, or too large for memory."""

from __future__ import annotations

from tests.hostile.attacks.base import attack, attacks, frame_of, raw, spec, tensors
from torchferry.core.manifest import Branch, Leaf, Manifest, TensorSpec
from torchferry.errors import BadManifest, StateError


def wire(**fields: object) -> bytes:
    """Return the frame of one tensor with any numbers."""
    sound: dict[str, object] = {
        "dtype": "float32",
        "itemsize": 4,
        "shape": [4],
        "stride": [1],
        "storage": 0,
        "offset": 0,
        "conj": False,
        "neg": False,
    }
    tensor = [*{**sound, **fields}.values()]
    return raw([[0, [], [["tensor", [0], None, None]], [tensor], [16]], 1 << 20])


attacks(
    "extents",
    {
        "reaches_beyond_its_storage": lambda: tensors(spec((5,)), storages=(16,)),
        "starts_beyond_its_storage": lambda: tensors(spec(offset=16), storages=(16,)),
        "has_a_stride_beyond_its_storage": lambda: tensors(spec((2,), (2**40,)), storages=(16,)),
        "is_of_a_storage_that_is_not_there": lambda: wire(storage=1),
        "is_of_storage_minus_one": lambda: wire(storage=-1),
        "has_a_negative_shape": lambda: wire(shape=[-4]),
        "has_a_negative_stride": lambda: wire(stride=[-1]),
        "has_a_negative_offset": lambda: wire(offset=-4),
        "has_an_offset_between_items": lambda: wire(offset=2),
        "has_an_item_size_of_zero": lambda: wire(itemsize=0),
        "has_an_item_size_of_three": lambda: wire(itemsize=3),
        "has_a_huge_item_size": lambda: wire(itemsize=2**62),
        "has_more_strides_than_dimensions": lambda: wire(stride=[1, 1]),
        "has_a_shape_of_floats": lambda: wire(shape=[4.0]),
        "has_a_shape_of_true": lambda: wire(shape=[True]),
        "has_a_shape_beyond_64_bits": lambda: wire(shape=[2**64 - 1]),
        "has_a_shape_whose_product_overflows": lambda: tensors(spec((2**62, 2**62), (0, 0))),
        "has_a_shape_whose_product_is_0_in_64_bits": lambda: tensors(spec((2**32, 2**32), (0, 0))),
        "is_empty_and_overflows": lambda: tensors(spec((0, 2**62, 2**62), (1, 1, 1)), storages=(0,)),
        "is_empty_and_far_outside": lambda: tensors(spec((0,), offset=2**62), storages=(0,)),
        "has_a_million_dimensions": lambda: tensors(spec((1,) * 1_000_000, (1,) * 1_000_000)),
        "has_many_dimensions_that_interlock": lambda: tensors(spec((2,) * 10_000, (1,) * 10_000)),
        "is_of_no_known_dtype": lambda: wire(dtype="float31"),
        "is_of_a_dtype_with_dots": lambda: wire(dtype="nn.Module"),
        "is_of_a_dtype_of_a_megabyte": lambda: wire(dtype="f" * (1 << 20)),
        "is_quantized": lambda: wire(dtype="quint8", itemsize=1),
        "is_of_a_dtype_of_another_size": lambda: wire(dtype="int64"),
        "conjugates_what_is_real": lambda: wire(conj=True),
        "names_a_tensor_that_is_not_there": lambda: raw([[0, [], [["tensor", [7], None, None]], [], []], 64]),
        "names_tensor_minus_one": lambda: raw([[0, [], [["tensor", [-1], None, None]], [], []], 64]),
        "has_a_tensor_of_no_leaf_and_no_dtype": lambda: frame_of(
            Manifest(0, (), (Leaf("value"),), (spec(dtype="float31"),), (16,))
        ),
        "negates_what_has_no_sign": lambda: tensors(spec(dtype="bool", itemsize=1, neg=True)),
    },
)


@attack()
def claims_2_to_the_60_bytes() -> bytes:
    """A tensor of 2**60 bytes, in the largest chunks."""
    return tensors(spec((2**60,), dtype="uint8", itemsize=1), chunk_bytes=1 << 30)


@attack(StateError)
def spreads_two_bytes_over_a_terabyte() -> bytes:
    """The system may allocate such memory lazily, but can't provide it when it is used."""
    return tensors(spec((2,), (2**40,), dtype="uint8", itemsize=1))


@attack(StateError)
def spreads_over_many_storages() -> bytes:
    """A hundred storages, each of which could be allocated alone."""
    return tensors(
        *(spec((2,), (2**32,), dtype="uint8", itemsize=1, storage=number) for number in range(100))
    )


@attack(StateError)
def claims_an_unused_storage() -> bytes:
    """A storage of 2**62 bytes, of which no tensor uses a byte."""
    return tensors(spec(), storages=(2**62,))


@attack()
def is_too_large_for_its_chunks() -> bytes:
    """2**50 bytes in chunks of sixteen bytes: the list of messages would not fit in memory."""
    return tensors(spec((2**50,), dtype="uint8", itemsize=1), chunk_bytes=16)


@attack()
def has_more_rows_than_messages() -> bytes:
    """A column of 2**50 rows, each of which needs a message."""
    return tensors(spec((2**50, 16), (64, 1), dtype="uint8", itemsize=1), chunk_bytes=16)


@attack(StateError)
def claims_all_that_messages_can_carry() -> bytes:
    """As many of the largest chunks as there are tags: 240 TiB."""
    return tensors(spec((240_000 << 30,), dtype="uint8", itemsize=1), chunk_bytes=1 << 30)


@attack()
def interlocks_with_itself() -> bytes:
    """Strides that do not nest, in 2**40 runs."""
    return tensors(spec((2**20, 2**20), (3, 2**21 + 1)))


@attack()
def interlocks_in_a_thousand_tensors() -> bytes:
    """A thousand tensors, each of which is just below the limit of runs."""
    one = [spec((1000, 1000), (3, 2501), storage=number) for number in range(1000)]
    return tensors(*one)


@attack()
def overlaps_in_a_thousand_patterns() -> bytes:
    """Patterns just below the limit of runs, which overlap in one storage."""
    return tensors(
        *(spec((500_000,), (7,), dtype="uint8", itemsize=1, offset=number) for number in range(500)),
        spec((300_000,), (11,), dtype="uint8", itemsize=1),
    )


@attack(None)
def has_patterns_inside_of_many_runs() -> bytes:
    """Twelve thousand runs, and six thousand patterns that may be inside one of them."""
    runs = [
        spec((8,), dtype="uint8", itemsize=1, offset=number * 8 + shift)
        for number in range(6_000)
        for shift in (0, 4)
    ]
    patterns = [spec((2,), (3,), dtype="uint8", itemsize=1, offset=number * 8) for number in range(6_000)]
    return tensors(*runs, *patterns)


@attack(None)
def overlaps_pairwise_thousands_of_times() -> bytes:
    """Six thousand extents, each shared by several tensors."""
    pairs = [
        spec((6,), dtype="uint8", itemsize=1, offset=number * 8 + shift)
        for number in range(6_000)
        for shift in (0, 2)
    ]
    return tensors(*pairs)


@attack(None)
def has_very_many_empty_tensors() -> bytes:
    """Time and memory must be proportional to the size of the frame."""
    return tensors(*(spec((0,)),) * 30_000)


@attack(None)
def expands_one_item_to_2_to_the_50() -> bytes:
    """An expanded tensor of four bytes and 2**50 items. A copy of it would not fit in memory."""
    return tensors(spec((2**50,), (0,)))


@attack(BadManifest)
def aliases_one_tensor_without_end() -> bytes:
    """A leaf of a hundred thousand parts, all of them the same tensor."""
    leaf = Leaf("tensor", (0,) * 100_000)
    one = TensorSpec("float32", 4, (4,), (1,), 0, 0)
    return frame_of(Manifest(-1, (Branch("list", (0,)),), (leaf,), (one,), (16,)))
