"""How ranks end: what they raise, how they die, what they printed, and pools that are closed meanwhile."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from limits import HUNG_S, UNLIMITED, wait_until
from test_launch import pid_of

from iris_core import PeerError, RankPool, iris, launch
from iris_core.launcher import pool as launcher
from iris_kernels.gemm_all_scatter import Problem
from overlap_taxonomy import get_variant


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


def die_and_leave_a_child(rank: int, world_size: int, how: str, folder: str) -> None:
    """Rank 1 dies; a child of its own, which has what it had, lives on until there is a file `end`."""
    if rank == 1:
        end = Path(folder, "end")
        if how == "program":
            wait = f"for i in $(seq 2000); do test -e {end} && exit; sleep 0.1; done"
            child = subprocess.Popen(wait, shell=True, close_fds=False).pid
        elif (child := os.fork()) == 0:
            wait_until(end.exists)
            os._exit(0)
        Path(folder, "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


@pytest.mark.parametrize("how", ["program", "fork"])
def test_a_death_is_heard_of_though_a_child_lives_on(tmp_path: Path, how: str) -> None:
    try:
        with pytest.raises(PeerError, match="rank 1 was killed by SIGKILL"):
            launch(die_and_leave_a_child, 2, device="cpu", args=(how, str(tmp_path)))
        child = psutil.Process(int((tmp_path / "child").read_text()))
        assert child.status() != psutil.STATUS_ZOMBIE
    finally:
        (tmp_path / "end").touch()


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


def keep_a_lock(rank: int, world_size: int) -> tuple[str, bool]:
    """Make a lock that lives as long as the process, as tqdm does; return the file of its semaphore."""
    global _lock
    _lock = multiprocessing.get_context("spawn").RLock()
    file = f"/dev/shm/sem.{_lock._semlock.name.removeprefix('/')}"  # type: ignore[attr-defined]
    return file, Path(file).exists()


def test_no_semaphore_outlives_its_rank() -> None:
    """The resource tracker would warn of it when this process ends."""
    found = launch(keep_a_lock, 2, device="cpu")
    assert [was_there for _, was_there in found] == [True, True]
    assert not [file for file, _ in found if Path(file).exists()]


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
    operator = get_variant("gemm_all_scatter", "fused_sequential:portable").build(ctx, problem)

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
def test_a_rank_that_closes_its_context_as_it_fails_waits_for_nobody(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(launcher, "_DYING_S", HUNG_S)  # the peer may answer first
    failure = pytest.raises(FileNotFoundError, match="a mistake of rank 1's own")
    with RankPool(2, "cpu", environment=UNLIMITED) as pool, failure:
        pool.call(fail_and_close, way)


def fail_together(rank: int, world_size: int) -> None:
    with iris(1 << 20) as ctx, ctx.collective_section("load the weights"):
        if rank == 2:
            time.sleep(0.3)
            raise ValueError("bad file")


def test_an_error_that_all_hear_of_is_raised_with_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_DYING_S", HUNG_S)  # the peers may answer first
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
