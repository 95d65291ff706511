"""The symmetric heap: the same allocation at the same offset on every rank, all of them in one window of addresses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..backends.base import Backend
from ..errors import PeerError
from ..rendezvous.control_plane import ControlPlane
from ..utils.torch_modes import plain_tensors
from .allocator import OffsetAllocator


class SymmetricHeap:
    """One heap a rank. Rank r's lies at ``base + r * stride``, so a peer's copy of a buffer is a constant away.

    Args:
        control_plane: all ranks; making a heap is collective.
        backend: the kind of memory.
        size: bytes a rank, rounded up to the backend's granularity.
    """

    def __init__(self, control_plane: ControlPlane, backend: Backend, size: int) -> None:
        self._storages_are_whole = backend.storages_are_whole
        self.rank = control_plane.rank
        self.world_size = control_plane.world_size
        try:
            self.window, self.stride = backend.open_window(control_plane, size)
        except PeerError:
            raise
        except (OSError, OverflowError, RuntimeError) as error:
            asked = f"no heap of {size:,} bytes a rank, which iris(heap_size=...) asks for"
            raise type(error)(f"{asked}: {error}") from error
        self.base = self.window.data_ptr() + self.rank * self.stride
        self.allocator = OffsetAllocator(self.stride)
        bases = [self.window.data_ptr() + rank * self.stride for rank in range(self.world_size)]
        self.bases = torch.tensor(bases, dtype=torch.uint64, device=backend.device)

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
        size = math.prod(shape) * dtype.itemsize
        offset = self.allocator.allocate(size, f"{tuple(shape)} of {dtype}")
        start = self.rank * self.stride + offset
        window = self.window.untyped_storage()
        # Triton's interpreter takes storages that begin at one address for one: what begins where the window does (the
        # context's own first words, on rank 0) is as large.
        if start == 0 or self._storages_are_whole:
            storage = window[0 : window.nbytes()]
        else:
            storage, start = window[start : start + size], 0
        storage.allocation = self.allocator.at(offset)
        strides = torch.empty(tuple(shape), device="meta").stride()
        with plain_tensors():
            buffer = torch.empty(0, dtype=dtype, device=self.window.device)
            return buffer.set_(storage, start // dtype.itemsize, tuple(shape), strides)

    def free(self, buffer: torch.Tensor) -> int:
        """Give a buffer back; every rank must make the same call. Returns how many bytes that are.

        Raises:
            ValueError: the tensor is not on the heap, does not start where a buffer starts, was freed before, or is
                part of a `peer_view`.
        """
        offset = self.offset(buffer)
        found = self.allocator.at(offset)
        if getattr(buffer.untyped_storage(), "allocation", None) is not found:
            raise ValueError(
                f"a tensor of shape {tuple(buffer.shape)} is not of the allocation at heap offset {offset}, "
                f"{found.what}: it was freed before, or is part of a peer_view"
            )
        return self.allocator.free(offset)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's memory is this rank's part of the heap."""
        return self.base <= address_of(tensor) < self.base + self.stride

    def offset(self, tensor: torch.Tensor) -> int:
        """Return how many bytes after the start of the heap the tensor starts.

        Raises:
            ValueError: it is not on the heap.
        """
        offset = address_of(tensor) - self.base
        if not 0 <= offset < self.stride:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} is not on rank {self.rank}'s symmetric "
                "heap; allocate it with the context (ctx.zeros, ctx.empty, ...)"
            )
        return offset

    def describe(self, address: int) -> str | None:
        """Say what lies at an address, and on whose heap; None if it is on none."""
        rank, within = divmod(address - self.window.data_ptr(), self.stride)
        return f"{self.allocator.describe(within)}, on rank {rank}'s heap" if 0 <= rank < self.world_size else None

    def peer_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return all ranks' copies of a heap tensor as one tensor, shape ``(world_size, *tensor.shape)``.

        Autograd does not see that what is written through it is written to the tensor.

        Raises:
            ValueError: the tensor is not on the heap.
        """
        itemsize, offset = tensor.element_size(), self.offset(tensor)
        shape, strides = (self.world_size, *tensor.shape), (self.stride // itemsize, *tensor.stride())
        with plain_tensors():
            return self.window.view(tensor.dtype).as_strided(shape, strides, offset // itemsize)


def address_of(tensor: torch.Tensor) -> int:
    """Where a tensor starts; unlike data_ptr() also for one without elements."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()
