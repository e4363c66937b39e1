"""Replace a worker that dies in mid-training, and check that the result does not change by a single bit.

    make demo                                             or: python examples/replace_worker.py
    make demo DEMO_ARGS="--workers 6 --kill-rank 0"

Four processes train data-parallel over gloo. The coordinator kills one with SIGKILL and starts a replacement.
The survivors and the replacement create a new process group. The replacement receives model, optimizer, RNG
state, step and data position from a peer through `torchferry.PGTransport`, in place. Training continues. A
second run without the kill is the reference. The exit code is 0 only if all ranks of both runs end with the
same bits. The functions to copy into a job are `join_group`, `catch_up` and `train`. Needs Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch._dynamo  # AdamW imports it, which takes a second: import it once, before the workers are forked.
import torch.distributed as dist
from torch import Tensor, nn

from torchferry import PGTransport

SEED = 0
BATCH = 32  # samples per rank and step
NO_STATE = -1  # the step of a replacement that has not caught up
GROUP_TIMEOUT = timedelta(seconds=30)
START_S = time.monotonic()
FORK = multiprocessing.get_context("fork")
Fingerprint = dict[str, str]  # the SHA-256 of each leaf of a state, by path

# gloo can't cancel a blocked all-reduce, and freeing its process group would block as well: keep the groups.
previous_groups: list[object] = []


def log(text: str) -> None:
    print(f"{time.monotonic() - START_S:6.2f} s  {text}", flush=True)


class Training:
    """A model in training. Without a seed: random values, to be overwritten with the state of a peer.

    A step has two halves: `compute_gradients`, which does not change the state, and `apply_gradients`. If the
    all-reduce between them fails, the state is still that of the previous step.
    """

    def __init__(self, seed: int | None) -> None:
        torch.manual_seed(torch.seed() if seed is None else seed)
        self.model = nn.Sequential(nn.Linear(128, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 128))
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=2e-3)
        # AdamW allocates its moments in its first step. A receive in place needs them before.
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.rng = torch.get_rng_state()
        self.step = NO_STATE if seed is None else 0
        self.position = 0  # how many samples all ranks have used
        self.data = torch.randn(4096, 128, generator=torch.Generator().manual_seed(SEED))

    def compute_gradients(self, rank: int) -> tuple[Tensor, float]:
        """Return the gradients of this rank's samples as one flat tensor, and the loss."""
        torch.set_rng_state(self.rng)
        begin = self.position + rank * BATCH
        inputs = self.data[torch.arange(begin, begin + BATCH) % len(self.data)]
        loss = nn.functional.mse_loss(self.model(inputs), torch.tanh(inputs - inputs.roll(1, dims=1)))
        return nn.utils.parameters_to_vector(torch.autograd.grad(loss, self.parameters)), loss.item()

    def apply_gradients(self, summed: Tensor, world_size: int) -> None:
        """Complete the step with the sum of all ranks' gradients."""
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, (summed / world_size).split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)
        self.optimizer.step()
        self.rng = torch.get_rng_state()
        self.step += 1
        self.position += world_size * BATCH

    def state(self) -> dict[str, Any]:
        """Return all that a replacement needs. The tensors are the live ones, not copies."""
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        numbers = {"step": self.step, "position": self.position}
        return {"model": model, "optimizer": optimizer, "rng": self.rng, **numbers}

    def load(self, received: Any) -> None:
        """Load what a receive in place does not write: all values that are not tensors."""
        self.optimizer.load_state_dict(received["optimizer"])
        self.step, self.position = received["step"], received["position"]


def run_worker(coordinator: Connection, job: Job, rank: int, generation: int) -> None:
    """Train in one process group after another. Generations number the groups; a replacement starts in 1."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end when the coordinator ends
    torch.set_num_threads(1)
    training = Training(seed=SEED if generation == 0 else None)
    while True:
        join_group(f"file://{job.folder}/generation-{generation}", rank, job.world_size)
        catch_up(training)
        train(training, job.steps, coordinator)
        generation = coordinator.recv()


def join_group(init_method: str, rank: int, world_size: int) -> None:
    """Leave the previous process group, and create a new one together with all other ranks."""
    if dist.is_initialized():
        previous_groups.append(dist.group.WORLD)
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)


def catch_up(training: Training) -> None:
    """Send the newest state in the process group to all ranks that are behind.

    A survivor can be one step behind: an interrupted all-reduce can succeed on one rank and fail on another.
    """
    rank = dist.get_rank()
    steps = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    steps[rank] = training.step
    dist.all_reduce(steps)
    newest = int(steps.max())
    if newest == NO_STATE:
        raise RuntimeError("no rank has a state to continue from")
    source, behind = int(steps.argmax()), [peer for peer, step in enumerate(steps) if step < newest]
    transport = PGTransport(dist.group.WORLD, GROUP_TIMEOUT, "cpu", state_dict=training.state)
    if rank == source and behind:
        transport.send_checkpoint(behind, training.state(), step=newest)
    elif rank in behind:
        training.load(transport.recv_checkpoint(source, step=newest))
        log(f"rank {rank}: caught up with rank {source}: {transport.last_report}")


def train(training: Training, steps: int, coordinator: Connection) -> None:
    """Train to the last step, or until a peer dies. Report each step and the final state to the coordinator.

    When a peer dies, the all-reduce fails on most ranks, but can block on others until the group's timeout.
    So poll the all-reduce, and stop as well when the coordinator announces the next generation.
    """
    rank = dist.get_rank()
    while training.step < steps:
        gradients, loss = training.compute_gradients(rank)
        all_reduce = dist.all_reduce(gradients, async_op=True)
        assert all_reduce is not None, "this process is not in the process group"
        while not all_reduce.is_completed():
            if coordinator.poll(timeout=0.001):
                return
        try:
            all_reduce.wait()
        except RuntimeError as error:
            reason = str(error).split("] ", 1)[-1].partition(". ")[0]
            log(f"rank {rank}: all-reduce of step {training.step + 1} failed: {reason}")
            return
        training.apply_gradients(gradients, dist.get_world_size())
        coordinator.send(training.step)
        if rank == 0 and training.step % 10 == 0:
            log(f"rank 0: step {training.step} of {steps}, loss {loss:.4f}")
    coordinator.send(fingerprint(training.state()))


@dataclass(frozen=True)
class Job:
    """One run. The coordinator starts a worker for each rank, and has one end of a pipe to it."""

    world_size: int
    steps: int
    folder: str  # of the files by which the ranks of a process group find each other
    workers: dict[int, tuple[BaseProcess, Connection]] = field(default_factory=dict)

    def start(self, rank: int, generation: int) -> None:
        """Fork a worker: fast because torch is imported, safe because the coordinator starts no threads."""
        ours, theirs = multiprocessing.Pipe()
        process = FORK.Process(target=run_worker, args=(theirs, self, rank, generation), name=f"rank {rank}")
        # Workers inherit the blocked SIGINT. Only the coordinator handles Ctrl-C.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        process.start()
        self.workers[rank] = process, ours
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()
        log(f"rank {rank}: started in generation {generation}, pid {process.pid}")

    def messages(self) -> Iterator[tuple[int, Any]]:
        """Yield rank and message: an int for each completed step, a fingerprint for the final state."""
        while True:
            ready = wait([channel for _, channel in self.workers.values()])
            for rank, (process, channel) in self.workers.items():
                if channel in ready:
                    try:
                        yield rank, channel.recv()
                    except (EOFError, OSError):
                        process.join()
                        sys.exit(f"FAILED: rank {rank} ended with exit code {process.exitcode}")

    def replace(self, rank: int) -> None:
        """Kill a rank after a third of the steps, announce generation 1 to the survivors, and replace it."""
        next(message for message in self.messages() if message == (rank, self.steps // 3))
        process, _ = self.workers.pop(rank)
        process.kill()
        process.join()
        log(f"rank {rank}: killed with SIGKILL, exit code {process.exitcode}")
        for _, survivor in self.workers.values():
            with contextlib.suppress(OSError):  # If the survivor has ended, `messages` ends the job.
                survivor.send(1)
        self.start(rank, generation=1)


def run_job(options: argparse.Namespace, kill_rank: int | None) -> dict[int, Fingerprint]:
    """Train with one process per rank, and return the fingerprint of each rank's final state."""
    final_states: dict[int, Fingerprint] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = Job(options.workers, options.steps, folder)
        try:
            for rank in range(options.workers):
                job.start(rank, generation=0)
            if kill_rank is not None:
                job.replace(kill_rank)
            messages = job.messages()
            while len(final_states) < options.workers:
                rank, message = next(messages)
                if isinstance(message, dict):
                    final_states[rank] = message
        finally:
            for process, _ in job.workers.values():
                process.kill()
            for process, _ in job.workers.values():
                process.join()
    return final_states


def fingerprint(tree: Any, path: str = "state") -> Fingerprint:
    """Return the SHA-256 of each leaf of a state, by path. Tensors must be contiguous."""
    if isinstance(tree, dict):
        return {p: digest for key in tree for p, digest in fingerprint(tree[key], f"{path}.{key}").items()}
    raw = ctypes.string_at(tree.data_ptr(), tree.nbytes) if isinstance(tree, Tensor) else repr(tree).encode()
    return {path: hashlib.sha256(raw).hexdigest()}


def differences(disturbed: dict[int, Fingerprint], undisturbed: dict[int, Fingerprint]) -> list[str]:
    """Return each rank and path where a final state is not that of rank 0 in the undisturbed run."""
    expected = undisturbed[0]
    return [
        f"rank {rank} of the {run} run: {path}"
        for run, states in (("disturbed", disturbed), ("undisturbed", undisturbed))
        for rank, state in sorted(states.items())
        for path in sorted(expected.keys() | state.keys())
        if state.get(path) != expected.get(path)
    ]


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=4, help="number of ranks (default: 4)")
    parser.add_argument("--steps", type=int, default=60, help="number of training steps (default: 60)")
    parser.add_argument("--kill-rank", type=int, default=1, help="rank to kill (default: 1)")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for both runs (default: 120)")
    options = parser.parse_args()
    if options.workers < 2 or options.steps < 3 or options.timeout < 1:
        parser.error("--workers must be at least 2, --steps at least 3, and --timeout at least 1")
    if not 0 <= options.kill_rank < options.workers:
        parser.error(f"--kill-rank must be 0 to {options.workers - 1}, not {options.kill_rank}")
    return options


def main() -> None:
    options = parse_options()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"FAILED: not finished after {options.timeout} s"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.alarm(options.timeout)
    try:
        log(f"first run: {options.workers} workers train, and rank {options.kill_rank} is killed")
        disturbed = run_job(options, options.kill_rank)
        log("second run: the same training, undisturbed")
        undisturbed = run_job(options, kill_rank=None)
    except KeyboardInterrupt:
        print("Interrupted; all workers have ended.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    if found := differences(disturbed, undisturbed):
        sys.exit("\n  ".join(["FAILED: the final states differ:", *found]))
    log(f"PASSED: the final states of both runs are bit-identical, in {len(undisturbed[0])} leaves per rank")


if __name__ == "__main__":
    main()
