"""The behaviour of gloo that torchferry relies on.

Each test checks one behaviour on which the engine or the process group link depends. If one fails after an
upgrade of torch, that code must be reviewed, even if all other tests pass.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.cluster import Cluster, WorkerDied

MiB = 1 << 20
LONG = timedelta(seconds=20)


def group() -> dist.ProcessGroup:
    """Create a group for one test: most tests break it."""
    created = dist.new_group(list(range(dist.get_world_size())))
    assert isinstance(created, dist.ProcessGroup)
    return created


def filled(nbytes: int, value: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


# --- tags and sizes -------------------------------------------------------------------------------------


def send_with_three_tags(rank: int) -> list[int]:
    pg = group()
    if rank == 0:
        works = [pg.send([filled(10, tag)], 1, tag) for tag in (5, 6)]
        works += [pg.send([filled(10, value)], 1, 7) for value in (1, 2)]
        for work in works:
            work.wait(LONG)
        return []
    buffers = {key: filled(10, 0) for key in ("six", "five", "first", "second")}
    works = [
        pg.recv([buffers["six"]], 0, 6),
        pg.recv([buffers["five"]], 0, 5),
        pg.recv([buffers["first"]], 0, 7),
        pg.recv([buffers["second"]], 0, 7),
    ]
    for work in works:
        work.wait(LONG)
    return [int(buffer[0]) for buffer in buffers.values()]


def test_a_receive_gets_the_message_of_its_tag_and_equal_tags_keep_their_order(pair: Cluster) -> None:
    assert pair.run(send_with_three_tags)[1] == [6, 5, 1, 2]


def receive_a_short_message(rank: int) -> list[int]:
    pg = group()
    if rank == 0:
        pg.send([filled(100, 7)], 1, 5).wait(LONG)
        return []
    buffer = filled(200, 1)
    pg.recv([buffer], 0, 5).wait(LONG)
    return [int((buffer == 7).sum()), int((buffer == 1).sum())]


def test_a_short_message_fills_the_beginning_of_a_longer_buffer(pair: Cluster) -> None:
    assert pair.run(receive_a_short_message)[1] == [100, 100]


def transfer_beside_unanswered_receives(rank: int) -> bool:
    pg = group()
    for _ in range(200):
        pg.recv([filled(1, 0)], 1 - rank, 999)
    if rank == 0:
        pg.send([filled(MiB, 9)], 1, 5).wait(LONG)
        return True
    buffer = filled(MiB, 0)
    pg.recv([buffer], 0, 5).wait(LONG)
    return bool((buffer == 9).all())


def test_unanswered_receives_do_not_affect_other_messages(pair: Cluster) -> None:
    assert pair.run(transfer_beside_unanswered_receives) == [True, True]


def change_after_the_send_is_posted(rank: int) -> int:
    pg = group()
    if rank == 0:
        data = filled(64 * MiB, 1)
        work = pg.send([data], 1, 5)
        data.fill_(2)
        pg.send([filled(1, 0)], 1, 6).wait(LONG)
        work.wait(LONG)
        return 0
    pg.recv([filled(1, 0)], 0, 6).wait(LONG)
    buffer = filled(64 * MiB, 0)
    pg.recv([buffer], 0, 5).wait(LONG)
    return int(buffer[-1])


def test_a_tensor_is_read_when_its_bytes_are_sent_and_not_when_the_send_is_posted(pair: Cluster) -> None:
    assert pair.run(change_after_the_send_is_posted)[1] == 2


# --- how waits end ----------------------------------------------------------------------------------


def wait_and_time(work: dist.Work, timeout: timedelta = LONG) -> tuple[str, float]:
    start = time.monotonic()
    try:
        work.wait(timeout)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def let_a_wait_time_out(rank: int) -> tuple[str, float, int]:
    pg = group()
    pg.barrier().wait(LONG)
    if rank == 1:
        error, seconds = wait_and_time(pg.recv([filled(1, 0)], 0, 50))
        return error, seconds, 0
    late = filled(MiB, 0)
    posted = pg.recv([late], 1, 51)
    results: list[tuple[str, float]] = []
    blocked = threading.Thread(target=lambda: results.append(wait_and_time(posted)))
    blocked.start()
    wait_and_time(pg.recv([filled(1, 0)], 1, 52), timedelta(milliseconds=1))
    blocked.join(10)
    return (*results[0], int(late.max()))


def test_a_wait_that_times_out_ends_all_other_waits_on_both_sides(pair: Cluster) -> None:
    here, there = pair.run(let_a_wait_time_out)
    for error, seconds, _ in (here, there):
        assert error
        assert seconds < 5
    assert here[2] == 0


def die_between_messages(rank: int) -> tuple[str, float]:
    pg = group()
    if rank == 1:
        pg.send([filled(1, 1)], 0, 5).wait(LONG)
        os.kill(os.getpid(), signal.SIGKILL)
    pg.recv([filled(1, 0)], 1, 5).wait(LONG)
    return wait_and_time(pg.recv([filled(1, 0)], 1, 6))


def test_a_peer_that_dies_between_messages_is_reported_at_once(doomed: Cluster) -> None:
    survivor, dead = doomed.start([(die_between_messages, ())] * 2).outcomes()
    assert isinstance(dead.error, WorkerDied)
    error, seconds = survivor.value
    assert error
    assert seconds < 2


def die_in_the_middle(rank: int) -> tuple[str, float, str, float]:
    pg = group()
    pid = torch.tensor([os.getpid()])
    if rank == 1:
        pg.send([pid], 0, 5).wait(LONG)
        pg.recv([filled(256 * MiB, 0)], 0, 6).wait(LONG)
        return "", 0, "", 0
    pg.recv([pid], 1, 5).wait(LONG)
    os.kill(int(pid), signal.SIGSTOP)
    results: list[tuple[str, float]] = []
    work = pg.send([filled(256 * MiB, 1)], 1, 6)
    # The receive was posted, or soon is: its memory may still be being faulted in when it is stopped.
    waiting = threading.Thread(target=lambda: results.append(wait_and_time(work, timedelta(seconds=3))))
    waiting.start()
    waiting.join(0.5)
    os.kill(int(pid), signal.SIGKILL)
    start = time.monotonic()
    refused = ""
    while not refused and time.monotonic() < start + 2:
        try:
            pg.recv([filled(1, 0)], 1, 99)
        except RuntimeError as error:
            refused = str(error)
    found_s = time.monotonic() - start
    waiting.join(10)
    return (*results[0], refused, found_s)


def test_a_new_receive_from_a_dead_peer_fails_at_once(
    doomed: Cluster,
) -> None:
    survivor, dead = doomed.start([(die_in_the_middle, ())] * 2).outcomes()
    assert isinstance(dead.error, WorkerDied)
    error, _, refused, found_s = survivor.value
    assert error
    assert refused
    assert found_s < 1


def send_many_messages_at_once(rank: int) -> bool:
    pg = group()
    buffers = [filled(1000, n % 256 if rank == 0 else 0) for n in range(500)]
    post = pg.send if rank == 0 else pg.recv
    works = [post([buffer], 1 - rank, 100 + n) for n, buffer in enumerate(buffers)]
    for work in works:
        work.wait(LONG)
    return all(bool((buffer == n % 256).all()) for n, buffer in enumerate(buffers))


def test_many_messages_can_be_in_flight_at_once(pair: Cluster) -> None:
    assert pair.run(send_many_messages_at_once) == [True, True]


def break_two_groups(rank: int) -> list[int]:
    seen = []
    for value in (3, 4):
        pg = group()
        data = filled(8, value if rank == 0 else 0)
        (pg.send if rank == 0 else pg.recv)([data], 1 - rank, 5).wait(LONG)
        seen.append(int(data[0]))
        # This breaks the group, but not the next one.
        wait_and_time(pg.recv([filled(1, 0)], 1 - rank, 6), timedelta(milliseconds=1))
    return seen


def test_a_new_group_works_after_an_old_one_broke(pair: Cluster) -> None:
    assert pair.run(break_two_groups) == [[3, 4], [3, 4]]


@pytest.mark.parametrize("tag", [0, 2**31 - 1])
def test_tags_up_to_the_largest_int_work(pair: Cluster, tag: int) -> None:
    assert pair.run(transfer_with_tag, tag) == [True, True]


def transfer_with_tag(rank: int, tag: int) -> bool:
    pg = group()
    data = filled(8, 5 if rank == 0 else 0)
    (pg.send if rank == 0 else pg.recv)([data], 1 - rank, tag).wait(LONG)
    return bool((data == 5).all())
