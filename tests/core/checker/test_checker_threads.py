"""The race checker on the threads of one program: what each has done, and knows, when one of them signals or waits."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import iris_core
from iris_core.checker import check

HEAP_BYTES = 1 << 20
BLOCK = 16


@triton.jit
def publish_kernel(data_ptr, flag_ptr, rank, heap_bases, HOW: tl.constexpr, MEET: tl.constexpr, BLOCK: tl.constexpr):
    there = iris_core.translate(data_ptr, rank, 1, heap_bases)
    lanes = tl.arange(0, BLOCK)
    if HOW == "block store":
        tl.store(there + lanes, 1)
    elif HOW == "block atomic":
        tl.atomic_add(there + lanes, 1, sem="relaxed", scope="sys")
    elif HOW == "block atomic that releases":
        tl.atomic_add(there + lanes, 1, sem="release", scope="sys")
        tl.atomic_xchg(there + BLOCK + lanes, 1, sem="relaxed", scope="sys")
    elif HOW == "scalar store":
        tl.store(there, 1)
    elif HOW == "scalar atomic":
        tl.atomic_xchg(there, 1, sem="relaxed", scope="sys")
    elif HOW == "signal first":
        iris_core.atomic_xchg(flag_ptr, 1, rank, 1, heap_bases, sem="release")
        tl.store(there, 1)
    if MEET:
        tl.debug_barrier()
    iris_core.atomic_xchg(flag_ptr, 1, rank, 1, heap_bases, sem="release")


@triton.jit
def read_kernel(data_ptr, flag_ptr, out_ptr, watchdog_ptr, BLOCK: tl.constexpr):
    iris_core.wait(flag_ptr, 1, watchdog_ptr)
    lanes = tl.arange(0, BLOCK)
    tl.store(out_ptr + lanes, tl.load(data_ptr + lanes))


def publish(rank: int, world_size: int, how: str, meet: bool) -> None:
    ctx = iris_core.iris(HEAP_BYTES, "cpu")
    data, flag = ctx.zeros(2 * BLOCK, dtype=torch.int32), ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    if rank == 0:
        publish_kernel[(1,)](data, flag, rank, ctx.get_heap_bases(), how, meet, BLOCK)
    else:
        out = torch.zeros(2 * BLOCK, dtype=torch.int32)
        read_kernel[(1,)](data, flag, out, ctx.get_watchdog(), 2 * BLOCK)
    ctx.barrier()
    ctx.close()


@pytest.mark.parametrize(
    ("how", "by_one_thread"),
    [
        ("block store", False),
        ("block atomic", False),
        ("block atomic that releases", False),
        ("scalar store", True),
        ("scalar atomic", True),
    ],
)
def test_one_thread_releases_what_all_did_before_a_barrier_and_what_it_did_itself(
    how: str, by_one_thread: bool
) -> None:
    assert check(publish, 2, args=(how, True), schedules=2).ok
    report = check(publish, 2, args=(how, False), schedules=2)
    assert report.ok == by_one_thread, report


def test_a_release_is_not_of_what_the_same_thread_does_after_it() -> None:
    assert check(publish, 2, args=("signal first", False), schedules=4).races


@triton.jit
def acquire_and_drop(flag_ptr, SEM: tl.constexpr):
    return tl.atomic_add(flag_ptr, 0, sem=SEM, scope="sys")


@triton.jit
def acquire_kernel(
    data_ptr,
    flag_ptr,
    out_ptr,
    rank,
    heap_bases,
    watchdog_ptr,
    USE: tl.constexpr,
    SEM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    while tl.load(flag_ptr, volatile=True) < 1:
        pass
    if USE == "nothing":
        tl.atomic_add(flag_ptr, 0, sem=SEM, scope="sys")
    elif USE == "nothing, through the device API":
        iris_core.atomic_add(
            flag_ptr,
            0,
            rank,
            rank,
            heap_bases,
            sem=SEM,
        )
    elif USE == "nothing, through functions":
        acquire_and_drop(flag_ptr, SEM)
    elif USE == "a name":
        seen = iris_core.atomic_add(flag_ptr, 0, rank, rank, heap_bases, sem=SEM)  # noqa: F841
    elif USE == "a condition":
        if tl.atomic_add(flag_ptr, 0, sem=SEM, scope="sys") < 1:
            tl.store(out_ptr, 7)
    elif USE == "a condition on its line":
        if tl.atomic_add(flag_ptr, 0, sem=SEM, scope="sys") < 1: tl.atomic_add(out_ptr, 7)  # noqa: E701  # fmt: skip
    elif USE == "nothing, in a line":
        if BLOCK > 1: tl.atomic_add(flag_ptr, 0, sem=SEM, scope="sys")  # noqa: E701  # fmt: skip
    elif USE == "a store":
        tl.store(out_ptr, tl.atomic_add(flag_ptr, 0, sem=SEM, scope="sys"))
    elif USE == "a name that is read":
        got = acquire_and_drop(flag_ptr, SEM)
        tl.store(out_ptr, got)
    tl.debug_barrier()
    lanes = tl.arange(0, BLOCK)
    tl.store(out_ptr + lanes, tl.load(data_ptr + lanes))


def acquire(rank: int, world_size: int, use: str, sem: str) -> None:
    ctx = iris_core.iris(HEAP_BYTES, "cpu")
    data, flag = ctx.zeros(BLOCK, dtype=torch.int32), ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    bases, watchdog = ctx.get_heap_bases(), ctx.get_watchdog()
    if rank == 0:
        publish_kernel[(1,)](data, flag, rank, bases, "block store", True, BLOCK)
    else:
        out = torch.zeros(BLOCK, dtype=torch.int32)
        acquire_kernel[(1,)](data, flag, out, rank, bases, watchdog, use, sem, BLOCK)
    ctx.barrier()
    ctx.close()


@pytest.mark.parametrize("use", ["a condition", "a condition on its line", "a store", "a name that is read"])
def test_an_acquire_whose_result_is_used_is_one(use: str) -> None:
    for sem in ("acquire", "acq_rel"):
        report = check(acquire, 2, args=(use, sem), schedules=2)
        assert report.ok, report


@pytest.mark.parametrize(
    "use", ["nothing", "nothing, in a line", "nothing, through the device API", "nothing, through functions", "a name"]
)
def test_an_acquire_whose_result_is_unused_is_none(use: str) -> None:
    report = check(acquire, 2, args=(use, "acquire"), schedules=2)
    assert report.races, report
    (error,) = report.errors
    assert "an acquire whose result is unused" in error
    assert "rank 1, program 0" in error
    assert "(acquire_kernel)" in error
    report = check(acquire, 2, args=(use, "acq_rel"), schedules=2)
    assert report.races, report
    assert not report.errors, report  # it may be there for its release


@triton.jit
def lanes_kernel(p, out_ptr, HOW: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    value = tl.load(p + lanes)
    if HOW == "two of one store":
        tl.store(out_ptr + lanes // 2, lanes)
    elif HOW == "two of one store, alike":
        tl.store(out_ptr + lanes // 2, lanes // 2)
        tl.store(out_ptr.to(tl.pointer_type(tl.float32)) + BLOCK // 2 + lanes // 2, lanes * float("nan"))
    elif HOW == "moved in place":
        tl.store(p + lanes + 1, value)
    elif HOW == "moved in place behind a barrier":
        tl.debug_barrier()
        tl.store(p + lanes + 1, value)
    elif HOW == "moved back in place":
        tl.store(p + lanes, value + 1)
    elif HOW == "others read it":
        tl.store(p + lanes, value + 1)
        tl.store(out_ptr + lanes, tl.load(p + BLOCK - 1 - lanes))
    elif HOW == "others read it behind a barrier":
        tl.store(p + lanes, value + 1)
        tl.debug_barrier()
        tl.store(out_ptr + lanes, tl.load(p + BLOCK - 1 - lanes))
    elif HOW == "all read one's":
        tl.store(p + lanes, value + 1)
        tl.store(out_ptr + lanes, tl.load(p + 3))
    elif HOW == "others read an atomic's":
        tl.atomic_add(p + lanes, 1, sem="relaxed")
        tl.store(out_ptr + lanes, tl.load(p + BLOCK - 1 - lanes))
    elif HOW == "one stores over what was summed":
        tl.store(p + 3, tl.sum(value, axis=0))
    elif HOW == "all read one's scalar":
        tl.store(p + BLOCK, 5)
        tl.store(out_ptr + lanes, tl.load(p + BLOCK))
    elif HOW == "one stores over what all read":
        number = tl.load(p + BLOCK)
        tl.store(p + BLOCK, number + 1)
        tl.store(out_ptr + lanes, number)
    elif HOW == "one stores over what all read, behind a barrier":
        number = tl.load(p + BLOCK)
        tl.debug_barrier()
        tl.store(p + BLOCK, number + 1)
        tl.store(out_ptr + lanes, number)


def lanes(rank: int, world_size: int, how: str) -> None:
    ctx = iris_core.iris(HEAP_BYTES, "cpu")
    data, out = ctx.zeros(2 * BLOCK, dtype=torch.int32), ctx.zeros(BLOCK, dtype=torch.int32)
    for _ in range(2):  # the kernel before is over
        lanes_kernel[(1,)](data, out, how, BLOCK)
    ctx.barrier()
    ctx.close()


@pytest.mark.parametrize(
    "how",
    [
        "two of one store",
        "moved in place",
        "others read it",
        "all read one's",
        "others read an atomic's",
        "all read one's scalar",
        "one stores over what all read",
    ],
)
def test_threads_of_a_program_race(how: str) -> None:
    report = check(lanes, 1, args=(how,), schedules=1)
    assert len(report.races) == 1, report
    assert "by a thread of rank 0, program 0" in str(report)
    assert "by another thread of rank 0, program 0" in str(report)


@pytest.mark.parametrize(
    "how",
    [
        "two of one store, alike",
        "moved in place behind a barrier",
        "moved back in place",
        "others read it behind a barrier",
        "one stores over what was summed",
        "one stores over what all read, behind a barrier",
    ],
)
def test_threads_of_a_program_that_meet_do_not_race(how: str) -> None:
    report = check(lanes, 1, args=(how,), schedules=1)
    assert report.ok, report


@triton.jit
def strengths_kernel(word_ptr, flag_ptr, out_ptr, rank, heap_bases, HOW: tl.constexpr):
    """Rank 0's plain access comes before a volatile or an atomic one; a relaxed flag orders neither before rank 1's."""
    if rank == 0:
        if HOW == "a plain read, then a volatile one":
            tl.store(out_ptr, tl.load(word_ptr) + tl.load(word_ptr, volatile=True))
        elif HOW == "a volatile read":
            tl.store(out_ptr, tl.load(word_ptr, volatile=True))
        elif HOW == "a plain write, then an atomic":
            tl.store(word_ptr, 1)
            tl.atomic_add(word_ptr, 1, sem="relaxed", scope="sys")
        else:
            tl.atomic_add(word_ptr, 1, sem="relaxed", scope="sys")
        iris_core.atomic_xchg(flag_ptr, 1, rank, 1, heap_bases, sem="relaxed")
    else:
        while tl.load(flag_ptr, volatile=True) < 1:
            pass
        iris_core.atomic_add(word_ptr, 1, rank, 0, heap_bases, sem="relaxed")


def of_strengths(rank: int, world_size: int, how: str) -> None:
    ctx = iris_core.iris(HEAP_BYTES, "cpu")
    word, flag = ctx.zeros(1, dtype=torch.int64), ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    strengths_kernel[(1,)](word, flag, torch.zeros(1, dtype=torch.int64), rank, ctx.get_heap_bases(), how)
    ctx.barrier()
    ctx.close()


@pytest.mark.parametrize(
    ("how", "races"),
    [
        ("a plain read, then a volatile one", True),
        ("a volatile read", False),
        ("a plain write, then an atomic", True),
        ("an atomic", False),
    ],
)
def test_a_plain_access_is_not_hidden_by_a_stronger_one(how: str, races: bool) -> None:
    report = check(of_strengths, 2, args=(how,), schedules=4)
    assert bool(report.races) == races, report
