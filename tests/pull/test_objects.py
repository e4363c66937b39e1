"""Objects with state_dict and load_state_dict in the states that are served and fetched."""

from __future__ import annotations

import copy
import gc
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lrs

import torchferry
from tests.support.equality import assert_same
from torchferry import Fetched, StateMismatch, TargetTorn, fetch, serve
from torchferry.engine.loading import Loading
from torchferry.engine.pull.fetch import _Fetch
from torchferry.engine.pull.landing import Landing


def ship(state: object, into: Any, **options: Any) -> Fetched:
    with serve(state, version=1) as source:
        return fetch(source.address, into=into, **options)


class Net(nn.Module):
    """Two layers whose weights are tied, a buffer, and a norm with buffers of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 6)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.embed(x)))
        return found


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int, seed: int = 7) -> None:
    """Step an optimizer, with the same data for the same seed."""
    data = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype

    def loss(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        value = model(x).float().square().sum()
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(partial(loss, torch.randn(5, 6, generator=data).to(dtype)))


# Modules.


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("served_as", ["object", "state dict"])
def test_a_module_is_received_where_it_is(served_as: str, atomic: bool) -> None:
    source, target = Net(1), Net(2)
    params = dict(target.named_parameters())
    pointers = {name: param.data_ptr() for name, param in params.items()}
    got = ship(source if served_as == "object" else source.state_dict(), target, atomic=atomic)
    assert got.state is target
    assert_same(target.state_dict(), source.state_dict())
    for name, param in target.named_parameters():
        assert param is params[name]
        assert param.data_ptr() == pointers[name]
    assert target.head.weight is target.embed.weight


def test_a_module_without_into_arrives_as_its_state_dict() -> None:
    source = Net(1)
    with serve({"model": source, "step": 3}, version=3) as served:
        got = fetch(served.address).state
    assert_same(got, {"model": source.state_dict(), "step": 3})
    assert vars(got["model"])["_metadata"] == vars(source.state_dict())["_metadata"]


def test_a_function_may_return_objects_but_an_object_is_never_called() -> None:
    class CallableObject:
        def __init__(self, value: int) -> None:
            self.value = value

        def __call__(self) -> object:
            raise AssertionError("called")

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    for wrap in (lambda target: target, lambda target: lambda: target):
        target = CallableObject(1)
        assert ship(CallableObject(5), wrap(target)).state is target
        assert target.value == 5


def test_all_mismatches_of_a_module_are_listed_before_anything_is_written() -> None:
    source = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 2), "new": nn.Linear(1, 1)})
    target = nn.ModuleDict({"a": nn.Linear(2, 4), "b": nn.Linear(2, 2), "old": nn.Linear(1, 1)})
    before = copy.deepcopy(target.state_dict())
    for options in ({}, {"extra": "fresh"}):
        with pytest.raises(StateMismatch) as caught:
            ship({"net": source}, {"net": target}, **options)
        paths = {mismatch.path for mismatch in caught.value.mismatches}
        wanted = {"a.weight", "a.bias", "new.weight", "new.bias", "old.weight", "old.bias"}
        assert paths == {f"net.{path}" for path in wanted}
        assert 'extra="fresh"' not in str(caught.value)  # it would not help
    assert_same(target.state_dict(), before)


def test_a_module_may_keep_what_the_source_lacks_and_drop_what_it_has_more() -> None:
    source: Any = nn.ModuleDict({"b": nn.Linear(2, 2), "new": nn.Linear(1, 1)})
    target: Any = nn.ModuleDict({"b": nn.Linear(2, 2), "old": nn.Linear(1, 1)})
    old = target["old"].weight.item()
    report = ship({"net": source}, {"net": target}, strict=False, extra="drop").report
    assert torch.equal(target["b"].weight, source["b"].weight)
    assert target["old"].weight.item() == old
    assert report.dropped == ("net.new.weight", "net.new.bias")
    assert report.kept == ("net.old.weight", "net.old.bias")
    assert report.loaded == ("net",)


def test_hooks_of_a_module_run() -> None:
    source: Any
    target: Any
    source, target = Net(1), Net(2)
    heard: list[str] = []
    target.register_load_state_dict_pre_hook(lambda *args: heard.append("before"))
    target.register_load_state_dict_post_hook(lambda *args: heard.append("after"))
    ship(source, target)
    assert heard == ["before", "after"]
    assert_same(target.state_dict(), source.state_dict())


@pytest.mark.parametrize("atomic", [False, True])
def test_a_module_of_inference_tensors_is_received_where_it_is(atomic: bool) -> None:
    source = Net(1)
    with torch.inference_mode():
        target = Net(2)
    weight, address = target.embed.weight, target.embed.weight.data_ptr()
    ship(source, target, atomic=atomic)
    assert (target.embed.weight is weight, weight.data_ptr()) == (True, address)
    assert_same(target.state_dict(), source.state_dict())
    assert not torch.is_inference_mode_enabled()


class Fused(nn.Module):
    """Holds one tensor, of which its state dict has two copies."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, part in zip("qk", self.fused.detach().chunk(2), strict=True):
            destination[prefix + name] = part.clone()

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        with torch.no_grad():
            self.fused.copy_(torch.cat([state[prefix + name] for name in "qk"]))


@pytest.mark.parametrize("atomic", [False, True])
def test_a_state_dict_of_copies_is_loaded_and_not_lost(atomic: bool) -> None:
    source: Any = nn.Sequential(Fused(1))
    target: Any = nn.Sequential(Fused(2))
    parameter = target[0].fused
    ship(source, target, atomic=atomic)
    assert target[0].fused is parameter
    assert torch.equal(target[0].fused, source[0].fused)


@torchferry.register
@dataclass
class Settings:
    n: int


def test_a_module_is_loaded_with_the_grad_mode_of_the_caller() -> None:
    class Copying(nn.Linear):
        def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
            modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    modes: list[tuple[bool, bool]] = []
    ship(nn.Linear(2, 2), Copying(2, 2))
    with torch.no_grad():
        ship(nn.Linear(2, 2), Copying(2, 2))
    with torch.inference_mode():
        ship(nn.Linear(2, 2), Copying(2, 2))
    assert modes == [(True, False), (False, False), (False, True)]


class WithExtraState(nn.Linear):
    def __init__(self, extra: object) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("local", [None, {"scale": torch.ones(2)}, {"other": [1, 2]}, torch.zeros(5)])
@pytest.mark.parametrize("sent", [{"scale": torch.ones(3), "n": 4}, torch.ones(7), None])
def test_extra_state_of_a_module_varies(sent: object, local: object, strict: bool) -> None:
    source, target = WithExtraState(sent), WithExtraState(copy.deepcopy(local))
    ship({"net": source, "x": 1}, {"net": target, "x": 0}, strict=strict)
    assert_same(target.extra, sent)
    assert torch.equal(target.weight, source.weight)


@pytest.mark.parametrize("extra", [None, {}, {"scale": torch.ones(3)}, torch.ones(7)])
def test_extra_state_on_one_side_only_is_a_mismatch_before_anything_is_written(extra: Any) -> None:
    for sent, local, said in (
        (WithExtraState(extra), nn.Linear(2, 2), "no such path here"),
        (nn.Linear(2, 2), WithExtraState(extra), "the peer has no such path"),
    ):
        before = copy.deepcopy(local.weight)
        with pytest.raises(StateMismatch, match=rf"net._extra_state.*: {said}"):
            ship({"net": sent}, {"net": local})
        assert torch.equal(local.weight, before)


@pytest.mark.parametrize("extra", [None, {}, {"scale": torch.ones(3)}, torch.ones(7)])
def test_extra_state_on_one_side_only_is_dropped_or_kept(extra: Any) -> None:
    dropping, keeping = nn.Linear(2, 2), WithExtraState(copy.deepcopy(extra))
    sent = WithExtraState(extra)
    report = ship({"net": sent}, {"net": dropping}, strict=False, extra="drop").report
    assert_same(dropping.weight, sent.weight)
    assert all(path.startswith("net._extra_state") for path in report.dropped)
    with pytest.raises(StateMismatch, match=r"net._extra_state.*: no such path here"):
        ship({"net": sent}, {"net": dropping}, strict=False, extra="fresh")
    ship({"net": dropping}, {"net": keeping}, strict=False)
    assert_same(keeping.weight, sent.weight)
    assert_same(keeping.extra, extra)


class ListMetric(nn.Module):
    """Like a metric of torchmetrics: a state that is a list of tensors, and grows."""

    def __init__(self, *preds: torch.Tensor) -> None:
        super().__init__()
        self.preds = list(preds)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "preds"] = [pred.detach() for pred in self.preds]

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.preds = state.pop(prefix + "preds")


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"strict": False, "extra": "drop"}])
@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_a_metric_takes_as_many_entries_as_the_source_has(count: int, options: dict[str, Any]) -> None:
    source = ListMetric(torch.ones(3), torch.ones(2) * 2)
    target = ListMetric(*(torch.zeros(3) for _ in range(count)))
    places = list(target.preds)
    ship({"metric": source, "net": nn.Linear(1, 1)}, {"metric": target, "net": nn.Linear(1, 1)}, **options)
    assert_same(target.preds, source.preds)
    if count:
        assert target.preds[0].data_ptr() == places[0].data_ptr()


def test_a_lazy_module_takes_its_shapes_from_the_source() -> None:
    source, target = nn.LazyLinear(3), nn.LazyLinear(3)
    source(torch.ones(1, 5))
    ship({"net": source}, {"net": target})
    assert_same(target.state_dict(), source.state_dict())


@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"strict": False}])
def test_a_module_on_the_meta_device_gets_fresh_tensors(options: dict[str, Any]) -> None:
    source = Net(1)
    source.norm.weight.requires_grad_(False)
    with torch.device("meta"):
        target = Net(2)
    target.norm.weight.requires_grad_(False)
    real = target.head.bias = nn.Parameter(torch.zeros(6))
    assert ship({"net": source}, {"net": target}, **options).state["net"] is target
    assert_same(target.state_dict(), source.state_dict())
    assert target.head.bias is real
    assert target.head.weight is target.embed.weight
    assert isinstance(target.embed.weight, nn.Parameter)
    assert not target.norm.weight.requires_grad
    assert [name for name, _ in target.named_buffers()] == [name for name, _ in source.named_buffers()]
    target(torch.ones(3, 6)).sum().backward()


def test_modules_on_the_meta_device_that_share_a_parameter_still_share_it() -> None:
    def make() -> list[nn.Linear]:
        pair = [nn.Linear(2, 2), nn.Linear(2, 2)]
        pair[1].weight = pair[0].weight
        return pair

    source = make()
    with torch.device("meta"):
        target = make()
    ship(source, target)
    assert target[0].weight is target[1].weight
    assert torch.equal(target[0].weight, source[0].weight)


class TaggedParameter(nn.Parameter):
    """A parameter with an attribute, as inference engines have them."""

    tag: str


class MetaNet(nn.Module):
    """A parameter of a subclass, a parameter and a buffer that are tensor subclasses, and other buffers."""

    def __init__(self, seed: int, device: str) -> None:
        super().__init__()
        self.tagged = TaggedParameter(torch.full((2,), float(seed), device=device))
        self.tagged.tag = f"tag {seed}"
        items = torch.full((6,), seed, dtype=torch.int8, device=device)
        quantized = Quantized(items, torch.tensor(0.5 * seed, device=device))
        self.weight = self.tied = nn.Parameter(quantized, requires_grad=False)
        self.register_buffer("table", torch.full((2,), seed, device=device))
        self.register_buffer("cache", torch.zeros(2, device=device), persistent=False)


@pytest.mark.parametrize("atomic", [False, True])
def test_tensor_subclasses_on_the_meta_device_get_fresh_tensors(
    atomic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sent: Any = MetaNet(1, "cpu")
    local: Any = MetaNet(2, "meta")
    ship({"net": sent}, {"net": local}, atomic=atomic)
    assert type(local.tagged) is TaggedParameter
    assert (local.tagged.tag, local.tagged.requires_grad) == ("tag 2", True)
    assert torch.equal(local.tagged, sent.tagged)
    assert isinstance(local.weight, nn.Parameter)
    assert local.tied is local.weight
    assert type(local.weight) is Quantized
    assert torch.equal(local.weight.items, sent.weight.items)
    assert torch.equal(local.weight.scale, sent.weight.scale)
    assert torch.equal(local.table, sent.table)
    (record,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert (
        record.getMessage()
        == "net (MetaNet) was loaded, but these tensors are still on the meta device: cache"
    )


def test_what_the_source_lacks_stays_on_the_meta_device(caplog: pytest.LogCaptureFixture) -> None:
    sent: Any = nn.Module()
    sent.table, sent.tied = nn.Buffer(torch.full((2,), 3)), MetaNet(1, "cpu").weight
    local: Any = MetaNet(2, "meta")
    tagged = local.tagged
    report = ship({"net": sent}, {"net": local}, strict=False).report
    assert report.kept == ("net.tagged",)
    assert local.tagged is tagged
    assert local.table.tolist() == [3, 3]
    # It is tied to what was received.
    assert torch.equal(local.weight.items, sent.tied.items)
    assert "meta device: tagged, cache" in caplog.text


def test_a_module_on_the_meta_device_may_have_extra_state_of_a_registered_class() -> None:
    with torch.device("meta"):
        local = WithExtraState(Settings(1))
    ship({"net": WithExtraState(Settings(2))}, {"net": local})
    assert local.extra == Settings(2)


def test_a_module_on_the_meta_device_is_compared_first() -> None:
    with torch.device("meta"):
        target = nn.Linear(2, 3)
    with pytest.raises(StateMismatch, match="weight: shape"):
        ship(nn.Linear(3, 3), target)
    assert target.weight.is_meta


def test_an_optimizer_of_meta_parameters_is_refused() -> None:
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="then create the optimizer"):
        ship({"o": optim.SGD(nn.Linear(2, 2).parameters())}, {"o": optim.SGD(net.parameters())})


# Optimizers.

Make = Callable[[Any], optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "Adadelta": optim.Adadelta,
    "Adafactor": optim.Adafactor,
    "Adagrad": optim.Adagrad,
    "Adam": optim.Adam,
    "Adam amsgrad": lambda params: optim.Adam(params, amsgrad=True),
    "Adam fused": lambda params: optim.Adam(params, fused=True),
    "Adam not foreach": lambda params: optim.Adam(params, foreach=False),
    "Adam, lr is a tensor": lambda params: optim.Adam(params, lr=torch.tensor(0.01), foreach=False),
    "AdamW": optim.AdamW,
    "Adamax": optim.Adamax,
    "ASGD": optim.ASGD,
    "LBFGS": lambda params: optim.LBFGS(params, max_iter=4),
    "LBFGS, strong Wolfe": lambda params: optim.LBFGS(params, max_iter=4, line_search_fn="strong_wolfe"),
    "Muon": lambda params: optim.Muon([p for p in params if p.ndim == 2]),
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "RMSprop": lambda params: optim.RMSprop(params, momentum=0.9, centered=True),
    "Rprop": optim.Rprop,
    "SGD": optim.SGD,
    "SGD momentum": lambda params: optim.SGD(params, lr=0.01, momentum=0.9),
    "SparseAdam": optim.SparseAdam,
}


class Embedding(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(5, 6, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(x.abs().sum(1).long() % 5)
        return found


def test_every_optimizer_of_torch_is_tried() -> None:
    classes = {name for name, cls in vars(optim).items() if isinstance(cls, type)}
    assert classes - {"Optimizer"} == {name.split()[0].rstrip(",") for name in OPTIMIZERS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps_here", [0, 1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_exactly_as_the_source_does(
    name: str, steps_here: int, dtype: torch.dtype
) -> None:
    make = Embedding if name == "SparseAdam" else Net
    models = [make(seed).to(dtype) for seed in (1, 2)]
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    train(models[0], optimizers[0], 2)
    train(models[1], optimizers[1], steps_here, seed=8)
    params = list(models[1].parameters())
    source, target = ({"model": m, "optim": o} for m, o in zip(models, optimizers, strict=True))
    got = ship(source, target)
    assert got.state["optim"] is optimizers[1]
    assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())
    held = [param for group in optimizers[1].param_groups for param in group["params"]]
    assert {id(param) for param in held} <= {id(param) for param in params}
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 2, seed=9)
    assert_same(models[1].state_dict(), models[0].state_dict())
    assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())


def test_moments_that_exist_are_written_where_they_are() -> None:
    models = Net(1), Net(2)
    optimizers = [optim.AdamW(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 1)
    moments = {id(p): optimizers[1].state[p]["exp_avg"] for p in models[1].parameters()}
    ship(optimizers[0], optimizers[1])
    assert all(optimizers[1].state[p]["exp_avg"] is moments[id(p)] for p in models[1].parameters())


def test_moments_that_the_source_lacks_are_gone() -> None:
    models = Net(1), Net(2)
    optimizers = [optim.AdamW(model.parameters()) for model in models]
    train(models[1], optimizers[1], 1)
    for options in ({}, {"strict": False, "extra": "drop"}):
        ship({"optim": optimizers[0]}, {"optim": optimizers[1]}, **options)
        assert optimizers[1].state_dict()["state"] == {}


@pytest.mark.parametrize("options", [{}, {"strict": False, "extra": "drop"}])
def test_an_optimizer_of_other_parameters_is_refused(options: dict[str, Any]) -> None:
    source, target = optim.AdamW(Net(1).parameters()), optim.AdamW(nn.Linear(6, 6).parameters())
    with pytest.raises(StateMismatch, match=r"optim.param_groups\[0\].params\[2\]: no such path here"):
        ship({"optim": source}, {"optim": target}, **options)


def test_hooks_of_an_optimizer_run_and_have_the_last_word() -> None:
    models = [Net(seed).to(torch.bfloat16) for seed in (1, 2)]
    optimizers = [optim.NAdam(model.parameters()) for model in models]
    train(models[0], optimizers[0], 2)

    def halve(optimizer: optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["mu_product"] = state["mu_product"].to(torch.float16)

    optimizers[1].register_load_state_dict_post_hook(halve)
    ship(optimizers[0], optimizers[1])
    states = optimizers[1].state_dict()["state"]
    assert {state["mu_product"].dtype for state in states.values()} == {torch.float16}
    assert_same(states[0]["exp_avg"], optimizers[0].state_dict()["state"][0]["exp_avg"])


def test_an_optimizer_that_wraps_another_needs_no_hooks_of_its_own() -> None:
    class Wrapper(optim.Optimizer):
        def __init__(self, inner: optim.Optimizer) -> None:
            self.inner = inner

        def __getattribute__(self, name: str) -> Any:
            if name in ("state_dict", "load_state_dict", "state", "param_groups"):
                return getattr(object.__getattribute__(self, "inner"), name)
            return object.__getattribute__(self, name)

    models = Net(1), Net(2)
    optimizers = [optim.AdamW(model.parameters()) for model in models]
    train(models[0], optimizers[0], 2)
    ship(Wrapper(optimizers[0]), Wrapper(optimizers[1]))
    assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())


# Other objects.

SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 3]),
    "ConstantLR": lrs.ConstantLR,
    "LinearLR": lrs.LinearLR,
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "PolynomialLR": lrs.PolynomialLR,
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, 20),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)], [2]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.ExponentialLR(o, 0.9)], o),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_as_the_source_does(name: str) -> None:
    optimizers = [optim.SGD(Net(seed).parameters(), lr=0.1, momentum=0.9) for seed in (1, 2)]
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in optimizers]
    for _ in range(3):
        optimizers[0].step()
        schedulers[0].step()
    states = [{"optim": o, "scheduler": s} for o, s in zip(optimizers, schedulers, strict=True)]
    ship(*states)
    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]


def test_a_scheduler_of_plateaus_and_a_grad_scaler() -> None:
    optimizers = [optim.SGD(Net(seed).parameters(), lr=0.1) for seed in (1, 2)]
    plateaus = [lrs.ReduceLROnPlateau(optimizer, patience=1) for optimizer in optimizers]
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0)]
    for loss in (1.0, 2.0, 3.0):
        plateaus[0].step(loss)
    ship(*([p, s] for p, s in zip(plateaus, scalers, strict=True)))
    assert plateaus[1].state_dict() == plateaus[0].state_dict()
    assert scalers[1].get_scale() == 8.0


@dataclass
class Stateful:
    """An object that keeps what it is given; may refuse it."""

    state: Any = field(default_factory=dict)
    refuses: list[str] = field(default_factory=list)
    loads: int = 0

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.loads += 1
        if self.refuses:
            raise ValueError(self.refuses.pop(0))
        self.state = state


@pytest.mark.parametrize("state", [5, None, "text", [1, torch.ones(2)], torch.arange(3), {}, (1, {"a": 2})])
def test_a_state_dict_may_be_anything_that_can_be_sent(state: object) -> None:
    for local in (copy.deepcopy(state), Stateful(copy.deepcopy(state)).state):
        target = Stateful(local)
        assert ship([Stateful(state), 1], [target, 0]).state == [target, 1]
        assert_same(target.state, state)


def test_a_state_dict_that_is_an_object_itself_is_refused() -> None:
    endless = Stateful()
    endless.state = endless
    with pytest.raises(torchferry.Unsendable, match="returned an object"):
        serve({"o": endless}, version=1)


def test_an_object_that_makes_another_one_whenever_it_is_read_is_refused() -> None:
    class Endless(Stateful):
        def state_dict(self) -> Any:
            return {"next": Endless()}

    with pytest.raises(torchferry.Unsendable, match="nested deeper than 256 levels"):
        serve(Endless(), version=1)


def test_objects_are_found_at_any_depth_and_in_state_dicts_of_others() -> None:
    def make(number: int) -> Any:
        inner = Stateful({"n": number, "t": torch.full((2,), number)})
        return {"a": [(Stateful({"inner": inner, "n": number}),)], "q": OrderedDict(x=inner)}

    source, target = make(1), make(2)
    outer, inner = target["a"][0][0], target["q"]["x"]
    tensor = inner.state["t"]
    got = ship(source, target).state
    assert got["a"][0][0] is outer
    assert got["q"]["x"] is inner
    assert outer.state == {"inner": inner, "n": 1}
    assert inner.state["n"] == 1
    assert inner.state["t"] is tensor
    assert tensor.tolist() == [1, 1]
    assert (outer.loads, inner.loads) == (1, 1)


def test_an_object_that_the_source_lacks_is_a_mismatch_or_kept() -> None:
    for state in ({}, {"n": 1}):
        target = Stateful(state)
        with pytest.raises(StateMismatch, match="scaler: the peer has no state dict for this object"):
            ship({"x": 1}, {"x": 2, "scaler": target})
        got = ship({"x": 1}, {"x": 2, "scaler": target}, strict=False)
        assert got.state == {"x": 1, "scaler": target}
        assert target.loads == 0
        assert got.report.loaded == ()


@pytest.mark.parametrize("make", [lambda: nn.Linear(1, 1), lambda: optim.SGD([nn.Parameter(torch.ones(1))])])
def test_a_value_in_the_place_of_a_module_or_an_optimizer_is_a_mismatch(make: Callable[[], Any]) -> None:
    for options in ({}, {"strict": False, "extra": "fresh"}):
        with pytest.raises(StateMismatch, match="o"):
            ship({"o": 5, "x": 1}, {"o": make(), "x": 2}, **options)


OTHER_STATES = [None, 5, torch.ones(3), {}, [], {"n": 1}, [torch.ones(2), {}], {"t": torch.ones(2)}]


@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"strict": False, "extra": "fresh"},
                                     {"strict": False, "extra": "drop"}])  # fmt: skip
def test_an_object_is_loaded_whatever_its_state_dict_was(options: dict[str, Any]) -> None:
    pairs = [(sent, local) for sent in OTHER_STATES for local in OTHER_STATES]
    targets = [Stateful(copy.deepcopy(local)) for _, local in pairs]
    got = ship(
        {"x": torch.ones(1), "o": [Stateful(sent) for sent, _ in pairs]},
        {"x": torch.zeros(1), "o": targets},
        **options,
    )
    assert len(got.report.loaded) == len(targets)
    for target, (sent, _) in zip(targets, pairs, strict=True):
        assert_same(target.state, sent)


# One object at two paths.


def stepped(seed: int) -> optim.Optimizer:
    model = Net(seed)
    optimizer = optim.AdamW(model.parameters(), lr=seed / 100)
    train(model, optimizer, 1)
    return optimizer


@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"strict": False, "extra": "fresh"},
                                     {"strict": False, "extra": "drop"}])  # fmt: skip
@pytest.mark.parametrize("make", [stepped, Net, lambda n: Stateful({"n": n}), lambda n: Stateful([n] * n)])
def test_one_object_for_two_state_dicts_is_a_mismatch(make: Callable[[int], Any], options: Any) -> None:
    local = make(3)
    before = copy.deepcopy(local.state_dict())
    with pytest.raises(StateMismatch, match=r"b\[0\]: this is the same object as at a, but the peer has"):
        ship({"a": make(1), "b": [make(2)]}, {"a": local, "b": [local]}, **options)
    assert_same(local.state_dict(), before)


@pytest.mark.parametrize("make", [stepped, Net, lambda n: Stateful({"n": n, "nan": float("nan")})])
def test_one_object_at_two_paths_is_loaded_once_if_the_source_has_one_there_too(
    make: Callable[[int], Any],
) -> None:
    sent, local = make(1), make(2)
    for sending in ({"a": sent, "b": [sent]}, {"a": sent.state_dict(), "b": [sent.state_dict()]}):
        got = ship(sending, {"a": local, "b": [local]})
        assert got.state["a"] is got.state["b"][0] is local
        assert_same(local.state_dict(), sent.state_dict())


def test_equal_values_at_two_paths_of_one_object_are_one_state_dict() -> None:
    local = Stateful({"n": 3})
    ship([Stateful({"n": 1}), Stateful({"n": 1})], [local, local])
    assert (local.state, local.loads) == ({"n": 1}, 1)


def test_entries_of_an_object_vary_and_what_fits_lands_in_place() -> None:
    source: dict[str, Any] = {"same": torch.ones(2), "grown": torch.ones(4), "new": torch.ones(1)}
    source["kind"] = torch.ones(2)
    source |= {"best": {"b": torch.ones(1)}, "shared": torch.ones(3), "too": torch.zeros(3), "n": None}
    both = torch.zeros(3)
    local: dict[str, Any] = {"same": torch.zeros(2), "grown": torch.zeros(3), "old": torch.zeros(1)}
    local["kind"] = None
    local |= {"best": {"a": torch.zeros(1)}, "shared": both, "too": both, "n": torch.zeros(1)}
    same = local["same"]
    for options in ({}, {"strict": False}, {"extra": "drop", "strict": False}, {"extra": "fresh"}):
        target = Stateful(dict(local))
        report = ship({"o": Stateful(source), "x": 1}, {"o": target, "x": 2}, **options).report
        assert_same(target.state, source)
        assert list(target.state) == list(source)
        assert target.state["same"] is same
        assert (report.fresh, report.dropped, report.kept, report.loaded) == ((), (), (), ("o",))


# Entries that vary in plain containers.


def test_a_list_that_is_longer_at_the_source_lands_as_far_as_it_goes() -> None:
    source = {"preds": [torch.ones(2), torch.ones(3)], "best": torch.ones(1)}
    for strict in (True, False):
        local: dict[str, Any] = {"preds": [torch.zeros(2)], "best": None}
        got = ship(source, local, extra="fresh", strict=strict)
        assert_same(got.state, source)
        assert got.state["preds"][0] is local["preds"][0]
        assert set(got.report.fresh) == {"preds[1]", "best"}


def test_a_list_that_is_shorter_at_the_source_keeps_the_rest() -> None:
    local = {"preds": [torch.zeros(2), torch.zeros(3)]}
    got = ship({"preds": [torch.ones(2)]}, local, strict=False)
    assert_same(got.state, {"preds": [torch.ones(2), torch.zeros(3)]})
    assert got.report.kept == ("preds[1]",)


# Objects and plain entries together.


def test_options_for_plain_entries_hold_beside_objects() -> None:
    source = {"o": Stateful({"n": 1}), "new": torch.ones(1), "x": torch.ones(2), "sub": 3}
    local = {"o": Stateful({"m": 0}), "old": torch.zeros(1), "x": torch.zeros(2), "sub": {"y": 1}}
    with pytest.raises(StateMismatch) as caught:
        ship(source, local)
    assert {each.path for each in caught.value.mismatches} == {"new", "old", "sub", "sub.y"}
    got = ship(source, local, strict=False, extra="drop")
    assert_same(got.state["x"], torch.ones(2))
    assert got.state["sub"] == {"y": 1}
    assert got.state["o"].state == {"n": 1}
    assert list(got.state) == ["o", "old", "x", "sub"]
    assert (got.report.dropped, got.report.kept) == (("new", "sub"), ("old", "sub.y"))


def test_the_second_fetch_moves_only_what_changed() -> None:
    models = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
    with serve({"net": models[0]}, version=1) as source:
        first = fetch(source.address, {"net": models[1]}).report
        with torch.no_grad():
            models[1].bias.zero_()
        second = fetch(source.address, {"net": models[1]}).report
    assert first.bytes_moved == first.bytes_total
    assert second.bytes_moved < first.bytes_total / 2
    assert_same(models[1].state_dict(), models[0].state_dict())


def test_a_module_that_is_served_live_is_read_where_it_is() -> None:
    net = nn.Linear(4, 4)
    with serve(net, version=1, snapshot=False) as source:
        assert_same(fetch(source.address).state, net.state_dict())


# Failures.


def failing(number: int, *refuses: str) -> dict[str, Any]:
    return {
        "plain": torch.full((2,), number),
        "net": nn.Linear(2, 2),
        "first": Stateful({"t": torch.full((2,), number), "n": number}),
        "bad": Stateful({"t": torch.full((2,), number), "n": number}, list(refuses)),
        "last": Stateful({"t": torch.full((2,), number), "n": number}),
    }


def contents(state: dict[str, Any]) -> dict[str, Any]:
    states = {name: each.state_dict() if hasattr(each, "loads") else each for name, each in state.items()}
    return copy.deepcopy({**states, "net": state["net"].state_dict()})


def test_an_object_that_refuses_its_state_leaves_a_torn_state_that_is_named() -> None:
    target = failing(2, "not mine")
    with pytest.raises(TargetTorn) as caught:
        ship(failing(1), target)
    error = caught.value
    assert error.torn == ("bad", "last")
    assert {"plain", "net", "first"} <= set(error.whole)
    assert "net.weight" in error.whole
    assert "load_state_dict of bad (Stateful) raised ValueError: not mine" in str(error)
    assert isinstance(error.__cause__, torchferry.StateError)
    assert isinstance(error.__cause__.__cause__, ValueError)


def test_a_tensor_that_was_copied_from_scratch_memory_is_whole_if_an_object_refuses_its_state() -> None:
    overlapping = torch.arange(20.0).as_strided((5, 6), (2, 1))
    target = {**failing(2, "not mine"), "plain": torch.zeros(5, 6)}
    with pytest.raises(TargetTorn) as caught:
        ship({**failing(1), "plain": overlapping}, target)
    assert "plain" in caught.value.whole
    assert torch.equal(target["plain"], overlapping)


def test_atomic_gives_everything_back_if_an_object_refuses_its_state() -> None:
    target = failing(2, "not mine")
    before, plain, weight = contents(target), target["plain"], target["net"].weight
    with pytest.raises(torchferry.StateError, match=r"not mine.*the earlier state was restored") as caught:
        ship(failing(1), target, atomic=True)
    assert not isinstance(caught.value, TargetTorn)
    assert_same(contents(target), before)
    assert target["plain"] is plain
    assert target["net"].weight is weight
    assert target["first"].loads == 2
    assert target["last"].loads == 0


def test_an_interrupted_atomic_fetch_gives_everything_back() -> None:
    class Interrupted(Stateful):
        def load_state_dict(self, state: Any) -> None:
            if state["n"] == 1:
                raise KeyboardInterrupt
            super().load_state_dict(state)

    target = failing(2)
    target["bad"] = Interrupted({"t": torch.full((2,), 2), "n": 2})
    before = contents(target)
    with pytest.raises(KeyboardInterrupt) as caught:
        ship(failing(1), target, atomic=True)
    assert caught.value.__notes__ == ["the earlier state was restored"]
    assert_same(contents(target), before)


def test_atomic_names_the_objects_that_do_not_take_their_earlier_state_back() -> None:
    target = failing(2, "not mine", "nor this")
    with pytest.raises(TargetTorn) as caught:
        ship(failing(1), target, atomic=True)
    assert caught.value.torn == ("bad",)
    assert "nor this" in str(caught.value)
    assert "not mine" in str(caught.value)
    assert set(caught.value.untouched) >= {"plain", "net.weight", "first.t", "last.t"}
    assert target["plain"].tolist() == [2, 2]
    assert target["first"].state["n"] == 2


def test_atomic_gives_objects_without_tensors_back() -> None:
    target = [Stateful({"n": 2}), Stateful({"n": 2}, ["no"])]
    with pytest.raises(torchferry.StateError, match="restored"):
        ship([Stateful({"n": 1}), Stateful({"n": 1})], target, atomic=True)
    assert [each.state for each in target] == [{"n": 2}, {"n": 2}]
    with pytest.raises(TargetTorn) as caught:
        ship([Stateful({"n": 1}), Stateful({"n": 1})], [Stateful({"n": 2}), Stateful({"n": 2}, ["no"])])
    assert (caught.value.torn, caught.value.whole) == (("[1]",), ("[0]",))


def test_atomic_gives_optimizers_and_copies_back_what_they_had() -> None:
    models = [nn.ModuleList([Net(seed), Fused(seed)]) for seed in (1, 2)]
    optimizers = [optim.AdamW(model[0].parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model[0], optimizer, 2)
    states: list[dict[str, Any]] = [
        {
            "model": m,
            "optim": o,
            "fresh": optim.AdamW(Net(0).parameters()),
            "bad": Stateful({"n": 1}, refuses),
        }
        for m, o, refuses in zip(models, optimizers, ([], ["no"]), strict=True)
    ]
    states[0]["fresh"] = optimizers[0]
    before = copy.deepcopy([models[1].state_dict(), optimizers[1].state_dict()])
    with pytest.raises(torchferry.StateError, match="restored"):
        ship(states[0], states[1], atomic=True)
    assert_same([models[1].state_dict(), optimizers[1].state_dict()], before)
    assert states[1]["fresh"].state_dict()["state"] == {}


def test_atomic_gives_a_module_back_to_the_meta_device() -> None:
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    weight = net.weight
    with suppress(torchferry.StateError):
        ship([nn.Linear(2, 2), Stateful({"n": 1})], [net, Stateful({"n": 1}, ["no"])], atomic=True)
    assert net.weight.is_meta
    assert net.weight is weight


@pytest.mark.parametrize("atomic", [False, True])
def test_a_failed_load_keeps_nothing_in_memory(atomic: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        with suppress(torchferry.StateError):
            ship(failing(1), failing(2, "no"), atomic=atomic)
        assert not [each for each in gc.get_objects() if type(each) in (_Fetch, Landing, Loading)]
    finally:
        gc.enable()


def test_the_report_counts_the_memory_of_the_copies() -> None:
    local = {"net": nn.Linear(64, 64), "o": Stateful({"t": torch.zeros(1000)})}
    state = {"net": nn.Linear(64, 64), "o": Stateful({"t": torch.zeros(2000)})}
    nbytes = 4 * (64 * 64 + 64)
    assert ship(state, local, atomic=True).report.extra_bytes == nbytes + 8000 + nbytes + 4000


def test_a_failed_fetch_into_objects_without_tensors_overwrites_nothing() -> None:
    def stop(event: torchferry.ProgressEvent) -> None:
        if event.bytes_moved:
            raise RuntimeError("stop")

    target = Stateful({"n": 0})
    with pytest.raises(RuntimeError, match="stop") as caught:
        ship(Stateful({"t": torch.ones(1 << 24)}), target, on_progress=stop)
    assert not getattr(caught.value, "__notes__", [])
    assert target.state == {"n": 0}


def test_what_can_not_be_sent_is_named_with_its_path() -> None:
    with pytest.raises(torchferry.Unsendable, match=r"o\.x: "):
        serve({"o": Stateful({"x": object()})}, version=1)


@pytest.mark.parametrize("side", ["source", "receiver"])
def test_an_object_that_can_not_be_read_is_named_with_its_path(side: str) -> None:
    class Unreadable(Stateful):
        def state_dict(self) -> Any:
            raise RuntimeError("not initialized")

    states = {"source": {"a": [Stateful({"n": 1})]}, "receiver": {"a": [Stateful({"n": 1})]}}
    states[side]["a"].append(Unreadable())
    with pytest.raises(torchferry.StateError) as caught:
        ship(states["source"], states["receiver"])
    assert caught.value.path == "a[1]"
    assert isinstance(caught.value, torchferry.Unsendable) == (side == "source")
    assert "Unreadable raised RuntimeError: not initialized" in str(caught.value)
    assert str(caught.value).startswith("a[1]: state_dict() of a ")
    assert isinstance(caught.value.__cause__, RuntimeError)


# Tensor subclasses and generators in objects.


class Quantized(torch.Tensor):
    """Integers and a scale. `copy_` quantizes again, as that of some libraries does."""

    items: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, items: torch.Tensor, scale: torch.Tensor) -> Quantized:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, items.shape, dtype=torch.float32)
        made.items, made.scale = items, scale
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["items", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: object, size: object, stride: object) -> Quantized:
        return cls(inner["items"], inner["scale"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].items, args[0].scale)
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            floats = source.items.float() * source.scale
            target.scale.copy_(floats.abs().max() / 127)
            target.items.copy_((floats / target.scale).round())
            return target
        raise NotImplementedError(f"{func} of a Quantized")


torchferry.register(Quantized)


class QuantizedNet(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        items = torch.arange(seed, seed + 6, dtype=torch.int8)
        self.weight = nn.Parameter(Quantized(items, torch.tensor(0.5 * seed)), requires_grad=False)
        self.bias = nn.Parameter(torch.full((2,), float(seed)))


class CopiedNet(QuantizedNet):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        weight = found["weight"]
        return {**found, "weight": Quantized(weight.items.clone(), weight.scale.clone())}


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("net", [QuantizedNet, CopiedNet])
def test_a_module_of_tensor_subclasses_is_not_quantized_again(net: Any, atomic: bool) -> None:
    sent, local = net(1), net(2)
    weight = local.weight
    ship({"net": sent}, {"net": local}, atomic=atomic)
    assert local.weight is weight
    assert torch.equal(weight.items, sent.weight.items)
    assert torch.equal(weight.scale, sent.weight.scale)
    assert torch.equal(local.bias, sent.bias)


def test_state_of_an_optimizer_in_tuples_and_deques_is_not_cast() -> None:
    class Keeping(optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            third = torch.ones(2) / 3
            for param in self.param_groups[0]["params"]:
                self.state[param] = {"pair": (third, 1), "recent": deque([third.clone()], maxlen=4)}

    params = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
    sent, local = (Keeping([param], {}) for param in params)
    sent.step()
    ship({"optim": sent}, {"optim": local})
    assert_same(local.state[params[1]], sent.state[params[0]])


@pytest.mark.parametrize("order", [("rng", "loader"), ("loader", "rng")])
def test_generators_are_exact_beside_objects_that_draw(order: tuple[str, ...]) -> None:
    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {"seed": int(torch.randint(100, ()))}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.rand(3)

    def state() -> dict[str, Any]:
        return {name: torchferry.RNG() if name == "rng" else Loader() for name in order}

    torch.manual_seed(1)
    with serve(state(), version=1) as source:
        expected = torch.rand(3)
        fetch(source.address, into=state())
        assert torch.equal(torch.rand(3), expected)


def test_atomic_gives_generators_back_that_another_object_drew_from() -> None:
    class Refusing(Stateful):
        def load_state_dict(self, state: Any) -> None:
            torch.rand(3)
            if not self.loads:
                self.loads += 1
                raise ValueError("not mine")

    with serve({"rng": torchferry.RNG(), "bad": Stateful({"a": 1})}, version=1) as source:
        torch.manual_seed(2)
        before = torch.get_rng_state()
        with pytest.raises(torchferry.StateError, match="the earlier state was restored"):
            fetch(source.address, into={"rng": torchferry.RNG(), "bad": Refusing({"a": 2})}, atomic=True)
        assert torch.equal(torch.get_rng_state(), before)


def test_atomic_names_an_object_whose_state_can_not_be_copied() -> None:
    target = Stateful({"a": 0, "lock": threading.Lock()})
    with pytest.raises(torchferry.StateError, match=r"state dict of x \(Stateful\) raised TypeError"):
        ship({"x": Stateful({"a": 1})}, {"x": target}, atomic=True)
    assert target.loads == 0
