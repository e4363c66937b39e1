"""Asks the sender for a state that it has to refuse, and sees that nothing of it was sent."""

from __future__ import annotations

import pytest

from torchferry.core.protocol import MAX_METADATA_BYTES
from torchferry.engine import Push, push
from torchferry.errors import Unsendable
from torchferry.testing import MemoryNetwork


def refusal_of(state: object) -> Unsendable:
    """Give the error that sending the state ends in."""
    network = MemoryNetwork()
    with pytest.raises(Unsendable) as raised:
        push(network.link(0), [1], state, Push(timeout_s=10, max_metadata_bytes=MAX_METADATA_BYTES))
    assert network.messages == 0, "something was sent before the refusal"
    assert raised.value.phase == "describe"
    return raised.value


def refusal_at_a_path(value: object) -> str:
    """Put a value beside sound ones, and give the message of the refusal, which must name its path."""
    error = refusal_of({"model": {"weight": 1, "odd": [0, value]}})
    assert error.path == "model.odd.1"
    assert str(error).startswith("model.odd.1: ")
    return str(error)
