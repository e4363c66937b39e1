"""Paths that only one side has: what is dropped, kept or fresh is said."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.unit.pg_transport.quacking import Ends
from torchferry import BadArgument, PGTransport, StateMismatch, register


@register
class Point(NamedTuple):
    x: int
    y: int


def theirs() -> dict[str, Any]:
    return {
        "model": {"w": torch.ones(2), "new": torch.full((3,), 5.0)},
        "lr": 0.5,
        "extra": [torch.full((2,), 7.0), "text"],
    }


def ours() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(2), "old": torch.full((2,), -1.0)}, "lr": 0.1, "mine": "kept"}


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What is logged as a WARNING or worse, filled in at the end of each transfer."""
    with caplog.at_level(logging.WARNING):
        yield _Said(caplog)


class _Said(list[str]):
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        super().__init__()
        self._caplog = caplog

    def __iter__(self) -> Iterator[str]:
        return iter([record.getMessage() for record in self._caplog.records])


def test_what_is_dropped_and_kept_is_in_the_report_and_in_one_warning(warnings: list[str]) -> None:
    ends = Ends(ours(), strict=False)
    ends.transfer(theirs())
    report = ends.receiver.last_report
    assert report is not None
    assert report.dropped == ("model.new", "extra[0]", "extra[1]")
    assert report.kept == ("model.old", "mine")
    assert report.fresh == ()
    (said,) = warnings
    assert "rank 0" in said
    assert "3 paths dropped, which only the sender has: model.new, extra[0], extra[1]" in said
    assert "2 paths left as they were, which only the local state has: model.old, mine" in said
    assert "3 paths dropped; 2 paths kept" in str(report)


def test_a_long_list_is_cut_in_the_warning_and_whole_in_the_report(warnings: list[str]) -> None:
    ends = Ends({"w": torch.zeros(2)}, strict=False)
    ends.transfer({"w": torch.ones(2), **{f"x{n}": n for n in range(100)}})
    (said,) = warnings
    assert "100 paths dropped, which only the sender has: x0, x1, x2, …" in said
    assert ends.receiver.last_report is not None
    assert len(ends.receiver.last_report.dropped) == 100


def test_where_both_have_the_same_paths_nothing_is_said(warnings: list[str]) -> None:
    for local in (theirs(), {**theirs(), "model": {"w": torch.zeros(2, 2)[:, 0], "new": torch.zeros(3)}}):
        ends = Ends(local, strict=False)
        ends.transfer(theirs())
        report = ends.receiver.last_report
        assert report is not None
        assert (report.dropped, report.fresh, report.kept) == ((), (), ())
    assert list(warnings) == []


@pytest.mark.parametrize("extra", [None, "drop", "fresh"])
def test_nothing_in_common_at_all_is_an_error_that_recognises_a_wrapper(extra: Any) -> None:
    local = {"layer.w": torch.zeros(2), "layer.b": torch.zeros(1)}
    ends = Ends(local, strict=False, extra=extra)
    with pytest.raises(StateMismatch) as raised:
        ends.transfer({f"module.{name}": torch.ones_like(tensor) for name, tensor in local.items()})
    assert "all incoming paths begin with `module.`: wrapped on one side only?" in str(raised.value)
    assert not local["layer.w"].any()
    assert ends.mail.waiting() == 0


def test_tensors_that_have_nothing_in_common_are_an_error_even_if_a_step_count_has() -> None:
    local = {"model": {"w": torch.zeros(2)}, "step": 1}
    with pytest.raises(StateMismatch, match=r"all incoming paths in `model` begin with `_orig_mod\.`"):
        Ends(local, strict=False).transfer({"model": {"_orig_mod.w": torch.ones(2)}, "step": 2})


@pytest.mark.parametrize(
    ("incoming", "local", "said"),
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
def test_a_prefix_is_recognised_if_all_paths_of_one_side_have_it(
    incoming: list[str], local: list[str], said: str | None
) -> None:
    with pytest.raises(StateMismatch) as raised:
        Ends({name: torch.zeros(1) for name in local}).transfer({name: torch.ones(1) for name in incoming})
    if said is None:
        assert "wrapped" not in str(raised.value)
    else:
        assert f"{said}: wrapped on one side only?" in str(raised.value)


def test_a_container_that_wraps_is_recognised_too() -> None:
    with pytest.raises(StateMismatch, match=r"all incoming paths begin with `state_dict\.`"):
        Ends({"w": torch.zeros(1)}).transfer({"state_dict": {"w": torch.ones(1)}})


def test_a_strict_mismatch_says_that_there_is_a_choice() -> None:
    with pytest.raises(StateMismatch, match=r'extra="fresh" receives .* extra="drop" leaves them out'):
        Ends({"w": torch.zeros(1)}).transfer({"w": torch.ones(1), "more": torch.ones(1)})


def test_fresh_writes_what_matches_and_returns_the_rest_as_fresh_tensors() -> None:
    local = {"model": {"w": torch.zeros(2)}, "lr": 0.1}
    ends = Ends(local, extra="fresh")
    received = ends.transfer(theirs())
    assert received["model"]["w"] is local["model"]["w"]  # type: ignore[index]
    assert received["model"]["w"].tolist() == [1, 1]
    assert received["model"]["new"].tolist() == [5, 5, 5]
    assert received["lr"] == 0.5
    assert received["extra"][0].tolist() == [7, 7]
    assert received["extra"][1] == "text"
    report = ends.receiver.last_report
    assert report is not None
    assert report.fresh == ("model.new", "extra[0]", "extra[1]")
    assert (report.dropped, report.kept) == ((), ())


def test_fresh_still_refuses_what_only_the_local_state_has() -> None:
    with pytest.raises(StateMismatch, match=r"model\.old: the peer has no such path"):
        Ends(ours(), extra="fresh").transfer(theirs())


def test_fresh_and_lenient_give_a_state_with_all_that_either_has(warnings: list[str]) -> None:
    local = ours()
    ends = Ends(local, strict=False, extra="fresh")
    received = ends.transfer(theirs())
    assert received["model"]["w"] is local["model"]["w"]
    assert received["model"]["old"] is local["model"]["old"]
    assert received["model"]["new"].tolist() == [5, 5, 5]
    assert (received["mine"], received["lr"], received["extra"][1]) == ("kept", 0.5, "text")
    report = ends.receiver.last_report
    assert report is not None
    assert report.fresh == ("model.new", "extra[0]", "extra[1]")
    assert report.kept == ("model.old", "mine")
    (said,) = warnings
    assert "dropped" not in said


def test_fresh_and_lenient_refuse_a_value_where_the_other_has_a_container() -> None:
    local = {"w": torch.zeros(1), "a": 1, "b": {"x": 1}}
    with pytest.raises(StateMismatch) as raised:
        Ends(local, strict=False, extra="fresh").transfer({"w": torch.ones(1), "a": {"x": 1}, "b": 2})
    assert [(m.path, m.incoming, m.local) for m in raised.value.mismatches] == [
        ("a", "a container", "a value"),
        ("b", "a value", "a container"),
    ]


def test_fresh_keeps_aliases_among_what_is_fresh_and_with_what_was_written() -> None:
    base = torch.arange(6.0)
    tied = torch.full((2,), 3.0)
    state = {"w": tied, "head": tied, "a": base[:4], "b": base[2:]}
    local = {"w": torch.zeros(2)}
    received = Ends(local, extra="fresh").transfer(state)
    assert received["head"] is received["w"] is local["w"]
    received["a"][3] = -1
    assert received["b"].tolist() == [2, -1, 4, 5]


def test_fresh_ties_what_has_the_memory_of_a_written_leaf_as_a_state_dict_has_tied_weights() -> None:
    tied = torch.full((2,), 3.0)
    local = {"embed": torch.zeros(2)}
    ends = Ends(local, extra="fresh")
    received = ends.transfer({"embed": tied.detach(), "head": tied.detach(), "part": tied[:1]})
    assert received["head"] is local["embed"]
    assert received["part"].tolist() == [3]
    assert ends.receiver.last_report is not None
    assert ends.receiver.last_report.fresh == ("head", "part")


@pytest.mark.parametrize("strict", [True, False])
def test_fresh_puts_a_leaf_where_the_local_state_has_an_empty_container(strict: bool) -> None:
    local = {"a": {}, "b": torch.zeros(2), "c": []}
    received = Ends(local, strict=strict, extra="fresh").transfer(
        {"a": torch.ones(3), "b": torch.ones(2), "c": 1}
    )
    assert received["a"].tolist() == [1, 1, 1]
    assert received["b"] is local["b"]
    assert received["c"] == 1
    assert Ends({}, strict=strict, extra="fresh").transfer(torch.ones(1)).tolist() == [1]


def test_what_no_local_container_can_hold_is_a_mismatch_and_not_the_peer_s_fault() -> None:
    state = {"w": torch.ones(1), "a": {"x": 1, "y": 2, "z": 3}, "d": [1, 2, 3]}
    for local in ({"a": Point(1, 2)}, {"d": deque([1, 2], maxlen=2)}):
        with pytest.raises(StateMismatch, match="no container can hold the keys of both sides"):
            Ends({"w": torch.zeros(1), **local}, strict=False, extra="fresh").transfer(state)


@pytest.mark.parametrize("state", [{}, {"a": {}, "b": []}])
def test_a_state_without_leaves_matches_nothing(state: dict[str, Any]) -> None:
    with pytest.raises(StateMismatch, match="w: the peer has no such path"):
        Ends({"w": torch.zeros(2)}, strict=False).transfer(state)


def test_fresh_into_an_empty_state_is_all_fresh() -> None:
    received = Ends({}, extra="fresh").transfer(theirs())
    assert received["model"]["w"].tolist() == [1, 1]


def test_a_view_beside_what_is_fresh_leaves_its_neighbours_alone() -> None:
    whole = torch.zeros(4, 4)
    base = torch.arange(8.0)
    received = Ends({"w": whole[1:3, 1:3]}, extra="fresh").transfer({"w": base[:4].view(2, 2), "x": base[2:]})
    assert whole.tolist() == [[0, 0, 0, 0], [0, 0, 1, 0], [0, 2, 3, 0], [0, 0, 0, 0]]
    assert received["x"].tolist() == [2, 3, 4, 5, 6, 7]


def test_drop_without_lenience_still_refuses_what_only_the_local_state_has() -> None:
    with pytest.raises(StateMismatch, match="the peer has no such path"):
        Ends(ours(), extra="drop").transfer(theirs())
    local = {"model": {"w": torch.zeros(2)}, "lr": 0.0}
    received = Ends(local, extra="drop").transfer(theirs())
    assert received == {"model": {"w": local["model"]["w"]}, "lr": 0.5}  # type: ignore[index]


def test_lenient_with_an_error_for_extra_paths_keeps_only_local_ones() -> None:
    with pytest.raises(StateMismatch) as raised:
        Ends(ours(), strict=False, extra="error").transfer(theirs())
    assert [m.path for m in raised.value.mismatches] == ["model.new", "extra[0]", "extra[1]"]
    local = {"w": torch.zeros(1), "mine": 1}
    assert Ends(local, strict=False, extra="error").transfer({"w": torch.ones(1)})["mine"] == 1


@pytest.mark.parametrize("extra", ["keep", "", True, 1])
def test_another_choice_is_a_bad_argument(extra: Any) -> None:
    with pytest.raises(BadArgument, match='extra must be one of "error", "fresh", "drop"'):
        PGTransport(Ends().group, 1, "cpu", extra=extra)


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
def test_a_new_worker_s_optimizer_gets_the_moments_that_it_has_not_made_yet(name: str) -> None:
    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
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

    healthy, new = made(1), made(2)
    for seed in range(3):
        step(*healthy, seed)
    received = Ends(state_of(*new), extra="fresh").transfer(state_of(*healthy))
    new[1].load_state_dict(received["optim"])
    for pair in (healthy, new):
        step(*pair, seed=9)
    for ours, theirs in zip(new[0].parameters(), healthy[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
