"""Ranks that never end by themselves: two meet, say so, and wait for ever; the rest is up to who started this."""

import signal
import sys
import time
from pathlib import Path

import iris_core


def meet_and_wait(rank, world_size, folder):
    ctx = iris_core.iris(1 << 20)
    ctx.zeros(10)
    ctx.barrier()
    Path(folder, f"rank{rank}").touch()
    if rank == 0:
        ctx.barrier()  # in the middle of something collective
    while True:
        time.sleep(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    iris_core.launch(meet_and_wait, 2, device="cpu", args=(sys.argv[1],))
