"""A script: one end of a transfer whose sender stops in the middle of a message, and an ordinary exit.

Run as `python -m tests.faults.leaving <rank> <port> <mark>`, for the receiver's interpreter to end as any
other does: with a thread that gloo still holds.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch.distributed as dist

from tests.faults.scene import Fault, Part, message, perform

if __name__ == "__main__":
    rank, port, mark = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    fault = Fault("cut", message(4), mark) if rank == 0 else None
    way = "send" if rank == 0 else "receive"
    sight = perform(rank, Part("leaving", (0, 1), way, 60.0, stall_s=0.5, fault=fault, narrow=True))
    assert rank == 0 or "mixed" in sight.fates.values(), sight.fates
    print(type(sight.error).__name__, flush=True)
