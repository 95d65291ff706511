"""The memory that interpreted kernels may touch: a pointer to anywhere else is an error, and would end the process.

It is the heaps, what the host shares with kernels, what a kernel is given, and any other tensor of the process, whose
address a kernel may have read from memory.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
from typing import Any

import numpy as np
import torch

from ..device.kernel_memory import Heaps, Span, shared_spans, span_of

_NEAR_BYTES = 1 << 20  # what is further from any memory is not said to be past its end


class MemoryBounds:
    """The memory that some kernels may touch."""

    def __init__(self) -> None:
        self._spans: list[Span] = []  # none lies in another: starts and stops both grow
        self._starts: list[int] = []
        self._heap_bases: set[int] = set()  # where the tensors begin that hold them

    @classmethod
    def of_process(cls) -> MemoryBounds:
        """Return what every kernel of this process may touch."""
        bounds = cls()
        for span in shared_spans:
            bounds.add(span)
        return bounds

    def add(self, span: Span) -> None:
        """Let them touch this, too."""
        if span.start == span.stop or self.find(span.start, span.stop - span.start) or self._is_window(span):
            return
        kept = [one for one in self._spans if not span.start <= one.start <= one.stop <= span.stop]
        self._spans = sorted([*kept, span], key=lambda one: one.start)
        self._starts = [one.start for one in self._spans]

    def _is_window(self, span: Span) -> bool:
        """Return whether it is all heaps' addresses, of which only some have memory: those are known."""
        first = self.find(span.start)
        return first is not None and first.heaps is not None and span.start == first.heaps.start

    def add_arguments(self, value: Any, name: str) -> None:
        """Let them touch the tensors of an argument, or of a tuple or the values of a dictionary of such."""
        if isinstance(value, (tuple, list)):
            for one in value:
                self.add_arguments(one, name)
        elif isinstance(value, dict):
            self.add_arguments(tuple(value.values()), name)
        elif not isinstance(value, torch.Tensor):
            if isinstance(base := getattr(value, "base", None), torch.Tensor):  # a descriptor, or of another dtype
                self.add_arguments(base, name)
        else:
            self.add(span_of(value, f"{tuple(value.shape)} of {value.dtype}, {name}"))

    def find(self, address: int, size: int = 1) -> Span | None:
        """Return the memory that holds so many bytes from an address on."""
        place = bisect.bisect_right(self._starts, address) - 1
        if place >= 0 and address + size <= self._spans[place].stop:
            return self._spans[place]
        return None

    def check(self, pointers: Any, mask: Any, doing: str) -> None:
        """Raise unless all that the interpreter's pointers point to, where the mask is set, is such memory.

        Raises:
            ValueError: says what lies near.
        """
        addresses, itemsize = pointers.data, itemsize_of(pointers)
        one_word = addresses.item() if addresses.size == 1 else None
        low = int(addresses.min()) if one_word is None else one_word
        high = int(addresses.max()) if one_word is None else one_word
        if self.find(low, high - low + itemsize):
            return
        rest = selected(pointers, mask)
        while rest.size:
            low = int(rest.min())
            span = self.find(low, itemsize) or self._add_living(low, itemsize)
            if span is None:
                raise ValueError(f"a kernel {doing} where it has no memory: {self._describe(low)}")
            rest = rest[rest > span.stop - itemsize]

    def check_on_heap(self, pointers: Any, from_ranks: np.ndarray, to_ranks: np.ndarray, bases: Any, mask: Any) -> None:
        """Raise unless the interpreter's pointers, which are to be moved to other ranks' heaps, are on `from_ranks`'.

        Args:
            pointers: to what is to be translated.
            from_ranks, to_ranks: a number each, or one a pointer.
            bases: a pointer to the addresses of the heaps.
            mask: which pointers are used; None for all, or "unknown": then one of them must be there.

        Raises:
            ValueError: names what they point to, or the rank that there is not.
        """
        self.check(bases, None, "reads")
        words = self.find(int(bases.data.min()))
        assert words is not None
        first = self.find(ctypes.c_uint64.from_address(int(bases.data.min())).value)
        if first is None or (heaps := first.heaps) is None:
            raise ValueError("a kernel reaches for a peer by heap_bases that are not those of ctx.get_heap_bases()")
        self._heap_bases.add(words.start)
        for rank in (*from_ranks.flat, *to_ranks.flat):
            if not 0 <= rank < heaps.world_size:
                last = heaps.world_size - 1
                raise ValueError(f"a kernel names rank {rank}; there are {last + 1} ranks, 0 to {last}")
        offsets = pointers.data.astype(np.int64) - (heaps.start + from_ranks.astype(np.int64) * heaps.stride)
        is_off = (offsets < 0) | (offsets >= heaps.stride)
        if isinstance(mask, str):
            is_off &= is_off.all()
        elif is_off.any():
            is_off &= lanes_of(pointers, mask)
        if is_off.any():
            address, rank = (np.broadcast_to(one, is_off.shape)[is_off][0] for one in (pointers.data, from_ranks))
            raise ValueError(self._describe_off_heap(int(address), int(rank), heaps))

    def is_heap_bases(self, address: int) -> bool:
        """Return whether a translation has read, there, where the heaps are: that is never a flag."""
        span = self.find(address)
        return span is not None and span.start in self._heap_bases

    def _describe_off_heap(self, address: int, rank: int, heaps: Heaps) -> str:
        """Say what is at an address that should be on a rank's heap."""
        span = self.find(address)
        if span is None:
            return f"a kernel reaches for a peer's copy where it has no memory: {self._describe(address)}"
        if span.heaps is not heaps:
            return (
                f"a kernel reaches for a peer's copy of {span.name}, which is not on the symmetric heap; allocate it "
                "with the context (ctx.zeros, ctx.empty, ...)"
            )
        owner = (address - heaps.start) // heaps.stride
        return (
            f"a kernel translates a pointer from rank {rank}'s heap that is on rank {owner}'s; are the two ranks "
            "swapped? A pointer is given as it is on the rank that runs the kernel"
        )

    def _add_living(self, address: int, size: int) -> Span | None:
        """Look through all tensors of the process."""
        for one in gc.get_objects():
            if not issubclass(type(one), torch.Tensor):
                continue
            try:
                span = span_of(one, f"{tuple(one.shape)} of {one.dtype}")
            except (RuntimeError, NotImplementedError):  # one without memory: a sparse one, or torch.compile's
                continue
            if span.start <= address and address + size <= span.stop and not self._is_window(span):
                self.add(span)
                return span
        return None

    def _describe(self, address: int) -> str:
        before = [(address - one.stop, f"after the end of {one.name}") for one in self._spans if one.stop <= address]
        behind = [
            (one.start - address, f"before the start of {one.name}") for one in self._spans if one.start > address
        ]
        distance, where = min([*before, *behind], default=(_NEAR_BYTES, ""))
        if distance < _NEAR_BYTES:
            return f"{distance} bytes {where}"
        return "far from all that it was given; pointers are to be those of its arguments, plus offsets"


def check_hint(pointers: Any, hint: list[int]) -> None:
    """Raise unless the interpreter's pointers are as a hint says, which has a number for each dimension.

    Raises:
        ValueError: so many are not contiguous, or do not begin at a multiple of so many bytes.
    """
    itemsize = itemsize_of(pointers)
    if len(hint) != pointers.data.ndim:
        raise ValueError(f"a hint of {len(hint)} numbers, {hint}, for pointers of shape {pointers.data.shape}")
    for axis, number in enumerate(hint):
        addresses = np.moveaxis(pointers.data.astype(np.int64), axis, 0)
        first = np.arange(len(addresses)) // number * number
        if (
            addresses - addresses[first]
            != (np.arange(len(addresses)) - first).reshape(-1, *[1] * (addresses.ndim - 1)) * itemsize
        ).any():
            raise ValueError(f"hint={number}, but {number} elements in a row are not contiguous")
        if (addresses[first] % number).any():
            raise ValueError(
                f"hint={number}, but {number} elements in a row do not begin at a multiple of {number} bytes"
            )


def selected(pointers: Any, mask: Any) -> np.ndarray:
    """Return the addresses that the interpreter's pointers and a mask, or none, name."""
    return pointers.data[lanes_of(pointers, mask)].reshape(-1)


def lanes_of(pointers: Any, mask: Any) -> np.ndarray:
    """Return a mask, or none, as an array of the pointers' shape."""
    # Block pointers come with a bare array, and what was a scalar is one of numbers.
    shape = pointers.data.shape
    if mask is None:
        return np.ones(shape, dtype=bool)
    lanes = np.array(getattr(mask, "data", mask), dtype=bool)
    return lanes if lanes.shape == shape else np.array(np.broadcast_to(lanes, shape))


def itemsize_of(pointers: Any) -> int:
    """Return how many bytes an element has that the interpreter's pointers point to."""
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)


def is_volatile_load(given: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether the interpreter's load is volatile, of its arguments: the last says so, or one by its name."""
    return named.get("is_volatile", given and given[-1])
