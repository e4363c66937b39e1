"""Registered tensor subclasses: the plain tensors that they are made of, and how to put them together.

A subclass names its inner tensors and its context with `__tensor_flatten__`, and is built from them by
`__tensor_unflatten__`. Inner tensors may be subclasses too. They are listed in a flat table of nodes, so that
nothing recurses over what a peer sent. In place, only the inner tensors are written: `copy_` of the outer one
may quantize again.
"""

from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Annotated, Any, TypeAlias

import torch
from msgspec import Meta, Struct

from torchferry.core.manifest import MAX_DIMS, Count, Leaf, TensorSpec, Value
from torchferry.core.text import MAX_CHARACTERS, show, show_name
from torchferry.errors import FerryError, Unsendable
from torchferry.tensors import registry
from torchferry.tensors.kinds.base import AddTensor, Form, Kind, RebuildContext
from torchferry.tensors.kinds.dense import GradFlags, check_grad_flags, grad_flags, with_grad_flags
from torchferry.tensors.memory import DTYPES, dtype_name

_MAX_NODES = 64
_GRAD = "requires_grad"

Sizes: TypeAlias = Annotated[tuple[Count | None, ...], Meta(max_length=MAX_DIMS)]
"""Sizes or strides. None stands for the symbolic size of a ragged dimension."""


class Node(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor subclass. A member m >= 0 is tensor m of the leaf, a member m < 0 is node ~m."""

    type: str
    dtype: str
    size: Sizes
    stride: Sizes
    context: Value
    members: tuple[tuple[str, int], ...]


Nodes: TypeAlias = Annotated[tuple[Node, ...], Meta(max_length=_MAX_NODES)]
"""The outermost subclass, then those inside it: parents first, and each has one parent."""


class SubclassFixed(Form, frozen=True):
    """What an in-place target must have in common with the incoming tensor."""

    nodes: Nodes


class SubclassTraits(Form, frozen=True):
    """The flags of every node, then those of every inner tensor."""

    grad: tuple[GradFlags, ...]


def describe_nodes(outer: torch.Tensor, add_tensor: AddTensor) -> tuple[list[int], Nodes, tuple[int, ...]]:
    """Describe a registered subclass: the numbers of its inner tensors, its nodes, and all flags.

    Raises Unsendable if its class is not registered, or if flattening and unflattening do not give it back.
    """
    tensors, nodes, flags = _take_apart(outer)
    try:
        rebuilt = build_nodes(nodes, tensors, flags)
        # Names, contexts and sizes, and the same memory in the same layout.
        again, nodes_again, flags_again = _take_apart(rebuilt)
        is_same = (nodes, flags) == (nodes_again, flags_again) and all(map(_is_alias, tensors, again))
    except FerryError:
        raise
    except Exception as error:
        raise _cannot_send(outer, f"__tensor_unflatten__ raised {type(error).__name__}: {error}") from error
    if not is_same:
        raise _cannot_send(outer, "after __tensor_flatten__ and __tensor_unflatten__ it is not the same")
    return [add_tensor(tensor) for tensor in tensors], nodes, flags


def _take_apart(outer: torch.Tensor) -> tuple[list[torch.Tensor], Nodes, tuple[int, ...]]:
    from torchferry.tensors.values import to_wire

    tensors: dict[int, torch.Tensor] = {}
    nodes: list[Node] = []
    pending = [outer]
    for tensor in pending:
        cls = type(tensor)
        if not registry.is_registered(cls):
            raise _cannot_send(tensor, "it is inside another one and is not registered, nor a plain tensor")
        if len(pending) > _MAX_NODES:
            raise _cannot_send(outer, f"it is made of more than {_MAX_NODES} tensor subclasses")
        try:
            names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            inner = {str(name): getattr(tensor, name) for name in names}
        except Exception as error:
            raise _cannot_send(outer, f"__tensor_flatten__ raised {type(error).__name__}: {error}") from error
        members: list[tuple[str, int]] = []
        for name, member in inner.items():
            if type(member) in (torch.Tensor, torch.nn.Parameter):
                tensors.setdefault(id(member), member)
                members.append((name, list(tensors).index(id(member))))
            else:
                pending.append(member)
                members.append((name, ~(len(pending) - 1)))
        if type(context) is dict and context.get(_GRAD) == tensor.requires_grad:
            # A local tensor keeps its own. `build_nodes` puts it back.
            context = {**context, _GRAD: None}
        try:
            wire = to_wire(context)
        except Unsendable as error:
            raise _cannot_send(tensor, f"in its context, {error.what}") from None
        sizes = [
            tuple(n if type(n) is int else None for n in each) for each in (tensor.shape, tensor.stride())
        ]
        nodes.append(Node(registry.name_of(cls), dtype_name(tensor.dtype), *sizes, wire, tuple(members)))
    found = list(tensors.values())
    return found, tuple(nodes), tuple(map(grad_flags, (*pending, *found)))


def _cannot_send(tensor: object, reason: str) -> Unsendable:
    name = registry.name_of(type(tensor))
    return Unsendable(f"the tensor subclass {name} can't be sent: {reason[:1000]}")


def _is_alias(one: torch.Tensor, two: torch.Tensor) -> bool:
    layouts = [(t.dtype, t.shape, t.stride(), t.device, t.is_conj(), t.is_neg()) for t in (one, two)]
    return layouts[0] == layouts[1] and one.data_ptr() == two.data_ptr()


def build_nodes(nodes: Nodes, tensors: Sequence[torch.Tensor], flags: Sequence[int]) -> torch.Tensor:
    """Build a subclass from its inner tensors, with the flags of its nodes and its tensors."""
    from torchferry.tensors.values import from_wire

    # At the sender, the tensors have their flags already.
    plain = [
        tensor if grad_flags(tensor) == flag else with_grad_flags(tensor, flag)
        for tensor, flag in zip(tensors, flags[len(nodes) :], strict=True)
    ]
    built: dict[int, Any] = {}
    for number in reversed(range(len(nodes))):
        node, requires_grad = nodes[number], bool(flags[number] & 1)
        members = {name: plain[m] if m >= 0 else built[~m] for name, m in node.members}
        context: Any = from_wire(node.context)
        if type(context) is dict and _GRAD in context:
            context[_GRAD] = requires_grad
        size = None if None in node.size else torch.Size(node.size)  # type: ignore[arg-type]
        stride = None if None in node.stride else node.stride
        cls: Any = registry.look_up(node.type)
        with torch.no_grad():
            made = cls.__tensor_unflatten__(members, context, size, stride)
        if type(made) is not cls or dtype_name(made.dtype) != node.dtype:
            raise ValueError(f"__tensor_unflatten__ returned a {type(made).__qualname__}, {made.dtype}")
        built[number] = made if grad_flags(made) == flags[number] else with_grad_flags(made, flags[number])
    return built[0]  # type: ignore[no-any-return]


def check_nodes(nodes: Nodes, flags: Sequence[int], specs: Sequence[TensorSpec]) -> None:
    """Raise an exception if the nodes of a peer are not a tree over these tensors, or can't be built here."""
    from torchferry.tensors.values import from_wire

    if len(flags) != len(nodes) + len(specs):
        raise ValueError(f"it has flags for {len(flags)} of {len(nodes) + len(specs)} tensors")
    parents = [0] * len(nodes)
    used = [0] * len(specs)
    for number, node in enumerate(nodes):
        if not registry.is_tensor_subclass(registry.look_up(node.type)):
            raise ValueError(f"{show_name(node.type)} is not a tensor subclass")
        if len({name for name, _ in node.members}) < len(node.members):
            raise ValueError("two of its inner tensors have the same name")
        for _, member in node.members:
            if 0 <= member < len(specs):
                used[member] += 1
            elif number < ~member < len(nodes):
                parents[~member] += 1
            else:
                raise ValueError(f"node {number} has the member {member}")
        if len(node.size) != len(node.stride):
            raise ValueError(f"it has {len(node.size)} sizes and {len(node.stride)} strides")
        if node.dtype not in DTYPES:
            raise ValueError(f"torch {torch.__version__} has no dtype {show(node.dtype)}")
        for sizes in (node.size, node.stride):
            if prod(n for n in sizes if n) * DTYPES[node.dtype].itemsize >= 2**63:
                raise ValueError(f"its size or stride {show(sizes)} is more than torch can count")
        check_grad_flags(flags[number], node.dtype)
        from_wire(node.context)
    if parents[1:] != [1] * (len(nodes) - 1) or not all(used) or not nodes:
        raise ValueError("its nodes are not a tree that has all its tensors")
    for flag, spec in zip(flags[len(nodes) :], specs, strict=True):
        check_grad_flags(flag, spec.dtype)


def node_properties(nodes: Nodes, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """Return the properties of nodes that are compared, as text by name."""
    from torchferry.tensors.values import from_wire

    outer = nodes[0]
    found = {"dtype": show_name(outer.dtype), "shape": _show_size(outer.size)}
    for number, node in enumerate(nodes):
        name = show_name(node.type.rpartition(".")[2])
        found[f"class {number}" if number else "class"] = show_name(node.type)
        with suppress(Exception):
            found[f"context of {name}"] = repr(from_wire(node.context))[: 10 * MAX_CHARACTERS]
        for member, part in node.members:
            if part >= 0:
                spec = specs[part]
                found[f"{name}.{show_name(member)}"] = f"{show_name(spec.dtype)}{show(list(spec.shape))}"
    return found


def _show_size(size: Sizes) -> str:
    return "[" + ", ".join("ragged" if n is None else str(n) for n in size) + "]"


def _describe(tensor: torch.Tensor, add_tensor: AddTensor) -> Leaf:
    parts, nodes, flags = describe_nodes(tensor, add_tensor)
    fixed, traits = SubclassFixed(nodes), SubclassTraits(flags)
    return Leaf(SUBCLASS.name, tuple(parts), fixed.packed(), traits.packed())


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], context: RebuildContext) -> object:
    return build_nodes(SubclassFixed.read(leaf.fixed).nodes, parts, SubclassTraits.read(leaf.traits).grad)


SUBCLASS = Kind(
    "subclass",
    _describe,
    _rebuild,
    tensor_count=None,
    fixed=SubclassFixed,
    traits=SubclassTraits,
    check=lambda leaf, specs: check_nodes(
        SubclassFixed.read(leaf.fixed).nodes, SubclassTraits.read(leaf.traits).grad, specs
    ),
    properties=lambda leaf, specs: node_properties(SubclassFixed.read(leaf.fixed).nodes, specs),
)
