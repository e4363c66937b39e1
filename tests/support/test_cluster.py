"""The cluster returns complete errors, and detects deaths and hangs in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support import processes
from tests.support.cluster import Cluster, Job, RemoteError, WorkerDied, WorkerHung
from tests.support.processes import without_gloo


class TwoPartError(Exception):
    """An exception that can be pickled but not loaded: its __init__ needs two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def add(rank: int, amount: int) -> int:
    return rank + amount


def own_pid(rank: int) -> int:
    return os.getpid()


def sum_of_ranks(rank: int) -> float:
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return total.item()


def mesh_size(rank: int) -> int:
    return init_device_mesh("cpu", (dist.get_world_size(),)).size()


def triangle(rank: int) -> torch.Tensor:
    return torch.ones(3, 3, dtype=torch.bfloat16).tril() * rank


def thread_count(rank: int) -> int:
    return torch.get_num_threads()


def fail_on_rank_1(rank: int) -> str:
    if rank == 1:
        raise KeyError("the cause")
    return "fine"


def fail_with_two_parts(rank: int) -> None:
    raise TwoPartError("this", "that")


def return_an_unpicklable_value(rank: int) -> object:
    return lambda: rank


def die(rank: int, how: int) -> None:
    os.kill(os.getpid(), how)


def exit_with(rank: int, code: int) -> None:
    os._exit(code)


def sleep(rank: int, seconds: float) -> str:
    time.sleep(seconds)
    return "awake"


def recv_from(rank: int, peer: int) -> None:
    dist.recv(torch.zeros(1), peer)


def start_an_orphan(rank: int) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid


@pytest.fixture(scope="module")
def cluster(_fork_server: None) -> Iterator[Cluster]:
    """A separate pair, because these tests break it repeatedly."""
    with Cluster(2, timeout_s=30, start_method="forkserver") as cluster:
        yield cluster


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_results_come_in_rank_order(cluster: Cluster) -> None:
    assert cluster.run(add, 10) == [10, 11]


def test_each_rank_can_have_its_own_job_or_none(cluster: Cluster) -> None:
    assert cluster.run_each([None, (add, (5,))]) == [None, 6]


def test_workers_persist_from_run_to_run(cluster: Cluster) -> None:
    assert cluster.run(own_pid) == cluster.run(own_pid) == cluster.pids


def test_workers_have_joined_one_default_group(cluster: Cluster) -> None:
    assert cluster.run(sum_of_ranks) == [1.0, 1.0]
    assert cluster.run(mesh_size) == [2, 2]


def test_workers_compute_on_one_thread(cluster: Cluster) -> None:
    assert cluster.run(thread_count) == [1, 1]


def test_tensors_come_back_by_value(cluster: Cluster) -> None:
    for rank, tensor in enumerate(cluster.run(triangle)):
        assert torch.equal(tensor, triangle(rank))
        assert not tensor.is_shared()


def test_an_exception_comes_back_with_type_message_and_traceback(cluster: Cluster) -> None:
    with pytest.raises(RemoteError, match="rank 1 raised KeyError: 'the cause'") as caught:
        cluster.run(fail_on_rank_1)
    assert (caught.value.rank, caught.value.type_name) == (1, "KeyError")
    assert "in fail_on_rank_1" in caught.value.remote_traceback
    assert isinstance(caught.value.original, KeyError)
    assert caught.value.__cause__ is caught.value.original


def test_an_exception_that_does_not_pickle_comes_back_as_text(cluster: Cluster) -> None:
    with pytest.raises(RemoteError, match="TwoPartError: this and that") as caught:
        cluster.run(fail_with_two_parts)
    assert caught.value.original is None


def test_a_result_that_does_not_pickle_is_an_error_of_that_rank(cluster: Cluster) -> None:
    with pytest.raises(RemoteError, match="pickle"):
        cluster.run(return_an_unpicklable_value)


def test_a_function_that_does_not_pickle_is_refused_before_anything_runs(cluster: Cluster) -> None:
    with pytest.raises(TypeError, match="function of a module"):
        cluster.run(lambda rank: rank)
    assert cluster.run(add, 1) == [1, 2]


def test_outcomes_have_values_and_errors_and_do_not_break_the_cluster(cluster: Cluster) -> None:
    before = cluster.run(own_pid)
    good, bad = cluster.start([(fail_on_rank_1, ())] * 2).outcomes()
    assert (good.value, good.error) == ("fine", None)
    assert isinstance(bad.error, RemoteError)
    assert cluster.run(own_pid) == before


@pytest.mark.parametrize(
    ("job", "how"),
    [
        ((die, (signal.SIGKILL,)), "killed by SIGKILL"),
        ((exit_with, (7,)), "exited with code 7"),
    ],
    ids=["signal", "exit"],
)
def test_a_death_is_reported_at_once_while_other_ranks_are_busy(cluster: Cluster, job: Job, how: str) -> None:
    cluster.run(own_pid)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=f"rank 1 (was )?{how}"):
        cluster.run_each([(sleep, (60,)), job])
    assert time.monotonic() - started < 10


def test_the_survivors_of_a_death_answer_the_next_call(cluster: Cluster) -> None:
    cluster.run(own_pid)
    pending = cluster.start([(add, (1,)), (sleep, (60,))])
    cluster.kill(1)
    alive, dead = pending.outcomes()
    assert alive.value == 1
    assert isinstance(dead.error, WorkerDied)
    assert dead.error.exitcode == -signal.SIGKILL
    assert cluster.run_each([(add, (2,)), None]) == [2, None]


def test_a_hang_ends_at_the_deadline_and_the_error_has_the_stacks(cluster: Cluster) -> None:
    cluster.run(own_pid)
    started = time.monotonic()
    with pytest.raises(WorkerHung) as caught:
        cluster.run_each([(recv_from, (1,)), (add, (1,))], timeout_s=1)
    assert 1 <= time.monotonic() - started < 5
    assert caught.value.rank == 0
    assert "in recv_from" in caught.value.stacks


def test_a_broken_cluster_gets_new_workers_and_the_old_ones_are_gone(cluster: Cluster) -> None:
    before = cluster.run(own_pid)
    cluster.broken = True
    after = cluster.run(own_pid)
    assert not set(before) & set(after)
    assert all(is_gone(pid) for pid in before)
    assert cluster.run(sum_of_ranks) == [1.0, 1.0]


def test_a_second_run_while_one_is_under_way_is_refused(cluster: Cluster) -> None:
    pending = cluster.start([(sleep, (0.2,))] * 2)
    with pytest.raises(RuntimeError, match="under way"):
        cluster.run(add, 1)
    assert pending.results() == ["awake", "awake"]


def test_an_unfinished_run_does_not_affect_the_next_test(cluster: Cluster) -> None:
    cluster.start([(sleep, (60,))] * 2)
    cluster.mark_if_broken()
    assert cluster.run(add, 1) == [1, 2]


@pytest.mark.usefixtures("_fork_server")
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_no_worker_is_left_when_the_cluster_closes(busy: bool) -> None:
    with Cluster(1, start_method="forkserver") as single:
        pids = single.run(own_pid)
        if busy:
            single.start([(sleep, (60,))])
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.slow
def test_workers_exit_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = """
from tests.support.cluster import Cluster
from tests.support.test_cluster import own_pid, sleep

if __name__ == "__main__":
    with Cluster(1) as single:
        print(*single.run(own_pid), flush=True)
        single.run(sleep, 60)
"""
    path = tmp_path / "doomed.py"
    path.write_text(script)
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, path],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{root}"},
    ) as doomed:
        assert doomed.stdout is not None
        worker = int(next(without_gloo(doomed.stdout)))
        doomed.kill()
    deadline = time.monotonic() + 10
    while not is_gone(worker):
        assert time.monotonic() < deadline, f"worker {worker} is still alive"
        time.sleep(0.05)


@pytest.mark.usefixtures("_fork_server")
def test_an_orphaned_process_is_found() -> None:
    tag = os.environ[processes.MARK]
    with Cluster(1, start_method="forkserver") as single:
        (stray,) = single.run(start_an_orphan)
    try:
        assert [p.pid for p in processes.left_behind(tag, patience_s=0) if p.pid == stray]
    finally:
        os.kill(stray, signal.SIGKILL)
