"""Starting ranks, and ending them: whatever happens, the caller hears of it and nothing is left behind."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from limits import wait_until
from ranks import context, raised

from iris_core import PeerError, RankError, RankPool, iris, launch, launcher
from iris_core.backends.shm import ShmBackend
from iris_kernels.gemm_all_scatter import Problem
from overlap_taxonomy import get_variant

INTERRUPTED = Path(__file__).parent / "programs" / "interrupted.py"


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
    with RankPool(3, "cpu") as pool:
        pids = pool.call(pids_then_wait)
        assert all(psutil.pid_exists(pid) for pid in pids)
        if killed == "by itself":
            start = time.monotonic()
            with pytest.raises(PeerError, match=r"rank 1 (left|was killed by SIGKILL)"):
                pool.call(die_while_peers_wait)
            assert time.monotonic() - start < 25  # not by running into the limit of a wait, 30 s
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
        _, error = program.communicate(timeout=60)
    finally:
        if program.poll() is None:
            program.kill()
    assert "KeyboardInterrupt" in error
    assert program.returncode != 0
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
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
        with pytest.raises(ValueError, match=r"IRIS_RANKS_PER_GPU is .* positive number of ranks"):
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
from iris_core import launcher
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


def getenv(rank: int, world_size: int, name: str) -> str | None:
    return os.environ.get(name)


class SaysNothing(Exception):
    def __init__(self) -> None:
        super().__init__(lambda: None)  # which cannot be pickled

    def __str__(self) -> str:
        raise ValueError("it has no words")


def raise_without_words(rank: int, world_size: int) -> None:
    raise SaysNothing


def test_an_error_without_words_is_an_error_all_the_same() -> None:
    with pytest.raises(RuntimeError, match="SaysNothing"):
        launch(raise_without_words, 2, device="cpu")


def raise_what_only_a_rank_knows(rank: int, world_size: int, folder: str) -> None:
    Path(folder, "only_of_ranks.py").write_text("class Full(Exception):\n    pass\n")
    sys.path.insert(0, folder)
    import only_of_ranks

    raise only_of_ranks.Full("the disk of\nrank 0 is full")


def test_an_error_that_only_a_rank_can_import_keeps_its_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"only_of_ranks\.Full: the disk of\nrank 0 is full") as caught:
        launch(raise_what_only_a_rank_knows, 1, device="cpu", args=(str(tmp_path),))
    assert "in raise_what_only_a_rank_knows" in str(caught.value.__cause__)


def spoil_output(rank: int, world_size: int, how: str) -> int:
    if how == "closed":
        sys.stdout.close()
    elif how == "none":
        sys.stdout = sys.stderr = None
    else:
        sys.stdout = open("/dev/full", "w")  # noqa: SIM115
        print("what there is no room for")
    return rank


@pytest.mark.parametrize("how", ["closed", "none", "full"])
def test_a_result_is_not_lost_with_what_was_printed(how: str) -> None:
    assert launch(spoil_output, 2, device="cpu", args=(how,)) == [0, 1]


def die_of_a_signal(rank: int, world_size: int, number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (40, "signal 40$"),  # which has no name
        (signal.SIGTERM, "SIGTERM$"),
        (signal.SIGSEGV, r"SIGSEGV \(a kernel may have used a pointer that is not of the heap"),
    ],
)
def test_a_signal_that_killed_a_rank_is_told(number: int, said: str) -> None:
    with pytest.raises(PeerError, match=f"rank 0 was killed by {said}"):
        launch(die_of_a_signal, 1, device="cpu", args=(number,))


def die_and_leave_a_child(rank: int, world_size: int, how: str, end: str) -> None:
    """Rank 1 dies; a child of its own, which has what it had, lives on until there is a file `end`."""
    if rank == 1:
        if how == "program":
            subprocess.Popen(
                f"for i in $(seq 600); do test -e {end} && exit; sleep 0.1; done", shell=True, close_fds=False
            )
        elif os.fork() == 0:
            wait_until(Path(end).exists)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


@pytest.mark.parametrize("how", ["program", "fork"])
def test_a_death_is_heard_of_though_a_child_lives_on(tmp_path: Path, how: str) -> None:
    start, end = time.monotonic(), tmp_path / "end"
    try:
        with pytest.raises(PeerError, match="rank 1 was killed by SIGKILL"):
            launch(die_and_leave_a_child, 2, device="cpu", args=(how, str(end)))
        assert time.monotonic() - start < 25
    finally:
        end.touch()


def say_and_wait(rank: int, world_size: int, folder: str) -> None:
    Path(folder, f"rank{rank}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)


@pytest.mark.parametrize("kill", [False, True])
def test_a_pool_is_closed_while_another_thread_calls(tmp_path: Path, kill: bool) -> None:
    pool = RankPool(2, "cpu")
    pids = pool.call(pid_of)
    with ThreadPoolExecutor(2) as threads:
        call = threads.submit(pool.call, say_and_wait, str(tmp_path))
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        closing = threads.submit(pool.close, kill=kill)
        if kill:
            with pytest.raises(PeerError, match=r"rank \d was killed by SIGKILL"):
                call.result(30)
        else:
            (tmp_path / "go").touch()
            assert call.result(30) == [None, None]
        closing.result(30)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def do_not_end(rank: int, world_size: int) -> None:
    os._exit = lambda code: time.sleep(600)  # type: ignore[assignment]


def test_ranks_that_do_not_end_have_one_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=time.monotonic)
    waits: list[float] = []

    def wait(what: Any, timeout_s: float | None = None) -> Any:
        if timeout_s is not None:
            waits.append(timeout_s)
            clock.monotonic = lambda: 1e9  # the limit is over
            return []
        return launcher_wait(what)

    launcher_wait = launcher.wait
    with RankPool(3, "cpu") as pool:
        pool.call(do_not_end)
        monkeypatch.setattr(launcher, "wait", wait)
        monkeypatch.setattr(launcher, "time", clock)
    assert waits == [pytest.approx(launcher._GRACE_S, abs=1)]


def leave(rank: int, world_size: int) -> None:
    if rank == 1:
        sys.exit()


def test_a_rank_that_ends_itself_does_not_end_the_caller() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 raised SystemExit\(.*\) in the middle of a call"):
        launch(leave, 2, device="cpu")


def fail_and_close(rank: int, world_size: int, way: str) -> None:
    """Rank 1 fails while its peer waits for it in an operator, and closes its context on the way out."""
    ctx = iris(1 << 20)
    problem = Problem(16, 16, 16, world_size, torch.float32)
    operator = get_variant("gemm_all_scatter", "fused_sequential").build(ctx, problem)

    def work() -> None:
        if rank == 1:
            time.sleep(0.3)
            raise FileNotFoundError("a mistake of rank 1's own")
        operator(torch.ones(16, 16), torch.ones(16, 8))

    if way == "with":
        with ctx:
            work()
    try:
        work()
    finally:
        ctx.close()


@pytest.mark.parametrize("way", ["with", "finally"])
def test_a_rank_that_closes_its_context_as_it_fails_waits_for_nobody(way: str) -> None:
    with RankPool(2, "cpu") as pool:
        pool.call(pid_of)
        start = time.monotonic()
        with pytest.raises(FileNotFoundError, match="a mistake of rank 1's own"):
            pool.call(fail_and_close, way)
        assert time.monotonic() - start < 25  # not by running into the limit of a wait, 30 s


def fail_together(rank: int, world_size: int) -> None:
    with iris(1 << 20) as ctx, ctx.together("load the weights"):
        if rank == 2:
            time.sleep(0.3)
            raise ValueError("bad file")


def test_an_error_that_all_hear_of_is_raised_with_where_it_came_from() -> None:
    with pytest.raises(ValueError, match=r"^bad file$") as caught:
        launch(fail_together, 3, device="cpu")
    assert "rank 2 of 3" in str(caught.value.__cause__)


def close_while_handling(rank: int, world_size: int) -> str:
    """Make and close a context because of an error that has nothing to do with it; rank 0 comes first and waits."""
    try:
        raise ImportError("something optional")
    except ImportError:
        ctx = iris(1 << 20)
        time.sleep(0.5 * rank)
        word = ctx.zeros(1, dtype=torch.int64)
        ctx.peer_view(word)[1 - rank] = 5
        ctx.close()
        return "closed"


def test_a_context_made_while_an_error_is_handled_is_closed_in_order() -> None:
    assert launch(close_while_handling, 2, device="cpu") == ["closed"] * 2


def test_what_cannot_be_sent_to_ranks_is_refused() -> None:
    with RankPool(1, "cpu") as pool:
        with pytest.raises(ValueError, match=r"<lambda>.*importable by name"):
            pool.call(lambda rank, world_size: None)
        with pytest.raises(ValueError, match="cannot be sent to the ranks"):
            pool.call(echo, threading.Lock())
        assert pool.call(echo, 3) == [3]


def pid_of(rank: int, world_size: int) -> int:
    return os.getpid()


def echo(rank: int, world_size: int, value: int) -> int:
    return value


def test_threads_share_a_pool_and_need_not_outlive_it() -> None:
    with ThreadPoolExecutor(1) as maker:
        pool = maker.submit(RankPool, 2, "cpu").result()
        assert maker.submit(pool.call, echo, 1).result() == [1, 1]
    with pool:
        with ThreadPoolExecutor(4) as callers:
            answers = list(callers.map(functools.partial(pool.call, echo), range(40)))
        assert answers == [[value] * 2 for value in range(40)]
        pids = pool.call(pid_of)
    assert not any(psutil.pid_exists(pid) for pid in pids)
