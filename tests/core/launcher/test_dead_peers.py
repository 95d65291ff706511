"""A rank that dies, raises, or stands still: its peers hear of it within the limit, and nothing is left behind.

The ranks are started by `launch`, and by nothing of ours, as torchrun would, where the peers' own errors count.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from families import make_problem
from limits import HUNG_S, UNLIMITED, short_limit, wait_until
from ranks import free_port
from test_launch import names_of_sockets, pid_of, shared_files

from iris_core import PeerError, RankError, RankPool, iris
from iris_core.launcher import pool as launcher
from overlap_taxonomy import get_variant

FAULTY = Path(__file__).parents[2] / "programs" / "faulty.py"


class Ranks:
    """Processes that nothing of ours started; each says in a file what it met with."""

    def __init__(self, folder: Path, fault: str, place: str, world_size: int = 3) -> None:
        self.folder = folder
        self.world_size = world_size
        self.pids: list[int] = []
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **(UNLIMITED if fault != "stopped" and place == "barrier" else {}),
        }
        self.parent = subprocess.Popen(
            [sys.executable, FAULTY, fault, place, folder, str(world_size)],
            env=environment,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def wait_until_ready(self) -> None:
        """Return when all ranks have met; they stand by until `go_on`."""
        ready = [self.folder / f"ready{rank}" for rank in range(self.world_size)]

        def are_ready() -> bool:
            assert self.parent.poll() is None
            return all(file.exists() and file.read_text().endswith("\n") for file in ready)

        wait_until(are_ready)
        self.pids = [int(file.read_text()) for file in ready]

    def go_on(self) -> None:
        """Let rank 1 fail, and its peers wait for it."""
        (self.folder / "go").touch()

    def running(self) -> set[int]:
        """Return the process ids of those that have not ended."""
        return {pid for pid in self.pids if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}

    def wait(self, *pids: int) -> None:
        """Return when these have ended."""
        wait_until(lambda: not self.running() & set(pids))

    def said(self, rank: int) -> dict[str, Any]:
        """Return what a rank has met with."""
        self.wait(self.pids[rank])
        return json.loads((self.folder / f"said{rank}").read_text())

    def end(self) -> None:
        """End those that have not ended."""
        if self.parent.poll() is None:
            for child in psutil.Process(self.parent.pid).children():
                child.kill()
        self.wait(*self.pids)
        self.parent.communicate()  # closes what it reads, which ends it


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        ("killed", "barrier"),
        ("killed", "operator"),
        ("raises", "barrier"),
        ("stopped", "barrier"),
        ("stopped", "operator"),
    ],
)
def test_the_peers_of_a_rank_that_is_gone_hear_of_it(tmp_path: Path, fault: str, place: str) -> None:
    before = set(os.listdir("/dev/shm"))
    ranks = Ranks(tmp_path, fault, place)
    try:
        ranks.wait_until_ready()
        pids = ranks.running()
        sockets, files = names_of_sockets(pids), shared_files(pids)
        ranks.go_on()
        for rank in (0, 2):
            said = ranks.said(rank)
            print(fault, place, rank, said)
            if place == "barrier":
                assert said["kind"] == "PeerError"
                how = "did not answer within 1 s" if fault == "stopped" else "left"
                # Who comes late may find that rank 0, which heard of it first, has gone as well.
                assert f"rank 1 {how}" in said["message"] or "rank 0 left" in said["message"]
                assert ("reset()" in said["message"]) == (fault == "stopped") or "rank 0 left" in said["message"]
            else:
                assert said["kind"] in ("TimeoutError", "PeerError")
                if said["kind"] == "TimeoutError":
                    assert (
                        "gemm_all_scatter/fused_sequential:portable of 16x16x16: rank 1 to be ready" in said["message"]
                    )
            if fault != "stopped":
                assert said["reset"][0] == "PeerError"
                assert "final" in said["reset"][1]
            assert said["sockets"] == 0  # closed with the context
    finally:
        ranks.end()
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    assert not {name for name in sockets if name.startswith("@iris-")} & {row[7] for row in rows if len(row) > 7}
    assert not [file for file in files if Path(file).exists()]
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "iris" in name]


def break_in(rank: int, world_size: int, fault: str, place: str) -> None:
    ctx = iris(1 << 20)
    operator = get_variant("gemm_all_scatter", "fused_sequential:portable").build(
        ctx, make_problem("gemm_all_scatter", 16, 16, 16, world_size, torch.float32)
    )
    a, b = torch.ones(16, 16), torch.ones(operator.problem.b_shape(rank))
    ctx.barrier()
    if rank == 1:
        time.sleep(0.3)  # the peers wait
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise KeyError("a mistake of rank 1's own")
    with short_limit(ctx) if fault == "stopped" else contextlib.nullcontext():
        if place == "operator":
            operator(a, b)
        ctx.barrier()


@pytest.mark.parametrize(
    ("fault", "place", "error", "part"),
    [
        ("killed", "barrier", PeerError, "rank 1 was killed by SIGKILL"),
        ("killed", "operator", PeerError, "rank 1 was killed by SIGKILL"),
        ("raises", "barrier", KeyError, "a mistake of rank 1's own"),
        ("stopped", "operator", TimeoutError, "rank 1 to be ready"),
    ],
)
def test_launch_names_the_rank_at_fault_and_ends_all(
    monkeypatch: pytest.MonkeyPatch, fault: str, place: str, error: Any, part: str
) -> None:
    if fault != "stopped":  # such a rank answers nothing, and is waited for in vain
        monkeypatch.setattr(launcher, "_DYING_S", HUNG_S)
    with RankPool(2, "cpu", environment=UNLIMITED if fault != "stopped" else None) as pool:
        pids = pool.call(pid_of)
        descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises(error) as caught:
            pool.call(break_in, fault, place)
        assert part in str(caught.value)
        assert not any(psutil.pid_exists(pid) for pid in pids)
    assert len(os.listdir("/proc/self/fd")) < descriptors


def raise_first(rank: int, world_size: int, heard: str) -> None:
    """Rank 0 raises of what a peer's death did; the death itself comes once the caller has heard of that."""
    if rank == 0:
        raise PeerError("rank 1 left")
    wait_until(Path(heard).exists)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_death_is_preferred_to_what_a_peer_says_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = tmp_path / "heard"

    def raise_what_is_behind(*given: Any) -> None:
        heard.touch()
        looks_for_what_is_behind(*given)

    looks_for_what_is_behind = RankPool._raise_root_cause
    monkeypatch.setattr(RankPool, "_raise_root_cause", raise_what_is_behind)
    monkeypatch.setattr(launcher, "_DYING_S", HUNG_S)
    death = pytest.raises(PeerError, match=r"^rank 1 was killed by SIGKILL; rank 0: ")
    with RankPool(2, "cpu") as pool, death as got:
        pool.call(raise_first, str(heard))
    assert isinstance(got.value.__cause__, RankError)
