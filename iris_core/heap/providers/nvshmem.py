"""Memory of NVSHMEM's symmetric heap, by ``nvshmem4py``.

NVSHMEM is to be initialised by the caller (``nvshmem.core.init``), with enough ``NVSHMEM_SYMMETRIC_SIZE``, and
finalised after the context was closed. Its heap is to be of CUDA's virtual-memory calls, as it is by default
(``NVSHMEM_DISABLE_CUDA_VMM=0``).
"""

from __future__ import annotations

import torch


class Nvshmem:
    """Allocates with ``nvshmem.core.tensor``, which is collective over all PEs.

    Raises:
        ImportError: nvshmem4py is not installed.
    """

    def __init__(self) -> None:
        try:
            from nvshmem import core
        except ImportError as error:
            install = "pip install nvshmem4py-cu12, or nvshmem4py-cu13"
            raise ImportError(f'the provider "nvshmem" needs nvshmem4py: {install}') from error
        self._core = core

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        """Return uint8 of (size,) on NVSHMEM's device, which is the rank's."""
        return self._core.tensor((size,), dtype=torch.uint8)

    def free(self, memory: torch.Tensor) -> None:
        """Give it back to NVSHMEM's heap."""
        self._core.free_tensor(memory)
