"""Directs the demo: starts the workers, kills one, replaces it, runs it all again in peace.

The coordinator takes no part in the training and holds no state of it. It is also where the workers
meet: the store that a group forms by lives here, so that any worker may die, rank 0 included.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

import torch.distributed as dist

from torchferry.demo import happenings
from torchferry.demo.crew import Crew, Gone, Member
from torchferry.demo.happenings import Watcher
from torchferry.demo.messages import (
    Begin,
    Crashed,
    Event,
    Finished,
    Healed,
    Proceed,
    Quit,
    Reached,
    Ready,
    Rejoin,
    Stumbled,
)
from torchferry.demo.proof import Portrait, Verdict, compare
from torchferry.demo.scenario import STEPS, Scenario, Seat

DEADLINE_S = 120.0
# Survivors that gloo does not tell of the death within this time are told by the coordinator.
_GRACE_S = 1.0
_TELL_EVERY = 10


class DemoFailed(Exception):
    """The demo could not be played to its end. Says why, and what to do."""


class _DeadlinePassed(Exception):
    pass


def play(scenario: Scenario, watch: Watcher, *, deadline_s: float = DEADLINE_S) -> Verdict:
    """Play the demo and return what the comparison of its two runs found. No process is left.

    Must be called from the main thread, because the deadline is an alarm signal: it interrupts
    whatever the coordinator waits for.

    Raises:
        DemoFailed: a worker ended that should not have, or the deadline passed.
    """
    with Crew() as crew:
        coordinator = _Coordinator(scenario, watch, crew)
        try:
            with _alarm(deadline_s):
                return coordinator.play()
        except _DeadlinePassed:
            raise DemoFailed(
                f"not finished after {deadline_s:.0f} s, while {coordinator.doing}. If the machine "
                "is very busy, try again when it is not, or with fewer --workers"
            ) from None


class _Coordinator:
    def __init__(self, scenario: Scenario, watch: Watcher, crew: Crew) -> None:
        self.doing = "starting the workers"
        self._scenario = scenario
        self._watch = watch
        self._crew = crew
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._doomed: Member | None = None
        self._replacement: Member | None = None
        self._killed_at: float | None = None
        self._dead = False
        self._ready: set[int] = set()
        self._stumbled: set[int] = set()
        self._told_step = 0
        self._finished: dict[int, Finished] = {}

    def play(self) -> Verdict:
        self._start_workers()
        disturbed = self._run_with_a_death()
        undisturbed = self._run_undisturbed()
        self._crew.order(Quit())
        return compare(disturbed, undisturbed)

    def _start_workers(self) -> None:
        size = self._scenario.workers
        self._watch(happenings.Starting(size))
        members = [self._crew.start(self._seat(rank)) for rank in range(size)]
        self._doomed = members[self._scenario.victim]
        self._listen_until(lambda: len(self._ready) == size)

    def _run_with_a_death(self) -> dict[int, Portrait]:
        self.doing = "the workers were training"
        self._watch(happenings.Training(generation=0, disturbed=True))
        self._crew.order(Begin(generation=0, seed=self._scenario.seed))
        self._listen_until(lambda: self._dead)

        self.doing = "the dead worker was being replaced"
        self._ready.clear()
        self._replacement = self._crew.start(self._seat(self._scenario.victim))
        self._listen_until(lambda: bool(self._ready))
        self._await_survivors()

        self.doing = "the replacement was catching up, or training went on"
        self._watch(happenings.Training(generation=1, disturbed=True))
        self._crew.order(Rejoin(generation=1))
        return self._portraits(disturbed=True)

    def _await_survivors(self) -> None:
        """Let gloo tell the survivors that their peer is dead; note those it leaves in the dark."""
        survivors = set(range(self._scenario.workers)) - {self._scenario.victim}
        self._listen_until(lambda: survivors <= self._stumbled, patience_s=_GRACE_S)
        if blocked := survivors - self._stumbled:
            self._watch(happenings.StillBlocked(tuple(sorted(blocked)), self._since_kill()))

    def _run_undisturbed(self) -> dict[int, Portrait]:
        self.doing = "the undisturbed run was under way"
        self._watch(happenings.Training(generation=2, disturbed=False))
        self._told_step = 0
        self._crew.order(Begin(generation=2, seed=self._scenario.seed))
        return self._portraits(disturbed=False)

    def _portraits(self, *, disturbed: bool) -> dict[int, Portrait]:
        """Wait until all have finished; what their final states look like."""
        self._listen_until(lambda: len(self._finished) == self._scenario.workers)
        finished, self._finished = self._finished, {}
        self._watch(happenings.Completed(STEPS, finished[0].loss, disturbed))
        return {rank: one.portrait for rank, one in finished.items()}

    def _seat(self, rank: int) -> Seat:
        return Seat(rank, self._scenario.workers, self._store.port)

    def _listen_until(self, done: Callable[[], bool], patience_s: float | None = None) -> None:
        """Handle what the workers say until `done()`, or until patience ends."""
        end = None if patience_s is None else time.monotonic() + patience_s
        while not done():
            left = None if end is None else max(0.0, end - time.monotonic())
            heard = self._crew.listen(left)
            if not heard:
                return
            for member, event in heard:
                self._handle(member, event)

    def _handle(self, member: Member, event: Event | Gone) -> None:
        rank = member.rank
        match event:
            case Ready():
                self._ready.add(rank)
                self._watch(happenings.Started(rank, event.pid, member is self._replacement))
            case Reached():
                self._handle_step(member, event)
            case Stumbled():
                self._stumbled.add(rank)
                self._watch(happenings.Noticed(rank, event.step, event.reason, self._since_kill()))
            case Healed():
                self._watch(
                    happenings.CaughtUp(
                        rank,
                        event.source,
                        event.step,
                        event.payload_bytes,
                        event.seconds,
                        member is self._replacement,
                    )
                )
            case Finished():
                self._finished[rank] = event
            case Crashed():
                raise DemoFailed(f"worker {rank} (pid {member.pid}) failed:\n{event.report}")
            case Gone():
                self._handle_end(member, event)

    def _handle_step(self, member: Member, event: Reached) -> None:
        if member is self._doomed and event.step == self._scenario.kill_at:
            self._killed_at = time.monotonic()
            member.kill()
            self._watch(happenings.Killed(member.rank, member.pid, event.step))
            return
        # Whoever is in a step has the gradients of all for the step before.
        completed = event.step - 1
        if completed % _TELL_EVERY == 0 and completed > self._told_step and event.last_loss is not None:
            self._told_step = completed
            self._watch(happenings.Stepped(completed, event.last_loss))
        member.order(Proceed(event.step))

    def _handle_end(self, member: Member, end: Gone) -> None:
        how = _describe_exit(end.exit_code)
        if member is not self._doomed or self._killed_at is None:
            raise DemoFailed(
                f"worker {member.rank} (pid {member.pid}) ended unexpectedly: {how}. What it wrote "
                "before that is above. A SIGKILL that the demo did not send mostly means that the "
                "machine ran out of memory: try fewer --workers"
            )
        if end.exit_code != -signal.SIGKILL:
            raise DemoFailed(f"worker {member.rank} was to die of SIGKILL, but ended by itself: {how}")
        self._dead = True
        self._watch(happenings.Died(member.rank, how, self._since_kill()))

    def _since_kill(self) -> float:
        return 0.0 if self._killed_at is None else time.monotonic() - self._killed_at


def _describe_exit(exit_code: int | None) -> str:
    """An exit code in words.

    >>> _describe_exit(-9), _describe_exit(3)
    ('SIGKILL', 'exit code 3')
    """
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-exit_code).name
    return f"exit code {exit_code}"


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise `_DeadlinePassed` in the main thread, wherever it is, if the block takes longer."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise _DeadlinePassed

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
