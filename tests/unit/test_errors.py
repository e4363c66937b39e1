"""The tree of errors: its root and branches, its messages, and pickling."""

from __future__ import annotations

import pickle

import pytest

import torchferry
from torchferry import errors
from torchferry.errors import (
    BadArgument,
    Corrupted,
    FerryError,
    GroupBroken,
    LinkBroken,
    LinkStalled,
    LinkTimeout,
    Mismatch,
    SendBroken,
    SendFailed,
    SendLate,
    StateChanged,
    StateMismatch,
    StepMismatch,
    TargetTorn,
    TornAndBroken,
    TornAndLate,
    Unsendable,
)

EVERY = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, FerryError)
]


def test_every_error_is_public_and_drawn_in_the_docstring() -> None:
    assert errors.__doc__ is not None
    for cls in EVERY:
        assert cls.__name__ in errors.__doc__
        assert getattr(torchferry, cls.__name__) is cls


def test_builtin_exceptions_catch_them() -> None:
    assert issubclass(BadArgument, ValueError)
    assert issubclass(LinkTimeout, TimeoutError)
    assert issubclass(LinkBroken, ConnectionError)


def test_a_message_has_the_peer_and_the_phase() -> None:
    error = LinkTimeout("nothing came", peer=3, phase="receive tensors")
    assert str(error) == "nothing came [peer: rank 3, phase: receive tensors]"


def test_a_mismatch_lists_every_path_up_to_a_screenful() -> None:
    many = [Mismatch(f"layer.{n}.weight", "dtype", "float32", "int32") for n in range(200)]
    error = StateMismatch(many)
    assert len(error.mismatches) == 200
    assert "200 places" in str(error)
    assert "layer.0.weight: dtype: incoming float32, local int32" in str(error)
    assert "and 150 more" in str(error)
    assert "nothing was overwritten" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        Unsendable("no", path="a.b", phase="describe"),
        StateMismatch([Mismatch("a", "dtype", "x", "y")], peer=2),
        StepMismatch(wanted=3, got=None, peer=1),
        LinkTimeout("late", peer=0),
        *(
            cls("gone", peer=1, path="a", phase="send tensors")
            for cls in (LinkBroken, GroupBroken, LinkStalled)
        ),
        StateChanged(["a", "b"], peer=1),
        Corrupted(["a", "b"], peer=1),
        *(
            cls([1], {2: LinkBroken("gone", peer=2), 3: LinkTimeout("late", peer=3)})
            for cls in (SendFailed, SendLate, SendBroken)
        ),
        *(
            cls(LinkBroken("gone", peer=1), whole=["a"], torn=["b"], untouched=["c"])
            for cls in (TargetTorn, TornAndLate, TornAndBroken)
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_pickled_error_keeps_all_its_fields(error: FerryError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert repr(vars(copy)) == repr(vars(error))


def test_a_step_mismatch_names_both_steps() -> None:
    assert "step 3" in str(StepMismatch(wanted=3, got=5))
    assert "step 5" in str(StepMismatch(wanted=3, got=5))
    assert "without a step" in str(StepMismatch(wanted=3, got=None))
