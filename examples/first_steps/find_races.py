"""A kernel under the race checker, which needs no GPU: with its signal it is sound, without it there is a race.

``python examples/first_steps/find_races.py``; race_test.py has it as a test of pytest's.
"""

import torch
import triton
import triton.language as tl

import iris_core
from iris_core import iris
from iris_core.checker import check


@triton.jit(do_not_specialize=["rank"])
def exchange_kernel(letter_ptr, flag_ptr, answer_ptr, rank, world_size, heap_bases, watchdog_ptr, SIGNAL: tl.constexpr):
    """Write a letter to the next rank, wait for the one from the rank before, and keep a copy."""
    target = (rank + 1) % world_size
    iris_core.store(letter_ptr, 10 * rank, rank, target, heap_bases)
    if SIGNAL:
        iris_core.signal(iris_core.translate(flag_ptr, rank, target, heap_bases), 1)
        iris_core.wait(flag_ptr, 1, watchdog_ptr)
    tl.store(answer_ptr, tl.load(letter_ptr))


def exchange(ctx, with_signal):
    letter, answer = ctx.zeros(1, dtype=torch.int64), ctx.zeros(1, dtype=torch.int64)
    flag = ctx.zeros(1, dtype=torch.int64)
    ctx.barrier()
    rank, world_size = ctx.get_rank(), ctx.get_num_ranks()
    exchange_kernel[(1,)](
        letter, flag, answer, rank, world_size, ctx.get_heap_bases(), ctx.get_watchdog(), SIGNAL=with_signal
    )
    if with_signal:
        assert answer.item() == 10 * ((rank - 1) % world_size)


def program(rank, world_size, with_signal):
    ctx = iris(1 << 20, device="cpu")
    exchange(ctx, with_signal)
    ctx.close()


if __name__ == "__main__":
    for with_signal in (True, False):
        report = check(program, world_size=2, args=(with_signal,), schedules=8, seed=0)
        print(report)  # report.races, report.deadlocks, report.errors, report.ok
        assert report.ok == with_signal
