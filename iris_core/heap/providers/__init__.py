"""Allocators of other libraries that the symmetric heap can be made of, each a `MemoryProvider`."""

from __future__ import annotations

from collections.abc import Callable

from ...backends.base import Backend, Memory
from ..heap import MemoryProvider


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


def provided_memory(provider: str | MemoryProvider, backend: Backend) -> Callable[[int], Memory]:
    """Return what takes a rank's memory, so many bytes, from a provider, or the one of a name, for the heap.

    Raises:
        ValueError, ImportError: as `provider_named`.
    """
    of_name = provider_named(provider) if isinstance(provider, str) else provider

    def own_memory(size: int) -> Memory:
        provided = of_name.allocate(size, backend.device)
        try:
            return backend.memory_of(provided)._replace(free=lambda: of_name.free(provided))
        except BaseException:
            of_name.free(provided)
            raise

    return own_memory
