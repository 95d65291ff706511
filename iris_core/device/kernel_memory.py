"""Host memory that this process shares with all its interpreted kernels: the heaps, and the fault board."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Span(NamedTuple):
    """A range of addresses.

    Args:
        start, stop: its bounds.
        name: what lies there.
        owner: what keeps it there.
        heaps: how many heaps these are, one a rank, all of one size; 0 for other memory.
    """

    start: int
    stop: int
    name: str
    owner: object
    heaps: int = 0

    @property
    def stride(self) -> int:
        """How far apart heaps are."""
        return (self.stop - self.start) // self.heaps


shared_spans: list[Span] = []


def span_of(memory: torch.Tensor, name: str, *, heaps: int = 0) -> Span:
    """Return the whole storage of a tensor; see `Span`."""
    storage = memory.untyped_storage()
    return Span(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name, storage, heaps)


def share(memory: torch.Tensor, name: str, *, heaps: int = 0) -> Span:
    """Let all kernels of this process access a tensor's memory, until `unshare`."""
    span = span_of(memory, name, heaps=heaps)
    shared_spans.append(span)
    return span


def unshare(span: Span) -> None:
    """End what `share` has begun."""
    shared_spans[:] = [one for one in shared_spans if one is not span]
