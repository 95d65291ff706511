"""An operator's memory: named buffers, each as large as the largest call needs, of which a call sees its own part.

Outputs that peers do not write may be new memory in each call instead (`NewOutputs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from iris_core import Context

from .device.handshake import number_of_call

OUTPUT = "output"  # the name of C among a call's memory

CallOf = Callable[[int, int], int]
_MOST_VIEWS = 1024  # that are kept


class Buffer(NamedTuple):
    """What a call needs of one buffer.

    Args:
        shape, dtype: of the part that a call uses.
        is_symmetric: on the heap, at the same place on every rank; then all ranks must ask for the same.
        halves: with two, calls use one half and the other alternately; `shape` is a half's.
        describe: what stands in the report of a failed wait for a word of it; given for words that are waited for.
        call_of: returns the call in which a word is expected to be a value; None for words that count within a call.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_symmetric: bool = False
    halves: int = 1
    describe: Callable[[int], str] | None = None
    call_of: CallOf | None = None

    @property
    def size(self) -> int:
        """Elements of a half, at least one: an empty tensor has no address."""
        return max(1, math.prod(self.shape))

    def new(self, device: torch.device) -> torch.Tensor:
        """Return memory from torch's allocator, in the buffer's shape."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def local_flags(count: int, what: str, *, dtype: torch.dtype = torch.int64, name: Callable[[int], str] = str) -> Buffer:
    """Return words that only this rank's kernels use, reported as `what` so-and-so.

    int64 words hold call numbers; others count within a call.
    """
    call_of = number_of_call if dtype == torch.int64 else None
    return Buffer((count,), dtype, describe=lambda word: f"{what} {name(word)} of this rank", call_of=call_of)


def flags_by_source(
    world_size: int, count: int, what: str, whose: str, *, are_numbered: bool = True, halves: int = 1
) -> Buffer:
    """Return int64 words (world_size, count) that the rank of the first index sets here, reported as its `whose`.

    They hold call numbers; not `are_numbered`: they are set, and zeroed again, in every call.
    """

    def describe(word: int) -> str:
        return f"{what} {word % count} of rank {word // count}'s {whose}"

    call_of = number_of_call if are_numbered else None
    return Buffer((world_size, count), torch.int64, True, halves, describe, call_of)


class NewOutputs:
    """The new outputs of calls of so many rows.

    Args:
        names: of them.
        like: tensors of their shapes, dtypes and device; none is kept.
    """

    def __init__(self, names: Sequence[str], like: Sequence[torch.Tensor]) -> None:
        self.names = names
        self._shapes: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}
        for name, one in zip(names, like, strict=True):  # no comprehension: a frame, a call
            self._shapes[name] = one.shape, one.dtype, one.device
        self._likes: dict[str, torch.Tensor] = {}

    def made(self, out: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return memory for them, by name: new, or `out` for C.

        Raises:
            ValueError: `out` does not fit, or C is no new output.
        """
        new, likes = {}, self._likes or self._make_likes()
        for name, like in likes.items():  # no comprehension: a frame, a call
            new[name] = torch.empty_like(like) if out is None or name != OUTPUT else out
        if out is not None:
            if not self.takes(out):
                raise ValueError(f"out is {tuple(out.shape)} of {out.dtype}; this call takes {self._what_is_taken()}")
            new[OUTPUT] = out.view(likes[OUTPUT].shape)
        return new

    def _what_is_taken(self) -> str:
        if OUTPUT not in self._shapes:
            return "none: its output is the operator's own"
        shape, dtype, _ = self._shapes[OUTPUT]
        return f"a contiguous {tuple(shape)} of {dtype}"

    def takes(self, out: torch.Tensor) -> bool:
        """Return whether this is memory for C as its rows lie there, which kernels may cut by shards."""
        if OUTPUT not in self._shapes:
            return False
        shape, dtype, _ = self._shapes[OUTPUT]
        if out.dtype != dtype or not out.is_contiguous():
            return False
        return out.shape[-1:] == shape[-1:] and out.numel() == math.prod(shape)

    def _make_likes(self) -> dict[str, torch.Tensor]:
        """Make tensors like which torch makes others in half the time that it takes by a shape.

        They have no memory: while a CUDA graph is recorded that would be the graph's, and what stays of it is an error.
        """
        for name, (shape, dtype, device) in self._shapes.items():
            is_tiny = math.prod(shape) < 2  # an expanded one has other strides, which torch would take
            like = torch.empty(shape if is_tiny else (), dtype=dtype, device=device).expand(shape)
            like.untyped_storage().resize_(0)
            self._likes[name] = like
        return self._likes


def with_room_to_grow(size: int) -> int:
    """Return what to make room for where a size was too small, so that sizes that grow step by step take few steps."""
    return size + -(-size // 4)


class Workspace:
    """Buffers by name, zeroed when they are made; they grow, and never shrink.

    Args:
        ctx: the context.
        who: names, in reports of failed waits, the operator and the problem of the call that was queued last.
        asked_last: returns what that call asks for, which says how reports describe words.
    """

    def __init__(self, ctx: Context, who: Callable[[], str], asked_last: Callable[[], Mapping[str, Buffer]]) -> None:
        self._ctx = ctx
        self._who = who
        self._asked_last = asked_last
        self._memory: dict[str, torch.Tensor] = {}  # (halves, elements)
        self._views: dict[Any, torch.Tensor] = {}  # by name and shape: of most buffers, calls use the same part
        self._outgrown: list[torch.Tensor] = []  # that captured graphs may still use

    def grows_on_heap(self, asked: Mapping[str, Buffer]) -> bool:
        """Return whether to make room for it is collective."""
        return any(one.is_symmetric and not self._fits(name, one) for name, one in asked.items())

    def _fits(self, name: str, buffer: Buffer) -> bool:
        return name in self._memory and self._memory[name].shape[1] >= buffer.size

    def grow(self, asked: Mapping[str, Buffer], *, keep: bool, is_foreseen: bool = True) -> None:
        """Make room for what is asked for; collective, if any of it is symmetric.

        Args:
            asked: by name; of symmetric buffers, all ranks ask for the same.
            keep: whether the memory that is outgrown stays where it is, as captured graphs use it.
            is_foreseen: whether calls that are to come ask for no more; else buffers grow by a quarter, or more.

        Raises:
            HeapExhausted: the heap has no room.
        """
        made = {}
        for name, buffer in asked.items():
            if not self._fits(name, buffer):
                is_spare = name in self._memory and not is_foreseen
                made[name] = self._made(buffer, with_room_to_grow(self.half_size(name)) if is_spare else 0)
        outgrown = [self._memory[name] for name in made if name in self._memory]
        self._memory |= made
        self._views.clear()
        for name in made:
            self._watch(name, asked[name])
        if keep:
            self._outgrown += outgrown
        elif any(self._ctx.heap.contains(old) for old in outgrown):
            self._ctx.barrier()  # no rank's kernels are under way that use it
            self._free(outgrown)

    def views(self, asked: Mapping[str, Buffer]) -> dict[str, torch.Tensor] | None:
        """Return the parts that a call asks for, of the first half where there are two; None if there is no room."""
        found = {}
        for name, buffer in asked.items():
            place = name, buffer.shape
            if place not in self._views:
                if not self._fits(name, buffer):
                    return None
                if len(self._views) == _MOST_VIEWS:
                    self._views.clear()
                self._views[place] = _leading(self._memory[name], buffer.shape)
            found[name] = self._views[place]
        return found

    def memory(self, name: str) -> torch.Tensor:
        """Return all of a buffer, (halves, elements)."""
        return self._memory[name]

    def half_size(self, name: str) -> int:
        """Return how many elements a half of a buffer has room for."""
        return self._memory[name].shape[1]

    def close(self) -> None:
        """Give all memory back; collective."""
        self._free([*self._memory.values(), *self._outgrown])
        self._memory, self._views, self._outgrown = {}, {}, []

    def _made(self, buffer: Buffer, least: int) -> torch.Tensor:
        shape = (buffer.halves, max(buffer.size, least))
        if buffer.is_symmetric:
            return self._ctx.zeros(shape, dtype=buffer.dtype)
        device = self._ctx.get_device()
        return lasting(device, lambda: torch.zeros(shape, dtype=buffer.dtype, device=device))

    def _free(self, memory: list[torch.Tensor]) -> None:
        for one in memory:
            self._ctx.watchdog.unwatch(one)
            if self._ctx.heap.contains(one):
                self._ctx.free(one)

    def _watch(self, name: str, buffer: Buffer) -> None:
        """Name a buffer's words in reports, by the layout of the call that was queued last."""
        if buffer.describe is None:
            return

        def describe(word: int, rank: int) -> str:
            described = self._asked_last().get(name, buffer)
            assert described.describe is not None
            return f"{self._who()}: {described.describe(word % self.half_size(name))}"

        self._ctx.watchdog.watch(self._memory[name].view(-1), describe, buffer.call_of)


def _leading(memory: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the first elements of some memory in a shape, by one function of torch's."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return memory.as_strided(shape, strides[::-1])


def lasting(device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a tensor that outlives the call, of memory that torch's allocator gives to no CUDA graph being warmed up.

    While `torch.compile` warms a CUDA graph up, what this thread allocates is the graph's, and what stays there an
    error; so another thread allocates. While a stream is captured the memory is the graph's: no other can be had then.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return make()
    stream = torch.cuda.current_stream(device)

    def make_on_stream() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(max_workers=1) as other:
        return other.submit(make_on_stream).result()
