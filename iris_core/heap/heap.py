"""The symmetric heap: the same allocation at the same offset on every rank, all of them in one window of addresses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from ..backends.base import STRIDE_ALIGNMENT, Backend, Memory, round_up
from ..errors import HeapExhausted, PeerError
from ..rendezvous.control_plane import ControlPlane
from ..utils.settings import is_whole
from ..utils.torch_modes import plain_tensors
from .allocator import ALIGNMENT, OffsetAllocator


class MemoryProvider(Protocol):
    """Another library's allocator, which the heap is to be made of."""

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        """Return uint8 of (size,), in memory that the ranks' processes can share; all ranks call it alike."""

    def free(self, memory: torch.Tensor) -> None:
        """Give back what `allocate` has returned; all ranks call it alike."""


class _Alias(NamedTuple):
    """A tensor of another allocator that the heap has a second address of.

    Args:
        tensor: which is held, as its allocator would hand its memory out again.
        place: the offset where its memory is mapped, in which it may start later.
        what: it is, for reports.
    """

    tensor: torch.Tensor
    place: int
    what: str


class SymmetricHeap:
    """One heap per rank. Rank r's lies at ``base + r * stride``, so a peer's copy of a buffer is a constant away.

    Args:
        control_plane: all ranks; making a heap is collective.
        backend: the kind of memory.
        size: bytes per rank, rounded up.
        own_memory: gives so many bytes of this rank's memory, such as `Backend.own_memory`.
    """

    def __init__(
        self, control_plane: ControlPlane, backend: Backend, size: int, own_memory: Callable[[int], Memory]
    ) -> None:
        self._control_plane, self._backend, self._own_memory = control_plane, backend, own_memory
        self._aliases: dict[int, _Alias] = {}  # by the offset of the tensor
        self._grown: dict[int, int] = {}  # bytes that `grow` has mapped, by offset
        self._storages_are_whole = backend.storages_are_whole
        self.rank, self.world_size = control_plane.rank, control_plane.world_size
        self.allocator = OffsetAllocator()
        try:
            self.stride = backend.open_window(control_plane, size)
            self._addresses = OffsetAllocator(self.stride)
            self.grow(size)
        except PeerError:
            raise
        except (OSError, OverflowError, RuntimeError) as error:
            asked = f"no heap of {size:,} bytes per rank, which iris(heap_size=...) asks for"
            raise type(error)(f"{asked}: {error}") from error
        self.window = backend.window()
        self.base = self.window.data_ptr() + self.rank * self.stride
        bases = [self.window.data_ptr() + rank * self.stride for rank in range(self.world_size)]
        self.bases = torch.tensor(bases, dtype=torch.uint64, device=backend.device)

    @plain_tensors()
    def grow(self, size: int) -> None:
        """Map `size` more bytes, rounded up; collective, and done on all ranks or on none. Buffers stay.

        Raises:
            RuntimeError, OSError: a rank's device has no such memory; or the current stream is being captured.
            ValueError: the size makes no sense.
            HeapExhausted: there are no such addresses.
        """
        if not is_whole(size):
            raise ValueError(f"size is {size!r}; it takes a positive number of bytes")
        if self._backend.is_capturing():
            raise RuntimeError("the heap cannot grow while the current stream is being captured; grow it before")
        size = round_up(size, STRIDE_ALIGNMENT)
        place, start = self._map(lambda: self._own_memory(size), f"{size:,} bytes for the heap")
        self._grown[place] = size
        # Not where the window starts, as peer views' storages do: Triton's interpreter takes storages that begin at one
        # address for one.
        offset = max(round_up(place + start, ALIGNMENT), ALIGNMENT)
        self.allocator.add(offset, place + start + size - offset)

    def shared(self) -> list[str]:
        """Return what tensors of other allocators have an address on the heap, in words."""
        return [alias.what for alias in self._aliases.values()]

    def release_memory(self) -> None:
        """Give this rank's memory back to the device, where it is mapped; all addresses stay reserved."""
        for place, size in self._grown.items():
            self._backend.release_memory(place, size)

    def map_memory(self) -> None:
        """Map zeroed memory where `release_memory` has given it back; collective."""
        for place, size in self._grown.items():
            self._backend.map_memory(self._control_plane, place, size)

    def _map(self, find: Callable[[], Memory], what: str) -> tuple[int, int]:
        """Return the offset where the memory is mapped that every rank finds, and its start there."""

        def place(size: int) -> int:
            try:
                return self._addresses.allocate(round_up(size, STRIDE_ALIGNMENT), what)
            except HeapExhausted:
                raise HeapExhausted(
                    f"no addresses for {what}: of {self.stride:,} a rank {self._addresses.free_bytes:,} are free"
                ) from None

        self._addresses.agreed()  # as whatever is mapped is compared
        before = self._addresses.snapshot()
        try:
            return self._backend.map(self._control_plane, find, place)
        except BaseException:
            self._addresses.restore(before)
            raise

    def as_symmetric(self, tensor: torch.Tensor, copy: bool | None) -> torch.Tensor:
        """Return a tensor on the heap with the values of `tensor`: itself, its memory shared, or a copy; collective.

        Args:
            tensor: of any shape and dtype.
            copy: False to share memory or raise, True to copy, None to copy where it cannot be shared.

        Raises:
            ValueError: as `share`, if `copy` is False.
        """
        if self.contains(tensor):
            return tensor
        if not copy:
            try:
                return self.share(tensor.detach())
            except ValueError:
                if copy is not None:
                    raise
        return self.allocate(tensor.shape, tensor.dtype).copy_(tensor.detach())

    def check_device(self, device: torch.device | str | int | None) -> None:
        """Raise RuntimeError for a device that is given and not the heap's."""
        own = self._backend.device
        asked = own if device is None else torch.device(device)
        if asked.type != own.type or asked.index not in (None, own.index):
            raise RuntimeError(f"device {str(device)!r} is not the heap's; it is on {str(own)!r}")

    @plain_tensors()
    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the heap that has the memory of another allocator's tensor; collective. `free` ends that.

        Raises:
            ValueError: a rank's memory cannot be shared, or the ranks' tensors do not lie alike in it.
        """
        what = f"{tuple(tensor.shape)} of {tensor.dtype}"

        def find() -> Memory:
            is_plain = tensor.is_contiguous() and tensor.numel() > 0 and not (tensor.is_neg() or tensor.is_conj())
            if not is_plain or tensor.device != self._backend.device:
                raise ValueError(
                    f"{what} on {tensor.device} cannot be shared; it takes a contiguous tensor with elements on "
                    f"{self._backend.device}, no negated or conjugated view"
                )
            return self._backend.memory_of(tensor)

        place, start = self._map(find, f"the memory of {what}")
        alias = self._aliases[place + start] = _Alias(tensor, place, what)
        return self._tensor_at(place + start, tensor.shape, tensor.dtype, alias)

    @plain_tensors()
    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous buffer with whatever is in it; every rank must make the same call.

        Its storage is its own, and names the allocation. It is no larger, unless the backend's `storages_are_whole`:
        what torch does to whole storages (save, deepcopy) concerns the buffer alone. It is no view, and counts its own
        versions.

        Raises:
            HeapExhausted: there is no room; the message says how much was asked, is in use, and is free.
            ValueError: there is no such shape or dtype.
        """
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype is {dtype!r}; it takes one of torch's, such as torch.bfloat16")
        if any(length < 0 for length in shape):
            raise ValueError(f"shape is {tuple(shape)}; no length may be negative")
        offset = self.allocator.allocate(math.prod(shape) * dtype.itemsize, f"{tuple(shape)} of {dtype}")
        return self._tensor_at(offset, shape, dtype, self.allocator.at(offset))

    def _tensor_at(self, offset: int, shape: Sequence[int], dtype: torch.dtype, allocation: object) -> torch.Tensor:
        """Return the tensor at an offset, whose storage names the allocation."""
        start, window = self.rank * self.stride + offset, self.window.untyped_storage()
        if self._storages_are_whole:
            storage = window[0 : window.nbytes()]
        else:
            storage, start = window[start : start + math.prod(shape) * dtype.itemsize], 0
        storage.allocation = allocation
        buffer = torch.empty(0, dtype=dtype, device=self.window.device)
        strides = torch.empty(tuple(shape), device="meta").stride()
        return buffer.set_(storage, start // dtype.itemsize, tuple(shape), strides)

    def free(self, buffer: torch.Tensor) -> int:
        """Give a buffer back; every rank must make the same call. Returns how many bytes that are.

        Raises:
            ValueError: the tensor is not on the heap, does not start where a buffer starts, was freed before, or is
                part of a `peer_view`.
        """
        offset = self.offset(buffer)
        alias = self._aliases.get(offset)
        found = alias or self.allocator.at(offset)
        if getattr(buffer.untyped_storage(), "allocation", None) is not found:
            raise ValueError(
                f"a tensor of shape {tuple(buffer.shape)} is not of the allocation at heap offset {offset}, "
                f"{found.what}: it was freed before, or is part of a peer_view"
            )
        if alias is None:
            return self.allocator.free(offset)
        self._backend.unmap(alias.place)
        self._addresses.free(alias.place)
        return self._aliases.pop(offset).tensor.nbytes

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's memory is this rank's part of the heap."""
        return self.base <= address_of(tensor) < self.base + self.stride

    def offset(self, tensor: torch.Tensor) -> int:
        """Return how many bytes after the start of the heap the tensor starts.

        Raises:
            ValueError: it is not on the heap.
        """
        if not self.contains(tensor):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} is not on rank {self.rank}'s symmetric "
                "heap; allocate it with the context (ctx.zeros, ctx.empty, ...)"
            )
        return address_of(tensor) - self.base

    def describe(self, address: int) -> str | None:
        """Say what lies at an address, and on whose heap; None if it is on none."""
        rank, within = divmod(address - self.window.data_ptr(), self.stride)
        for offset, alias in self._aliases.items():
            if offset <= within < offset + alias.tensor.nbytes and 0 <= rank < self.world_size:
                return f"byte {within - offset} of {alias.what}, of another allocator's, on rank {rank}'s heap"
        return f"{self.allocator.describe(within)}, on rank {rank}'s heap" if 0 <= rank < self.world_size else None

    def peer_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all ranks' copies of a heap tensor as one tensor, shape ``(world_size, *tensor.shape)``.

        Autograd does not see that what is written through it is written to the tensor.

        Raises:
            ValueError: the tensor is not on the heap, or a negated or conjugated view.
        """
        if tensor.is_neg() or tensor.is_conj():
            raise ValueError("a negated or conjugated view has no peers' views; take those of the tensor that it views")
        itemsize, offset = tensor.element_size(), self.offset(tensor)
        shape, strides = (self.world_size, *tensor.shape), (self.stride // itemsize, *tensor.stride())
        # `no_grad` alone takes the host a microsecond, where first calls ask for views.
        with plain_tensors() if torch.is_inference_mode_enabled() else torch.no_grad():
            return self.window.view(tensor.dtype).as_strided(shape, strides, offset // itemsize)


def address_of(tensor: torch.Tensor) -> int:
    """Where a tensor starts; unlike data_ptr() also for one without elements."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()
