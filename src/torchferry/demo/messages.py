"""What the coordinator and its workers say to each other, and how it is put into bytes.

Each worker has a pipe of its own: a queue shared by all has a lock, and a process that is killed
while it holds that lock silences the others.
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import msgspec


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Order: form the group of this generation and train from the beginning."""

    generation: int
    seed: int


class Rejoin(msgspec.Struct, frozen=True, tag=True):
    """Order: the group has changed. Form this one, catch up with it, and train on."""

    generation: int


class Proceed(msgspec.Struct, frozen=True, tag=True):
    """Order: your `Reached` was read; you may complete that step."""

    step: int


class Quit(msgspec.Struct, frozen=True, tag=True):
    """Order: leave."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Event: the worker runs, and waits for orders."""

    pid: int


class Reached(msgspec.Struct, frozen=True, tag=True):
    """Event: the gradients of this step are on their way to the others.

    The worker completes the step only when it has the `Proceed` for it. That is what makes the kill
    land where it was aimed, however slow the coordinator is: the victim can't run past its step.
    """

    step: int
    last_loss: float | None


class Stumbled(msgspec.Struct, frozen=True, tag=True):
    """Event: the all-reduce of this step failed, and the step was not taken."""

    step: int
    reason: str


class Healed(msgspec.Struct, frozen=True, tag=True):
    """Event: the worker was behind, and now has the state of `source`."""

    source: int
    step: int
    payload_bytes: int
    seconds: float


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Event: all steps are done. `portrait` has the bytes of every tensor of the final state."""

    loss: float
    portrait: dict[str, bytes]


class Crashed(msgspec.Struct, frozen=True, tag=True):
    """Event: an error that the worker can't deal with; it exits."""

    report: str


Instruction = Begin | Rejoin | Quit
Order = Instruction | Proceed
Event = Ready | Reached | Stumbled | Healed | Finished | Crashed

_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def send(channel: Connection, message: Order | Event) -> None:
    """Write one message.

    Raises:
        OSError: the other end is gone.
    """
    channel.send_bytes(_encoder.encode(message))


def receive_order(channel: Connection) -> Order:
    """The next order; blocks until there is one.

    Raises:
        EOFError, OSError: the coordinator is gone.
    """
    return _orders.decode(channel.recv_bytes())


def receive_event(channel: Connection) -> Event:
    """The next event; blocks until there is one.

    Raises:
        EOFError, OSError: the worker is gone.
    """
    return _events.decode(channel.recv_bytes())
