"""A warp that announces what another has sent, so that the sender need not wait for the announcement.

A release to peers waits until all that its thread has seen stored is visible to them, which takes microseconds while
the link is busy. The warp that sends has more to do: it only waits for its stores' arrival, which is long past when it
asks, tells the herald, and goes on. Messages are told and said in one order, which both know; one is under way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .arguments import Herald


@gluon.jit
def open_herald():
    """Return a herald who has been told nothing."""
    told = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    said = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(told, count=1)
    mbarrier.init(said, count=1)
    return Herald(told, said)


@gluon.jit
def tell(herald, message):
    """Have the herald say the `message`-th message, when the one before is said.

    Edge: what this warp has sent, and awaited, happens before what the herald does after `hear`.
    """
    if message > 0:
        mbarrier.wait(herald.said, (message - 1) & 1)
    mbarrier.arrive(herald.told, count=1)


@gluon.jit
def hear(herald, message):
    """Wait until the `message`-th message is to be said; by the herald."""
    mbarrier.wait(herald.told, message & 1)


@gluon.jit
def said(herald):
    """Let the next message be told; by the herald."""
    mbarrier.arrive(herald.said, count=1)
