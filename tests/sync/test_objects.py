"""sync of states that hold objects: modules, optimizers, schedulers and random number generators."""

from __future__ import annotations

import random
import signal
from _thread import interrupt_main
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchferry
from tests.support.cluster import Cluster
from tests.sync.test_sync import TIMEOUT_S
from torchferry.engine.pull.landing import Landing


class Training:
    """A small training run. Its state holds objects."""

    def __init__(self, seed: int, steps: int, mesh: Any = None) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6, bias=False))
        if mesh is not None:
            self.model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.step = 0
        for _ in range(steps):
            self.train()

    def train(self) -> float:
        loss = self.model(torch.randn(4, 6)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return float(loss) + random.random()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optim": self.optimizer,
            "scheduler": self.scheduler,
            "rng": torchferry.RNG(),
            "step": self.step,
        }


def train_on(rank: int, new: list[int], atomic: bool, shape: tuple[int, ...] | None) -> dict[str, Any]:
    """New ranks take the state of the others; then all train on, and return their losses."""
    mesh = None if shape is None else init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    training = Training(7, 3, mesh)
    if rank in new:
        training = Training(100 + rank, 0, mesh)
    # The weights of all ranks are equal, but the generators of each rank are its own.
    torch.manual_seed(rank)
    parameter = next(training.model.parameters())
    result = torchferry.sync(
        training.state(), None if rank in new else training.step, atomic=atomic, timeout=TIMEOUT_S
    )
    training.step = result.state["step"]
    assert result.state["model"] is training.model
    if result.report is not None:
        assert ("optim.state[0].exp_avg" in result.report.fresh) == (rank in new)
    assert next(training.model.parameters()) is parameter
    assert parameter is training.optimizer.param_groups[0]["params"][0]
    drawn = torch.randint(1 << 30, (1,)).item()
    torch.manual_seed(1)
    random.seed(1)
    return {
        "step": training.step,
        "losses": [training.train() for _ in range(3)],
        "lr": training.optimizer.param_groups[0]["lr"],
        "drawn": drawn,
        "loaded": () if result.report is None else result.report.loaded,
    }


@pytest.mark.parametrize("atomic", [False, True])
def test_a_new_rank_trains_on_like_the_others(pair: Cluster, atomic: bool) -> None:
    one, two = pair.run(train_on, [1], atomic, None)
    assert {**one, "loaded": ()} == {**two, "loaded": ()}
    assert two["step"] == 3
    assert set(two["loaded"]) == {"model", "optim", "scheduler", "rng"}


def test_generators_differ_without_being_an_error_and_come_from_the_lowest_rank(quad: Cluster) -> None:
    answers = quad.run(train_on, [3], False, None)
    assert len({answer["drawn"] for answer in answers[:3]}) == 3
    assert answers[3]["drawn"] == answers[0]["drawn"]
    assert len({tuple(answer["losses"]) for answer in answers}) == 1


def test_a_rank_of_hsdp_gets_the_moments_of_its_twin(quad: Cluster) -> None:
    for new in ([2], [0, 3]):
        answers = quad.run(train_on, new, False, (2, 2))
        assert len({tuple(answer["losses"]) for answer in answers}) == 1
        assert {answer["step"] for answer in answers} == {3}


class Refusing(nn.Linear):
    """A module that can't be loaded."""

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError("no more room")


def load_what_refuses(rank: int, atomic: bool) -> str:
    model = (nn.Linear if rank == 0 else Refusing)(2, 2)
    state = {"w": torch.full((5,), float(rank)), "model": model}
    before = [parameter.clone() for parameter in model.parameters()]
    if rank == 0:
        return "".join(torchferry.sync(state, 1, timeout=TIMEOUT_S).failed[1])
    with pytest.raises(torchferry.StateError) as raised:
        torchferry.sync(state, None, atomic=atomic, timeout=TIMEOUT_S)
    if atomic:
        assert all(map(torch.equal, before, model.parameters()))
        assert state["w"][0] == 1.0  # type: ignore[index]
    return f"{type(raised.value).__name__} {raised.value}"


def test_an_object_that_refuses_its_state_fails_its_rank_and_the_other_knows(pair: Cluster) -> None:
    source, receiver = pair.run(load_what_refuses, False)
    assert "load_state_dict of model (Refusing) raised RuntimeError: no more room" in source
    assert receiver.startswith("TargetTorn")
    assert "(model)" in receiver
    _, receiver = pair.run(load_what_refuses, True)
    assert "giving" in receiver or "except that model" in receiver


class Interrupted(nn.Linear):
    """A module whose loading the user interrupts, the first time."""

    is_first = True

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        if self.is_first:
            self.is_first = False
            raise KeyboardInterrupt
        return super().load_state_dict(*args, **options)


def load_what_is_interrupted(rank: int, atomic: bool) -> list[str]:
    second = (nn.Linear if rank == 0 else Interrupted)(2, 2)
    state = {"w": torch.full((5,), float(rank)), "one": nn.Linear(2, 2), "two": second}
    before = {name: value.clone() for name, value in second.state_dict().items()}
    if rank == 0:
        return [torchferry.sync(state, 1, timeout=TIMEOUT_S).failed[1]]
    with pytest.raises(KeyboardInterrupt) as raised:
        torchferry.sync(state, None, atomic=atomic, timeout=TIMEOUT_S)
    if atomic:
        assert all(torch.equal(value, second.state_dict()[name]) for name, value in before.items())
        assert state["w"][0] == 1.0  # type: ignore[index]
    return raised.value.__notes__


def test_an_interrupt_while_an_object_is_loaded_is_undone_or_leaves_a_torn_state_that_is_named(
    pair: Cluster,
) -> None:
    _, (note,) = pair.run(load_what_is_interrupted, False)
    assert "1 paths may hold old and new bytes mixed (two), 4 paths are whole" in note
    _, (note,) = pair.run(load_what_is_interrupted, True)
    assert "the earlier state was restored" in note


def interrupt_the_write(rank: int) -> list[str]:
    """The user interrupts rank 1 when all bytes have arrived, and are being written."""
    model = nn.Linear(2, 2)
    state = {"w": torch.full((5,), float(rank)), "model": model}
    before = [parameter.clone() for parameter in model.parameters()]
    if rank == 0:
        return [torchferry.sync(state, 1, timeout=TIMEOUT_S).failed[1]]
    apply = Landing.apply

    def interrupt(landing: Landing) -> None:
        interrupt_main()
        apply(landing)

    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with mock.patch.object(Landing, "apply", interrupt), pytest.raises(KeyboardInterrupt) as raised:
            torchferry.sync(state, None, atomic=True, timeout=TIMEOUT_S)
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert all(map(torch.equal, before, model.parameters()))
    assert state["w"][0] == 1.0  # type: ignore[index]
    return raised.value.__notes__


def test_an_interrupt_of_an_atomic_write_leaves_the_earlier_state(pair: Cluster) -> None:
    _, notes = pair.run(interrupt_the_write)
    assert "the earlier state was restored" in notes[-1]


def sync_other_modules(rank: int) -> str:
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)] if rank == 0 else [nn.Linear(3, 3)]
    state = {"model": nn.Sequential(*layers), "step": rank}
    if rank == 0:
        return torchferry.sync(state, 1, timeout=TIMEOUT_S).failed[1]
    before = layers[0].weight.clone()
    with pytest.raises(torchferry.StateMismatch) as raised:
        torchferry.sync(state, None, timeout=TIMEOUT_S)
    assert torch.equal(before, layers[0].weight)
    return str(raised.value)


def test_a_module_without_a_place_for_an_entry_is_a_mismatch_before_anything_is_written(
    pair: Cluster,
) -> None:
    for text in pair.run(sync_other_modules):
        assert "model.1.weight: no such path here" in text


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> object:
        return {"scale": 1}

    def set_extra_state(self, state: object) -> None:
        pass


class Stateful:
    """An object that keeps what it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def sync_what_does_not_fit(rank: int, case: str) -> str:
    states: list[Any] = [{"model": nn.Linear(3, 3)}, {"model": WithExtraState(3, 3)}]
    if case == "extra state at the source":
        states.reverse()
    elif case == "one object at two paths":
        both = Stateful({"n": 3})
        states = [{"a": Stateful({"n": 1}), "b": Stateful({"n": 2})}, {"a": both, "b": both}]
    state = {**states[rank], "w": torch.full((2,), float(rank))}
    if rank == 0:
        return torchferry.sync(state, 1, timeout=TIMEOUT_S).failed[1]
    with pytest.raises(torchferry.StateMismatch) as raised:
        torchferry.sync(state, None, timeout=TIMEOUT_S)
    assert state["w"].tolist() == [1, 1]
    return str(raised.value)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("extra state at the source", "model._extra_state.scale: no such path here"),
        ("extra state at the receiver", "model._extra_state.scale: the peer has no such path"),
        ("one object at two paths", "b: this is the same object as at a, but the peer has different states"),
    ],
)
def test_objects_that_do_not_fit_are_a_mismatch_before_anything_is_written(
    case: str, said: str, pair: Cluster
) -> None:
    for text in pair.run(sync_what_does_not_fit, case):
        assert said in text


def sync_objects_of_other_kinds(rank: int) -> tuple[list[object], bool]:
    """The state of each object is a value on one rank and a container on the other; one model is on meta."""
    states: list[list[Any]] = [[5, {"n": torch.ones(2)}, {}], [{"n": torch.zeros(2)}, None, torch.ones(3)]]
    torch.manual_seed(rank)
    with torch.device("meta" if rank else "cpu"):
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    objects = [Stateful(state) for state in states[rank]]
    torchferry.sync({"model": model, "objects": objects}, None if rank else 1, timeout=TIMEOUT_S)
    torch.manual_seed(0)
    expected = nn.Linear(3, 3).weight
    return [str(each.state) for each in objects], torch.equal(model[0].weight, expected)


def test_objects_are_loaded_whatever_their_state_dicts_were(pair: Cluster) -> None:
    assert pair.run(sync_objects_of_other_kinds) == [(["5", "{'n': tensor([1., 1.])}", "{}"], True)] * 2


def sync_shards_on_meta(rank: int) -> tuple[list[float], bool]:
    """Ranks 2 and 3 have their model on the meta device. Return what each rank computes with it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.manual_seed(rank // 2)
    with torch.device("cpu" if rank < 2 else "meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torchferry.sync({"model": model}, 1 if rank < 2 else None, timeout=TIMEOUT_S)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model(torch.ones(1, 3)).tolist()[0], all(param.grad is not None for param in model.parameters())


def test_a_sharded_model_on_the_meta_device_takes_the_shards_of_its_twin(quad: Cluster) -> None:
    answers = quad.run(sync_shards_on_meta)
    assert answers == [answers[0]] * 4
    assert answers[0][1]
