"""The race checker on programs that each set a flag and look at the other's: both may miss the other."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import iris_core
from iris_core.checker import check

HEAP_BYTES = 1 << 20


@triton.jit
def enter_kernel(flags_ptr, data_ptr, rank, heap_bases, watchdog_ptr, HOW: tl.constexpr):
    mine = iris_core.translate(flags_ptr, rank, 0, heap_bases) + rank
    other = iris_core.translate(flags_ptr, rank, 0, heap_bases) + 1 - rank
    alone = False
    if HOW == "looks":
        tl.atomic_xchg(mine, 1, sem="release", scope="sys")
        alone = tl.atomic_add(other, 0, sem="acquire", scope="sys") == 0
    elif HOW == "looks by a load":
        tl.atomic_xchg(mine, 1, sem="acq_rel", scope="sys")
        alone = tl.load(other, volatile=True) == 0
    elif HOW == "sets, and drops what was there":
        tl.atomic_xchg(mine, 1, sem="acq_rel", scope="sys")
        alone = tl.atomic_add(other, 0, sem="acq_rel", scope="sys") == 0
    elif HOW == "changes by what acquires, looks by what releases":
        before = tl.atomic_xchg(mine, 1, sem="acq_rel", scope="sys")
        alone = (tl.atomic_add(other, 0, sem="acq_rel", scope="sys") == 0) & (before == 0)
    elif HOW == "changes one word":
        alone = iris_core.atomic_add(flags_ptr, 1, rank, 0, heap_bases) == 0
    elif HOW == "one of them waits":
        tl.atomic_xchg(mine, 1, sem="release", scope="sys")
        if rank == 0:
            alone = tl.atomic_add(other, 0, sem="acquire", scope="sys") == 0
        else:
            iris_core.wait(other, 1, watchdog_ptr)
    elif HOW == "both wait":
        tl.atomic_xchg(mine, 1, sem="release", scope="sys")
        while tl.atomic_add(other, 0, sem="acquire", scope="sys") == 0:
            pass
    if alone:
        iris_core.store(data_ptr, 1.0, rank, rank, heap_bases)


def enter(rank: int, world_size: int, how: str) -> None:
    ctx = iris_core.iris(HEAP_BYTES, "cpu")
    flags, data = ctx.zeros(2, dtype=torch.int64), ctx.zeros(1)
    ctx.barrier()
    for _ in range(2):
        enter_kernel[(1,)](flags, data, rank, ctx.get_heap_bases(), ctx.get_watchdog(), how)
        ctx.barrier()
        flags.zero_()
        ctx.barrier()
    ctx.close()


@pytest.mark.parametrize("how", ["looks", "looks by a load", "sets, and drops what was there"])
def test_two_that_look_after_they_have_set_may_miss_each_other(how: str) -> None:
    report = check(enter, 2, args=(how,), schedules=2)
    (error,) = report.errors
    assert "may both see the old value: rank 0, program 0 at" in error
    assert "and rank 1, program 0 at" in error
    assert not report.races


@pytest.mark.parametrize(
    "how",
    ["changes by what acquires, looks by what releases", "changes one word", "one of them waits", "both wait"],
)
def test_two_of_which_one_must_see_the_other_are_not_reported(how: str) -> None:
    report = check(enter, 2, args=(how,), schedules=4)
    assert report.ok, report
