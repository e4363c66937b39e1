"""Objects in a state: whatever has `state_dict` and `load_state_dict`, such as modules and optimizers.

`read_objects` reads each object once. In the description of the state, the state dict stands in the object's
place. Receivers write in place what fits, and then give the whole state dict to `load_state_dict`. That runs
the object's hooks, and updates what the object derives from its state. It costs little for tensors that were
written in place, because torch does not copy a tensor onto itself. If `state_dict()` returned copies, as it
does for fused and quantized modules, their values reach the object this way too.
"""

from collections import deque
from collections.abc import Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from msgspec.structs import replace
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from torchferry.core.codec import encode_value
from torchferry.core.compare import Rule, RuleOf
from torchferry.core.manifest import Manifest
from torchferry.core.tree import MAX_DEPTH, Path, format_path, walk
from torchferry.errors import BadArgument, FerryError, StateError, Unsendable
from torchferry.tensors import registry
from torchferry.tensors.containers import is_builtin_container, take_apart
from torchferry.tensors.kinds import is_plain_parameter
from torchferry.tensors.kinds.dense import as_plain, grad_flags, with_grad_flags
from torchferry.tensors.kinds.subclass import build_nodes, copy_inner, flatten
from torchferry.tensors.memory import CPU
from torchferry.tensors.rng import RNG
from torchferry.torch_internals import local_tensor_of, make_dtensor

_PLAIN_TYPES = frozenset(
    {torch.Tensor, Parameter, type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype}
)


@dataclass(frozen=True, eq=False)
class ReadObject:
    """An object, and what its `state_dict()` returned.

    If `earlier` is given, the object is a module with tensors on the meta device. Then `state` has new
    tensors in their place, which are assigned to the module, and `earlier` has those that they replace.
    """

    value: Any
    state: Any
    earlier: Any = None

    def load(self, state: Any) -> None:
        """Give a state dict to the object."""
        if self.earlier is not None:
            self.value.load_state_dict(state, assign=True)
        elif isinstance(self.value, Optimizer):
            _load_exactly(self.value, state)
        elif isinstance(self.value, Module):
            tensors = chain(self.value.parameters(), self.value.buffers())
            # Inference tensors can be written only in inference mode.
            is_inference = any(not is_lazy(tensor) and tensor.is_inference() for tensor in tensors)
            with _InnerCopies(), torch.inference_mode() if is_inference else nullcontext():
                self.value.load_state_dict(state)
        else:
            self.value.load_state_dict(state)

    def names_on_meta(self) -> list[str]:
        """List the parameters and buffers of a module that was on the meta device and are still there."""
        if self.earlier is None:
            return []
        tensors = chain(self.value.named_parameters(), self.value.named_buffers())
        return [name for name, tensor in tensors if _is_on_meta(tensor)]


ReadObjects: TypeAlias = Mapping[int, ReadObject]
"""Objects by id."""

PlacedObjects: TypeAlias = Mapping[Path, ReadObject]
"""Objects by path, inner ones before outer ones. An object in two places of a state has two paths."""


def is_object(value: object) -> bool:
    """Return whether a value is an object with a state dict. A class is not, whatever its instances are."""
    if type(value) in _PLAIN_TYPES or is_builtin_container(value) or isinstance(value, type):
        return False
    with suppress(Exception):
        # The attribute may be a property, which may raise anything.
        return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    return False


def read_objects(state: Any, *, is_target: bool = False) -> ReadObjects:
    """Read every object in a state, also those in the state dicts of others. Each is read once.

    In a target, modules on the meta device get new tensors in their state dicts. Raises StateError with the
    path of an object whose `state_dict()` raises. In a source, it is Unsendable.
    """
    found: dict[int, ReadObject] = {}
    # This keeps visited values alive. Otherwise a new one could get the id of one that was freed.
    visited: dict[int, object] = {}
    made: dict[int, object] = {}
    pending: list[tuple[tuple[object, ...], Any]] = [((), state)]
    generators: list[tuple[tuple[object, ...], Any]] = []
    while pending or generators:
        path, value = pending.pop() if pending else generators.pop()
        # A state that is nested too deeply is refused when it is described.
        if id(value) in visited or len(path) > MAX_DEPTH:
            continue
        if isinstance(value, RNG) and pending:
            # Last, because `state_dict()` of another object may draw random numbers.
            generators.append((path, value))
            continue
        visited[id(value)] = value
        if is_object(value):
            what = f"state_dict() of a {type(value).__qualname__}"
            try:
                read = _read_target(value, made) if is_target else ReadObject(value, value.state_dict())
                if is_object(read.state):
                    raise Unsendable(f"{what} returned an object that has a state dict itself")
            except Exception as error:
                raised = f"{what} raised {type(error).__name__}: {error}"
                unread = StateError(raised) if is_target else Unsendable(raised)
                failure = error if isinstance(error, FerryError) else unread
                raise failure.at(format_path(path)).with_context(phase="describe") from error
            found[id(value)] = read
            pending.append((path, read.state))
            continue
        parts = None
        # What can't be sent is reported when the state is described.
        with suppress(Exception):
            parts = take_apart(value)
        if parts is not None and not _PLAIN_TYPES.issuperset(map(type, parts.children)):
            pairs = [*zip(parts.keys, parts.children, strict=True)]
            pending += [((*path, key), one) for key, one in reversed(pairs) if type(one) not in _PLAIN_TYPES]
    return found


def _read_target(value: Any, made: dict[int, object]) -> ReadObject:
    """Read an object. `made` has the tensors that were made for those on the meta device, by their ids."""
    if isinstance(value, Optimizer):
        if any(_is_on_meta(param) for group in value.param_groups for param in group["params"]):
            raise BadArgument(
                f"an {type(value).__name__} has parameters on the meta device, which are replaced when their "
                "module is received: receive the module first, then create the optimizer"
            )
    elif isinstance(value, Module) and any(map(_is_on_meta, chain(value.parameters(), value.buffers()))):
        earlier, state = value.state_dict(keep_vars=True), value.state_dict()
        for key, tensor in earlier.items():
            # One new tensor for each parameter, in all modules, so that tied parameters stay tied.
            if id(tensor) not in made:
                made[id(tensor)] = _materialized(tensor) if _is_on_meta(tensor) else tensor
            state[key] = made[id(tensor)]
        return ReadObject(value, state, earlier)
    return ReadObject(value, value.state_dict())


def _is_on_meta(value: Any) -> bool:
    local = _local(value)
    if isinstance(local, torch.Tensor) and registry.is_registered(type(local)):
        # The outer tensor may claim another device than that of its inner tensors.
        with suppress(Unsendable):
            return any(inner.is_meta for inner in flatten(local)[0])
    return isinstance(local, torch.Tensor) and local.is_meta


def _materialized(tensor: Any, device: torch.device = CPU) -> Any:
    """Return an empty tensor like one on the meta device, or that one itself if that can't be done."""
    if (local := _local(tensor)) is not tensor:
        mesh = tensor.device_mesh
        empty = _materialized(local, torch.device(mesh.device_type))
        made = make_dtensor(empty, mesh, tensor.placements, tensor.shape, tensor.stride())
        return with_grad_flags(made, grad_flags(tensor))
    if registry.is_registered(type(tensor)):
        with suppress(Exception):
            tensors, nodes, flags = flatten(tensor)
            return build_nodes(nodes, [_materialized(inner, device) for inner in tensors], flags)
        return tensor
    if type(tensor) is not torch.Tensor and not is_plain_parameter(tensor):
        return tensor
    plain = torch.empty_like(as_plain(tensor), device=device, requires_grad=False)
    made = plain.as_subclass(type(tensor)).requires_grad_(tensor.requires_grad)
    vars(made).update(vars(tensor))
    return made


class _InnerCopies(TorchFunctionMode):
    """Copies between equal tensor subclasses copy their inner tensors: `copy_` may quantize again.

    Modules load with `copy_`. What was received in place is then copied onto itself, which changes nothing.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and len(args) > 1 and isinstance(args[1], torch.Tensor):
            target, source = map(_local, args[:2])
            is_same = type(target) is type(source) and registry.is_registered(type(target))
            if is_same and copy_inner(target, source):
                return args[0]
        return func(*args, **(kwargs or {}))


def _local(tensor: Any) -> Any:
    """Return a tensor, or the local one of a DTensor."""
    return local_tensor_of(tensor) if hasattr(tensor, "device_mesh") else tensor


def _load_exactly(optimizer: Optimizer, state: Any) -> None:
    """Load the state of an optimizer without its casts: torch casts state tensors to the parameter's dtype.

    The hooks here get the state dict after the user's pre-hooks, and undo the casts before the user's
    post-hooks.
    """
    seen: dict[str, Any] = {}
    hooks: list[Any] = []
    # A wrapper that never called Optimizer.__init__ has no hooks.
    with suppress(AttributeError):
        hooks.append(optimizer.register_load_state_dict_pre_hook(lambda _, given: seen.update(given)))
        undo = partial(_undo_casts, seen)
        hooks.append(optimizer.register_load_state_dict_post_hook(undo, prepend=True))
    try:
        optimizer.load_state_dict(state)
    finally:
        for hook in hooks:
            hook.remove()


def _undo_casts(given: Mapping[str, Any], optimizer: Optimizer) -> None:
    # Parameters, and the numbers that they have in the state dict, in the same order.
    numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, param in zip(numbers, params, strict=True):
        if number in given["state"]:
            optimizer.state[param] = _uncast(optimizer.state[param], given["state"][number])


def _uncast(loaded: Any, given: Any) -> Any:
    """Return what was loaded, with the given tensor in place of each one that was cast."""
    if isinstance(loaded, torch.Tensor) and isinstance(given, torch.Tensor):
        if loaded.device == given.device:
            return given
        return loaded if loaded.dtype == given.dtype else given.to(loaded.device)
    if type(loaded) is dict and isinstance(given, dict):
        return {key: _uncast(value, given.get(key)) for key, value in loaded.items()}
    if type(loaded) is type(given) and type(loaded) in (list, tuple):
        return type(loaded)(_uncast(*each) for each in zip(loaded, given, strict=True))
    if type(loaded) is type(given) is deque:
        return deque(map(_uncast, loaded, given), given.maxlen)
    return loaded


def find_contradictions(objects: PlacedObjects, incoming: Manifest) -> list[tuple[Path, Path]]:
    """List pairs of paths that have one object here and different state dicts in the incoming state.

    State dicts are equal if all their values are, and their tensors are the same memory of the source.
    """
    first: dict[int, Path] = {}
    pairs = [(first.setdefault(id(read), path), path) for path, read in objects.items()]
    contents: dict[Path, list[object]] = {path: [] for pair in pairs if pair[0] != pair[1] for path in pair}
    for path, child in walk(incoming) if contents else ():
        held: Any = replace(incoming.branches[~child], children=()) if child < 0 else incoming.leaves[child]
        if child >= 0:
            held = replace(held, parts=()), [incoming.tensors[part] for part in held.parts]
        for depth in range(len(path) + 1):
            if path[:depth] in contents:
                # Encoded, a NaN equals itself.
                contents[path[:depth]].append((path[depth:], encode_value(held)))
    return [(one, two) for one, two in pairs if one != two and contents[one] != contents[two]]


def entries_of_modules(objects: PlacedObjects, manifest: Manifest) -> list[tuple[Path, bool]]:
    """List what the state dicts of modules have at the first level, and whether it is an empty container."""
    modules = {path for path, read in objects.items() if isinstance(read.value, Module)}
    found = [(path, child) for path, child in walk(manifest) if path and path[:-1] in modules]
    return [(path, child < 0 and not manifest.branches[~child].children) for path, child in found]


def rules_of(objects: PlacedObjects, shared: Collection[Path] | None = None) -> RuleOf:
    """Return the rules for the paths in objects.

    A module has the entries that it was built with. Extra state and the items of lists vary, but only in
    entries that both states have. Those are in `shared`; None means all. The state of all other objects
    varies, but an optimizer needs as many parameters as the peer's.
    """

    def rule_of(path: Path) -> Rule | None:
        for depth in range(len(path), -1, -1):
            if (read := objects.get(path[:depth])) is not None:
                is_shared = shared is None or path[: depth + 1] in shared
                return _rule(read, path[depth:], is_shared=is_shared)
        return None

    return rule_of


def _rule(read: ReadObject, path: Path, *, is_shared: bool) -> Rule:
    if isinstance(read.value, Module):
        entry: Any = read.state.get(path[0]) if path and isinstance(read.state, Mapping) else None
        is_variable = len(path) > 1 or (path and str(path[0]).endswith("_extra_state")) or is_lazy(entry)
        return "varies" if is_variable and is_shared else "fixed"
    is_parameter = len(path) >= 3 and (path[0], path[2]) == ("param_groups", "params")
    return "required" if is_parameter and isinstance(read.value, Optimizer) else "varies"
