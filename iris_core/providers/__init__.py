"""Allocators of other libraries that the symmetric heap can be made of, each a `MemoryProvider`."""

from __future__ import annotations

from ..heap.heap import MemoryProvider


def provider_named(name: str) -> MemoryProvider:
    """Return the provider of a name.

    Raises:
        ValueError: there is none.
        ImportError: its library is not installed.
    """
    if name == "torch_symmetric_memory":
        from .torch_symmetric_memory import TorchSymmetricMemory

        return TorchSymmetricMemory()
    if name == "nvshmem":
        from .nvshmem import Nvshmem

        return Nvshmem()
    raise ValueError(f'there is no provider {name!r}; there are "torch_symmetric_memory" and "nvshmem"')
