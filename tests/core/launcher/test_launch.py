"""Starting ranks, and ending them: whatever happens, the caller hears of it and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from limits import HUNG_S, UNLIMITED, wait_until
from ranks import context, raised

from iris_core import PeerError, RankError, RankPool, iris, launch
from iris_core.backends.shm import ShmBackend
from iris_core.launcher import pool as launcher

INTERRUPTED = Path(__file__).parents[2] / "programs" / "interrupted.py"


def square(rank: int, world_size: int, number: int) -> tuple[int, int, int]:
    return rank, world_size, number**2


def test_launch_returns_the_ranks_results_in_order() -> None:
    assert launch(square, 3, device="cpu", args=(5,)) == [(0, 3, 25), (1, 3, 25), (2, 3, 25)]


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("the one that failed")
    time.sleep(600)


def test_launch_raises_the_failing_ranks_error_with_where_it_came_from() -> None:
    with pytest.raises(KeyError, match="the one that failed") as caught:
        launch(fail_on_one, 2, device="cpu")
    assert isinstance(caught.value.__cause__, RankError)
    assert "rank 1 of 2" in str(caught.value.__cause__)
    assert "fail_on_one" in str(caught.value.__cause__)  # the rank's own traceback


def return_a_function(rank: int, world_size: int) -> Any:
    return lambda: rank


def test_a_result_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(ValueError, match="a rank returned what cannot be sent, a function: "):
        launch(return_a_function, 2, device="cpu")


class Unpicklable(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def fail_strangely(rank: int, world_size: int) -> None:
    raise Unpicklable("an error that", "cannot be rebuilt")


def pids_then_wait(rank: int, world_size: int) -> int:
    context().barrier()
    return os.getpid()


def die_while_peers_wait(rank: int, world_size: int) -> None:
    ctx = context()
    ctx.barrier()
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.barrier()


@pytest.mark.parametrize("killed", ["by itself", "none: an error that cannot be rebuilt"])
def test_no_rank_outlives_a_failed_call(killed: str) -> None:
    with RankPool(3, "cpu", environment=UNLIMITED) as pool:
        pids = pool.call(pids_then_wait)
        assert all(psutil.pid_exists(pid) for pid in pids)
        if killed == "by itself":
            with pytest.raises(PeerError, match=r"rank 1 (left|was killed by SIGKILL)"):
                pool.call(die_while_peers_wait)
        else:
            with pytest.raises(RuntimeError, match="Unpicklable: an error that"):
                pool.call(fail_strangely)
        assert not any(psutil.pid_exists(pid) for pid in pids)
        with pytest.raises(RuntimeError, match="have ended"):
            pool.call(pids_then_wait)


def opened(pid: int) -> set[str]:
    """Return what a process's file descriptors name, but for those that it closes in the meantime."""
    names = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.add(os.readlink(descriptor))
    return names


def tensors_of_the_heap(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    ctx = iris(1 << 20)
    whole = ctx.arange(12, dtype=torch.int32).view(3, 4)
    return {"whole": whole, "columns": whole[:, 1:3], "every other": whole[::2], "none": whole[:0]}


def test_a_rank_returns_what_a_tensor_shows_not_the_heap() -> None:
    for tensors in launch(tensors_of_the_heap, 2, device="cpu"):
        whole = torch.arange(12, dtype=torch.int32).view(3, 4)
        expected = {"whole": whole, "columns": whole[:, 1:3], "every other": whole[::2], "none": whole[:0]}
        for what, tensor in tensors.items():
            assert torch.equal(tensor, expected[what])
            assert tensor.untyped_storage().nbytes() == expected[what].nbytes


def names_of_sockets(pids: set[int]) -> set[str]:
    """Return the names of the Unix sockets that these processes hold."""
    names = set().union(*map(opened, pids))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {row[7] for row in rows if len(row) > 7 and f"socket:[{row[6]}]" in names}


def shared_files(pids: set[int]) -> set[str]:
    """Return the files in shared memory that these processes have mapped or open."""
    mapped = (re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text()) for pid in pids)
    return {name for name in set().union(*map(opened, pids), *mapped) if name.startswith("/dev/shm/")}


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a collective: no process, no file in shared memory, no socket."""
    before = set(os.listdir("/dev/shm"))
    program = subprocess.Popen(
        [sys.executable, INTERRUPTED, tmp_path], start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    try:

        def are_running() -> bool:
            assert program.poll() is None, program.communicate()
            return len(list(tmp_path.iterdir())) >= 2

        wait_until(are_running)
        pids = {child.pid for child in psutil.Process(program.pid).children(recursive=True)}
        assert len(pids) >= 2
        sockets, files = names_of_sockets(pids), shared_files(pids)
        assert any(name.startswith("@iris-") for name in sockets)  # so this test looks in the right place
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        _, error = program.communicate(timeout=HUNG_S)
    finally:
        if program.poll() is None:
            program.kill()
    assert "KeyboardInterrupt" in error
    assert program.returncode != 0
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=HUNG_S)
    assert not alive
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    assert not {name for name in sockets if name.startswith("@iris-")} & {row[7] for row in rows if len(row) > 7}
    assert not [file for file in files if Path(file).exists()]
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "iris" in name]


@pytest.mark.parametrize(
    ("world_size", "device", "gpus", "parts"),
    [
        (2, "tpu", 0, ["tpu", "auto, cpu, cuda"]),
        (0, "cpu", 0, ["world_size is 0", "positive"]),
        (1.5, "cpu", 0, ["world_size is 1.5", "positive"]),
        (2, "cuda", 0, ["no GPU", "device='cpu'"]),
        (3, "cuda", 2, ["3 is larger than the 2 GPU", "at most 2", "device='cpu'"]),
        (3, "auto", 2, ["3 is larger than the 2 GPU", "IRIS_RANKS_PER_GPU=2"]),
    ],
)
def test_what_cannot_be_started_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, world_size: int, device: str, gpus: int, parts: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    children = len(psutil.Process().children())
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        launch(square, world_size, device=device, args=(1,))
    for part in parts:
        assert part in str(caught.value)
    assert len(psutil.Process().children()) == children


def test_ranks_share_gpus_where_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("IRIS_RANKS_PER_GPU", "2")
    assert launcher._checked_device(4, "cuda") == "cuda"
    with pytest.raises(ValueError, match=r"5 is larger than the 2 GPU.*at most 4 ranks.*IRIS_RANKS_PER_GPU=3"):
        launcher._checked_device(5, "cuda")
    for wrong in ("0", "two", "-1", ""):
        monkeypatch.setenv("IRIS_RANKS_PER_GPU", wrong)
        with pytest.raises(ValueError, match=r"IRIS_RANKS_PER_GPU is .* whole number from 1 on"):
            launcher._checked_device(4, "cuda")


def open_on_shared_devices(rank: int, world_size: int, allowed: str, devices: list[str]) -> Any:
    """Open a context on the devices that ranks have; return what it says of that."""
    os.environ["IRIS_RANKS_PER_GPU"] = allowed
    with mock.patch.object(ShmBackend, "identity", return_value=devices[rank]):
        try:
            ctx = iris(1 << 20, "cpu")
        except ValueError as error:
            return str(error)
    said = ctx.ranks_on_device, raised(ctx.process_group)[1] if ctx.ranks_on_device > 1 else ""
    ctx.close()
    return said


def test_a_context_knows_that_ranks_share_a_device() -> None:
    devices = ["GPU 0", "GPU 1", "GPU 0"]
    with RankPool(3, "cpu") as pool:
        for said in pool.call(open_on_shared_devices, "1", devices):
            assert "number of GPUs the ranks see (2)" in said
            assert "at most 2 ranks" in said
            assert "IRIS_RANKS_PER_GPU=2" in said
        # Also on the rank that has one to itself.
        for count, refusal in pool.call(open_on_shared_devices, "2", devices):
            assert count == 2
            assert "NCCL and RCCL take one rank each" in refusal
        ((count, _), *_) = pool.call(open_on_shared_devices, "1", ["", "", "GPU 0"])  # not for it to complain about
        assert count == 1


def pid_of(rank: int, world_size: int) -> int:
    return os.getpid()


def getenv(rank: int, world_size: int, name: str) -> str | None:
    return os.environ.get(name)


def test_the_environment_of_ranks_does_not_leak_into_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    before = dict(os.environ)
    with RankPool(1, "cpu", environment={"IRIS_TIMEOUT_S": "7"}) as pool:
        assert dict(os.environ) == before
        assert pool.call(getenv, "IRIS_TIMEOUT_S") == ["7"]
        assert pool.call(getenv, "TRITON_INTERPRET") == ["1"]


LAUNCHED_AFTER_A_CONTEXT = """
import os, sys
import iris_core
from iris_core.launcher import pool as launcher
iris_core.iris(1 << 20, device="cpu").close()
assert os.environ["TRITON_INTERPRET"] == "1"
sys.stdout.write(str([launcher._rank_environment(device).get("TRITON_INTERPRET") for device in ("cuda", "cpu")]))
"""


@pytest.mark.parametrize("asked", [None, "1"])
def test_ranks_on_gpus_do_not_interpret_as_their_caller_did(asked: str | None) -> None:
    """Unless the user has set so: then `iris` says that it cannot be."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": asked} if asked else {}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHED_AFTER_A_CONTEXT], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == ("[None, '1']" if asked else "['0', '1']"), done.stderr
