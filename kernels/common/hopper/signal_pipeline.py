"""A pipeline of one stage between a warp that stores and one that signals, so that the former need not wait.

A release to peers waits until all that its thread has seen stored is visible to them, which takes microseconds while
the link is busy. The warp that stores has more to do: it waits only for its stores' arrival, which is long past when it
asks, commits the signal, and goes on. Signals are committed and sent in one order, which both warps know; one is under
way.
"""

from __future__ import annotations

from triton.experimental import gluon

from .pipeline import pipeline_state, producer_acquire, producer_commit


@gluon.jit
def commit_signal(signals, number):
    """Have the other warp send the `number`-th signal, when the one before is sent; by the warp that stores.

    Edge: what this warp has stored, and awaited, happens before what the other does after `consumer_wait`.
    """
    if number > 0:
        producer_acquire(signals, pipeline_state(signals, number))
    producer_commit(signals, 0)
