"""Paths that only one side has: the report and a warning list what is dropped, kept or fresh."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.unit.pg_transport.fake_group import TransportPair
from torchferry import BadArgument, PGTransport, StateMismatch, register


@register
class Point(NamedTuple):
    x: int
    y: int


def incoming_state() -> dict[str, Any]:
    return {
        "model": {"w": torch.ones(2), "new": torch.full((3,), 5.0)},
        "lr": 0.5,
        "extra": [torch.full((2,), 7.0), "text"],
    }


def local_state() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(2), "old": torch.full((2,), -1.0)}, "lr": 0.1, "mine": "kept"}


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The messages that were logged at WARNING or above."""
    with caplog.at_level(logging.WARNING):
        yield _Messages(caplog)


class _Messages(list[str]):
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        super().__init__()
        self._caplog = caplog

    def __iter__(self) -> Iterator[str]:
        return iter([record.getMessage() for record in self._caplog.records])


def test_dropped_and_kept_paths_are_in_the_report_and_in_one_warning(warnings: list[str]) -> None:
    transports = TransportPair(local_state(), strict=False)
    transports.transfer(incoming_state())
    report = transports.receiver.last_report
    assert report is not None
    assert report.dropped == ("model.new", "extra[0]", "extra[1]")
    assert report.kept == ("model.old", "mine")
    assert report.fresh == ()
    (message,) = warnings
    assert "rank 0" in message
    assert "3 paths dropped, which only the sender has: model.new, extra[0], extra[1]" in message
    assert "2 paths not changed, which only the local state has: model.old, mine" in message
    assert "3 paths dropped; 2 paths kept" in str(report)


def test_a_local_path_that_shares_memory_with_a_written_tensor_is_not_kept() -> None:
    weight, halves = torch.zeros(4), torch.zeros(8)
    local = {"w": weight, "tied": weight, "half": halves[:4], "all": halves, "rest": halves[4:]}
    transports = TransportPair(local, strict=False)
    transports.transfer({"w": torch.ones(4), "half": torch.ones(4)})
    assert transports.receiver.last_report is not None
    assert transports.receiver.last_report.kept == ("rest",)
    assert torch.equal(local["tied"], torch.ones(4))


def test_a_long_list_is_shortened_in_the_warning_and_complete_in_the_report(warnings: list[str]) -> None:
    transports = TransportPair({"w": torch.zeros(2)}, strict=False)
    transports.transfer({"w": torch.ones(2), **{f"x{n}": n for n in range(100)}})
    (message,) = warnings
    assert "100 paths dropped, which only the sender has: x0, x1, x2, …" in message
    assert transports.receiver.last_report is not None
    assert len(transports.receiver.last_report.dropped) == 100


def test_there_is_no_warning_if_both_sides_have_the_same_paths(warnings: list[str]) -> None:
    for local in (
        incoming_state(),
        {**incoming_state(), "model": {"w": torch.zeros(2, 2)[:, 0], "new": torch.zeros(3)}},
    ):
        transports = TransportPair(local, strict=False)
        transports.transfer(incoming_state())
        report = transports.receiver.last_report
        assert report is not None
        assert (report.dropped, report.fresh, report.kept) == ((), (), ())
    assert list(warnings) == []


@pytest.mark.parametrize("extra", [None, "drop", "fresh"])
def test_states_without_a_common_path_are_a_mismatch_that_names_the_wrapper_prefix(extra: Any) -> None:
    local = {"layer.w": torch.zeros(2), "layer.b": torch.zeros(1)}
    transports = TransportPair(local, strict=False, extra=extra)
    with pytest.raises(StateMismatch) as raised:
        transports.transfer({f"module.{name}": torch.ones_like(tensor) for name, tensor in local.items()})
    assert "all incoming paths begin with `module.`: wrapped on one side only?" in str(raised.value)
    assert not local["layer.w"].any()
    assert transports.mailboxes.unread() == 0


def test_states_without_a_common_tensor_are_a_mismatch_even_if_they_share_a_value() -> None:
    local = {"model": {"w": torch.zeros(2)}, "step": 1}
    with pytest.raises(StateMismatch, match=r"all incoming paths in `model` begin with `_orig_mod\.`"):
        TransportPair(local, strict=False).transfer({"model": {"_orig_mod.w": torch.ones(2)}, "step": 2})


@pytest.mark.parametrize(
    ("incoming", "local", "message"),
    [
        (["module.a", "module.b"], ["a", "b"], "all incoming paths begin with `module.`"),
        (["a", "b"], ["module.a", "module.b"], "all local paths begin with `module.`"),
        (["module._orig_mod.a"], ["a"], "all incoming paths begin with `module._orig_mod.`"),
        (["module.a", "b"], ["a", "b"], "all other incoming paths begin with `module.`"),
        (["module.a", "module.c"], ["a", "b"], "all incoming paths begin with `module.`"),
        (["module.a", "module.b", "c"], ["a", "b"], None),
        (["a"], ["b"], None),
    ],
)
def test_a_prefix_is_recognized_if_all_paths_of_one_side_have_it(
    incoming: list[str], local: list[str], message: str | None
) -> None:
    with pytest.raises(StateMismatch) as raised:
        TransportPair({name: torch.zeros(1) for name in local}).transfer(
            {name: torch.ones(1) for name in incoming}
        )
    if message is None:
        assert "wrapped" not in str(raised.value)
    else:
        assert f"{message}: wrapped on one side only?" in str(raised.value)


def test_a_container_around_the_whole_state_is_recognized() -> None:
    with pytest.raises(StateMismatch, match=r"all incoming paths begin with `state_dict\.`"):
        TransportPair({"w": torch.zeros(1)}).transfer({"state_dict": {"w": torch.ones(1)}})


def test_a_strict_mismatch_names_the_options_of_extra() -> None:
    with pytest.raises(StateMismatch, match=r'extra="fresh" receives .* extra="drop" leaves them out'):
        TransportPair({"w": torch.zeros(1)}).transfer({"w": torch.ones(1), "more": torch.ones(1)})


def test_extra_fresh_writes_matching_paths_and_returns_the_others_as_fresh_tensors() -> None:
    local = {"model": {"w": torch.zeros(2)}, "lr": 0.1}
    transports = TransportPair(local, extra="fresh")
    received = transports.transfer(incoming_state())
    assert received["model"]["w"] is local["model"]["w"]  # type: ignore[index]
    assert received["model"]["w"].tolist() == [1, 1]
    assert received["model"]["new"].tolist() == [5, 5, 5]
    assert received["lr"] == 0.5
    assert received["extra"][0].tolist() == [7, 7]
    assert received["extra"][1] == "text"
    report = transports.receiver.last_report
    assert report is not None
    assert report.fresh == ("model.new", "extra[0]", "extra[1]")
    assert (report.dropped, report.kept) == ((), ())


def test_extra_fresh_rejects_paths_that_only_the_local_state_has() -> None:
    with pytest.raises(StateMismatch, match=r"model\.old: the peer has no such path"):
        TransportPair(local_state(), extra="fresh").transfer(incoming_state())


def test_extra_fresh_without_strict_returns_the_paths_of_both_sides(warnings: list[str]) -> None:
    local = local_state()
    transports = TransportPair(local, strict=False, extra="fresh")
    received = transports.transfer(incoming_state())
    assert received["model"]["w"] is local["model"]["w"]
    assert received["model"]["old"] is local["model"]["old"]
    assert received["model"]["new"].tolist() == [5, 5, 5]
    assert (received["mine"], received["lr"], received["extra"][1]) == ("kept", 0.5, "text")
    report = transports.receiver.last_report
    assert report is not None
    assert report.fresh == ("model.new", "extra[0]", "extra[1]")
    assert report.kept == ("model.old", "mine")
    (message,) = warnings
    assert "dropped" not in message


def test_extra_fresh_without_strict_rejects_a_value_in_place_of_a_container() -> None:
    local = {"w": torch.zeros(1), "a": 1, "b": {"x": 1}}
    with pytest.raises(StateMismatch) as raised:
        TransportPair(local, strict=False, extra="fresh").transfer(
            {"w": torch.ones(1), "a": {"x": 1}, "b": 2}
        )
    assert [(m.path, m.incoming, m.local) for m in raised.value.mismatches] == [
        ("a", "a container", "a value"),
        ("b", "a value", "a container"),
    ]


def test_extra_fresh_keeps_aliases_among_fresh_and_written_tensors() -> None:
    base = torch.arange(6.0)
    tied = torch.full((2,), 3.0)
    state = {"w": tied, "head": tied, "a": base[:4], "b": base[2:]}
    local = {"w": torch.zeros(2)}
    received = TransportPair(local, extra="fresh").transfer(state)
    assert received["head"] is received["w"] is local["w"]
    received["a"][3] = -1
    assert received["b"].tolist() == [2, -1, 4, 5]


def test_extra_fresh_ties_a_fresh_leaf_to_the_written_leaf_that_shares_its_memory() -> None:
    tied = torch.full((2,), 3.0)
    local = {"embed": torch.zeros(2)}
    transports = TransportPair(local, extra="fresh")
    received = transports.transfer({"embed": tied.detach(), "head": tied.detach(), "part": tied[:1]})
    assert received["head"] is local["embed"]
    assert received["part"].tolist() == [3]
    assert transports.receiver.last_report is not None
    assert transports.receiver.last_report.fresh == ("head", "part")


@pytest.mark.parametrize("strict", [True, False])
def test_extra_fresh_replaces_an_empty_local_container_by_a_leaf(strict: bool) -> None:
    local = {"a": {}, "b": torch.zeros(2), "c": []}
    received = TransportPair(local, strict=strict, extra="fresh").transfer(
        {"a": torch.ones(3), "b": torch.ones(2), "c": 1}
    )
    assert received["a"].tolist() == [1, 1, 1]
    assert received["b"] is local["b"]
    assert received["c"] == 1
    assert TransportPair({}, strict=strict, extra="fresh").transfer(torch.ones(1)).tolist() == [1]


def test_keys_that_the_local_container_can_t_hold_are_a_mismatch() -> None:
    state = {"w": torch.ones(1), "a": {"x": 1, "y": 2, "z": 3}, "d": [1, 2, 3]}
    for local in ({"a": Point(1, 2)}, {"d": deque([1, 2], maxlen=2)}):
        with pytest.raises(StateMismatch, match="no container can hold the keys of both sides"):
            TransportPair({"w": torch.zeros(1), **local}, strict=False, extra="fresh").transfer(state)


@pytest.mark.parametrize("state", [{}, {"a": {}, "b": []}])
def test_a_state_without_leaves_is_a_mismatch(state: dict[str, Any]) -> None:
    with pytest.raises(StateMismatch, match="w: the peer has no such path"):
        TransportPair({"w": torch.zeros(2)}, strict=False).transfer(state)


def test_extra_fresh_into_an_empty_state_returns_fresh_tensors() -> None:
    received = TransportPair({}, extra="fresh").transfer(incoming_state())
    assert received["model"]["w"].tolist() == [1, 1]


def test_extra_fresh_writes_only_the_bytes_of_a_local_view() -> None:
    whole = torch.zeros(4, 4)
    base = torch.arange(8.0)
    received = TransportPair({"w": whole[1:3, 1:3]}, extra="fresh").transfer(
        {"w": base[:4].view(2, 2), "x": base[2:]}
    )
    assert whole.tolist() == [[0, 0, 0, 0], [0, 0, 1, 0], [0, 2, 3, 0], [0, 0, 0, 0]]
    assert received["x"].tolist() == [2, 3, 4, 5, 6, 7]


def test_extra_drop_with_strict_rejects_paths_that_only_the_local_state_has() -> None:
    with pytest.raises(StateMismatch, match="the peer has no such path"):
        TransportPair(local_state(), extra="drop").transfer(incoming_state())
    local = {"model": {"w": torch.zeros(2)}, "lr": 0.0}
    received = TransportPair(local, extra="drop").transfer(incoming_state())
    assert received == {"model": {"w": local["model"]["w"]}, "lr": 0.5}  # type: ignore[index]


def test_extra_error_without_strict_keeps_local_paths_and_rejects_incoming_ones() -> None:
    with pytest.raises(StateMismatch) as raised:
        TransportPair(local_state(), strict=False, extra="error").transfer(incoming_state())
    assert [m.path for m in raised.value.mismatches] == ["model.new", "extra[0]", "extra[1]"]
    local = {"w": torch.zeros(1), "mine": 1}
    assert TransportPair(local, strict=False, extra="error").transfer({"w": torch.ones(1)})["mine"] == 1


@pytest.mark.parametrize("extra", ["keep", "", True, 1])
def test_an_unknown_value_of_extra_is_a_bad_argument(extra: Any) -> None:
    with pytest.raises(BadArgument, match='extra must be one of "error", "fresh", "drop"'):
        PGTransport(TransportPair().group, 1, "cpu", extra=extra)


OPTIMIZERS = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "ASGD": {},
    "LBFGS": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_has_not_stepped_receives_the_moments(name: str) -> None:
    def create(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        options: Any = OPTIMIZERS[name]
        return model, getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = model(batch).square().mean()
            value.backward()
            return value

        optimizer.step(loss)  # type: ignore[arg-type]

    def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    healthy, new = create(1), create(2)
    for seed in range(3):
        step(*healthy, seed)
    received = TransportPair(state_of(*new), extra="fresh").transfer(state_of(*healthy))
    new[1].load_state_dict(received["optim"])
    for pair in (healthy, new):
        step(*pair, seed=9)
    for parameter, expected in zip(new[0].parameters(), healthy[0].parameters(), strict=True):
        assert torch.equal(parameter, expected)
