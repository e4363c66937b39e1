"""One worker: a process that trains, notices when a peer is gone, rejoins and catches up.

The main thread does the work. A second thread reads the orders, so that an order gets through while
a collective is blocked, and so that no worker outlives the coordinator.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import NoReturn, cast

import torch

from torchferry import PGTransport
from torchferry.demo import group, messages
from torchferry.demo.group import Group, Settled
from torchferry.demo.messages import (
    Begin,
    Crashed,
    Event,
    Finished,
    Healed,
    Instruction,
    Order,
    Proceed,
    Quit,
    Reached,
    Ready,
    Rejoin,
    Stumbled,
)
from torchferry.demo.scenario import STEPS, Seat
from torchferry.demo.training import Attempt, Training, TrainingState

_NO_STATE = -1


def main(channel: Connection, seat: Seat) -> NoReturn:
    """Run one worker until it is told to quit, or the coordinator is gone."""
    # Ctrl-C goes to the coordinator too, and the coordinator decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One thread each: there are more workers than cores, and the order of every sum stays fixed.
    torch.set_num_threads(1)
    status = 1
    try:
        _Worker(channel, seat).serve()
        status = 0
    except Exception:
        with contextlib.suppress(OSError):
            messages.send(channel, Crashed(traceback.format_exc()))
    finally:
        # Without the interpreter's clean-up, which would wait for collectives still blocked.
        os._exit(status)


def choose_source(steps: Sequence[int]) -> tuple[int, list[int]]:
    """Who sends its state, and to whom, when the worker of rank r stands at `steps[r]`.

    The first of the most advanced sends, to all who are behind it. A survivor can be behind too, by
    one step: an all-reduce that a death interrupts may succeed on one rank and fail on another.

    Raises:
        ValueError: nobody has a state.

    >>> choose_source([24, 25, -1, 25])
    (1, [0, 2])
    """
    newest = max(steps)
    if newest == _NO_STATE:
        raise ValueError("no worker has a state to go on from: nobody survived")
    return steps.index(newest), [rank for rank, step in enumerate(steps) if step < newest]


class _Inbox:
    """All that a worker waits for, in one queue: orders, and the ends of its collectives."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._queue: SimpleQueue[Order | Settled] = SimpleQueue()
        threading.Thread(target=self._read_orders, name="orders", daemon=True).start()

    def post(self, settled: Settled) -> None:
        self._queue.put(settled)

    def take(self) -> Order | Settled:
        return self._queue.get()

    def take_instruction(self) -> Instruction:
        """The next order that starts something new; what is left of the last step is dropped."""
        while True:
            item = self.take()
            if not isinstance(item, Settled | Proceed):
                return item

    def _read_orders(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._queue.put(messages.receive_order(self._channel))
        # The coordinator is gone. The main thread can't be asked to leave: gloo may block it.
        os._exit(1)


class _Worker:
    def __init__(self, channel: Connection, seat: Seat) -> None:
        self._channel = channel
        self._seat = seat
        self._inbox = _Inbox(channel)
        self._group = Group(seat)
        self._training: Training | None = None

    def serve(self) -> None:
        self._tell(Ready(os.getpid()))
        instruction = self._inbox.take_instruction()
        while not isinstance(instruction, Quit):
            self._group.form(instruction.generation)
            if isinstance(instruction, Begin):
                self._training = Training.fresh(instruction.seed)
            else:
                self._training = self._catch_up(self._training)
            instruction = self._train(self._training)

    def _train(self, training: Training) -> Instruction:
        """Train to the last step, or to where something comes between; return what to do next."""
        while training.step < STEPS:
            attempt = training.attempt(self._seat.rank, self._seat.size)
            interruption = self._share(attempt, training.step + 1, training.loss)
            if interruption is not None:
                return interruption
            training.commit(attempt, self._seat.size)
        self._tell(Finished(training.loss or 0.0, training.portrait()))
        return self._inbox.take_instruction()

    def _share(self, attempt: Attempt, step: int, last_loss: float | None) -> Instruction | None:
        """Sum the gradients over the group: None if that succeeded, else what to do instead."""
        ticket = self._group.start_sum(attempt.gradients, self._inbox.post)
        self._tell(Reached(step, last_loss))
        summed = allowed = False
        while not (summed and allowed):
            match self._inbox.take():
                case Settled(ticket=which) if which != ticket:
                    pass  # of a group that was abandoned
                case Settled(error=None):
                    summed = True
                case Settled(error=str(reason)):
                    # To leave is to tell: those who wait for this one get an error in their turn.
                    self._group.leave()
                    self._tell(Stumbled(step, reason))
                    return self._inbox.take_instruction()
                case Proceed(step=which):
                    allowed = allowed or which == step
                case Begin() | Rejoin() | Quit() as instruction:
                    if not summed:
                        self._group.abandon()
                    return instruction
        return None

    def _catch_up(self, training: Training | None) -> Training:
        """Give the group's newest state to those who lack it; this worker may be on either side."""
        steps = self._group.gather(_NO_STATE if training is None else training.step)
        source, behind = choose_source(steps)
        training = training or Training.blank()
        transport = PGTransport(self._group.world, group.TIMEOUT, "cpu", state_dict=training.state)
        if self._seat.rank == source:
            transport.send_checkpoint(behind, training.state(), step=steps[source])
        elif self._seat.rank in behind:
            state = transport.recv_checkpoint(source, step=steps[source])
            training.adopt(cast(TrainingState, state))
            report = transport.last_report
            assert report is not None, "a transfer that succeeded has a report"
            self._tell(Healed(source, training.step, report.payload_bytes, report.seconds))
        return training

    def _tell(self, event: Event) -> None:
        messages.send(self._channel, event)
