"""Containers arrive as the same type, with their keys, order and attributes."""

from __future__ import annotations

import argparse
import collections
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.equality import assert_same
from tests.support.transfer import transfer
from tests.unit.tensors.refusing import refusal_at_a_path, refusal_of
from torchferry import register
from torchferry.core.tree import MAX_DEPTH
from torchferry.errors import StateMismatch


@register
class Point(NamedTuple):
    x: object
    y: object = None


Pair = collections.namedtuple("Pair", "left right")
register(Pair)


@register
@dataclass
class Loader:
    epoch: int
    seen: list[Any] = field(default_factory=list)


@register
@dataclass(frozen=True, slots=True)
class Frozen:
    weight: torch.Tensor
    inner: object = None


@register
@dataclass
class Picky:
    """Its constructor would reject or change what was sent."""

    value: int
    doubled: int = field(init=False)

    def __post_init__(self) -> None:
        if self.value == 13:
            raise ValueError("__post_init__ must not be called on arrival")
        self.doubled = 2 * self.value


def picky_with_a_rejected_value() -> Picky:
    picky = Picky(1)
    picky.value = 13
    return picky


def counter_of_tensors() -> Counter[str]:
    counter: Any = Counter(a=1)
    counter["b"], counter["c"] = torch.ones(1), None
    return counter  # type: ignore[no-any-return]


CONTAINERS = {
    "dict": {"a": {"b": torch.ones(2)}, 1: {}},
    "list": [torch.ones(2), [], [[1]]],
    "tuple": (torch.ones(2), (), ((1,),)),
    "OrderedDict": OrderedDict(b=1, a=torch.ones(2)),
    "defaultdict": defaultdict(list, a=[torch.ones(2)]),
    "defaultdict of dicts": defaultdict(dict, a={}),
    "defaultdict without factory": defaultdict(None, a=1),
    "Counter": Counter({3: 1, 7: 2}),
    "Counter of tensors": counter_of_tensors(),
    "deque": deque([torch.ones(2), 1]),
    "deque with a limit": deque([1, 2], maxlen=2),
    "namedtuple": Point(torch.ones(2), Point(1)),
    "collections.namedtuple": Pair(1, [torch.ones(2)]),
    "dataclass": Loader(3, [torch.ones(2)]),
    "dataclass, frozen with slots": Frozen(torch.ones(2), {"a": (1,)}),
    "dataclass, with a constructor that rejects the value": picky_with_a_rejected_value(),
    "nested in each other": [{"a": (deque([OrderedDict(x=Point(Loader(1), {2: Frozen(torch.ones(1))}))]),)}],
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_arrives_unchanged(name: str) -> None:
    assert_same(CONTAINERS[name], transfer(CONTAINERS[name]).state)


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_can_be_received_in_place(name: str) -> None:
    local = transfer(CONTAINERS[name]).state
    mine = tensors_in(local)
    for tensor in mine:
        tensor.zero_()
    received = transfer(CONTAINERS[name], into=local).state
    assert_same(CONTAINERS[name], received)
    assert [id(tensor) for tensor in tensors_in(received)] == [id(tensor) for tensor in mine]


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    return (
        [t for child in value for t in tensors_in(child)]
        if not isinstance(value, (int, str, type(None)))
        else []
    )


def test_a_received_counter_and_defaultdict_work() -> None:
    received = transfer({"c": Counter("aab"), "d": defaultdict(int, x=1)}).state
    assert received["c"].most_common(1) == [("a", 2)]
    assert received["d"]["new"] == 0


def test_the_metadata_of_a_state_dict_arrives() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = model.state_dict()
    received = transfer({"model": state, "step": 3}).state["model"]
    assert_same(state, received)
    assert received._metadata == state._metadata  # type: ignore[attr-defined]
    assert received._metadata["1"] == {"version": 2}
    assert type(received._metadata) is OrderedDict


def test_in_place_the_incoming_metadata_is_returned() -> None:
    incoming, local = torch.nn.BatchNorm1d(3).state_dict(), torch.nn.BatchNorm1d(3).state_dict()
    local._metadata[""]["version"] = 1  # type: ignore[attr-defined]
    received = transfer(incoming, into=local).state
    assert received._metadata[""]["version"] == 2


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_s_state_arrives_fresh_and_in_place(name: str) -> None:
    def after_a_step(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        optimizer = OPTIMIZERS[name](list(model.parameters()))

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = (
                model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).square().mean()
            )
            value.backward()
            return value

        optimizer.step(loss)
        state: dict[str, Any] = optimizer.state_dict()
        return state

    state = after_a_step(1)
    assert_same(state, transfer(state).state)
    if name != "LBFGS":  # the length of its history varies
        local = after_a_step(2)
        received = transfer(state, into=local).state
        assert_same(state, received)
        own = {name: value for name, value in local["state"][0].items() if isinstance(value, torch.Tensor)}
        assert own
        assert all(received["state"][0][name] is tensor for name, tensor in own.items())


SCHEDULERS: dict[str, Any] = {
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 3, 7]),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_s_state_arrives(name: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    state = SCHEDULERS[name](optimizer).state_dict()
    assert_same(state, transfer(state).state)


class Unregistered(NamedTuple):
    x: int


@dataclass
class UnregisteredDataclass:
    x: int


class DictSubclass(dict):  # type: ignore[type-arg]
    pass


class OrderedDictSubclass(OrderedDict):  # type: ignore[type-arg]
    pass


def loader_with_another_attribute() -> Loader:
    loader = Loader(1)
    loader.more = 2  # type: ignore[attr-defined]
    return loader


REFUSED = {
    "a namedtuple": (Unregistered(1), ["test_containers.Unregistered", "torchferry.register", "both sides"]),
    "a dataclass": (
        UnregisteredDataclass(1),
        ["test_containers.UnregisteredDataclass", "torchferry.register"],
    ),
    "a subclass of dict": (DictSubclass(), ["test_containers.DictSubclass", "built-in container"]),
    "a subclass of OrderedDict": (
        OrderedDictSubclass(),
        ["test_containers.OrderedDictSubclass", "built-in container"],
    ),
    "a defaultdict with a lambda": (defaultdict(lambda: 1), ["defaultdict", "lambda", "Convert it"]),
    "a dataclass with another attribute": (
        loader_with_another_attribute(),
        ["test_containers.Loader", "(more)"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_container_is_refused_with_its_path_type_and_advice(name: str) -> None:
    value, said = REFUSED[name]
    message = refusal_at_a_path(value)
    assert [words for words in said if words not in message] == []


def test_an_unsendable_attribute_of_a_container_is_refused() -> None:
    ordered = OrderedDict(a=1)
    ordered.hook = len  # type: ignore[attr-defined]
    assert "builtin_function" in refusal_at_a_path(ordered)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {"weight": torch.ones(2), "nested": {"list": []}}
    state["nested"]["list"].append(state)
    error = refusal_of(state)
    assert str(error).startswith("nested.list[0].nested.list[0].nested.list…: a ")
    assert "contains itself" in str(error)
    assert error.path == "nested.list[0].nested.list[0].nested.list…"


def test_a_state_that_contains_itself_many_times_is_refused_quickly() -> None:
    state: list[Any] = []
    state.extend([state] * 10)
    refusal_of(state)


def nested(depth: int) -> list[Any]:
    state: list[Any] = [torch.ones(1)]
    for _ in range(depth - 1):
        state = [state]
    return state


def test_a_state_is_sent_up_to_the_maximum_depth() -> None:
    received = transfer(nested(MAX_DEPTH)).state
    for _ in range(MAX_DEPTH):
        (received,) = received
    assert torch.equal(received, torch.ones(1))
    assert f"deeper than {MAX_DEPTH}" in str(refusal_of(nested(MAX_DEPTH + 1)))


@pytest.mark.parametrize("levels", [20, 30, 200])
def test_a_container_in_too_many_places_is_refused_at_the_sender(levels: int) -> None:
    """Each place becomes a container of its own, so the number of paths doubles with every level."""
    state: Any = torch.ones(1)
    for _ in range(levels):
        state = [state, state]
    error = refusal_of({"model": state})
    assert (error.path or "").startswith("model[0]")
    assert "A container in several places is sent once for each place" in str(error)


def test_a_container_in_two_places_arrives_as_two_with_the_same_tensors() -> None:
    shared = {"w": torch.ones(2), "n": 1}
    received = transfer({"a": shared, "b": shared}).state
    assert_same({"a": dict(shared), "b": dict(shared)}, received)
    assert received["a"] is not received["b"]
    assert received["a"]["w"] is received["b"]["w"]


@register
@dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """Like the outputs of transformers: its items are the fields that are set."""

    loss: Any = None
    logits: Any = None

    def __post_init__(self) -> None:
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                OrderedDict.__setitem__(self, name, getattr(self, name))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError("no method of the class is called")


@register
@dataclass
class Bag(dict):  # type: ignore[type-arg]
    name: str


@register
@dataclass
class Batch(list):  # type: ignore[type-arg]
    name: str


def filled(container: Any, items: Any) -> Any:
    if isinstance(container, dict):
        dict.update(container, items)
    else:
        list.extend(container, items)
    return container


DERIVED: dict[str, Callable[[], Any]] = {
    "an output": lambda: ModelOutput(loss=torch.ones(2)),
    "a dict": lambda: filled(Bag("b"), {"x": torch.ones(2), 3: [1]}),
    "a list": lambda: filled(Batch("b"), [torch.ones(2), {"a": 1}]),
}


@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
@pytest.mark.parametrize("name", DERIVED)
def test_a_dataclass_derived_from_a_container_keeps_its_fields_and_items(name: str, in_place: bool) -> None:
    original = DERIVED[name]()
    received = transfer({"o": original}, into={"o": DERIVED[name]()} if in_place else None).state["o"]
    assert type(received) is type(original)
    assert_same(vars(original), vars(received))
    plain = dict if isinstance(original, dict) else list
    assert_same(plain(original), plain(received))
    if name == "an output":
        assert list(received.keys()) == ["loss"]
        assert received.loss is dict.__getitem__(received, "loss")
        assert received.logits is None


@register
@dataclass
class Word(str):
    language: str


@register
@dataclass
class CodedError(Exception):
    code: int


@register
@dataclass
class NamedDefaultdict(defaultdict):  # type: ignore[type-arg]
    name: str = "x"


@pytest.mark.parametrize(
    "value", [Word("en"), CodedError(3), NamedDefaultdict()], ids=["a str", "an exception", "a defaultdict"]
)
def test_a_dataclass_derived_from_another_built_in_type_is_refused(value: object) -> None:
    said = refusal_at_a_path(value)
    assert type(value).__qualname__ in said
    assert "rebuilt from its fields" in said


class Slotted:
    __slots__ = ("__hidden", "beside")


@register
@dataclass
class OnSlots(Slotted):
    value: int


def test_an_attribute_in_a_slot_of_a_base_class_is_refused() -> None:
    plain: Any = OnSlots(1)
    assert transfer(plain).state == plain
    plain.beside = torch.ones(1)
    assert "attributes besides its fields (beside)" in refusal_at_a_path(plain)
    hidden = OnSlots(1)
    object.__setattr__(hidden, "_Slotted__hidden", 1)
    assert "attributes besides its fields (_Slotted__hidden)" in refusal_at_a_path(hidden)


def test_the_refusal_of_an_attribute_names_the_attribute() -> None:
    state: Any = torch.nn.Linear(1, 1).state_dict()
    state._metadata["odd"] = {"version": object()}
    said = refusal_at_a_path(state)
    assert "in its attribute _metadata, a value of type builtins.object can't be sent" in said


CONTAINERS_OF_ATTRIBUTES: dict[str, Callable[[torch.Tensor], Any]] = {
    "an argparse.Namespace": lambda w: argparse.Namespace(lr=0.1, nested=[w]),
    "a SimpleNamespace": lambda w: SimpleNamespace(lr=0.1, nested=[w]),
    "a mappingproxy": lambda w: MappingProxyType({"lr": 0.1, 3: w}),
    "the result of max": lambda w: torch.max(w.view(1, -1), 1),
    "the result of svd": lambda w: torch.svd(w.view(1, -1)),
}


@pytest.mark.parametrize("name", CONTAINERS_OF_ATTRIBUTES)
def test_tensors_in_such_containers_are_leaves_and_are_written_in_place(name: str) -> None:
    make = CONTAINERS_OF_ATTRIBUTES[name]
    state, local = {"c": make(torch.tensor([1.0, 5.0, 2.0]))}, {"c": make(torch.zeros(3))}
    assert_same(state, transfer(state).state)
    assert_same(state, transfer(state, into=local).state)
    assert_same(state, local)


def test_the_paths_in_such_containers_have_the_names_of_attributes_and_fields() -> None:
    state = {"a": argparse.Namespace(w=torch.ones(1)), "m": torch.max(torch.ones(1, 2), 1)}
    target = {"a": argparse.Namespace(w=torch.ones(2)), "m": torch.max(torch.ones(2, 2), 1)}
    with pytest.raises(StateMismatch) as raised:
        transfer(state, into=target)
    assert [mismatch.path for mismatch in raised.value.mismatches] == ["a.w", "m.values", "m.indices"]


@register
class Attributed(dict[Any, Any]):
    """Its items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


@register
class Noted(OrderedDict[Any, Any]):
    note: Any

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)
        self.note = f"{self.note}, {key}" if hasattr(self, "note") else str(key)


@register
class Defaulting(defaultdict[Any, Any]):
    pass


class UnregisteredDict(dict[Any, Any]):
    pass


def test_a_registered_subclass_of_dict_arrives_with_its_items_and_attributes() -> None:
    noted = Noted()
    noted["a"], noted["b"] = torch.ones(2), 1
    state = {"attributed": Attributed(w=torch.ones(1)), "noted": noted, "defaulting": Defaulting(list, x=[1])}
    received = transfer(state).state
    assert_same(state, received)
    assert received["attributed"].w is received["attributed"]["w"]
    assert received["noted"].note == "a, b"
    assert received["defaulting"]["new"] == []
    local: dict[str, Any] = {
        "attributed": Attributed(w=torch.zeros(1)),
        "noted": noted,
        "defaulting": Defaulting(list, x=[0]),
    }
    weight = local["attributed"].w
    assert transfer(state, into=local).state["attributed"].w is weight
    assert weight.tolist() == [1]


def test_a_subclass_of_dict_that_is_not_registered_is_refused_with_advice() -> None:
    assert "torchferry.register" in refusal_at_a_path(UnregisteredDict(a=1))


def test_a_subclass_of_dict_with_tensors_in_its_attributes_is_refused() -> None:
    noted = Noted()
    noted.note = torch.ones(1)
    assert "in the attributes of a tests.unit.tensors.test_containers.Noted" in refusal_at_a_path(noted)
