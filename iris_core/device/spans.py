"""Spans of programs' time, recorded from kernels; nothing where `trace_ptr` is None. tracing/spans.py reads them.

A trace is int64 words: how many spans there are, for how many there is room, then a row of `SPAN_WORDS` a span. Rows
are handed out in the order in which spans end; what finds no room is counted and not kept.

A span's times are those at which the first thread passed, of a program or of the warps that have a part of their own:
loads and stores under way count for the code that waits for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .intrinsics import clock_ns

SPAN_WORDS = tl.constexpr(7)
HEAD_WORDS = tl.constexpr(2)


@triton.jit
def begin_event(trace_ptr):
    """Return the time at which a span begins; a constant where `trace_ptr` is None."""
    if trace_ptr is not None:
        return clock_ns()
    else:
        return 0


@triton.jit
def end_event(trace_ptr, KIND: tl.constexpr, begin, peer=-1, num_bytes=0, tile=-1):
    """Record that this program did KIND since `begin`; return when it ended, which the next span may begin with.

    Args:
        begin: when it began, in ns, of `begin_event`.
        trace_ptr, KIND, peer, num_bytes, tile: as of `record_event`.
    """
    if trace_ptr is not None:
        end = clock_ns()
        record_event(trace_ptr, KIND, begin, end, peer, num_bytes, tile)
        return end
    else:
        return begin


@triton.jit
def record_event(trace_ptr, KIND: tl.constexpr, begin, end, peer=-1, num_bytes=0, tile=-1):
    """Record a span that ended a while ago.

    Args:
        trace_ptr: the words of `make_spans` or of a trace, or None to record nothing.
        KIND: a constant, the place of the span's name among the trace's kinds.
        begin, end: when it began and ended, in ns of `clock_ns`.
        peer: the rank that it was with; -1 for none.
        num_bytes: how much was moved.
        tile: of which tile, for the trace's `details`; -1 for none.
    """
    if trace_ptr is not None:
        # No edge: the host reads the trace when the kernel has ended.
        index = tl.atomic_add(trace_ptr, 1, sem="relaxed", scope="gpu")
        if index < tl.load(trace_ptr + 1):
            row_ptr = trace_ptr + HEAD_WORDS + index * SPAN_WORDS
            tl.store(row_ptr, tl.cast(tl.program_id(0), tl.int64))
            tl.store(row_ptr + 1, tl.cast(KIND, tl.int64))
            tl.store(row_ptr + 2, tl.cast(tile, tl.int64))
            tl.store(row_ptr + 3, begin)
            tl.store(row_ptr + 4, end)
            tl.store(row_ptr + 5, tl.cast(peer, tl.int64))
            tl.store(row_ptr + 6, tl.cast(num_bytes, tl.int64))
