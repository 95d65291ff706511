"""The errors of this package that have no fitting built-in type."""

from __future__ import annotations


class PeerError(RuntimeError):
    """Another rank died, left, or failed at something all ranks do together."""


class HeapExhausted(MemoryError):
    """The symmetric heap has no room for an allocation."""


class AllocationMismatch(RuntimeError):
    """The ranks allocated or freed in different orders."""
