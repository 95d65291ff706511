"""Host memory that this process shares with all its interpreted kernels: the heaps, and the fault board."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Heaps(NamedTuple):
    """The addresses of all ranks' heaps.

    Args:
        start: of rank 0's.
        stride: how far a rank's is from the one before.
        world_size: how many there are.
    """

    start: int
    stride: int
    world_size: int


class Span(NamedTuple):
    """A range of addresses.

    Args:
        start, stop: its bounds.
        name: what lies there.
        owner: what keeps it there.
        heaps: the heaps that it is of, if it is of one.
    """

    start: int
    stop: int
    name: str
    owner: object
    heaps: Heaps | None = None


shared_spans: list[Span] = []


def span_of(memory: torch.Tensor, name: str, heaps: Heaps | None = None) -> Span:
    """Return the whole storage of a tensor; see `Span`."""
    storage = memory.untyped_storage()
    return Span(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name, storage, heaps)


def share(span: Span) -> Span:
    """Let all kernels of this process access this memory, until `unshare`."""
    shared_spans.append(span)
    return span


def unshare(span: Span) -> None:
    """End what `share` has begun."""
    shared_spans[:] = [one for one in shared_spans if one is not span]
