"""The processes on the hosts of a cluster, one on each: started, listened to, and gone with it."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NoReturn

import torch
import torch.distributed as dist

from benchmarks.fanout import TAKE_TIMEOUT_S, measure
from benchmarks.fanout_works import fanout_works
from benchmarks.hosts import Host
from benchmarks.processes import context_with, processes
from benchmarks.run import Tell
from benchmarks.worker import Crashed, Finished, Word, hear, say
from benchmarks.works import Size

# Each cluster has a network of its own, so that nobody else can have taken it.
_PORT = 29500
_MEETING_TIMEOUT = timedelta(seconds=120)
# Longer than anything that is measured may take: a run in which nobody says anything for so long hangs.
_SILENCE_S = TAKE_TIMEOUT_S + _MEETING_TIMEOUT.total_seconds()
_REAP_S = 10.0


class FleetFailed(Exception):
    """The measuring could not be brought to its end. Says on which host, and why."""


@dataclass(frozen=True)
class Orders:
    """What a process is to do, and where it stands."""

    rank: int
    hosts: Sequence[Host]
    size: Size
    repeats: int


@dataclass(frozen=True)
class _Member:
    rank: int
    process: BaseProcess
    channel: Connection


def run_on(hosts: Sequence[Host], size: Size, repeats: int, tell: Tell) -> None:
    """Measure everything that these hosts can do; the processes on them are gone afterwards.

    Raises:
        FleetFailed: one of the processes failed or was killed, or all were silent for too long.
    """
    with _members(hosts, size, repeats) as members:
        waiting = {member.channel: member for member in members}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), _SILENCE_S)
            if not ready:
                raise FleetFailed(f"no process said anything for {_SILENCE_S:.0f} s: the run hangs")
            for channel in ready:
                assert isinstance(channel, Connection), "only channels are waited for"
                match _hear(waiting[channel]):
                    case Finished():
                        del waiting[channel]
                    case Crashed(report):
                        raise FleetFailed(f"the process on host {waiting[channel].rank} failed:\n{report}")
                    case event:
                        tell(event)


def _hear(member: _Member) -> Word:
    try:
        return hear(member.channel)
    except (EOFError, OSError):
        member.process.join(_REAP_S)
        raise FleetFailed(f"the process on host {member.rank} {_ending(member.process.exitcode)}") from None


def _ending(exit_code: int | None) -> str:
    """How a process came to its end.

    >>> _ending(-9), _ending(1)
    ('was killed by SIGKILL', 'ended with exit code 1')
    """
    if exit_code is not None and exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


@contextlib.contextmanager
def _members(hosts: Sequence[Host], size: Size, repeats: int) -> Iterator[list[_Member]]:
    # Seven processes that import torch, each on its own, would need most of a minute on two cores.
    context = context_with(__name__)
    orders = [(Orders(rank, tuple(hosts), size, repeats),) for rank in range(len(hosts))]
    with processes(context, main, orders, "torchferry-host") as started:
        yield [_Member(rank, *one) for rank, one in enumerate(started)]


def main(channel: Connection, orders: Orders) -> NoReturn:
    """Be the process on one of the hosts, to the end of the measuring or to that of the parent."""
    host = orders.hosts[orders.rank]
    status = 1
    try:
        # Before any thread is started, for it would stay where it was.
        host.enter()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _leave_with_the_parent(channel)
        os.environ["GLOO_SOCKET_IFNAME"] = host.interface
        # As torchrun does: the ranks are as many as the cores, or more.
        torch.set_num_threads(1)
        # Those of torch's own transport, which are not for whoever runs this.
        warnings.simplefilter("ignore")
        _join(orders)
        measure(
            fanout_works(orders.size, len(orders.hosts)), orders.repeats, lambda event: say(channel, event)
        )
        # The first to leave closes its connections, which others may still need.
        dist.barrier()
        say(channel, Finished())
        status = 0
    except Exception:
        with contextlib.suppress(OSError):
            say(channel, Crashed(traceback.format_exc()))
    finally:
        # Without the interpreter's clean-up, which would wait for what is still blocked.
        os._exit(status)


def _join(orders: Orders) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{orders.hosts[0].address}:{_PORT}",
        rank=orders.rank,
        world_size=len(orders.hosts),
        timeout=_MEETING_TIMEOUT,
    )


def _leave_with_the_parent(channel: Connection) -> None:
    def watch() -> None:
        # The parent says nothing; that this returns means that it is gone.
        with contextlib.suppress(EOFError, OSError):
            channel.recv_bytes()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
