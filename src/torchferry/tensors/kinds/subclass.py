"""Registered tensor subclasses: the plain tensors that they are made of, and how to put them together.

A subclass names its inner tensors and its context with `__tensor_flatten__`, and is built from them by
`__tensor_unflatten__`. Inner tensors may be subclasses too. They are listed in a flat table of nodes, so that
nothing recurses over what a peer sent. In place, only the inner tensors are written: `copy_` of the outer one
may quantize again.
"""

from collections.abc import Sequence
from math import prod
from typing import Annotated, Any, TypeAlias

import torch
from msgspec import Meta, Struct

from torchferry.core.manifest import MAX_DIMS, Count, Leaf, TensorSpec, Value
from torchferry.core.text import MAX_CHARACTERS, show, show_name
from torchferry.errors import Unsendable
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
    """The grad flags of every node, then those of every inner tensor."""

    grad: tuple[GradFlags, ...]


def describe_nodes(outer: torch.Tensor, add_tensor: AddTensor) -> tuple[list[int], Nodes, tuple[int, ...]]:
    """Describe a registered subclass: the numbers of its inner tensors, its nodes, and all flags.

    Raises Unsendable if flattening and unflattening it, as the receiver does, does not give it back.
    """
    what = f"the tensor subclass {registry.name_of(type(outer))} can't be sent: "
    try:
        tensors, nodes, flags = flatten(outer)
        again, *rest = flatten(build_nodes(nodes, tensors, flags))
    except Unsendable as error:
        raise Unsendable(what + error.what) from None
    except Exception as error:
        reason = str(error)[:MAX_CHARACTERS]
        raise Unsendable(
            f"{what}flattening or unflattening it raised {type(error).__name__}: {reason}"
        ) from error
    if rest != [nodes, flags] or not all(map(_is_alias, tensors, again)):
        raise Unsendable(what + "after __tensor_flatten__ and __tensor_unflatten__ it is not the same")
    return [add_tensor(tensor) for tensor in tensors], nodes, flags


def flatten(outer: Any) -> tuple[list[torch.Tensor], Nodes, tuple[int, ...]]:
    """Return the plain tensors in a registered subclass, its nodes and all flags; or raise Unsendable."""
    from torchferry.tensors.values import to_wire  # here, because that module imports kinds

    tensors: dict[int, torch.Tensor] = {}
    nodes: list[Node] = []
    pending = [outer]
    for tensor in pending:
        name = registry.name_of(type(tensor))
        if not registry.is_registered(type(tensor)):
            raise Unsendable(f"it contains a {name}, which is neither a plain tensor nor registered")
        if len(pending) > _MAX_NODES:
            raise Unsendable(f"it is made of more than {_MAX_NODES} tensor subclasses")
        names, context = tensor.__tensor_flatten__()
        members: list[tuple[str, int]] = []
        for attribute in names:
            member = getattr(tensor, attribute)
            if type(member) in (torch.Tensor, torch.nn.Parameter):
                tensors.setdefault(id(member), member)
                members.append((attribute, list(tensors).index(id(member))))
            else:
                members.append((attribute, ~len(pending)))
                pending.append(member)
        if type(context) is dict and context.get(_GRAD) == tensor.requires_grad:
            # requires_grad is a grad flag, which a local tensor keeps. `build_nodes` puts it back.
            context = {**context, _GRAD: None}
        size, stride = (
            tuple(n if type(n) is int else None for n in t) for t in (tensor.shape, tensor.stride())
        )
        dtype = dtype_name(tensor.dtype)
        nodes.append(Node(name, dtype, size, stride, to_wire(context), tuple(members)))
    found = list(tensors.values())
    return found, tuple(nodes), tuple(map(grad_flags, (*pending, *found)))


def _is_alias(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors have the same layout over the same memory."""
    layouts = [(t.dtype, t.shape, t.stride(), t.device, t.is_conj(), t.is_neg()) for t in (one, two)]
    return layouts[0] == layouts[1] and one.data_ptr() == two.data_ptr()


def copy_inner(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Copy the inner tensors of one registered subclass to another; return False if they do not fit."""
    try:
        (targets, nodes, _), (sources, others, _) = flatten(target), flatten(source)
    except Unsendable:
        return False
    layouts = [[(t.dtype, t.shape) for t in tensors] for tensors in (targets, sources)]
    if nodes != others or layouts[0] != layouts[1]:
        return False
    with torch.no_grad():
        for one, two in zip(targets, sources, strict=True):
            one.copy_(two)
    return True


def build_nodes(nodes: Nodes, tensors: Sequence[torch.Tensor], flags: Sequence[int]) -> torch.Tensor:
    """Build a subclass from its inner tensors, with the flags of its nodes and its tensors."""
    from torchferry.tensors.values import from_wire

    def flagged(tensor: torch.Tensor, flag: int) -> torch.Tensor:
        # At the sender, tensors have their flags already. What `__tensor_unflatten__` returns may require a
        # gradient because an inner tensor does.
        return tensor if grad_flags(tensor) == flag else with_grad_flags(tensor.requires_grad_(False), flag)

    plain = list(map(flagged, tensors, flags[len(nodes) :]))
    built: dict[int, Any] = {}
    for number in reversed(range(len(nodes))):
        node = nodes[number]
        members = {name: plain[m] if m >= 0 else built[~m] for name, m in node.members}
        context: Any = from_wire(node.context)
        if type(context) is dict and _GRAD in context:
            context[_GRAD] = bool(flags[number] & 1)
        size = None if None in node.size else torch.Size(node.size)  # type: ignore[arg-type]
        stride = None if None in node.stride else node.stride
        cls: Any = registry.look_up(node.type)
        with torch.no_grad():
            made = cls.__tensor_unflatten__(members, context, size, stride)
        if type(made) is not cls or dtype_name(made.dtype) != node.dtype:
            raise ValueError(f"__tensor_unflatten__ returned a {type(made).__qualname__}, {made.dtype}")
        built[number] = flagged(made, flags[number])
    return built[0]  # type: ignore[no-any-return]


def check_nodes(nodes: Nodes, flags: Sequence[int], specs: Sequence[TensorSpec]) -> None:
    """Raise an exception if the nodes of a peer are not a tree over these tensors, or can't be built here."""
    from torchferry.tensors.values import from_wire

    dtypes = [node.dtype for node in nodes] + [spec.dtype for spec in specs]
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise ValueError(f"torch {torch.__version__} has no dtype {show(unknown[0])}")
    for flag, dtype in zip(flags, dtypes, strict=True):
        check_grad_flags(flag, dtype)
    referred: list[int] = []
    for number, node in enumerate(nodes):
        if not registry.is_tensor_subclass(registry.look_up(node.type)):
            raise ValueError(f"{show_name(node.type)} is not a tensor subclass")
        if len(dict(node.members)) < len(node.members):
            raise ValueError("two of its inner tensors have the same name")
        if any(not number < ~member < len(nodes) for _, member in node.members if member < 0):
            raise ValueError(
                f"node {number} of {len(nodes)} has members that are not later nodes: {show(node.members)}"
            )
        referred += [member for _, member in node.members]
        sizes = [n for n in (*node.size, *node.stride) if n]
        if len(node.size) != len(node.stride) or prod(sizes) * DTYPES[node.dtype].itemsize >= 2**63:
            raise ValueError(
                f"its size {show(node.size)} and stride {show(node.stride)} do not match, or are too large"
            )
        from_wire(node.context)
    # Every tensor must be in some node, and every node except the outermost in exactly one.
    inner = [~member for member in referred if member < 0]
    if sorted(inner) != [*range(1, len(nodes))] or {*referred} - {~n for n in inner} != {*range(len(specs))}:
        raise ValueError(f"its {len(nodes)} nodes are not a tree that has all its {len(specs)} tensors")


def node_properties(nodes: Nodes, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """Return the properties of nodes that are compared, as text by name."""
    from torchferry.tensors.values import from_wire

    sizes = ["ragged" if n is None else str(n) for n in nodes[0].size]
    return {
        "dtype": show_name(nodes[0].dtype),
        "shape": f"[{', '.join(sizes)}]",
        "class": ", ".join(show_name(node.type) for node in nodes),
        "inner tensors": ", ".join(show_name(name) for node in nodes for name, _ in node.members),
        "dtypes of the inner tensors": ", ".join(show_name(spec.dtype) for spec in specs),
        "shapes of the inner tensors": ", ".join(show(list(spec.shape)) for spec in specs),
        "context": ", ".join(show(from_wire(node.context)) for node in nodes),
    }


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
