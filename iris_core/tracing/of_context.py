"""`Context.tracing`: events that kernels record by their context object, in one trace a context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..context import Context
from ..device.context import set_trace
from ..device.tracing import EVENTS
from .spans import Span, make_spans
from .trace import Trace, TracedRanks


class ContextTracing:
    """Lets kernels record what they do, and writes it down; `Context.tracing` is it.

    A kernel makes its context object by ``DeviceContext.initialize(context_tensor, rank, world_size, tracing=True)``,
    with Gluon ``IrisDeviceCtx.initialize(context_tensor, tracing=True)``, and calls `record_event_start` and
    `record_event_end` of its `tracing`. Without ``tracing=True`` nothing of it is compiled; while tracing is not
    enabled nothing is kept.

    Args:
        ctx: the context.
        context_tensor: what kernels make their context objects of.
    """

    def __init__(self, ctx: Context, context_tensor: torch.Tensor) -> None:
        self._ctx = ctx
        self._context_tensor = context_tensor
        self._trace: Trace | None = None
        self._none = make_spans(0, ctx.get_device())
        set_trace(context_tensor, self._none)

    @property
    def enabled(self) -> bool:
        """Whether events are kept."""
        return self._trace is not None

    @property
    def trace_counter(self) -> torch.Tensor:
        """How many events this rank has recorded, those that found no room among them: a word on the device."""
        return self._enabled().words[:1]

    def enable(self, max_events: int = 1_000_000, kinds: Sequence[str] = ()) -> None:
        """Keep this rank's events from now on, also of kernels that have their context tensor already.

        Args:
            max_events: for how many there is room, of 56 bytes each; further ones are counted.
            kinds: names of the kernels' own kinds of events, which are numbers from 14 on.

        Raises:
            ValueError: there is room for none.
        """
        self._trace = Trace(self._ctx, (*EVENTS, *kinds), capacity=max_events, details=_details)
        set_trace(self._context_tensor, self._trace.words)

    def disable(self) -> None:
        """Keep no more events, and give their memory back."""
        self._ctx.backend.synchronize()
        set_trace(self._context_tensor, self._none)
        self._trace = None

    def reset(self) -> None:
        """Forget this rank's events, as after a first call, which compiles."""
        self._enabled().clear()

    def export(self, filename: Path | str = "trace.json", merge: bool = True) -> TracedRanks:
        """Write a file for ui.perfetto.dev.

        Args:
            filename: the file.
            merge: whether rank 0 writes one of all ranks, on one clock, which is collective. Without, each rank writes
                its own, with its number in the name: "trace_rank0.json".

        Returns:
            What was written.

        Raises:
            RuntimeError: tracing is not enabled.
            ValueError, OSError, TimeoutError, PeerError: see `Trace.write`.
        """
        trace, path = self._enabled(), Path(filename)
        if merge:
            return trace.write(path)
        return trace.write_own(path.with_stem(f"{path.stem}_rank{self._ctx.get_rank()}"))

    def _enabled(self) -> Trace:
        if self._trace is None:
            raise RuntimeError("tracing is not enabled: call ctx.tracing.enable() before the kernels")
        return self._trace


def _details(span: Span) -> dict[str, Any]:
    return {"peer": span.peer, "bytes": span.num_bytes, "pid_m": span.tile >> 32, "pid_n": span.tile & 0xFFFFFFFF}
