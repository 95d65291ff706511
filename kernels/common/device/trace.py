"""What a program did when, recorded tile by tile; nothing at all where `Peers.trace_ptr` is None.

`iris_core.tracing` records; here are the kinds of spans, and its functions for kernels that have a bundle of arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from iris_core.tracing import begin_event, end_event, record_event

MULTIPLY = tl.constexpr(0)
STORE = tl.constexpr(1)  # what was computed, to this rank's memory and to peers'
WAIT = tl.constexpr(2)  # for peers, or for those that split its tile, by a program that computes
# Add partial sums of a tile: the peers', or those of the programs that split it; in the former case store it.
SUM = tl.constexpr(3)
PUSH = tl.constexpr(4)  # to peers, by a program that only communicates
PUSH_WAIT = tl.constexpr(5)  # such a program, for peers or for what it pushes
# By warps that do not multiply, in programs whose other warps do (hopper/).
SEND = tl.constexpr(6)  # a finished tile's subtiles, to the ranks it is for
SEND_WAIT = tl.constexpr(7)  # for peers, or for what was sent to arrive
COLLECT = tl.constexpr(8)  # the peers' partials of a tile
COLLECT_WAIT = tl.constexpr(9)  # for the peers to send them


@triton.jit
def trace_time(peers):
    """Return the time at which a span begins; a constant where there is no trace.

    `peers`, here and below: any bundle with a `trace_ptr`.
    """
    return begin_event(peers.trace_ptr)


@triton.jit
def trace_span(peers, KIND: tl.constexpr, tile, begin):
    """Record that this program did KIND for a tile since `begin`; return when it ended."""
    return end_event(peers.trace_ptr, KIND, begin, tile=tile)


@triton.jit
def trace_until(peers, KIND: tl.constexpr, tile, begin, end):
    """Record a span that ended a while ago."""
    record_event(peers.trace_ptr, KIND, begin, end, tile=tile)
