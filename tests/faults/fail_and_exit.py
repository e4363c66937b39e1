"""A script: a transfer whose sender stops in the middle of a message. The receiver fails and exits normally.

Run as `python -m tests.faults.fail_and_exit <rank> <port> <timestamp file>`. It is not a job of a worker,
because the interpreter must end normally while gloo still blocks a thread.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch.distributed as dist

from tests.faults.jobs import Fault, Role, message, run_transfer

if __name__ == "__main__":
    rank, port, timestamp_file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    fault = Fault("cut", message(4), timestamp_file) if rank == 0 else None
    direction = "send" if rank == 0 else "receive"
    result = run_transfer(
        rank,
        Role("fail_and_exit", (0, 1), direction, 60.0, stall_s=0.5, fault=fault, small_socket_buffers=True),
    )
    assert rank == 0 or "mixed" in result.contents.values(), result.contents
    print(type(result.error).__name__, flush=True)
