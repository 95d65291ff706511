"""The words that kernels record spans in, on the host; device/spans.py is the kernels' half."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device.spans import HEAD_WORDS, SPAN_WORDS


class Span(NamedTuple):
    """A stretch of a program's time, on its device's clock.

    Attributes:
        program: its number in the grid.
        kind: what it did, a number of the kernel's author.
        tile: for which tile, or -1.
        begin_ns, end_ns: when.
        peer: with which rank, or -1.
        num_bytes: how much went from rank to rank, or 0.
    """

    program: int
    kind: int
    tile: int
    begin_ns: int
    end_ns: int
    peer: int = -1
    num_bytes: int = 0


def make_spans(capacity: int, device: torch.device) -> torch.Tensor:
    """Return the words of an empty trace, int64, which kernels take as `trace_ptr`.

    Args:
        capacity: for how many spans there is room; later ones are counted and not kept.
        device: that of the kernels.
    """
    words = torch.zeros(HEAD_WORDS.value + capacity * SPAN_WORDS.value, dtype=torch.int64, device=device)
    words[1] = capacity
    return words


def clear_spans(words: torch.Tensor) -> None:
    """Forget a trace's spans."""
    words[0] = 0


def read_spans(words: torch.Tensor) -> tuple[list[Span], int]:
    """Return a trace's spans, and how many found no room."""
    count, capacity = words[:2].tolist()
    kept = min(count, capacity)
    rows = words[HEAD_WORDS.value :][: kept * SPAN_WORDS.value].view(kept, SPAN_WORDS.value)
    return [Span(*row) for row in rows.tolist()], count - kept
