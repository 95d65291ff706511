"""What the programs of all ranks did when: spans recorded from kernels, on one line of time, for Perfetto.

A kernel takes `Trace.words` as ``trace_ptr``, or None, with which it is compiled as if nothing were recorded.
"""

from ..device.spans import begin_event, end_event, record_event
from .clocks import align, read_clocks
from .of_context import ContextTracing
from .perfetto import perfetto_events, write_perfetto
from .spans import Span, clear_spans, make_spans, read_spans
from .trace import Trace, TracedRanks

__all__ = [
    "ContextTracing",
    "Span",
    "Trace",
    "TracedRanks",
    "align",
    "begin_event",
    "clear_spans",
    "end_event",
    "make_spans",
    "perfetto_events",
    "read_clocks",
    "read_spans",
    "record_event",
    "write_perfetto",
]
