"""The race checker on small programs: what it must find, and what it must not take for a race."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import iris_core
from iris_core import iris
from iris_core.checker import Report, check
from iris_core.checker.shadow import _Page

HEAP_BYTES = 1 << 20
BLOCK = 16


@triton.jit
def send_kernel(
    data_ptr, flag_ptr, rank, peer, heap_bases, BLOCK: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr
):
    offsets = tl.arange(0, BLOCK)
    iris_core.store(data_ptr + offsets, offsets + 1, rank, peer, heap_bases)
    tl.debug_barrier()
    iris_core.atomic_xchg(flag_ptr, 1, rank, peer, heap_bases, sem=SEM, scope=SCOPE)


@triton.jit
def receive_kernel(data_ptr, flag_ptr, out_ptr, BLOCK: tl.constexpr, SEM: tl.constexpr):
    while tl.atomic_cas(flag_ptr, 1, 0, sem=SEM, scope="sys") != 1:  # no pause: the checker must cope
        pass
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(data_ptr + offsets))


def message(rank: int, world_size: int, send_sem: str, scope: str, receive_sem: str) -> None:
    ctx = iris(HEAP_BYTES, "cpu")
    data = ctx.zeros(BLOCK, dtype=torch.int32)
    flag = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if rank == 0:
        send_kernel[(1,)](data, flag, 0, 1, ctx.get_heap_bases(), BLOCK, send_sem, scope)
    else:
        out = torch.zeros(BLOCK, dtype=torch.int32)
        receive_kernel[(1,)](data, flag, out, BLOCK, receive_sem)
        assert out.tolist() == list(range(1, BLOCK + 1))
    ctx.close()


def test_the_record_of_memory_goes_with_its_schedule() -> None:
    """Also where Python does not look for cycles meanwhile: a suite of tests would keep gigabytes."""
    gc.collect()
    gc.disable()
    try:
        report = check(message, 2, args=("release", "sys", "acquire"), schedules=2)
        pages = [one for one in gc.get_objects() if type(one) is _Page]
    finally:
        gc.enable()
    assert report.accesses > 0
    assert pages == []


def test_a_message_with_release_and_acquire_is_no_race() -> None:
    report = check(message, 2, args=("release", "sys", "acquire"), schedules=6)
    assert report.ok, report
    assert report.accesses > 0
    assert report.schedules == 6


@pytest.mark.parametrize(
    ("send_sem", "scope", "receive_sem"),
    [("relaxed", "sys", "acquire"), ("release", "gpu", "acquire"), ("release", "sys", "relaxed")],
)
def test_a_message_without_an_edge_is_a_race(send_sem: str, scope: str, receive_sem: str) -> None:
    report = check(message, 2, args=(send_sem, scope, receive_sem))
    found = "\n".join(map(str, report.races))
    assert "(send_kernel)" in found
    assert "(receive_kernel)" in found
    assert "write by rank 0, program 0" in found
    assert "test_checker.py:" in found


def two_writers(rank: int, world_size: int, apart: bool) -> None:
    ctx = iris(HEAP_BYTES, "cpu")
    data = ctx.zeros(2, dtype=torch.bfloat16)
    ctx.barrier()
    ctx.peer_view(data)[0, rank if apart else 0] = rank
    ctx.close()


@pytest.mark.parametrize("apart", [True, False])
def test_writes_race_by_the_byte(apart: bool) -> None:
    report = check(two_writers, 2, args=(apart,))
    assert report.ok == apart, report
    assert apart or "byte 0 of (2,) of torch.bfloat16, on rank 0's heap" in str(report.races[0])


def meet_between(rank: int, world_size: int, how: str) -> None:
    ctx = iris(HEAP_BYTES, "cpu")
    data = ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    if rank == 0:
        ctx.peer_view(data)[1, 0] = 7
    if how == "barrier":
        ctx.barrier()
    elif how == "device barrier":
        ctx.device_barrier()
    elif how == "hosts alone":  # the device may be far behind its host
        ctx.control_plane.barrier()
    if rank == 1:
        data.clone()
    ctx.close()


@pytest.mark.parametrize("how", ["barrier", "device barrier", "hosts alone", "nothing"])
def test_barriers_order_and_hosts_alone_do_not(how: str) -> None:
    report = check(meet_between, 2, args=(how,))
    assert report.ok == (how in ("barrier", "device barrier")), report


@triton.jit
def fill_kernel(data_ptr, value, BLOCK: tl.constexpr):
    tl.store(data_ptr + tl.arange(0, BLOCK), tl.cast(value, tl.int32))


def two_streams(rank: int, world_size: int, waits: bool, torch_reads: bool) -> None:
    ctx = iris(HEAP_BYTES, "cpu")
    data = torch.zeros(BLOCK, dtype=torch.int32)
    beside = ctx.make_stream()
    fill_kernel[(1,)](data, 1, BLOCK)
    if torch_reads:
        data.clone()
    if waits:
        beside.wait_for_current()
    with beside.as_current():
        fill_kernel[(1,)](data, 2, BLOCK)
    ctx.close()


@pytest.mark.parametrize("torch_reads", [False, True])
@pytest.mark.parametrize("waits", [True, False])
def test_streams_are_ordered_by_their_waits_alone(waits: bool, torch_reads: bool) -> None:
    """A wait is for what torch did in the other stream, too."""
    report = check(two_streams, 1, args=(waits, torch_reads))
    assert report.ok == waits, report
    assert waits or "stream 1" in str(report)


@triton.jit
def own_block_kernel(data_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(data_ptr + tl.program_id(0) * BLOCK * BLOCK + offsets, 1)
    for block in tl.range(0, 2):  # the mask is one number for all
        tl.load(data_ptr + block * BLOCK * BLOCK + offsets, mask=block == tl.program_id(0), other=0)


def load_own_blocks(rank: int, world_size: int) -> None:
    ctx = iris(HEAP_BYTES, "cpu")
    own_block_kernel[(2,)](torch.zeros(2 * BLOCK * BLOCK, dtype=torch.int32), BLOCK)
    ctx.close()


def test_what_is_masked_is_not_accessed() -> None:
    report = check(load_own_blocks, 1)
    assert report.ok, report


@triton.jit
def count_kernel(count_ptr, data_ptr):
    if tl.atomic_add(count_ptr, 1, sem="relaxed", scope="gpu") == 1:
        number = tl.load(data_ptr) + 1
        tl.debug_barrier()  # every thread has loaded it
        tl.store(data_ptr, number)


def count_in_gpu(rank: int, world_size: int) -> None:
    ctx = iris(HEAP_BYTES, "cpu")
    count_kernel[(4,)](torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    ctx.close()


def test_atomics_do_not_race_with_each_other() -> None:
    assert check(count_in_gpu, 1).ok


def never_signalled(rank: int, world_size: int) -> None:
    ctx = iris(HEAP_BYTES, "cpu")
    flag = ctx.zeros(1, dtype=torch.int32)
    out = ctx.zeros(BLOCK, dtype=torch.int32)
    receive_kernel[(1,)](out, flag, out, BLOCK, "acquire")
    ctx.close()


@triton.jit
def wait_kernel(flag_ptr, watchdog_ptr):
    iris_core.wait(flag_ptr, 1, watchdog_ptr)


def never_signalled_to_wait(rank: int, world_size: int) -> None:
    ctx = iris(HEAP_BYTES, "cpu")
    wait_kernel[(1,)](ctx.zeros(1, dtype=torch.int64), ctx.get_watchdog())
    ctx.close()


@triton.jit
def wait_for_both_kernel(flag_ptr, watchdog_ptr):
    iris_core.signal(flag_ptr, tl.program_id(0) + 1)  # a flag has one writer: the later one may write the smaller value
    iris_core.wait(flag_ptr, 2, watchdog_ptr)


def waits_in_vain(rank: int, world_size: int) -> None:
    with iris(HEAP_BYTES, "cpu") as ctx:
        flag = ctx.zeros(1, dtype=torch.int64)
        wait_for_both_kernel[(2,)](flag, ctx.get_watchdog())
        ctx.barrier()


def test_the_watchdogs_own_words_are_no_race() -> None:
    report = check(waits_in_vain, 2, schedules=20)
    assert any("timed out" in error for error in report.errors)
    assert not report.races, report


def absent(rank: int, world_size: int) -> None:
    if rank == 0:
        iris(HEAP_BYTES, "cpu")


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (never_signalled, "program 0, of receive_kernel waits for byte 0 of (1,)"),
        (never_signalled_to_wait, "test_checker.py"),
        (absent, "the other ranks' hosts"),
    ],
)
def test_who_waits_in_a_deadlock_is_said(fn: Callable[..., None], words: str) -> None:
    report = check(fn, 2, schedules=20)
    assert len(report.deadlocks) == report.schedules
    assert all(words in deadlock for deadlock in report.deadlocks)
    assert not any("(4,) of torch.int64" in deadlock for deadlock in report.deadlocks)  # the watchdog's words
    assert not report.races


def fails(rank: int, world_size: int, words: str | None) -> None:
    iris(HEAP_BYTES, "cpu")
    if rank == 1:
        if words:
            raise KeyError(words)
        raise LookupError


@triton.jit
def failing_kernel(data_ptr, SIZE: tl.constexpr):
    tl.store(data_ptr + tl.arange(0, SIZE), 1)


def fails_in_a_kernel(rank: int, world_size: int) -> None:
    ctx = iris(HEAP_BYTES, "cpu")
    if rank == 1:
        failing_kernel[(1,)](ctx.zeros(3), 3)
    ctx.barrier()


def test_what_a_rank_raises_is_reported_once_and_the_next_check_is_not_disturbed() -> None:
    (error,) = check(fails, 2, args=("not there",)).errors
    assert "rank 1's host: KeyError: 'not there'" in error
    assert re.search(r"at \S*test_checker\.py:\d+ \(fails\)", error)
    assert "in 4 schedules, the first: in order" in error
    assert check(count_in_gpu, 1).ok


def test_an_error_without_words_is_reported_as_the_line_that_raised_it() -> None:
    (error,) = check(fails, 2, args=(None,), schedules=1).errors
    assert "LookupError in `raise LookupError`" in error
    assert "in schedule in order" in error


def test_an_error_in_a_kernel_is_reported_with_its_line_and_program() -> None:
    (error,) = check(fails_in_a_kernel, 2, schedules=2).errors
    assert "rank 1, program 0, of failing_kernel: " in error
    assert re.search(r"at \S*test_checker\.py:\d+ \(failing_kernel\)", error)


def test_a_report_repeats_itself() -> None:
    def found() -> Report:
        return check(message, 2, args=("relaxed", "sys", "acquire"), schedules=5, seed=7)

    first, second = found(), found()
    assert first.races == second.races
    assert first.accesses == second.accesses


@pytest.mark.parametrize(("world_size", "schedules"), [(0, 1), (1, 0)])
def test_nonsense_is_refused(world_size: int, schedules: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        check(count_in_gpu, world_size, schedules=schedules)


MARKED = """
import pytest, torch, triton, triton.language as tl

@triton.jit
def put(data_ptr, rank, OWN: tl.constexpr):
    tl.store(data_ptr + (rank if OWN else 0), rank)

@pytest.mark.race_check(world_size=3)
@pytest.mark.parametrize("own", [True, False])
def test_put(iris_ctx, own):
    data = iris_ctx.zeros(3, dtype=torch.int32)
    iris_ctx.barrier()
    put[(1,)](iris_ctx.peer_view(data)[0], iris_ctx.get_rank(), own)

def test_unmarked():
    pass

def test_without_the_marker(iris_ctx):
    iris_ctx.barrier()

@pytest.mark.race_check(ranks=2)
def test_another_option(iris_ctx):
    pass

@pytest.mark.race_check
def test_without_a_context():
    pass
"""


@pytest.mark.slow
def test_the_marker_runs_a_test_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["iris_core.checker.pytest_plugin"]')
    (tmp_path / "test_marked.py").write_text(MARKED)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert "3 failed, 2 passed, 1 error" in run.stdout, run.stdout
    assert "race_check(ranks=2) is not understood; what there is: race_check(world_size=2, schedules=4," in run.stdout
    assert "iris_ctx is for tests that are marked @pytest.mark.race_check(world_size=2)" in run.stdout
    assert "race_check(): it takes the fixture iris_ctx" in run.stdout
    assert "test_put[False]" in run.stdout
    assert "write by rank 1, program 0" in run.stdout


@pytest.mark.slow
def test_lines_are_the_users_where_the_package_is_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "iris_core").symlink_to(Path(iris_core.__file__).resolve().parent)
    example = Path(__file__).parents[3] / "examples/first_steps/find_races.py"
    run = subprocess.run(
        [sys.executable, str(example)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert "race at " in run.stdout, run.stderr
    assert re.search(
        r"write by rank 1, program 0 at \S+rma\.py:\d+ \(store\), called from \S+find_races\.py", run.stdout
    )


CHECK_FIRST = """
import iris_core
from iris_core.checker import check

def body(rank, world_size):
    iris_core.iris(1 << 20, device="cpu").close()

assert check(body, 2, schedules=1).ok
from iris_core.x.access import accumulator
print(type(accumulator).__name__)
"""


@pytest.mark.slow
def test_what_a_context_imports_as_it_is_checked_can_be_compiled_later() -> None:
    """A module first imported while kernels are interpreted has interpreted functions for good."""
    run = subprocess.run([sys.executable, "-c", CHECK_FIRST], capture_output=True, text=True, timeout=120)
    assert run.stdout == "JITFunction\n", run.stderr
