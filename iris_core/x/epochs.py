"""How the programs that work on one tile, one per rank, order what they do: flags that only grow, never reset.

A tile has world_size + 1 int64 words on the heap, zeroed once: a flag per rank, which that rank alone writes, and the
number of calls that this rank has made. In its call number e a rank writes at most `_STAGES` values to a flag,
_STAGES * e + 1 and so on, and waits compare with ≥: a faster rank cannot harm a slower one.

| stage | says |
|---|---|
| READY | the writer's tile may be read, and its output be overwritten |
| DONE | what the writer does for the others in this call is done: its reads of their tiles, its writes to theirs |
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.rma import translate
from ..device.sync import signal, signal_peers, wait, wait_peers

READY = tl.constexpr(1)
DONE = tl.constexpr(2)
LATER = tl.constexpr(3)  # of algorithms with a third step
_STAGES = tl.constexpr(4)


@triton.jit
def flags_of(flags_ptr, tile_id, ctx):
    """Return where a tile's words begin, in those of all tiles; None, where the caller orders, stays None."""
    if flags_ptr is not None:  # compiled code cannot return a None that is written out
        return flags_ptr + tl.cast(tile_id, tl.int64) * (ctx.world_size + 1)


@triton.jit
def begin_call(flags_ptr, epoch, ctx):
    """Return the number of this call with a tile's words; 0 where the caller orders."""
    if flags_ptr is None:
        return 0
    else:
        return count_call(flags_ptr + ctx.world_size, epoch)


@triton.jit
def count_call(count_ptr, epoch):
    """Return the caller's number, or if that is None one more than the count, which it becomes."""
    if epoch is None:
        number = tl.load(count_ptr) + 1
        tl.debug_barrier()  # every thread has loaded it; the call's signals are a barrier before the next one does
        tl.store(count_ptr, number)
        return number
    else:
        return tl.cast(epoch, tl.int64)


@triton.jit
def signal_all(flags_ptr, number, stage: tl.constexpr, ctx):
    """Signal to all peers that this rank has come to a stage of the call, with release over the system."""
    if flags_ptr is not None:
        signal_peers(flags_ptr, number * _STAGES + stage, ctx.rank, ctx.world_size, ctx.heap_bases)


@triton.jit
def wait_all(flags_ptr, number, stage: tl.constexpr, ctx):
    """Wait until all peers have come to a stage of the call, with acquire over the system; bounded."""
    if flags_ptr is not None:
        wait_peers(flags_ptr, number * _STAGES + stage, ctx.rank, ctx.world_size, ctx.watchdog_ptr)


@triton.jit
def signal_one(flags_ptr, number, stage: tl.constexpr, peer, ctx):
    """Signal to one peer that this rank has come to a stage of the call, with release over the system."""
    if flags_ptr is not None:
        flag_ptr = translate(flags_ptr, ctx.rank, peer, ctx.heap_bases) + ctx.rank
        signal(flag_ptr, number * _STAGES + stage, scope="sys")


@triton.jit
def wait_one(flags_ptr, number, stage: tl.constexpr, peer, ctx):
    """Wait until one peer has come to a stage of the call, with acquire over the system; bounded."""
    if flags_ptr is not None:
        wait(flags_ptr + peer, number * _STAGES + stage, ctx.watchdog_ptr, scope="sys")


@triton.jit
def barrier_all(flags_ptr, number, stage: tl.constexpr, ctx):
    """Signal to all peers, and wait for all of them."""
    signal_all(flags_ptr, number, stage, ctx)
    wait_all(flags_ptr, number, stage, ctx)


@triton.jit
def ready_for(owner, flags_ptr, number, ctx):
    """Let `owner` go on when all ranks are here; the others do not wait."""
    if ctx.rank == owner:
        wait_all(flags_ptr, number, READY, ctx)
    else:
        signal_one(flags_ptr, number, READY, owner, ctx)


@triton.jit
def done_by(owner, flags_ptr, number, ctx):
    """Let all ranks go on when `owner` is here."""
    if ctx.rank == owner:
        signal_all(flags_ptr, number, DONE, ctx)
    else:
        wait_one(flags_ptr, number, DONE, owner, ctx)
