"""Roots: what changes them, what does not, and that equal roots mean equal chunks."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from tests.support.sizes import examples
from torchferry.core.codec import encode_value
from torchferry.core.manifest import Branch, Leaf, Manifest, Special, TensorSpec
from torchferry.core.plan import Plan, make_plan
from torchferry.core.pull import PULL_CHUNK_BYTES
from torchferry.core.root import root_of
from torchferry.engine.pull.published import Published, SnapshotMemory, publish
from torchferry.engine.workspace import Workspace
from torchferry.errors import Unsendable
from torchferry.tensors.memory import CPU

CHUNK = PULL_CHUNK_BYTES


def plan_of(manifest: Manifest) -> Plan:
    return make_plan(manifest, CHUNK, pack_from=1)


def chunks_of(manifest: Manifest, storages: list[bytes]) -> list[bytes]:
    """Return the chunks of a state whose storages have these bytes, and whose tensors have no gaps."""
    return [
        b"".join(storages[piece.storage][piece.offset : piece.end] for piece in chunk.pieces)
        for chunk in plan_of(manifest).chunks
    ]


def identify(manifest: Manifest, storages: list[bytes]) -> str:
    """Return the root of such a state."""
    digests = [xxh3_64_intdigest(chunk) for chunk in chunks_of(manifest, storages)]
    return root_of(manifest, plan_of(manifest), digests)


def root(state: object) -> str:
    return published(state).root


def published(state: object, *, snapshot: bool = True) -> Published:
    return publish(state, 1, Workspace(CPU), SnapshotMemory(), snapshot=snapshot)


def make_state() -> dict[str, Any]:
    """A state with most kinds of leaves and containers."""
    numbers = torch.Generator().manual_seed(7)
    base = torch.randn(200, generator=numbers)
    return {
        "w": torch.randn(20, 11, generator=numbers),
        "head": base[:60],
        "tail": base[40:150],
        "column": torch.randn(30, 4, generator=numbers)[:, 1],
        "large": torch.randn(400_000, generator=numbers),
        "complex": torch.randn(5, dtype=torch.complex64, generator=numbers),
        "sparse": torch.eye(4).to_sparse(),
        "list": [torch.ones(3), 1.5, None],
        "empty": {},
        "step": 7,
    }


def test_equal_states_have_equal_roots_copied_or_not() -> None:
    one, two = published(make_state()), published(make_state(), snapshot=False)
    assert one.root == two.root


def test_another_process_computes_the_same_root() -> None:
    code = "from tests.unit.core.test_root import make_state, root\nprint(root(make_state()))"
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "5"}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=60
    )
    assert found.stdout.split()[-1] == root(make_state())


def change(path: str, function: Callable[[Any], Any]) -> Callable[[dict[str, Any]], object]:
    def apply(state: dict[str, Any]) -> object:
        return {**state, path: function(state[path])}

    return apply


def with_last_byte_changed(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[-1] ^= 1
    return changed


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a byte": change("w", with_last_byte_changed),
    "a byte of the second chunk": change("large", with_last_byte_changed),
    "a byte of a column": change("column", lambda t: t + torch.eye(30)[3]),
    "minus zero": change("list", lambda items: [torch.tensor([1.0, 1.0, -0.0]), *items[1:]]),
    "zero": change("list", lambda items: [torch.tensor([1.0, 1.0, 0.0]), *items[1:]]),
    "dtype": change("w", lambda t: t.view(torch.int32)),
    "shape": change("w", lambda t: t.view(11, 20)),
    "one more dimension": change("w", lambda t: t[None]),
    "strides": change("w", lambda t: t.t().contiguous().t()),
    "conj": change("complex", lambda t: t.conj()),
    "neg": change("w", lambda t: torch._neg_view(t)),
    "path": lambda state: {("v" if key == "w" else key): value for key, value in state.items()},
    "type of a key": lambda state: {(7 if key == "step" else key): value for key, value in state.items()},
    "nesting": lambda state: {"state": state},
    "order of keys": lambda state: dict(reversed(state.items())),
    "value": change("step", lambda step: step + 1),
    "type of a value": change("step", float),
    "a value that equals it": change("list", lambda items: [items[0], items[1], False]),
    "kind": change("w", lambda t: t.numpy()),
    "sparse size": change("sparse", lambda t: torch.eye(4, 5).to_sparse()),
    "sparse index": change("sparse", lambda t: torch.eye(4).flip(0).to_sparse()),
    "list instead of tuple": change("list", tuple),
    "dict instead of list": change("list", lambda items: dict(enumerate(items))),
    "OrderedDict": lambda state: OrderedDict(state),
    "an empty list instead of an empty dict": change("empty", list),
    "no empty dict": lambda state: {key: value for key, value in state.items() if key != "empty"},
    "one more leaf": lambda state: {**state, "more": None},
    "memory that is not shared any more": change("head", torch.clone),
    "a tied tensor": lambda state: {**state, "more": state["w"]},
    "an equal tensor": lambda state: {**state, "more": state["w"].clone()},
    "an empty tensor": lambda state: {**state, "more": torch.empty(0)},
}


def test_every_difference_changes_the_root() -> None:
    roots = {name: root(alter(make_state())) for name, alter in CHANGES.items()}
    assert root(make_state()) not in roots.values()
    assert len({*roots.values()}) == len(roots), "all of them differ from each other too"


def test_traits_that_a_receiver_in_place_keeps_do_not_change_the_root() -> None:
    state = make_state()
    state["w"] = torch.nn.Parameter(state["w"])
    state["list"][0].requires_grad_()
    assert root(state) == root(make_state())
    array = make_state()["w"].numpy()
    arrays = [array.copy(), array.copy()]
    arrays[1].flags.writeable = False
    assert root(arrays[0]) == root(arrays[1])


def test_memory_that_no_tensor_uses_does_not_change_the_root() -> None:
    state = make_state()
    wide = torch.full((30, 4), 9.0)
    wide[:, 1] = state["column"]
    state["column"] = wide[:, 1]
    state["w"] = torch.cat([torch.zeros(3, 11), state["w"]])[3:]
    assert root(state) == root(make_state())


def test_the_order_of_storages_does_not_change_the_root() -> None:
    first, second = bytes(range(8)), bytes(range(100, 108))
    one, two = (TensorSpec("uint8", 1, (8,), (1,), storage, 0) for storage in (0, 1))
    leaves = (Leaf("tensor", (0,)), Leaf("tensor", (1,)))
    branch = Branch("dict", (0, 1), ("a", "b"))
    manifest = Manifest(-1, (branch,), leaves, (one, two), (8, 8))
    swapped = replace(manifest, tensors=(replace(one, storage=1), replace(two, storage=0)))
    assert identify(manifest, [first, second]) == identify(swapped, [second, first])
    # The number of a tensor, unlike that of a storage, decides about the order of chunks.
    renumbered = replace(manifest, branches=(replace(branch, children=(1, 0)),))
    assert chunks_of(manifest, [first, second]) != chunks_of(renumbered, [second, first])
    assert identify(manifest, [first, second]) != identify(renumbered, [second, first])


def views_and_clones() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Views of one buffer, at odd offsets and in another order than in the state, and their clones."""
    flat = torch.randn(1_500_000, generator=torch.Generator().manual_seed(5))
    views = {
        "large": flat[500_001:1_300_008],
        "small": flat[3:90],
        "matrix": flat[200_005:440_005].view(400, 600),
        "transposed": flat[91:99].view(2, 4).t(),
        "bytes": flat[1_300_008:1_400_000].view(torch.uint8)[7:300_000],
        "scalar": flat[2],
    }
    return views, {name: view.clone() for name, view in views.items()}


def test_views_of_one_buffer_have_the_root_and_the_chunks_of_their_clones() -> None:
    one, two = (published(state) for state in views_and_clones())
    assert len(one.digests) > 6
    assert one.digests == two.digests
    assert one.root == two.root


def test_a_pattern_that_is_too_irregular_for_a_root_can_not_be_published() -> None:
    x = torch.arange(30_000)
    with pytest.raises(Unsendable, match=r"clone\(\) the strided"):
        published({"a": x[::2], "b": x[::3]})


def sharded(shards: tuple[tuple[int, int], ...], placement: str) -> tuple[Manifest, list[bytes]]:
    """A sharded tensor of which this process has some shards: (offset, size)."""
    fixed = Special(0, encode_value({"size": [8], "shards": [[[start], [n]] for start, n in shards]}))
    traits = Special(0, encode_value({"all": [[[0], [4], placement]], "dtype": "uint8"}))
    tensors = tuple(TensorSpec("uint8", 1, (n,), (1,), number, 0) for number, (_, n) in enumerate(shards))
    leaf = Leaf("sharded", tuple(range(len(shards))), fixed, traits)
    return Manifest(0, (), (leaf,), tensors, tuple(n for _, n in shards)), [b"x" * n for _, n in shards]


def test_the_position_of_a_shard_changes_the_root() -> None:
    assert identify(*sharded(((0, 4),), "rank:0/cpu")) != identify(*sharded(((4, 4),), "rank:0/cpu"))


@pytest.mark.parametrize("shards", [((0, 4),), ()], ids=["one shard", "no shard"])
def test_ranks_and_devices_do_not_change_the_root(shards: tuple[tuple[int, int], ...]) -> None:
    roots = {identify(*sharded(shards, place)) for place in ("rank:0/cpu", "rank:3/cuda:1")}
    assert len(roots) == 1


def test_tensors_of_equal_bytes_that_are_shared_in_another_way_have_another_root() -> None:
    a, c = (torch.full((1 << 18,), value) for value in (1.0, 2.0))
    own = a.clone()
    states = [
        {"a": a, "b": own, "c": c, "d": own},
        {"a": a, "b": a, "c": c, "d": own},
        {"a": a, "b": own, "c": c, "d": a},
        {"a": a, "b": a, "c": c, "d": a},
        {"a": a, "b": own, "c": c, "d": a.clone()},
    ]
    one, two, three, *_ = found = [published(state) for state in states]
    assert len({each.root for each in found}) == len(states)
    assert one.digests != two.digests, "chunk 1 is A in one state and C in the other"
    assert one.digests == three.digests, "the states differ only in what is shared"


@st.composite
def states(draw: st.DrawFn) -> tuple[Manifest, list[bytes]]:
    """Paths with uint8 tensors that are views of up to three storages, shared in any way."""
    storages = [
        draw(st.sampled_from([b"aaaaaa", b"abcabc", b"aabbcc"])) for _ in range(draw(st.integers(1, 3)))
    ]
    storage_numbers = st.integers(0, len(storages) - 1)
    starts = draw(st.lists(st.tuples(storage_numbers, st.sampled_from([0, 2, 3])), min_size=1, max_size=4))
    tensors = tuple(TensorSpec("uint8", 1, (3,), (1,), storage, start) for storage, start in starts)
    count = draw(st.integers(len(tensors), 5))
    extra = [draw(st.integers(0, len(tensors) - 1)) for _ in range(count - len(tensors))]
    parts = draw(st.permutations([*range(len(tensors)), *extra]))
    leaves = tuple(Leaf("tensor", (part,)) for part in parts)
    branch = Branch("list", tuple(range(count)))
    return Manifest(-1, (branch,), leaves, tensors, (6,) * len(storages)), storages


@st.composite
def sharings(draw: st.DrawFn, contents: list[bytes]) -> tuple[Manifest, list[bytes]]:
    """A state with these bytes at its paths, whose equal tensors are one or several, in any order."""
    copies = [(content, draw(st.integers(0, 1))) for content in contents]
    tensors = draw(st.permutations(list(dict.fromkeys(copies))))
    specs = tuple(TensorSpec("uint8", 1, (3,), (1,), storage, 0) for storage in range(len(tensors)))
    leaves = tuple(Leaf("tensor", (tensors.index(copy),)) for copy in copies)
    manifest = Manifest(-1, (Branch("list", tuple(range(len(leaves)))),), leaves, specs, (3,) * len(specs))
    return manifest, [content for content, _ in tensors]


@examples(500)
@given(st.data())
def test_states_of_equal_root_have_equal_chunks_and_share_tensors_in_the_same_way(
    data: st.DataObject,
) -> None:
    contents = data.draw(st.lists(st.sampled_from([b"aaa", b"ccc"]), min_size=2, max_size=4))
    one, two = (data.draw(sharings(contents)) for _ in range(2))
    if identify(*one) == identify(*two):
        assert chunks_of(*one) == chunks_of(*two)
        assert one[0].leaves == two[0].leaves
    else:
        assert one != two


@examples(200)
@given(states(), st.data())
def test_a_byte_that_any_leaf_uses_changes_the_root_and_no_other_byte_does(
    state: tuple[Manifest, list[bytes]], data: st.DataObject
) -> None:
    manifest, storages = state
    number = data.draw(st.integers(0, len(storages) - 1))
    offset = data.draw(st.integers(0, 5))
    changed = [bytearray(storage) for storage in storages]
    changed[number][offset] ^= data.draw(st.integers(1, 255))
    is_used = any(
        spec.storage == number and spec.offset <= offset < spec.offset + 3 for spec in manifest.tensors
    )
    assert (identify(manifest, storages) != identify(manifest, [*map(bytes, changed)])) == is_used
