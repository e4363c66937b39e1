"""Pickle: leaves that only pickle can encode, and the pickled metadata that PGTransport's tests use.

No other module imports pickle, and nothing is unpickled unless the caller allows it. In the format of those
tests ("the contract"), the metadata is a pickle of the classes below, and the whole storage of each tensor is
one message. torchferry receives this format but never sends it. `_to_frame` converts such metadata to a
frame, so that the engine receives the state with all its checks.
"""

import pickle
import pickletools
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from msgspec import msgpack

from torchferry.core.codec import Frame, decode_manifest
from torchferry.core.manifest import VALUE, Leaf, Manifest, TensorSpec
from torchferry.core.text import show
from torchferry.errors import BadManifest, FerryError, PickleRefused, Unsendable
from torchferry.tensors.describe import describe
from torchferry.tensors.memory import dtype_name
from torchferry.tensors.values import to_wire
from torchferry.torch_internals import pytree

_OPCODES = frozenset(opcode.code for opcode in pickletools.opcodes)


@dataclass
class ContractTensorMeta:
    """A strided tensor in the contract. `nbytes` is the size of its whole storage, which is sent."""

    shape: torch.Size
    dtype: torch.dtype
    storage_offset: int
    stride: tuple[int, ...]
    nbytes: int


@dataclass
class ContractStateMeta:
    """A state in the contract: its tree, and path and value of each leaf.

    Despite its name, `non_tensor_leaves` has all leaves: a tensor is a ContractTensorMeta there.
    """

    treespec: Any
    paths: list[Any]
    non_tensor_leaves: list[object]


def cast_storage(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the storage of a plain tensor as a flat tensor; raises Unsendable for a subclass."""
    if type(tensor) is not torch.Tensor:
        raise Unsendable(f"only plain tensors can be cast, not {type(tensor)}")
    return torch.tensor(tensor.untyped_storage(), dtype=dtype, device=tensor.device)


def prepare_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, ContractTensorMeta]:
    """Return the storage of a tensor as bytes, and its description."""
    offset, nbytes = int(tensor.storage_offset()), tensor.untyped_storage().nbytes()
    meta = ContractTensorMeta(tensor.shape, tensor.dtype, offset, tensor.stride(), nbytes)
    return cast_storage(tensor, torch.uint8), meta


def prepare_state(state_dict: object, device: torch.device) -> tuple[ContractStateMeta, list[torch.Tensor]]:
    """Describe a state of plain tensors and values, and return its storages as bytes; ignores `device`."""
    found, treespec = pytree().tree_flatten_with_path(state_dict)
    leaves = [value for _, value in found]
    storages: list[torch.Tensor] = []
    for number, value in enumerate(leaves):
        if isinstance(value, torch.Tensor):
            is_parameter = type(value) is torch.nn.Parameter
            storage, leaves[number] = prepare_tensor(value.detach() if is_parameter else value)
            storages.append(storage)
    return ContractStateMeta(treespec, [path for path, _ in found], leaves), storages


def dump_leaf(value: object) -> bytes:
    """Pickle a leaf; raises Unsendable if pickle can't encode it."""
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise Unsendable(f"a {type(value).__qualname__} can't be pickled either: {error}") from None


def load_leaf(data: bytes) -> object:
    """Unpickle a leaf, which runs any code that the sender put there; raises BadManifest if that fails."""
    try:
        return pickle.loads(data)
    except Exception as error:
        raise BadManifest(f"a pickled leaf can't be loaded here: {error!r}") from error


def decode_pickled(data: bytes, *, allow_pickle: bool) -> Frame:
    """Decode pickled metadata; raises PickleRefused if that is not allowed, BadManifest if it is invalid."""
    if not allow_pickle and data[:1].decode("latin-1") in _OPCODES:
        raise PickleRefused(
            "the peer's metadata looks like a pickle, which could run code here; nothing was loaded. Send "
            "with torchferry, or set allow_pickle=True where the sender is trusted"
        )
    try:
        # Without allow_pickle, this is reached only if the first byte is no opcode. Then `loads` fails before
        # it runs anything. It is called because the contract's tests replace it.
        meta = pickle.loads(data)
    except Exception as error:
        raise BadManifest(
            f"the peer's metadata is neither torchferry's nor a pickle ({error}): does the peer run the same "
            "version of torchferry?"
        ) from None
    if not isinstance(meta, ContractStateMeta):
        raise BadManifest(f"the peer's metadata is a pickled {type(meta).__qualname__}, not that of a state")
    try:
        return _to_frame(meta)
    except Exception as error:
        reason = error.what if isinstance(error, FerryError) else error
        raise BadManifest(f"the peer's pickled metadata does not describe a state: {reason}") from None


def _to_frame(meta: ContractStateMeta) -> Frame:
    """Express a state of the contract as a frame: one storage for each tensor, sent whole."""
    leaves = meta.non_tensor_leaves
    # Describe the tree with a number for each leaf, and put leaf n in the place of number n.
    tree = describe(pytree().tree_unflatten(list(range(len(leaves))), meta.treespec)).manifest
    tensors: list[TensorSpec] = []
    storages: list[int] = []
    described: list[Leaf] = []
    for placeholder in tree.leaves:
        value = leaves[placeholder.traits]  # type: ignore[index]
        if not isinstance(value, ContractTensorMeta):
            described.append(Leaf(VALUE, traits=to_wire(value)))
            continue
        described.append(Leaf("tensor", (len(tensors),)))
        dtype, nbytes, storage = value.dtype, _plain_int(value.nbytes), len(storages)
        shape, stride = tuple(map(_plain_int, value.shape)), tuple(map(_plain_int, value.stride))
        offset = _plain_int(value.storage_offset) * dtype.itemsize
        tensors.append(TensorSpec(dtype_name(dtype), dtype.itemsize, shape, stride, storage, offset))
        # The whole storage as a tensor without a leaf, so that all its bytes are moved.
        tensors.append(TensorSpec("uint8", 1, (nbytes,), (1,), storage, 0))
        storages.append(nbytes)
    manifest = Manifest(tree.root, tree.branches, tuple(described), tuple(tensors), tuple(storages))
    # Decoding checks it like any other manifest. torch's PGTransport does not cut storages into chunks.
    return Frame(decode_manifest(msgpack.encode(manifest)), chunk_bytes=2**62)


def _plain_int(number: object) -> int:
    """Convert an integer of any type, such as numpy's; raise BadManifest if it is not an integer."""
    try:
        return int(index(number))  # type: ignore[arg-type]
    except TypeError:
        raise BadManifest(f"the size, stride or offset {show(number)} is not an integer") from None
