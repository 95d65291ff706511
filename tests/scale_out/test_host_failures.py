"""A simulated host that is killed, stopped or fails: the ranks of the other say so, and nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from families import make_problem
from limits import wait_until
from ranks import TIMEOUT_S, free_port, raised

from iris_core import RankPool, iris
from iris_core.context.hierarchical import HierarchicalContext
from overlap_taxonomy import get_variant

PROGRAM = Path(__file__).parents[1] / "programs" / "failing_host.py"
LIMIT_S = 4.0  # of a wait in a kernel; between hosts twice as long
HOSTS = 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "failing"), [("killed", 1), ("killed", 0), ("stopped", 1), ("raises", 1)], ids=lambda given: str(given)
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_host_that_fails_is_named_on_the_other_within_the_limit(
    tmp_path: Path, device: str, how: str, failing: int
) -> None:
    """Where host 0 is killed, torch's store goes with it, as torchrun's does."""
    size = 2 if device == "cpu" else 1
    if device == "cuda" and torch.cuda.device_count() < HOSTS:
        pytest.skip(f"needs {HOSTS} GPUs; there are {torch.cuda.device_count()}")
    arguments = [device, HOSTS * size, how, failing, tmp_path, free_port(), LIMIT_S]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    parent = subprocess.Popen(
        [sys.executable, PROGRAM, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | hidden,
        stdin=subprocess.PIPE,
        stderr=(log := (tmp_path / "log").open("w")),
    )
    survivors = range((1 - failing) * size, (2 - failing) * size)
    said_by = {rank: tmp_path / f"said{rank}" for rank in survivors}
    pids: set[int] = set()
    try:
        wait_until(lambda: parent.poll() is not None or all(file.exists() for file in said_by.values()))
        pids = {int(file.read_text()) for file in tmp_path.glob("pid*")}
        for rank, file in said_by.items():
            assert file.exists(), (tmp_path / "log").read_text()
            said = json.loads(file.read_text())
            assert said["kind"] == "PeerError", said
            assert f"host {failing}" in said["message"], said
            assert "again" in said, said["message"]
            assert said["again"][0] == "PeerError", said
            assert said["took_s"] < 3 * 2 * LIMIT_S, (rank, said)
            wait_until(lambda rank=rank: _has_ended(int((tmp_path / f"pid{rank}").read_text())))
        assert len(pids) == HOSTS * size
        assert not [name for name in os.listdir("/dev/shm") if "iris" in name]
    finally:
        for pid in pids:  # that are stopped
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        parent.communicate()
        log.close()


def _has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


_made: list[Any] = []  # a rank's context, operator and operands


def make(rank: int, world_size: int) -> None:
    """Make what `fail_twice` calls, in a call of its own: no rank is in something collective when another fails."""
    ctx = iris(1 << 24)
    problem = make_problem("all_gather_gemm", 16, 16, 16, world_size, torch.bfloat16)
    operator = get_variant("all_gather_gemm", "auto").build(ctx, problem)
    _made.extend([ctx, operator])
    _made.extend(torch.ones(shape(rank), dtype=torch.bfloat16) for shape in (problem.a_shape, problem.b_shape))


def fail_twice(rank: int, world_size: int, first: str) -> list[tuple[str, str]]:
    """Have host 1 fail and then a wait on host 0, or the other way around; return what this rank raises after both."""
    ctx, operator, a, b = _made
    assert isinstance(ctx, HierarchicalContext)
    for what in (first, *({"host", "wait"} - {first})):
        if what == "host" and rank == 3:
            ctx.control_plane.abort("its disk is full")
        if what == "wait" and rank == 1:
            ctx.local.watchdog.stream_timed_out(ctx.local.watchdog.words[:1], expected=-1)
            raised(ctx.check)
        wait_until(lambda: ctx.control_plane.failure is not None)
    wait_until(lambda: rank >= 2 or ctx.local.watchdog.board.words[0])
    found = [raised(ctx.check), raised(operator, a, b), raised(ctx.barrier), raised(ctx.check)]
    ctx.close()
    return found


@pytest.mark.parametrize(
    ("first", "why"),
    [("host", "rank 3 of host 1 aborted: its disk is full"), ("wait", "rank 1: a stream timed out")],
)
def test_of_failures_between_hosts_and_inside_one_the_first_is_raised(first: str, why: str) -> None:
    with RankPool(4, "cpu", environment={"IRIS_TIMEOUT_S": TIMEOUT_S}, hosts=2) as pool:
        pool.call(make)
        for rank, found in enumerate(pool.call(fail_twice, first)):
            kind = "TimeoutError" if first == "wait" and rank < 2 else "PeerError"
            assert {one for one, _ in found} == {kind}, (rank, found)
            assert all(why in message for _, message in found), (rank, found)
