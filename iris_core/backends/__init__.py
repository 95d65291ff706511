"""Where the symmetric heap's memory comes from and how ranks share it: one module a kind of memory."""

from __future__ import annotations

from .base import Backend

BACKENDS = ("cuda", "hip", "shm")


def make_backend(name: str, device_index: int) -> Backend:
    """Return a backend by name; `device_index` is the GPU's, and ignored by ``shm``.

    Raises:
        RuntimeError: this machine cannot run it; the message says what is missing.
        ValueError: no backend has this name.
    """
    if name == "cuda":
        from .cuda import CudaBackend

        return CudaBackend(device_index)
    if name == "hip":
        from .hip import HipBackend

        return HipBackend(device_index)
    if name == "shm":
        from .shm import ShmBackend

        return ShmBackend()
    raise ValueError(f"unknown backend {name!r}; known backends: {', '.join(BACKENDS)}")
