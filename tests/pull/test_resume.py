"""A fetch into tensors that an earlier fetch wrote moves what is missing; `atomic` writes all or nothing."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import torchferry
from tests.support.proxy import Exchange, Proxy, with_longer_length
from tests.support.pull import (
    LAYERS,
    MIB,
    PATHS,
    FetchResult,
    change_target,
    fetch_into,
    new_state,
    reset_target,
    serve_state,
    target_contents,
)
from tests.support.solo import Solo, Solos
from torchferry import fetch, serve
from torchferry.errors import (
    Corrupted,
    FerryError,
    LinkStalled,
    LinkTimeout,
    SourcesLost,
    TornAndBroken,
)

LAYOUTS: dict[str, tuple[Callable[[torch.Tensor], dict[str, torch.Tensor]], ...]] = {
    "transposed here": (lambda t: {"w": t}, lambda t: {"w": t.t().clone().t()}),
    "transposed there": (lambda t: {"w": t.t()}, lambda t: {"w": t.t().clone()}),
    "gaps here": (lambda t: {"w": t}, lambda t: {"w": t.repeat_interleave(2, dim=1)[:, ::2]}),
    "gaps there": (lambda t: {"w": t[:, ::2]}, lambda t: {"w": t[:, ::2].clone()}),
    "tied there": (lambda t: {"a": t, "b": t}, lambda t: {"a": t.clone(), "b": t.clone()}),
    "small": (
        lambda t: {"a": t[:9, :9].clone().t(), "b": t[0].clone()},
        lambda t: {"a": t[:9, :9].t().clone(), "b": t[0].clone()},
    ),
    "conjugated there": (
        lambda t: {"w": torch.view_as_complex(t.view(-1, 2)).conj()},
        lambda t: {"w": torch.view_as_complex(t.view(-1, 2)).conj().resolve_conj()},
    ),
}
"""A state at the source, and one with the same values but another layout here."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_another_layout_are_compared_too(layout: str) -> None:
    there, here = LAYOUTS[layout]
    values = torch.randn(700, 2048)
    local = here(values)
    with torchferry.serve(there(values), version=1) as source:
        report = torchferry.fetch(source.address, into=local, compare=True, timeout=20).report
        assert (report.bytes_moved, report.bytes_skipped) == (0, report.bytes_total)
        for tensor in local.values():
            tensor[(-1,) * tensor.dim()] += 1
            got = torchferry.fetch(source.address, into=local, timeout=20)
            assert 0 < got.report.bytes_moved <= min(2 * MIB, got.report.bytes_total)
            assert all(map(torch.equal, local.values(), there(values).values()))


def test_tensors_that_were_not_written_do_not_count_as_changed() -> None:
    local = {"w": torch.zeros(8 * MIB)}

    def stop(event: torchferry.ProgressEvent) -> None:
        if event.bytes_moved:
            raise ZeroDivisionError

    with torchferry.serve({"w": torch.ones(8 * MIB)}, version=1) as source:
        with pytest.raises(ZeroDivisionError):
            torchferry.fetch(source.address, into=local, atomic=True, on_progress=stop)
        assert local["w"]._version == 0
        assert not local["w"].any()
        torchferry.fetch(source.address, into=local)
        assert local["w"]._version == 1
        assert torchferry.fetch(source.address, into=local, compare=True).report.bytes_moved == 0
        assert local["w"]._version == 1


SMALL = 8 * MIB
"""The size of a layer: 64 MiB in all."""
LARGE, TINY = 64 * MIB, 2 * MIB
OLD, NEW = dict.fromkeys(PATHS, "old"), dict.fromkeys(PATHS, "new")

SIZES = [pytest.param(SMALL, id="64MiB"), pytest.param(LARGE, id="512MiB", marks=pytest.mark.slow)]


@pytest.fixture
def receiver(solos: Solos) -> Iterator[Solo]:
    found = solos.get("receiver")
    yield found
    if found.alive:
        # Free the large tensors.
        found.run(reset_target, 4)


def fetched(receiver: Solo, address: str, layer_bytes: int, **options: Any) -> FetchResult:
    result = receiver.run(partial(fetch_into, [address], layer_bytes, **{"timeout": 30.0, **options}))
    assert result.left == ""
    return result


def moved(result: FetchResult) -> int:
    assert result.error is None, result.error
    assert result.contents == NEW
    assert result.report is not None
    report = result.report
    assert report.bytes_moved + report.bytes_skipped == report.bytes_total
    return report.bytes_moved


def fetch_until_killed(solos: Solos, layer_bytes: int, share: float, **options: Any) -> FetchResult:
    """Fetch into new tensors, and kill the source when this share of the bytes has been relayed."""
    source = solos.get("source-0")
    lock = threading.Lock()

    def relay(exchange: Exchange) -> None:
        if exchange.step != "chunks":
            exchange.relay()
            return
        exchange.send_request(exchange.request)
        exchange.receive_head()
        exchange.send_head(exchange.head)
        while exchange.body_bytes:
            if proxy.relayed_bytes >= share * LAYERS * layer_bytes:
                with lock:
                    if source.alive:
                        source.signal(signal.SIGKILL)
                        source.join()
                        proxy.refuse()
                exchange.end()
            exchange.relay_body(min(exchange.body_bytes, 256 << 10))

    with Proxy(source.run(serve_state, layer_bytes), relay) as proxy:
        return fetched(solos.get("receiver"), proxy.address, layer_bytes, **options)


@pytest.mark.parametrize("layer_bytes", SIZES)
def test_after_a_source_was_killed_another_delivers_only_what_is_missing(
    solos: Solos, receiver: Solo, layer_bytes: int
) -> None:
    failed = fetch_until_killed(solos, layer_bytes, 0.7)
    assert isinstance(failed.error, TornAndBroken)
    address = solos.get("source-1").run(serve_state, layer_bytes)
    result = fetched(receiver, address, layer_bytes, keep=True)
    assert 0.2 < moved(result) / (LAYERS * layer_bytes) <= 0.35


@pytest.mark.parametrize("layer_bytes", SIZES)
def test_an_unchanged_state_moves_nothing(solos: Solos, receiver: Solo, layer_bytes: int) -> None:
    address = solos.get("source-1").run(serve_state, layer_bytes)
    assert moved(fetched(receiver, address, layer_bytes, compare=False)) == LAYERS * layer_bytes
    with Proxy(address) as proxy:
        for compare in (True, "auto"):
            result = fetched(receiver, proxy.address, layer_bytes, keep=True, compare=compare)
            assert moved(result) == 0
        assert proxy.relayed_bytes < LAYERS * layer_bytes / 1000
        assert not [exchange for exchange in proxy.requests if exchange.step == "chunks"]
    assert moved(fetched(receiver, address, layer_bytes, keep=True, compare=False)) == LAYERS * layer_bytes


def test_true_compares_tensors_that_no_fetch_has_written(solos: Solos, receiver: Solo) -> None:
    # "auto" does not hash them.
    address = solos.get("source-1").run(serve_state, TINY)
    assert moved(fetched(receiver, address, TINY, compare="auto")) == LAYERS * TINY
    result = receiver.run(partial(fetch_into_equal, address))
    assert moved(result) == 0


def fetch_into_equal(address: str) -> FetchResult:
    """Fetch into tensors that hold the served state already, but not from a fetch."""
    reset_target(TINY, new_state(TINY))
    return fetch_into([address], TINY, keep=True, compare=True)


def test_what_was_changed_since_the_last_fetch_is_fetched_again(solos: Solos, receiver: Solo) -> None:
    address = solos.get("source-1").run(serve_state, TINY)
    moved(fetched(receiver, address, TINY))
    receiver.run(change_target, "layer2", 3)
    receiver.run(change_target, "layer7", -1)
    assert receiver.run(target_contents, TINY)["model.layer2"] == "neither"
    assert moved(fetched(receiver, address, TINY, keep=True)) == 2 * MIB


@pytest.mark.slow
def test_what_was_changed_since_a_fetch_failed_is_fetched_again(solos: Solos, receiver: Solo) -> None:
    failed = fetch_until_killed(solos, SMALL, 0.7)
    assert isinstance(failed.error, TornAndBroken)
    whole = failed.error.whole[0].removeprefix("model.")
    receiver.run(change_target, whole, 0)
    address = solos.get("source-1").run(serve_state, SMALL)
    assert 0 < moved(fetched(receiver, address, SMALL, keep=True)) < 0.4 * LAYERS * SMALL


def test_the_next_version_is_exact_after_a_failed_fetch_of_another(solos: Solos, receiver: Solo) -> None:
    # Nothing of version 7 may remain.
    fetch_until_killed(solos, SMALL, 0.5)
    address = solos.get("source-1").run(serve_state, SMALL, 8, 1)
    result = fetched(receiver, address, SMALL, keep=True, seed=1)
    assert moved(result) == LAYERS * SMALL


# Atomic.


def damage(exchange: Exchange) -> None:
    exchange.send_request(exchange.request)
    exchange.receive_head()
    exchange.send_head(exchange.head)
    exchange.relay_body(MIB // 2)
    exchange.relay_changed_byte()
    exchange.relay_body()


def reset(exchange: Exchange) -> None:
    exchange.send_request(exchange.request)
    exchange.receive_head()
    exchange.send_head(exchange.head)
    exchange.relay_body(MIB // 2)
    exchange.reset()


def lengthen(exchange: Exchange) -> None:
    exchange.send_request(exchange.request)
    exchange.receive_head()
    exchange.send_head(with_longer_length(exchange.head))
    exchange.relay_body()


FAILURES: dict[str, tuple[Callable[[Exchange], None], dict[str, float], type[FerryError]]] = {
    "damaged": (damage, {}, Corrupted),
    "reset": (reset, {}, SourcesLost),
    "wrong length": (lengthen, {}, SourcesLost),
    "stalled": (Exchange.hold, {"stall_timeout": 0.5}, LinkStalled),
    "late": (Exchange.hold, {"timeout": 0.5}, LinkTimeout),
}


@pytest.mark.parametrize(
    "failure", [pytest.param(name, marks=pytest.mark.slow) if name == "late" else name for name in FAILURES]
)
def test_a_fetch_that_fails_leaves_the_old_state_if_it_is_atomic(
    solos: Solos, receiver: Solo, failure: str
) -> None:
    act, options, error = FAILURES[failure]

    def relay(exchange: Exchange) -> None:
        # The last chunk never arrives, all others do.
        act(exchange) if LAYERS * TINY // MIB - 1 in exchange.chunks else exchange.relay()

    with Proxy(solos.get("source-1").run(serve_state, TINY), relay) as proxy:
        result = fetched(receiver, proxy.address, TINY, atomic=True, **options)
    assert result.contents == OLD
    assert type(result.error) is error, result.error
    assert "nothing was overwritten" in str(result.error)
    assert failure != "damaged" or "model.layer7" in str(result.error)


@pytest.mark.parametrize("atomic", [True, False])
def test_a_fetch_that_fails_before_it_writes_does_not_call_the_state_overwritten(
    solos: Solos, receiver: Solo, atomic: bool
) -> None:
    # Comparing finds that all chunks but one are there already.
    address = solos.get("source-1").run(serve_state, TINY)
    moved(fetched(receiver, address, TINY))
    receiver.run(change_target, "layer2", 3)
    before = receiver.run(target_contents, TINY)

    def relay(exchange: Exchange) -> None:
        exchange.reset() if exchange.step == "chunks" else exchange.relay()

    with Proxy(address, relay) as proxy:
        result = fetched(receiver, proxy.address, TINY, keep=True, atomic=atomic)
    assert type(result.error) is SourcesLost, result.error
    assert "nothing was overwritten" in str(result.error)
    assert result.contents == before


def test_an_atomic_fetch_whose_source_is_killed_leaves_the_old_state(solos: Solos, receiver: Solo) -> None:
    result = fetch_until_killed(solos, TINY, 0.7, atomic=True)
    assert isinstance(result.error, SourcesLost)
    assert result.contents == OLD


def test_an_atomic_fetch_reports_its_extra_memory(solos: Solos, receiver: Solo) -> None:
    address = solos.get("source-1").run(serve_state, TINY)
    result = fetched(receiver, address, TINY, atomic=True)
    assert moved(result) == LAYERS * TINY
    assert result.report is not None
    assert result.report.extra_bytes == LAYERS * TINY
    # Only what differs is kept beside the state.
    receiver.run(change_target, "layer2", 3)
    result = fetched(receiver, address, TINY, atomic=True, keep=True)
    assert result.report is not None
    assert (moved(result), result.report.extra_bytes) == (MIB, MIB)


def test_ctrl_c_during_an_atomic_fetch_leaves_the_old_state(solos: Solos, receiver: Solo) -> None:
    waits = threading.Event()

    def relay(exchange: Exchange) -> None:
        if LAYERS * TINY // MIB - 1 in exchange.chunks:
            waits.set()
            exchange.hold()
        exchange.relay()

    with Proxy(solos.get("source-1").run(serve_state, TINY), relay) as proxy:
        receiver.start(
            partial(fetch_into, [proxy.address], TINY, atomic=True, interruptible=True, timeout=30.0)
        )
        assert waits.wait(10.0)
        receiver.signal(signal.SIGINT)
        sent_s = time.monotonic()
        result: FetchResult = receiver.answer()
    assert isinstance(result.error, KeyboardInterrupt)
    assert result.ended_s - sent_s < 1.0
    assert (result.contents, result.notes, result.left) == (OLD, [], "")


@pytest.mark.slow
def test_ctrl_c_during_the_write_of_an_atomic_fetch_leaves_the_old_or_the_new_state(
    solos: Solos, receiver: Solo
) -> None:
    address = solos.get("source-1").run(serve_state, SMALL)
    seen = set()
    for number in range(12):
        receiver.start(partial(interrupted_while_it_writes, address, number))
        result: FetchResult = receiver.answer()
        assert result.left == ""
        if result.error is None:
            assert result.contents == NEW
            continue
        assert isinstance(result.error, KeyboardInterrupt)
        assert result.contents in (OLD, NEW), "the state is torn"
        # If it was written, the note says so.
        assert bool(result.notes) == (result.contents == NEW)
        seen.add(result.contents["model.layer0"])
    assert "new" in seen, "no interrupt came during the write"


def interrupted_while_it_writes(address: str, number: int) -> FetchResult:
    """Fetch, and interrupt this process twice, a few milliseconds after the last chunk has arrived."""
    interrupts: list[threading.Timer] = []

    def interrupt(event: Any) -> None:
        if event.bytes_moved == event.bytes_total and event.bytes_total and not interrupts:
            for delay_s in (0.002 * number, 0.002 * number + 0.01):
                interrupts.append(threading.Timer(delay_s, signal.raise_signal, [signal.SIGINT]))
                interrupts[-1].start()

    try:
        return fetch_into(
            [address], SMALL, atomic=True, interruptible=True, timeout=30.0, on_progress=interrupt
        )
    finally:
        for timer in interrupts:
            timer.join()


def test_auto_soon_stops_comparing_a_tensor_that_was_overwritten() -> None:
    """The report does not tell what was compared, so chunks that are equal by chance do."""
    with serve({"a": torch.ones(4 * MIB), "b": torch.ones(4 * MIB)}, 1) as source:
        local = {"a": torch.zeros(4 * MIB), "b": torch.zeros(4 * MIB)}
        assert fetch(source.address, local).report.bytes_skipped == 0
        for tensor, zeros in ((local["a"], 4 * MIB - 1), (local["b"], MIB // 2)):
            tensor[:zeros].zero_()
        report = fetch(source.address, local).report
        # Of a, the last chunk has one value that is right. Of b, 2 chunks differ and 14 are as they were.
        assert report.bytes_skipped == 14 * MIB
        assert all(torch.equal(tensor, torch.ones(4 * MIB)) for tensor in local.values())
        # Of a, four chunks differ in a row, and the others are not compared.
        local["a"][: 2 * MIB].zero_()
        assert fetch(source.address, local).report.bytes_skipped == 16 * MIB
        assert fetch(source.address, local).report.bytes_skipped == 32 * MIB


def test_auto_soon_stops_comparing_small_tensors_that_were_all_overwritten() -> None:
    # 8 packed chunks of 128 tensors. Torch overwrites all tensors, the last half with equal values.
    state = {f"{number}": torch.ones(2048) for number in range(1024)}
    local = {path: torch.zeros(2048) for path in state}
    with serve(state, 1) as source:
        assert fetch(source.address, local).report.bytes_skipped == 0
        for number, tensor in enumerate(local.values()):
            tensor.fill_(5.0 if number < 512 else 1.0)
        assert fetch(source.address, local).report.bytes_skipped == 0
        for number, tensor in enumerate(local.values()):
            tensor.fill_(5.0 if number < 256 else 1.0)
        assert fetch(source.address, local).report.bytes_skipped == 6 * MIB
    assert all(torch.equal(tensor, torch.ones(2048)) for tensor in local.values())


def test_auto_compares_everything_that_only_a_fetch_has_written() -> None:
    local = {"a": torch.zeros(4 * MIB)}
    with serve({"a": torch.ones(4 * MIB)}, 1) as source:
        fetch(source.address, local)
        local["a"].numpy()[: 2 * MIB] = 5.0  # nobody counts that
        assert fetch(source.address, local).report.bytes_skipped == 8 * MIB
    assert torch.equal(local["a"], torch.ones(4 * MIB))


def test_auto_compares_other_tensors_over_memory_that_a_fetch_wrote() -> None:
    with serve({"a": torch.ones(MIB)}, 1) as source:
        parameter = torch.nn.Parameter(torch.zeros(MIB))
        for _ in range(3):
            parameter.data.mul_(1)
        fetch(source.address, {"a": parameter.detach()})
        assert fetch(source.address, {"a": parameter.data}).report.bytes_moved == 0
        assert fetch(source.address, {"a": parameter}).report.bytes_moved == 0


def test_auto_compares_the_tensors_of_objects() -> None:
    model = torch.nn.Linear(1024, 1024)
    with serve({"model": model}, 1) as source:
        other = {"model": torch.nn.Linear(1024, 1024)}
        fetch(source.address, other)
        assert fetch(source.address, other).report.bytes_moved == 0


def test_an_expanded_tensor_is_fetched_into_a_tensor_that_is_not() -> None:
    state, local = {"a": torch.ones(1).expand(4)}, {"a": torch.tensor([1.0, 1.0, 1.0, 5.0])}
    with serve(state, 1) as source:
        fetch(source.address, local, compare=True)
    assert local["a"].tolist() == [1.0] * 4
