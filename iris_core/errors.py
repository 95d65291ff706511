"""The errors of this package that have no fitting built-in type, and how errors name ranks."""

from __future__ import annotations

from collections.abc import Iterable


class PeerError(RuntimeError):
    """Another rank died, left, or failed at something all ranks do together."""


class HeapExhausted(MemoryError):
    """The symmetric heap has no room for an allocation."""


class AllocationMismatch(RuntimeError):
    """The ranks allocated or freed in different orders."""


def ranks_named(numbers: Iterable[int]) -> str:
    """Return "rank 1", or "ranks 1, 2"."""
    listed = sorted(numbers)
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed))}"
