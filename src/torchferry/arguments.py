"""Checks of the arguments that users pass to the front doors. Every check raises BadArgument."""

import operator
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeGuard

import torch

from torchferry.core.pull import MAX_NAME_CHARACTERS
from torchferry.errors import BadArgument
from torchferry.links.address import without_token

Timeout = timedelta | float


def require(is_valid: bool, name: str, expected: str, value: object) -> None:
    """Raise BadArgument unless an argument is valid."""
    if not is_valid:
        raise BadArgument(f"{name} must be {expected}, not {without_token(repr(value))}")


def is_int(value: object) -> TypeGuard[int]:
    """Return whether a value is an int, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_int(value: object, name: str, low: int = -(2**63), high: int = 2**63 - 1) -> int:
    """Return an int that lies between two limits. What has `__index__` counts, but no bool and no tensor."""
    expected = f"an int from {low} to {high}" if low > -(2**63) else "an int of 64 bits"
    found: int | None = None
    if not isinstance(value, (bool, torch.Tensor)):
        with suppress(TypeError):
            found = operator.index(value)  # type: ignore[arg-type]
    require(found is not None and low <= found <= high, name, expected, value)
    return found  # type: ignore[return-value]


def check_str(value: object, name: str) -> str:
    """Return a string that is not empty. The message does not show the value, which may be a secret."""
    if not isinstance(value, str) or not value:
        raise BadArgument(f"{name} must be a string that is not empty")
    return value


def check_name(value: object) -> str:
    """Return a name under which a state is served."""
    is_name = isinstance(value, str) and 0 < len(value) <= MAX_NAME_CHARACTERS
    # A lone surrogate can't be encoded.
    is_name = is_name and not any("\ud800" <= c <= "\udfff" for c in str(value))
    require(is_name, "name", f"a string of 1 to {MAX_NAME_CHARACTERS} characters", value)
    return str(value)


def check_bool(value: object, name: str) -> bool:
    """Return True or False."""
    require(isinstance(value, bool), name, "True or False", value)
    return value  # type: ignore[return-value]


def check_choice(value: object, name: str, choices: Sequence[object]) -> None:
    """Check that a value is one of several."""
    # Not `in`, because 1 == True.
    is_choice = any(value is choice or (isinstance(value, str) and value == choice) for choice in choices)
    listed = ", ".join(f'"{choice}"' if isinstance(choice, str) else repr(choice) for choice in choices)
    require(is_choice, name, f"one of {listed}", value)


def check_tls(tls: object) -> None:
    """Check that a value is an SSLContext, or None."""
    require(tls is None or isinstance(tls, ssl.SSLContext), "tls", "an ssl.SSLContext", tls)


def check_state_function(state_dict: object) -> None:
    """Check that a function returns the local state, and not the state itself or a module."""
    # A module is callable too, but calling it runs its forward pass.
    if state_dict is not None and (not callable(state_dict) or isinstance(state_dict, torch.nn.Module)):
        raise BadArgument(
            f"state_dict must be a function that returns the local state, not a {type(state_dict).__name__}: "
            "pass model.state_dict, not model.state_dict() or the model"
        )


def state_function(into: Any) -> Callable[[], object] | None:
    """Return a function that returns the local state, given that state or such a function."""
    # A module is callable too, but calling it runs its forward pass.
    if into is None or (callable(into) and not hasattr(into, "load_state_dict")):
        return into  # type: ignore[no-any-return]
    return lambda: into


def seconds(timeout: Timeout, name: str) -> float:
    """Return a positive number of seconds."""
    try:
        if isinstance(timeout, (bool, str, bytes)):
            raise TypeError
        found = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (TypeError, ValueError, OverflowError):
        shown = without_token(repr(timeout))
        raise BadArgument(f"{name} must be a timedelta or a number of seconds, not {shown}") from None
    require(0 < found <= timedelta.max.total_seconds(), name, "positive and finite", timeout)
    return found
