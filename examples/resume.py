"""A source is killed in the middle of a fetch. The next fetch moves only what is missing.

    python examples/resume.py

Two processes serve the same state. This process fetches it from the first, in place, and kills that source
with SIGKILL on the way. The fetch raises `TargetTorn`, which says what became of every tensor. A second fetch
into the same tensors keeps what was received, and takes the rest from the second source. The exit code is 0
only if the result is exact.
"""

import multiprocessing
import signal
import sys
from multiprocessing.connection import Connection

import torch

import torchferry

TENSORS, MIB = 48, 4
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torchferry"])


def make_state() -> dict[str, torch.Tensor]:
    """The same state in every process, as two replicas have it after the same step."""
    generator = torch.Generator().manual_seed(0)
    return {f"layer {i}": torch.rand(MIB << 18, generator=generator) for i in range(TENSORS)}


def serve(announce: Connection) -> None:
    with torchferry.serve(make_state(), version=7, snapshot=False) as source:
        announce.send(source.address)
        signal.pause()


def main() -> None:
    sources, addresses = [], []
    for _ in range(2):
        ours, theirs = CONTEXT.Pipe()
        sources.append(CONTEXT.Process(target=serve, args=(theirs,), daemon=True))
        sources[-1].start()
        addresses.append(ours.recv())
    print(f"two sources serve version 7: {TENSORS} tensors of {MIB} MiB", flush=True)
    params = {name: torch.zeros_like(tensor) for name, tensor in make_state().items()}

    def kill_on_the_way(event: torchferry.ProgressEvent) -> None:
        if event.bytes_moved > event.bytes_total / 3 and sources[0].is_alive():
            sources[0].kill()
            sources[0].join()
            print(f"the first source is killed at {event.bytes_moved:,} of {event.bytes_total:,} bytes")

    # If it were given both addresses, this fetch would go on with the second source, and not fail.
    try:
        torchferry.fetch(addresses[0], into=params, on_progress=kill_on_the_way)
        sys.exit("FAILED: the fetch did not notice that its source was killed")
    except torchferry.TargetTorn as error:
        whole, torn, untouched = len(error.whole), len(error.torn), len(error.untouched)
        print(f"{type(error).__name__}: {whole} tensors are new, {torn} mixed, {untouched} old")

    got = torchferry.fetch(addresses, into=params)
    share = got.report.bytes_moved / got.report.bytes_total
    print(f"the second fetch moved {share:.0%}: {got.report}")
    for process in sources:
        process.kill()
        process.join()
    if share > 0.7:
        sys.exit("FAILED: the second fetch moved more than what was missing")
    if wrong := [name for name, tensor in make_state().items() if not torch.equal(params[name], tensor)]:
        sys.exit(f"FAILED: these tensors are not exact: {wrong}")
    print("PASSED: all tensors are exact")


if __name__ == "__main__":
    main()
