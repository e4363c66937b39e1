"""Sends a state that the sender must refuse, and checks that the receiver only gets the refusal."""

from __future__ import annotations

import pytest

from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.engine.push import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.errors import PeerGaveUp, Unsendable
from torchferry.testing import MemoryNetwork


def refusal_of(state: object) -> Unsendable:
    """Return the error that sending the state raises."""
    network = MemoryNetwork()
    with pytest.raises(Unsendable) as raised:
        send_state(
            network.link(0), [1], state, SendOptions(timeout_s=10, max_metadata_bytes=MAX_METADATA_BYTES)
        )
    with pytest.raises(PeerGaveUp, match="refused to send its state") as told:
        receive_state(network.link(1), 0, ReceiveOptions(timeout_s=10, max_metadata_bytes=MAX_METADATA_BYTES))
    assert network.messages == 2, "the sender sent more than the refusal"
    assert (raised.value.path or "") in str(told.value)
    assert raised.value.phase == "describe"
    return raised.value


def refusal_at_a_path(value: object) -> str:
    """Send a value next to sendable ones, and return the error message, which must name its path."""
    error = refusal_of({"model": {"weight": 1, "odd": [0, value]}})
    assert error.path == "model.odd[1]"
    assert str(error).startswith("model.odd[1]: ")
    return str(error)
