"""A trace of all ranks' kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..context import Context
from ..utils.settings import is_whole
from .clocks import align, read_clocks
from .perfetto import perfetto_events, write_perfetto
from .spans import Span, clear_spans, make_spans, read_spans

DEFAULT_CAPACITY = 1 << 16


@dataclass(frozen=True)
class TracedRanks:
    """What all ranks have recorded.

    Attributes:
        ranks: each rank's spans, on rank 0's clock.
        accuracy_ns: how far apart the same moment may be on two ranks.
        lost: how many spans found no room.
    """

    ranks: list[list[Span]]
    accuracy_ns: float
    lost: int


class Trace:
    """Room for the spans of this rank's kernels, and what brings all ranks' together.

    Args:
        ctx: the context.
        kinds: names of what is recorded, by the numbers that kernels give as KIND.
        capacity: spans for which there is room on a rank.
        details: what a file shows of a span beside its time.

    Attributes:
        words: what kernels take as ``trace_ptr``.

    Raises:
        ValueError: there is room for none.
    """

    def __init__(
        self,
        ctx: Context,
        kinds: Sequence[str],
        *,
        capacity: int = DEFAULT_CAPACITY,
        details: Callable[[Span], dict[str, Any]] = lambda span: {
            "peer": span.peer,
            "bytes": span.num_bytes,
            "tile": span.tile,
        },
    ) -> None:
        if not is_whole(capacity):
            raise ValueError(f"capacity is {capacity!r}; it takes a positive number of spans")
        self._ctx = ctx
        self._kinds = list(kinds)
        self._details = details
        self.words = make_spans(capacity, ctx.get_device())

    def clear(self) -> None:
        """Forget this rank's spans, as after a first call, which compiles."""
        clear_spans(self.words)

    def gather(self) -> TracedRanks:
        """Wait for the device, and return all ranks' spans on one clock; collective, the same on every rank.

        Raises:
            TimeoutError, PeerError: see ``Context.barrier``.
        """
        clocks = read_clocks(self._ctx)
        self._ctx.barrier()
        found, lost = read_spans(self.words)
        gather = self._ctx.control_plane.all_gather
        offsets, accuracy_ns = align(gather(clocks))
        ranks = [
            [Span(*row)._replace(begin_ns=row[3] - offset, end_ns=row[4] - offset) for row in rows]
            for rows, offset in zip(gather(found), offsets, strict=True)
        ]
        return TracedRanks(ranks, accuracy_ns, sum(gather(lost)))

    def write(self, path: Path | str) -> TracedRanks:
        """Gather, and write a file for ui.perfetto.dev on rank 0: a process per rank, a thread per program; collective.

        Raises:
            ValueError: a kernel gave a KIND that has no name; on every rank.
            OSError: the file cannot be written; on every rank, of another kind on the others.
            TimeoutError, PeerError: see ``Context.barrier``.
        """
        traced = self.gather()
        self._check_kinds(traced)
        with self._ctx.collective_section("write the trace"):
            if self._ctx.get_rank() == 0:
                self._write(Path(path), traced)
        return traced

    def write_own(self, path: Path | str) -> TracedRanks:
        """Wait for the device, and write a file of this rank's spans alone, on its own clock.

        Raises:
            ValueError: a kernel gave a KIND that has no name.
            OSError: the file cannot be written.
        """
        self._ctx.backend.synchronize()
        spans, lost = read_spans(self.words)
        others: list[list[Span]] = [[] for _ in range(self._ctx.get_rank())]
        traced = TracedRanks([*others, spans], 0.0, lost)
        self._check_kinds(traced)
        self._write(Path(path), traced)
        return traced

    def _check_kinds(self, traced: TracedRanks) -> None:
        numbers = {span.kind for spans in traced.ranks for span in spans}
        if nameless := numbers - set(range(len(self._kinds))):
            raise ValueError(f"kernels recorded kinds {sorted(nameless)}; kinds has {len(self._kinds)} names")

    def _write(self, path: Path, traced: TracedRanks) -> None:
        events = perfetto_events(
            traced.ranks,
            name=lambda span: self._kinds[span.kind],
            thread=lambda span: (span.program, f"program {span.program}"),
            details=self._details,
        )
        about = {"clock_accuracy_us": traced.accuracy_ns / 1e3, "lost_spans": traced.lost}
        write_perfetto(path, events, about)
