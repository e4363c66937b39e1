"""The fault matrix of the pull: every fault, its victim, the step of the fetch, and what the receiver sees.

test_pull_matrix.py runs the cases; docs/faults.md lists them.
"""

from __future__ import annotations

from dataclasses import dataclass

FAULTS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "pause": "SIGSTOP, then SIGCONT in time",
    "exit": "`sys.exit` in a signal handler",
    "reset": "connection reset",
    "truncated": "message truncated",
    "wrong_bytes": "wrong bytes in a message",
    "wrong_length": "wrong length of a message",
    "no_memory": "failed allocations",
}
"""Of the receiver, a message is a request; of the source, it is a response.

Over memory, wrong bytes of the source are in the memory that comes with the response.
"""

STEPS = ["connect", "manifest", "digests", "first chunk", "middle chunk", "last chunk", "confirm"]
CHUNK_STEPS = STEPS[3:6]

EARLY_STEPS = STEPS[:3]
"""The steps before the first byte of a tensor."""

PROCESS_FAULTS = ("kill", "stop", "pause", "exit")
DEADLY_FAULTS = ("kill", "exit")


@dataclass(frozen=True)
class PullCase:
    """One fault of a fetch from one source, or from two of which the other lives.

    `link` is how chunks come: "tcp" or "memory".
    `runs_in` is "test", "test-all" or "faults": the smallest goal of the Makefile that runs the case.
    """

    fault: str
    victim: str
    step: str
    sources: int = 1
    link: str = "tcp"
    runs_in: str = "faults"

    @property
    def name(self) -> str:
        """The id of the test."""
        step = self.step.replace(" ", "_")
        link = "" if self.link == "tcp" else f"-over-{self.link}"
        return f"{self.fault}-{self.victim}-{step}-of-{self.sources}{link}"

    @property
    def kills_receiver(self) -> bool:
        """Whether the process that fetches ends."""
        return self.victim == "receiver" and self.fault in DEADLY_FAULTS

    @property
    def errors(self) -> tuple[str, ...]:
        """The names of the errors that the fetch may raise; "" stands for success.

        If memory is short, timing decides which allocation fails. The test checks that the error describes
        the local tensors correctly.
        """
        found = self._errors
        if self.link == "memory" and self.step in ("first chunk", "middle chunk"):
            # The fault happens before a byte of the chunk is copied. The other connection to the source may
            # have copied its first chunks by then, or not.
            not_torn = {"TornAndLate": "LinkTimeout", "TornAndBroken": "SourcesLost"}
            found += tuple(not_torn[name] for name in found if name in not_torn)
        return tuple(dict.fromkeys(found))

    @property
    def _errors(self) -> tuple[str, ...]:
        is_early = self.step in EARLY_STEPS
        if self.step == "confirm" or self.fault == "pause":
            return ("",)
        if self.fault == "no_memory" and self.victim == "receiver":
            return ("StateError", "")
        if self.fault == "stop" and self.victim == "receiver":
            return ("LinkTimeout",) if is_early else ("TornAndLate",)
        if self.sources > 1:
            return ("",)
        return self._errors_with_one_source(is_early)

    def _errors_with_one_source(self, is_early: bool) -> tuple[str, ...]:
        if self.fault == "no_memory":
            return ("SourcesLost",) if self.step == "connect" else ("SourcesLost", "TornAndBroken", "")
        if self.fault in DEADLY_FAULTS:
            return ("SourcesLost",) if is_early else ("TornAndBroken",)
        waits = self.victim == "receiver" or self.link == "memory"
        if self.fault == "wrong_length" and waits and not is_early:
            # The last attempt at the deadline may succeed.
            return ("TornAndLate", "")
        if (self.fault, self.victim, self.step) == ("wrong_length", "source", "manifest"):
            # The first byte of the next answer, which was requested ahead, is taken for the manifest's last.
            return ("SourcesLost",)
        if (self.fault, self.victim, self.step) == ("wrong_length", "source", "digests"):
            return ("BadManifest",)
        if self.fault in ("stop", "wrong_length") and is_early:
            return ("LinkTimeout",)
        if self.fault == "stop":
            return ("TornAndLate",)
        if not is_early:
            return ("",)
        if (self.fault, self.victim) == ("wrong_bytes", "source"):
            return ("BadManifest",) if self.step == "connect" else ("Corrupted",)
        return ("SourcesLost",)

    @property
    def when(self) -> str:
        """The time limit of the fetch."""
        if self.fault in ("stop", "wrong_length"):
            return "by the deadline, + 0.5 s at most"
        return "at the end" if self.fault == "pause" else "within 1 s"


_TEST = {
    ("kill", "source", "middle chunk", 1),
    ("kill", "receiver", "middle chunk", 1),
    ("pause", "source", "middle chunk", 1),
    ("exit", "source", "confirm", 1),
    ("reset", "source", "digests", 2),
    ("truncated", "source", "middle chunk", 1),
    ("truncated", "receiver", "manifest", 1),
    ("wrong_bytes", "source", "first chunk", 1),
    ("wrong_length", "source", "middle chunk", 2),
    ("no_memory", "source", "connect", 1),
    ("no_memory", "receiver", "first chunk", 1),
}
_TEST_ALL = {
    ("kill", "source", "connect", 1),
    ("kill", "source", "last chunk", 2),
    ("stop", "source", "first chunk", 2),
    ("kill", "source", "confirm", 1),
    ("stop", "source", "manifest", 1),
    ("stop", "source", "manifest", 2),
    ("stop", "receiver", "middle chunk", 1),
    ("pause", "source", "manifest", 2),
    ("pause", "receiver", "middle chunk", 2),
    ("exit", "receiver", "last chunk", 2),
    ("reset", "receiver", "confirm", 1),
    ("wrong_bytes", "source", "connect", 2),
    ("wrong_bytes", "receiver", "manifest", 2),
    ("wrong_length", "receiver", "last chunk", 2),
}


_TEST_OVER_MEMORY = {
    ("kill", "source", "middle chunk", 1),
    ("kill", "receiver", "first chunk", 1),
    ("truncated", "source", "last chunk", 1),
    ("wrong_bytes", "source", "middle chunk", 1),
    ("no_memory", "receiver", "first chunk", 1),
}
_TEST_ALL_OVER_MEMORY = {
    ("kill", "source", "first chunk", 2),
    ("stop", "source", "middle chunk", 2),
    ("stop", "receiver", "first chunk", 1),
    ("pause", "source", "last chunk", 1),
    ("exit", "receiver", "middle chunk", 2),
    ("reset", "source", "first chunk", 1),
    ("truncated", "receiver", "middle chunk", 1),
    ("wrong_bytes", "receiver", "first chunk", 2),
    ("wrong_length", "source", "middle chunk", 2),
    ("no_memory", "source", "first chunk", 1),
}


def _case(fault: str, victim: str, step: str, sources: int, link: str) -> PullCase:
    key = (fault, victim, step, sources)
    test, test_all = (_TEST, _TEST_ALL) if link == "tcp" else (_TEST_OVER_MEMORY, _TEST_ALL_OVER_MEMORY)
    return PullCase(
        *key, link, runs_in="test" if key in test else "test-all" if key in test_all else "faults"
    )


def _cases(sources: int, link: str, steps: list[str]) -> list[PullCase]:
    return [
        _case(fault, victim, step, sources, link)
        for fault in FAULTS
        for victim in ("source", "receiver")
        for step in steps
    ]


PULLS = {sources: _cases(sources, "tcp", STEPS) for sources in (1, 2)}
"""The cases over TCP, by the number of sources."""

PULLS_OVER_MEMORY = {sources: _cases(sources, "memory", CHUNK_STEPS) for sources in (1, 2)}
"""The cases over memory. All steps but these are over TCP there too."""
