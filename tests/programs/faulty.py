"""Ranks of which rank 1 dies, raises or stands still while its peers wait for it; they write down what they met with.

Arguments: the fault ("killed", "raises", "stopped"), where the peers wait ("barrier", "operator"), a folder, and the
number of ranks. They are forks of one process, which imports for all of them and then stands by. A rank that has met
its peers says so in a file, and goes on when it finds the file "go".
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "support/processes"))
from limits import clock_of_waits, short_limit, wait_until

import iris_core
from iris_kernels.gemm_all_scatter import Problem
from overlap_taxonomy import get_variant

fault, place, folder, ranks = sys.argv[1:]
for number in range(int(ranks)):
    if os.fork() == 0:
        os.environ |= {"WORLD_SIZE": ranks, "RANK": str(number), "LOCAL_RANK": str(number)}
        break
else:
    sys.stdin.read()  # to the end of the test, so that no process id is another's before
    os._exit(0)
ctx = iris_core.iris(1 << 20, device="cpu")
rank, world_size = ctx.get_rank(), ctx.get_num_ranks()
problem = Problem(16, 16, 16, world_size, torch.float32)
operator = get_variant("gemm_all_scatter", "fused_sequential:portable").build(ctx, problem)
a, b = torch.ones(16, 16), torch.ones(problem.b_shape(rank))
ctx.barrier()
Path(folder, f"ready{rank}").write_text(f"{os.getpid()}\n")
wait_until(Path(folder, "go").exists)
if rank == 1:
    time.sleep(0.5)  # the peers wait
    if fault == "raises":
        raise KeyError("a mistake of its own")
    os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)


def raised(*steps):
    try:
        for step in steps:
            step()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def sockets():
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    inodes = {os.readlink(link)[8:-1] for link in links if os.path.lexists(link) and "socket:" in os.readlink(link)}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sum(row[6] in inodes for row in rows)


waits = [lambda: operator(a, b)] * (place == "operator") + [ctx.barrier]
limit = contextlib.nullcontext()
if place == "operator":  # kernels know by the limit alone, here when all are ready but rank 1
    ready = operator.state[:world_size]
    limit = clock_of_waits(lambda: all(ready[peer] for peer in range(world_size) if peer not in (1, rank)))
elif fault == "stopped" and rank == 0:  # so does the host; it is rank 0 that knows who is missing, when rank 2 has come
    others = ctx.control_plane.exchange._sockets
    wait_until(lambda: others[2] in select.select([others[2]], [], [], 0)[0])
    limit = short_limit(ctx)
with limit:
    kind, message = raised(*waits)
reset = raised(ctx.reset) if fault != "stopped" else None
closed = raised(ctx.close)
said = {"kind": kind, "message": message, "reset": reset, "closed": closed, "sockets": sockets()}
Path(folder, f"said{rank}").write_text(json.dumps(said))
os._exit(0)
