"""A pipeline of one stage between a warp that stores and one that signals, so that the former need not wait.

A release to peers waits until all that its thread has seen stored is visible to them, which takes microseconds while
the link is busy. The warp that stores has more to do: it waits only for its stores' arrival, which is long past when it
asks, commits the signal, and goes on. Signals are committed and sent in one order, which both warps know; one is under
way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .arguments import SignalPipeline


@gluon.jit
def make_signal_pipeline():
    """Return an empty pipeline."""
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    return SignalPipeline(full, empty)


@gluon.jit
def commit_signal(signals, number):
    """Have the other warp send the `number`-th signal, when the one before is sent; by the warp that stores.

    Edge: what this warp has stored, and awaited, happens before what the other does after `wait_signal`.
    """
    if number > 0:
        mbarrier.wait(signals.empty, (number - 1) & 1)
    mbarrier.arrive(signals.full, count=1)


@gluon.jit
def wait_signal(signals, number):
    """Wait until the `number`-th signal is to be sent; by the warp that signals."""
    mbarrier.wait(signals.full, number & 1)


@gluon.jit
def release_signal(signals):
    """Let the next signal be committed; by the warp that signals."""
    mbarrier.arrive(signals.empty, count=1)
