"""Ranks of two simulated hosts, of which one fails in the middle of calls; the others write down what they met with.

Arguments: the device, the number of ranks, how the host fails ("killed", "stopped", "raises"), which host, a folder, a
port, and the limit of a wait in seconds. The ranks are forks of one process, which imports for all of them and then
stands by. A rank that has met the others says so in a file, and goes on when all have.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "support/processes"))
from limits import wait_until
from ranks import raised

import iris_core
from iris_kernels.all_gather_gemm import Problem
from overlap_taxonomy import get_variant

device, ranks, how, failing, folder, port, limit_s = sys.argv[1:]
HOSTS = 2
for number in range(int(ranks)):
    if os.fork() == 0:
        os.environ |= {"WORLD_SIZE": ranks, "RANK": str(number), "LOCAL_RANK": str(number)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        os.environ["IRIS_HOST_ID"] = str(number * HOSTS // int(ranks))
        break
else:
    sys.stdin.read()  # to the end of the test, so that no process id is another's before
    os._exit(0)


def say_what_went_wrong(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Say it to the test, which would wait, and end."""
    say({"kind": kind.__name__, "message": "".join(traceback.format_exception(error))})
    os._exit(1)


def say(said: dict[str, Any]) -> None:
    """Have the test read it, whole."""
    written = Path(folder, f"saying{number}")
    written.write_text(json.dumps(said))
    written.rename(Path(folder, f"said{number}"))


sys.excepthook = say_what_went_wrong
ctx = iris_core.iris(1 << 24 if device == "cpu" else 1 << 28, device, timeout_s=float(limit_s))
rank, world_size = ctx.get_rank(), ctx.get_num_ranks()
problem = Problem(16, 16, 16, world_size, torch.bfloat16)
operator = get_variant("all_gather_gemm", "auto").build(ctx, problem)
a, b = (torch.ones(shape(rank), dtype=torch.bfloat16).to(device) for shape in (problem.a_shape, problem.b_shape))
operator(a, b)
ctx.barrier()
Path(folder, f"pid{rank}").write_text(str(os.getpid()))
wait_until(lambda: len(list(Path(folder).glob("pid*"))) == world_size)
if ctx.topology.host_of(rank) == int(failing):
    if how == "raises":
        with ctx:
            raise KeyError("a mistake of its own")
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)


def go_on() -> None:
    while True:
        operator(a, b)
        ctx.barrier()


began = time.monotonic()
kind, message = raised(go_on)
said = {"kind": kind, "message": message, "took_s": time.monotonic() - began, "again": raised(operator, a, b)}
ctx.close()
say(said)
own_host = ctx.topology.ranks_of(ctx.topology.host_of(rank))
wait_until(lambda: all(Path(folder, f"said{peer}").exists() for peer in own_host))  # as torch's store ends with rank 0
os._exit(0)
