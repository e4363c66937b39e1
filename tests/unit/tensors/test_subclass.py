"""Registered tensor subclasses arrive as the tensors that they are made of, fresh and in place."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

import torchferry
from tests.support.equality import assert_same
from tests.support.transfer import transfer
from tests.unit.tensors.refusing import refusal_at_a_path
from torchferry.errors import BadArgument, StateMismatch, UnknownType
from torchferry.tensors import registry


@pytest.fixture(autouse=True)
def _registered_classes_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests need tensor subclasses that are not registered."""
    monkeypatch.setattr(registry, "_types", dict(registry._types))
    torchferry.register_known("torch")
    torchferry.register(TwoTensor)


@torchferry.register
class Scheme(enum.Enum):
    ROW = 1
    BLOCK = 2


@torchferry.register
@dataclass(frozen=True)
class Settings:
    scheme: Scheme
    block: tuple[int, ...] = (1, 4)


@torchferry.register
class Scaled(torch.Tensor):
    """Integers with a scale, as torchao's quantized weights are. It counts the operations that it runs."""

    codes: torch.Tensor
    scale: torch.Tensor
    operations: list[str] = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, settings: object, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Any, scale: Any, settings: object, dtype: torch.dtype) -> None:
        self.codes, self.scale, self.settings = codes, scale, settings

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "scale"], {"settings": self.settings, "dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, context: Any, size: object, stride: object) -> Scaled:
        return cls(tensors["codes"], tensors["scale"], context["settings"], context["dtype"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        Scaled.operations.append(str(func))
        if func is torch.ops.aten.detach.default:
            (one,) = args
            return cls(one.codes.detach(), one.scale.detach(), one.settings, one.dtype)
        if func is torch.ops.aten.view.default:
            one, _ = args
            return cls(one.codes, one.scale, one.settings, one.dtype)
        raise NotImplementedError(str(func))


SETTINGS = Settings(Scheme.BLOCK)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scaled(seed: int, settings: object = SETTINGS, rows: int = 3) -> Scaled:
    codes = (numbers(seed, rows, 4) * 50).to(torch.int8)
    return Scaled(codes, numbers(seed + 100, rows, 1), settings, torch.bfloat16)


def two(seed: int, *, requires_grad: bool = False) -> TwoTensor:
    one, other = (numbers(seed + n, 2, 3).requires_grad_(requires_grad) for n in (0, 50))
    return TwoTensor(one, other)


def jagged(seed: int) -> torch.Tensor:
    rows = [numbers(seed, 2, 3), numbers(seed + 1, 4, 3)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def jagged_that_knows_its_longest(seed: int) -> torch.Tensor:
    built: Any = jagged(seed)
    built._get_max_seqlen()
    return built  # type: ignore[no-any-return]


EXAMPLES: dict[str, Callable[[int], Any]] = {
    "two tensors": two,
    "two tensors that require gradients": lambda seed: two(seed, requires_grad=True),
    "two that require gradients in one that does not": lambda seed: two(
        seed, requires_grad=True
    ).requires_grad_(False),
    "a parameter": lambda seed: torch.nn.Parameter(two(seed)),
    "two tensors of two": lambda seed: TwoTensor(two(seed), two(seed + 2)),
    "one tensor twice": lambda seed: TwoTensor(*[numbers(seed, 3)] * 2),
    "transposed": lambda seed: two(seed).t(),
    "a context of registered types": scaled,
    "a parameter with a context": lambda seed: torch.nn.Parameter(scaled(seed), requires_grad=False),
    "a parameter of integers that requires a gradient": lambda seed: torch.nn.Parameter(scaled(seed)),
    "a subclass inside a subclass": lambda seed: TwoTensor(scaled(seed), scaled(seed + 1)),
    "jagged": jagged,
    "jagged that requires a gradient": lambda seed: jagged(seed).requires_grad_(),
    "jagged with a cached size": jagged_that_knows_its_longest,
    "jagged and transposed": lambda seed: jagged(seed).transpose(1, 2),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_registered_subclass_arrives(name: str) -> None:
    state = {"w": EXAMPLES[name](0), "step": 3}
    assert_same(state, transfer(state).state)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_registered_subclass_is_written_in_place(name: str) -> None:
    state, local = {"w": EXAMPLES[name](0)}, {"w": EXAMPLES[name](7)}
    target = local["w"]
    assert transfer(state, into=local).state["w"] is target
    assert_same(state, local)


def test_in_place_no_operation_of_the_subclass_runs() -> None:
    state, local = {"w": scaled(0)}, {"w": torch.nn.Parameter(scaled(1), requires_grad=False)}
    codes = local["w"].codes  # type: ignore[attr-defined]
    Scaled.operations.clear()
    transfer(state, into=local)
    assert [operation for operation in Scaled.operations if "detach" not in operation] == []
    assert torch.equal(codes, state["w"].codes)


def sharing(plain: torch.Tensor) -> dict[str, Any]:
    return {"plain": plain, "two": TwoTensor(plain, plain * 2), "view": plain[1:3]}


def test_inner_tensors_share_memory_with_other_leaves() -> None:
    state, local = sharing(numbers(0, 4)), sharing(torch.zeros(4))
    assert_same(state, transfer(state).state)
    assert_same(state, transfer(state, into=local).state)
    assert_same(state, local)


def test_jagged_tensors_of_equal_rows_can_be_added_after_they_arrived() -> None:
    one = jagged(0)
    received = transfer({"one": one, "two": one * 2}).state
    assert torch.equal((received["one"] + received["two"]).values(), one.values() * 3)


def test_one_subclass_in_two_places_is_one_object() -> None:
    weight = scaled(0)
    received = transfer({"a": weight, "b": [weight]}).state
    assert received["a"] is received["b"][0]


@pytest.mark.parametrize(
    ("local", "said"),
    [
        (lambda: scaled(1, Settings(Scheme.ROW)), "context"),
        (lambda: scaled(1, rows=5), "shape"),
        (lambda: two(1), "class"),
        (lambda: torch.zeros(3, 4, dtype=torch.bfloat16), "kind"),
    ],
)
def test_a_target_of_another_class_context_or_shape_is_a_mismatch(
    local: Callable[[], torch.Tensor], said: str
) -> None:
    target = local()
    with pytest.raises(StateMismatch) as raised:
        transfer({"w": scaled(0)}, into={"w": target})
    assert said in {mismatch.what for mismatch in raised.value.mismatches}
    assert {mismatch.path for mismatch in raised.value.mismatches} == {"w"}
    assert_same(local(), target)


class Changing(Scaled):
    """Each time that it is flattened, it has another context."""

    times = 0

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        Changing.times += 1
        return ["codes", "scale"], {"settings": Changing.times, "dtype": self.dtype}


class Forgetful(Scaled):
    """It is built with other tensors than those that it is given."""

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, context: Any, size: object, stride: object) -> Scaled:
        return cls(tensors["codes"].clone(), tensors["scale"], context["settings"], context["dtype"])


class Failing(Scaled):
    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, context: Any, size: object, stride: object) -> Scaled:
        raise RuntimeError("it can't be built")


def as_class(cls: type[Scaled], settings: object = SETTINGS) -> Scaled:
    torchferry.register(cls)
    plain = scaled(0)
    return cls(plain.codes, plain.scale, settings, plain.dtype)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: as_class(Forgetful), "it is not the same"),
        (lambda: as_class(Changing), "it is not the same"),
        (lambda: as_class(Failing), "raised RuntimeError: it can't be built"),
        (lambda: scaled(0, object()), "builtins.object"),
        (lambda: scaled(0, torch.ones(1)), "a tensor can't be a key"),
        (
            lambda: TwoTensor(Unregistered(torch.ones(1)), Unregistered(torch.ones(1))),
            "Unregistered, which is neither",
        ),
    ],
)
def test_a_subclass_that_does_not_come_back_is_refused_with_its_path(
    make: Callable[[], torch.Tensor], said: str
) -> None:
    message = refusal_at_a_path(make())
    assert said in message
    assert "the tensor subclass" in message


class Unregistered(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.held = inner

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(tensors: Any, context: Any, size: object, stride: object) -> Unregistered:
        return Unregistered(tensors["held"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(str(func))


def test_a_subclass_that_is_not_registered_is_refused_with_the_call_that_registers_it() -> None:
    assert "torchferry.register(Unregistered)" in refusal_at_a_path(Unregistered(torch.ones(2)))


def test_a_receiver_that_has_not_registered_the_class_does_not_import_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torchferry.core.push import MAX_METADATA_BYTES
    from torchferry.engine.push import ReceiveOptions, SendOptions, receive_state, send_state
    from torchferry.testing import MemoryNetwork

    network = MemoryNetwork()
    send_state(network.link(0), [1], {"w": two(0)}, SendOptions(10, MAX_METADATA_BYTES))
    monkeypatch.setattr(registry, "_types", {})
    with pytest.raises(UnknownType, match=r"w: .*two_tensor\.TwoTensor is not registered"):
        receive_state(network.link(1), 0, ReceiveOptions(10, MAX_METADATA_BYTES))


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


@pytest.mark.parametrize("make", [two, scaled, lambda seed: TwoTensor(scaled(seed), scaled(seed + 1))])
def test_a_dtensor_of_a_subclass_arrives_and_is_written_in_place(
    mesh: Any, make: Callable[[int], Any]
) -> None:
    def sharded(seed: int) -> DTensor:
        return DTensor.from_local(make(seed), mesh, [Shard(0)], run_check=False)

    state, local = {"w": sharded(0)}, {"w": sharded(9)}
    assert_same(state, transfer(state).state)
    target = local["w"]
    assert transfer(state, into=local).state["w"] is target
    assert_same(state, local)


def test_a_dtensor_of_a_subclass_lands_neither_in_another_class_nor_in_another_placement(mesh: Any) -> None:
    state = {"w": DTensor.from_local(two(0), mesh, [Replicate()], run_check=False)}
    for local, placement in ((numbers(0, 2, 3), Replicate()), (two(0), Shard(0))):
        target = DTensor.from_local(local, mesh, [placement], run_check=False)
        with pytest.raises(StateMismatch):
            transfer(state, into={"w": target})


def test_in_place_the_version_counters_of_the_inner_tensors_change() -> None:
    local = two(1)
    before = local.a._version
    transfer({"w": two(0)}, into={"w": local})
    assert local.a._version > before


class LoadedParameter(torch.nn.Parameter):
    """As vLLM has it: a parameter that knows how its weights are loaded."""

    def __new__(cls, data: torch.Tensor, loader: object = None) -> LoadedParameter:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: torch.Tensor, loader: object = None) -> None:
        self.loader = loader

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_a_subclass_of_parameter_arrives_as_a_parameter_and_is_a_target_in_place() -> None:
    state = {"w": LoadedParameter(numbers(0, 3), print), "view": numbers(0, 2)}
    received = transfer(state).state
    assert_same(torch.nn.Parameter(numbers(0, 3), requires_grad=False), received["w"])
    local = LoadedParameter(torch.zeros(3), print)
    version = local._version
    written = transfer(state, into={"w": local, "view": torch.zeros(2)}).state["w"]
    assert written is local
    assert local.loader is print
    assert torch.equal(local.data, state["w"].data)
    assert local._version > version
    assert_same(torch.nn.Parameter(numbers(0, 3), requires_grad=False), transfer({"w": local}).state["w"])


def test_only_known_libraries_that_are_installed_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(cls.__name__ == "NestedTensor" for cls in torchferry.register_known("torch"))
    with pytest.raises(
        BadArgument, match=r"register_known\('numpy'\): the known libraries are torch, torchao"
    ):
        torchferry.register_known("numpy")
    import sys

    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(BadArgument, match="torchao can't be imported here"):
        torchferry.register_known("torchao")
    monkeypatch.setitem(sys.modules, "torch.nested._internal.nested_tensor", None)
    with pytest.raises(BadArgument, match="torch can't be imported here"):
        torchferry.register_known("torch")
