"""Inference workers follow a trainer, which publishes its parameters after every step.

    python examples/inference_follows_trainer.py

Three followers fetch each newer version in place. One is so slow that its version is replaced before it is
done. One is killed with SIGKILL and started again. The trainer waits for none of them: `publish` copies the
parameters, and `readers="drop"` disconnects a follower that still reads the version before the last. The exit
code is 0 only if all followers end with the last version, and no step was held up longer than a copy takes.
"""

import multiprocessing
import sys
import time

import torch

import torchferry

LAST, SLOW_S = 30, 1.5  # the last version, and how long the slow follower takes for one
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torchferry"])


def new_params() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)  # four processes share the machine
    return {f"layer {i}": torch.zeros(1 << 18) for i in range(8)}


def follow(name: str, address: str, pause_s: float) -> None:
    params, version, fetches = new_params(), -1, 0

    def pause(event: torchferry.ProgressEvent) -> None:
        time.sleep(pause_s * (event.phase == "receive tensors"))

    while version < LAST:
        try:
            got = torchferry.fetch(address, into=params, newer_than=version, on_progress=pause)
        except ConnectionError:  # dropped, because the trainer needed the memory of the version
            if (trainer := multiprocessing.parent_process()) and trainer.is_alive():
                continue
            raise
        version, fetches = got.version, fetches + 1
        if not all(torch.all(tensor == version) for tensor in params.values()):
            sys.exit(f"FAILED: {name} has a mixture of versions")
    print(f"{name}: has version {version}, after {fetches} fetches", flush=True)


def main() -> None:
    with torchferry.Source() as source:

        def start(name: str, pause_s: float = 0.0) -> multiprocessing.process.BaseProcess:
            follower = CONTEXT.Process(target=follow, args=(name, source.address, pause_s), daemon=True)
            follower.start()
            return follower

        params, held_up_s = new_params(), [0.0]
        source.publish(params, version=0)
        followers = [start("fast"), start("slow", SLOW_S), start("unlucky")]
        source.wait(0, receivers=2)  # until the fast ones run
        for step in range(1, LAST + 1):
            for tensor in params.values():
                tensor.fill_(step)  # stands for training
            time.sleep(0.05)
            begin_s = time.monotonic()
            source.publish(params, version=step, readers="drop")
            held_up_s.append(time.monotonic() - begin_s)
            print(f"trainer: step {step}, publishing took {held_up_s[-1] * 1e3:.0f} ms", flush=True)
            if step == LAST // 2:
                followers[2].kill()
                followers[2] = start("unlucky, restarted")
        source.wait(LAST, receivers=3)
        for follower in followers:
            follower.join()
    if max(held_up_s) > SLOW_S / 2 or any(follower.exitcode for follower in followers):
        sys.exit(f"FAILED: the trainer was held up for {max(held_up_s):.1f} s, or a follower failed")
    print(f"PASSED: all have version {LAST}; no step was held up longer than {max(held_up_s) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
