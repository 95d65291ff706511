"""What a program did when, written down tile by tile; nothing at all where `Peers.trace_ptr` is None.

A trace is int64 words: how many spans there are, for how many there is room, then a row of SPAN_WORDS a span. Rows are
handed out in the order in which spans end; what finds no room is counted and not kept.

A span's times are those at which the first thread passed, of a program or of the warps that have a part of their own:
loads and stores that are under way belong to whoever waits for them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from iris_core import clock_ns

SPAN_WORDS = tl.constexpr(5)
_HEAD_WORDS = tl.constexpr(2)

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


class Span(NamedTuple):
    """A stretch of a program's time, on its device's clock; `tile` counts those of a rank in a call."""

    program: int
    kind: int
    tile: int
    begin_ns: int
    end_ns: int


@triton.jit
def trace_time(peers):
    """Return the time at which a span begins; a constant where there is no trace.

    `peers`, here and below: any bundle with a `trace_ptr`.
    """
    if peers.trace_ptr is not None:
        return clock_ns()
    else:
        return 0


@triton.jit
def trace_span(peers, KIND: tl.constexpr, tile, begin):
    """Write down that this program did KIND for a tile since `begin`; return when it ended."""
    if peers.trace_ptr is not None:
        end = clock_ns()
        trace_until(peers, KIND, tile, begin, end)
        return end
    else:
        return begin


@triton.jit
def trace_until(peers, KIND: tl.constexpr, tile, begin, end):
    """Write down a span that ended a while ago."""
    if peers.trace_ptr is not None:
        # No edge: the host reads the trace when the kernel has ended.
        index = tl.atomic_add(peers.trace_ptr, 1, sem="relaxed", scope="gpu")
        if index < tl.load(peers.trace_ptr + 1):
            row_ptr = peers.trace_ptr + _HEAD_WORDS + index * SPAN_WORDS
            tl.store(row_ptr, tl.cast(tl.program_id(0), tl.int64))
            tl.store(row_ptr + 1, tl.cast(KIND, tl.int64))
            tl.store(row_ptr + 2, tl.cast(tile, tl.int64))
            tl.store(row_ptr + 3, begin)
            tl.store(row_ptr + 4, end)


def make_trace(capacity: int, device: torch.device) -> torch.Tensor:
    """Return an empty trace with room for `capacity` spans."""
    words = torch.zeros(_HEAD_WORDS.value + capacity * SPAN_WORDS.value, dtype=torch.int64, device=device)
    words[1] = capacity
    return words


def clear_trace(trace: torch.Tensor) -> None:
    """Forget a trace's spans."""
    trace[0] = 0


def read_trace(trace: torch.Tensor) -> tuple[list[Span], int]:
    """Return a trace's spans, and how many found no room."""
    count, capacity = trace[:2].tolist()
    kept = min(count, capacity)
    rows = trace[_HEAD_WORDS.value :][: kept * SPAN_WORDS.value].view(kept, SPAN_WORDS.value)
    return [Span(*row) for row in rows.tolist()], count - kept
