"""Where on the heap an allocation goes: first fit over offsets, the same on every rank that makes the same calls."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from ..errors import HeapExhausted

KEPT_CALLS = 100_000  # by name, since the ranks last compared theirs: what one message takes
ALIGNMENT = 1024  # bytes: more than any vector access or tensor descriptor asks for


class Allocation(NamedTuple):
    """A range that is handed out; one at the same place later is another object.

    Args:
        size: in bytes, rounded up to the alignment.
        what: what it is for.
    """

    size: int
    what: str


class OffsetAllocator:
    """Hands out ranges of bytes, of ``[0, capacity)`` or of what else it is given, and takes them back.

    It keeps a fingerprint of all its calls and the first calls since the ranks last compared theirs, so that ranks can
    find out whether, and where, they parted.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.history: list[str] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._free: dict[int, int] = {0: capacity} if capacity else {}  # offset -> size, in order of offset
        self._added: list[tuple[int, int]] = []  # later than those: offset and size
        self._used: dict[int, Allocation] = {}  # by offset

    @property
    def used_bytes(self) -> int:
        """What is handed out, rounded up to the alignment."""
        return sum(allocation.size for allocation in self._used.values())

    @property
    def free_bytes(self) -> int:
        """What is left, in however many ranges."""
        return sum(self._free.values())

    @property
    def digest(self) -> str:
        """A fingerprint of the history: equal on two ranks if and only if they made the same calls."""
        return self._digest.hexdigest()

    def add(self, offset: int, size: int) -> None:
        """Hand out `size` bytes from an offset on, too, which is a multiple of the alignment; `restore` keeps them."""
        self._added.append((offset, size))
        self._take_back(offset, size)
        self.capacity += size

    def allocate(self, size_bytes: int, what: str) -> int:
        """Return the offset of `size_bytes` free bytes; `what` describes them in the history and in errors.

        Raises:
            HeapExhausted: no free range is large enough.
        """
        size = max(1, -(-size_bytes // ALIGNMENT)) * ALIGNMENT
        offset = next((start for start, free in self._free.items() if free >= size), None)
        if offset is None:
            largest = max(self._free.values(), default=0)
            raise HeapExhausted(
                f"symmetric heap exhausted: {what} needs {size:,} bytes; of {self.capacity:,} bytes "
                f"{self.used_bytes:,} are in use and {self.free_bytes:,} free, the largest free range {largest:,}; "
                f"make the heap larger with iris(heap_size=...) or grow(), or free() what is no longer used"
            )
        free = self._free.pop(offset)
        if free > size:
            self._free[offset + size] = free - size
            self._free = dict(sorted(self._free.items()))
        self._used[offset] = Allocation(size, what)
        self._record(f"allocate {what}")
        return offset

    def at(self, offset: int) -> Allocation:
        """Return the allocation that starts at `offset`.

        Raises:
            ValueError: none does.
        """
        if offset not in self._used:
            raise ValueError(f"no allocation starts at heap offset {offset}; it may have been freed already")
        return self._used[offset]

    def free(self, offset: int) -> int:
        """Give back the allocation at `offset`; return its size in bytes, rounded up as it was.

        Raises:
            ValueError: no allocation starts there.
        """
        size = self.at(offset).size
        del self._used[offset]
        self._take_back(offset, size)
        self._record(f"free the allocation at offset {offset}")
        return size

    def describe(self, offset: int) -> str:
        """Say what lies at an offset, for reports."""
        for start, (size, what) in self._used.items():
            if start <= offset < start + size:
                return f"byte {offset - start} of {what}"
        return f"byte {offset}, which is free"

    def snapshot(self) -> tuple[Any, ...]:
        """Return all there is to know of the allocations, for `restore`."""
        return dict(self._free), dict(self._used), list(self.history), self._digest.copy(), len(self._added)

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Undo all calls since the snapshot was taken; a snapshot is for one use."""
        self._free, self._used, self.history, self._digest, added = snapshot
        for offset, size in self._added[added:]:
            self._take_back(offset, size)

    def agreed(self) -> None:
        """Forget the calls so far: all ranks made the same ones."""
        self.history.clear()

    def _take_back(self, offset: int, size: int) -> None:
        self._free[offset] = size
        self._free = _merged(self._free)

    def _record(self, event: str) -> None:
        if len(self.history) < KEPT_CALLS:
            self.history.append(event)
        self._digest.update(event.encode() + b"\n")


def _merged(free: dict[int, int]) -> dict[int, int]:
    merged: dict[int, int] = {}
    start = end = -1
    for offset, size in sorted(free.items()):
        if offset != end:
            start = offset
        merged[start] = merged.get(start, 0) + size
        end = offset + size
    return merged


def first_difference(histories: list[list[str]]) -> str:
    """Say where the ranks' histories part: the first call that is not the same on every rank."""
    length = max(map(len, histories))
    for index in range(length):
        calls = [history[index] if index < len(history) else "nothing" for history in histories]
        if len(set(calls)) > 1:
            listed = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
            return f"call {index + 1} differs: {listed}"
    return "no difference" if length < KEPT_CALLS else f"only after the first {length:,} calls, which are kept by name"
