"""Scenes that the command line can't be made to play, each with real workers. Run by test_troubles.

They run in a process of their own, one after the other: it keeps what starts the workers out of the
test session, and pays for it once. Prints what each scene came to, as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from torchferry.demo import coordinator, happenings
from torchferry.demo.coordinator import DemoFailed, play
from torchferry.demo.crew import Crew, Gone
from torchferry.demo.happenings import Happening
from torchferry.demo.messages import (
    Begin,
    Crashed,
    Finished,
    Healed,
    Proceed,
    Reached,
    Rejoin,
)
from torchferry.demo.proof import compare
from torchferry.demo.scenario import Scenario, Seat
from torchferry.local import dismiss_server

Scene = Callable[[], dict[str, object]]
HELD_STEP = 5
PATIENCE_S = 60.0


def a_survivor_is_a_step_behind() -> dict[str, object]:
    """Worker 1 is held in step 5 until worker 0 has taken it and sits blocked in step 6."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    healed: list[Healed] = []
    finished: dict[int, Finished] = {}

    with Crew() as crew:

        def listen(*, hold: bool) -> None:
            """Until all have finished; or, if worker 1 is to be held, until worker 0 is blocked."""
            end = time.monotonic() + PATIENCE_S
            while len(finished) < 2:
                for member, event in crew.listen(end - time.monotonic()) or timed_out():
                    match event:
                        case Reached(step=step):
                            if hold and member.rank == 0 and step == HELD_STEP + 1:
                                return
                            if not (hold and member.rank == 1 and step == HELD_STEP):
                                member.order(Proceed(step))
                        case Healed():
                            healed.append(event)
                        case Finished():
                            finished[member.rank] = event
                        case Crashed() | Gone():
                            raise SystemExit(f"worker {member.rank}: {event}")
                        case _:
                            pass

        for rank in range(2):
            crew.start(Seat(rank, 2, store.port))
        crew.order(Begin(generation=0, seed=9))
        listen(hold=True)
        crew.order(Rejoin(generation=1))
        listen(hold=False)
        disturbed = {rank: one.portrait for rank, one in finished.items()}
        finished.clear()
        crew.order(Begin(generation=2, seed=9))
        listen(hold=False)
        undisturbed = {rank: one.portrait for rank, one in finished.items()}

    return {
        "healed": [(one.source, one.step, one.payload_bytes) for one in healed],
        "identical": compare(disturbed, undisturbed).identical,
    }


def timed_out() -> NoReturn:
    raise SystemExit(f"no worker said anything for {PATIENCE_S} s")


def a_worker_dies_that_should_not() -> dict[str, object]:
    scenario = Scenario(workers=2, kill_at=59, seed=0)
    bystander = 1 - scenario.victim
    pids: dict[int, int] = {}

    def watch(happening: Happening) -> None:
        if isinstance(happening, happenings.Started):
            pids[happening.rank] = happening.pid
        if isinstance(happening, happenings.Stepped):
            os.kill(pids[bystander], signal.SIGKILL)

    return failure_of(lambda: play(scenario, watch))


def a_survivor_hears_nothing() -> dict[str, object]:
    """The survivor is frozen from the kill on, as good as blocked: no error can reach it."""
    scenario = Scenario(workers=2, kill_at=3, seed=4)
    survivor = 1 - scenario.victim
    pids: dict[int, int] = {}
    blocked: list[int] = []

    def watch(happening: Happening) -> None:
        match happening:
            case happenings.Started(rank, pid, replacement=False):
                pids[rank] = pid
            case happenings.Killed():
                os.kill(pids[survivor], signal.SIGSTOP)
            case happenings.StillBlocked(ranks):
                blocked.extend(ranks)
                os.kill(pids[survivor], signal.SIGCONT)
            case _:
                pass

    identical = play(scenario, watch).identical
    return {"survivor": survivor, "blocked": blocked, "identical": identical}


def time_runs_out() -> dict[str, object]:
    return failure_of(lambda: play(Scenario(2, 30, 0), lambda happening: None, deadline_s=0.5))


def nobody_has_a_state() -> dict[str, object]:
    """Two replacements and no survivor: they must not make a state up."""
    with Crew() as crew:
        stage = coordinator._Coordinator(Scenario(2, 30, 0), lambda happening: None, crew)
        for rank in range(2):
            crew.start(stage._seat(rank))
        crew.order(Rejoin(generation=0))
        return failure_of(lambda: stage._listen_until(lambda: False, patience_s=PATIENCE_S))


def failure_of(act: Callable[[], object]) -> dict[str, object]:
    start = time.monotonic()
    try:
        act()
    except DemoFailed as failure:
        return {"failure": str(failure), "seconds": time.monotonic() - start}
    return {"failure": None}


SCENES: list[Scene] = [
    a_survivor_is_a_step_behind,
    a_worker_dies_that_should_not,
    a_survivor_hears_nothing,
    time_runs_out,
    nobody_has_a_state,
]

if __name__ == "__main__":
    results = {}
    for scene in SCENES:
        results[scene.__name__] = scene()
        results[scene.__name__]["left"] = len(multiprocessing.active_children())
    dismiss_server()
    print(json.dumps(results))
