"""Which bytes of the heaps are a tensor's: an access to others, such as those past a tensor's end, is a mistake.

Memory that is freed stays known, as kernels that were queued before may still use it. Under the checker tensors lie
apart, so that what is past the end of one is not the next one's.
"""

from __future__ import annotations

import numpy as np

from ..errors import HeapExhausted
from ..heap.allocator import ALIGNMENT, OffsetAllocator


class Extents:
    """Ranges of bytes of a heap, by offset: those of any rank's tensors, as all ranks have the same."""

    def __init__(self) -> None:
        self._stops: dict[int, int] = {}  # by start
        self._sorted = np.zeros((2, 0), dtype=np.int64)

    def watch(self, allocator: OffsetAllocator) -> None:
        """Add what is allocated, in the allocator's units, and what will be, to the byte, with a gap behind it."""
        _, used, *_ = allocator.snapshot()
        for offset, allocation in used.items():
            self._add(offset, allocation.size)
        allocate = allocator.allocate

        def with_a_gap(size_bytes: int, what: str) -> int:
            try:
                offset = allocate(size_bytes + ALIGNMENT, what)
            except HeapExhausted as error:
                text = f"{error}; under the checker each tensor takes {ALIGNMENT:,} bytes more"
                raise HeapExhausted(text) from error
            self._add(offset, size_bytes)
            return offset

        setattr(allocator, "allocate", with_a_gap)  # noqa: B010 - on the instance: its class keeps the original

    def first_outside(self, offsets: np.ndarray, itemsize: int) -> int | None:
        """Return the index of the first item that no range holds; None if all are held."""
        starts, stops = self._sorted
        if not starts.size:
            return 0
        place = np.searchsorted(starts, offsets, side="right") - 1
        outside = (place < 0) | (offsets + itemsize > stops[place])
        return int(outside.argmax()) if outside.any() else None

    def _add(self, start: int, size: int) -> None:
        """Add a range. Of several that began there, the longest holds."""
        if self._stops.get(start, 0) < start + size:
            self._stops[start] = start + size
            starts = np.array(sorted(self._stops), dtype=np.int64)
            stops = np.array([self._stops[one] for one in starts.tolist()], dtype=np.int64)
            self._sorted = np.stack([starts, np.maximum.accumulate(stops)])
