"""Runs one case of the pull's fault matrix: real processes, and a proxy that injects the fault."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial
from typing import Any

from tests.faults.controller import wait_until_stopped
from tests.faults.pull_cases import CHUNK_STEPS, PROCESS_FAULTS, PullCase
from tests.support.proxy import Exchange, Proxy, with_longer_length
from tests.support.pull import LAYERS, MIB, FetchResult, Resources, fetch_into, serve_state
from tests.support.solo import Solo, Solos

LAYER_BYTES = 2 * MIB
CHUNKS = LAYERS * LAYER_BYTES // MIB
STOP_S = 2.0
"""The timeout of faults that end at the deadline."""
FAR_S = 10.0
"""The timeout of other faults, which can't be the cause of an error."""
PAUSE_S = 0.4
HEADROOM_BYTES = 1 << 20
"""How much memory a process gets when its allocations are to fail: too little for a thread or a tensor."""

VERSION = 7


class PullRun:
    """One case. Every source is behind a proxy; the first that is asked at the step has the fault."""

    def __init__(self, case: PullCase, solos: Solos) -> None:
        self.case = case
        self.solos = solos
        if case.fault == "no_memory":
            # A process keeps the memory of threads that have ended for its next threads.
            for name in ("receiver",) if case.victim == "receiver" else ("source-0", "source-1"):
                solos.discard(name)
        self.sources = [solos.get(f"source-{n}") for n in range(case.sources)]
        self.receiver = solos.get("receiver")
        self.direct = [source.run(serve_state, LAYER_BYTES, VERSION) for source in self.sources]
        self.baselines = [source.run(Resources.now) for source in self.sources]
        self.proxies = [
            Proxy(address, partial(self._on_exchange, number), memory=case.link == "memory")
            for number, address in enumerate(self.direct)
        ]
        self.timeout_s = STOP_S if case.fault == "stop" or self.may_stall else FAR_S
        self.faulty: int | None = None
        self.fault_s = 0.0
        self.continued_s = 0.0
        """When a stopped receiver continued."""
        self._injected = threading.Event()
        self._lock = threading.Lock()

    @property
    def may_stall(self) -> bool:
        """Whether one side waits for bytes that never come."""
        return self.case.fault == "wrong_length"

    @property
    def victim(self) -> Solo:
        """The process that has the fault."""
        if self.case.victim == "receiver":
            return self.receiver
        assert self.faulty is not None, "the fault was injected"
        return self.sources[self.faulty]

    def run(self) -> FetchResult | None:
        """Run the fetch to its end; None if the receiver died."""
        options: dict[str, Any] = {"timeout": self.timeout_s}
        if self.case.fault == "no_memory" and self.case.victim == "receiver":
            options["fresh"] = True
        addresses = [proxy.address for proxy in self.proxies]
        self.receiver.start(partial(fetch_into, addresses, LAYER_BYTES, **options))
        try:
            assert self._injected.wait(FAR_S), f"no source was asked at the step {self.case.step}"
            if self.case.victim == "receiver":
                if self.case.fault in ("kill", "exit"):
                    self.receiver.join()
                    return None
                if self.case.fault == "stop":
                    self._wait_for_deadline()
                    self.continued_s = time.monotonic()
                    self.receiver.signal(signal.SIGCONT)
            result: FetchResult = self.receiver.answer(self.timeout_s + 10.0)
            return result
        finally:
            self._recover()

    def fetch_again(self, *, keep: bool) -> FetchResult:
        """Fetch from all sources without a proxy, into the same tensors if `keep`. Dead ones are replaced."""
        for number, source in enumerate(self.sources):
            if not source.alive:
                self.sources[number] = self.solos.get(source.name)
                self.direct[number] = self.sources[number].run(serve_state, LAYER_BYTES, VERSION)
        job = partial(fetch_into, self.direct, LAYER_BYTES, keep=keep, timeout=FAR_S)
        return self.solos.get("receiver").run(job)

    def close(self) -> None:
        """Close the proxies."""
        for proxy in self.proxies:
            proxy.close()

    def _wait_for_deadline(self) -> None:
        """Wait until the deadline of the receiver, which is stopped, has passed."""
        limit_s = self.fault_s + self.timeout_s + 0.1
        while time.monotonic() < limit_s:
            time.sleep(0.01)

    def _recover(self) -> None:
        """End the fault: a stopped process continues, and memory can be allocated again."""
        if self._injected.is_set() and self.victim.alive:
            self.victim.signal(signal.SIGCONT)
            self.victim.limit_memory(None)

    # In the threads of the proxies.

    def _on_exchange(self, number: int, exchange: Exchange) -> None:
        if not self._is_the_step(exchange):
            exchange.relay()
            return
        with self._lock:
            is_first, self.faulty = self.faulty is None, number if self.faulty is None else self.faulty
        if not is_first:
            exchange.relay()
        elif self.case.fault in PROCESS_FAULTS or self.case.fault == "no_memory":
            self._break_process(exchange)
        elif self.case.victim == "source":
            self._break_response(exchange)
        else:
            self._break_request(exchange)

    def _is_the_step(self, exchange: Exchange) -> bool:
        if self.case.step in CHUNK_STEPS:
            return self._chunk in exchange.chunks and exchange.is_local == (self.case.link == "memory")
        return exchange.step == self.case.step

    @property
    def _chunk(self) -> int:
        return {"first chunk": 0, "middle chunk": CHUNKS // 2, "last chunk": CHUNKS - 1}[self.case.step]

    def _note(self) -> None:
        self.fault_s = time.monotonic()
        self._injected.set()

    def _relay_half(self, exchange: Exchange) -> None:
        """Relay up to the middle of the response, or of the chunk of this step.

        Over memory, the receiver copies chunks after it has the response. So that is cut in its head.
        """
        exchange.send_request(exchange.request)
        exchange.receive_head()
        if exchange.is_local:
            exchange.send_head(exchange.head[: len(exchange.head) // 2])
            return
        exchange.send_head(exchange.head)
        exchange.relay_body(self._half(exchange))

    def _relay_rest(self, exchange: Exchange) -> None:
        if exchange.is_local:
            exchange.send_head(exchange.head[len(exchange.head) // 2 :])
        exchange.relay_body()

    def _half(self, exchange: Exchange) -> int:
        if self.case.step in CHUNK_STEPS and not exchange.is_local:
            return (self._chunk - exchange.chunks.start) * MIB + MIB // 2
        return exchange.body_bytes // 2

    def _break_process(self, exchange: Exchange) -> None:
        # At these steps, the fault happens before the source has the request.
        is_early = self.case.step in ("connect", "confirm")
        if not is_early:
            self._relay_half(exchange)
        victim, proxy = self.victim, self.proxies[self.faulty or 0]
        if self.case.fault in ("kill", "exit"):
            self._note()
            victim.signal(signal.SIGKILL if self.case.fault == "kill" else signal.SIGTERM)
            if victim is not self.receiver:
                victim.join()
                proxy.refuse()
            exchange.hold() if victim is self.receiver else exchange.end()
        elif self.case.fault in ("stop", "pause"):
            victim.signal(signal.SIGSTOP)
            wait_until_stopped(victim.pid)
            self._note()
            if self.case.fault == "stop":
                exchange.hold()
            threading.Event().wait(PAUSE_S if self.case.sources == 1 else 3 * PAUSE_S)
            victim.signal(signal.SIGCONT)
        else:
            victim.limit_memory(HEADROOM_BYTES)
            self._note()
        exchange.relay() if is_early else self._relay_rest(exchange)

    def _break_response(self, exchange: Exchange) -> None:
        fault = self.case.fault
        if fault == "wrong_length":
            exchange.send_request(exchange.request)
            exchange.receive_head()
            self._note()
            exchange.send_head(with_longer_length(exchange.head))
            exchange.relay_body()
            return
        exchange.send_request(exchange.request)
        exchange.receive_head()
        if exchange.is_local and fault == "wrong_bytes":
            self._note()
            exchange.relay_damaged_memory((self._chunk - exchange.chunks.start) * MIB + MIB // 2)
            return
        if not exchange.body_bytes:
            # A response without a body: its head is broken.
            half = len(exchange.head) // 2
            self._note()
            if fault == "wrong_bytes":
                exchange.send_head(b"H" + bytes([exchange.head[1] ^ 0xFF]) + exchange.head[2:])
                return
            exchange.send_head(exchange.head[:half])
        else:
            exchange.send_head(exchange.head)
            exchange.relay_body(self._half(exchange))
            self._note()
            if fault == "wrong_bytes":
                exchange.relay_changed_byte()
                exchange.relay_body()
                return
        exchange.reset() if fault == "reset" else exchange.end()

    def _break_request(self, exchange: Exchange) -> None:
        request = exchange.request
        self._note()
        if self.case.fault == "wrong_length":
            exchange.request = with_longer_length(request)
            exchange.relay()
        elif self.case.fault == "wrong_bytes":
            # A byte of the body, or else the last digit of the lease.
            body = request.index(b"\r\n\r\n") + 4
            place = (body + len(request)) // 2 if body < len(request) else len("GET /v1/leases/") + 31
            changed = (
                request[place] ^ 0xFF if body < len(request) else ord("1" if request[place] == 48 else "0")
            )
            exchange.request = request[:place] + bytes([changed]) + request[place + 1 :]
            exchange.relay()
        else:
            exchange.send_request(request[: len(request) // 2])
            if self.case.fault == "reset":
                exchange.reset()
            exchange.end_request()
