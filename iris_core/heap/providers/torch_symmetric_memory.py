"""Memory of torch's symmetric memory, of the backend that is set there: CUDA, NVSHMEM or NCCL.

The buffers need no `rendezvous` of torch's: the heap maps the peers' memory itself, at addresses a stride apart.
Kernels that use torch's own signal pads or multicast addresses do need it.
"""

from __future__ import annotations

import torch
import torch.distributed._symmetric_memory as symm_mem


class TorchSymmetricMemory:
    """Allocates with ``torch.distributed._symmetric_memory.empty``."""

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        """Return uint8 of (size,) on a device."""
        return symm_mem.empty(size, dtype=torch.uint8, device=device)

    def free(self, memory: torch.Tensor) -> None:
        """Do nothing: torch frees a buffer with its last tensor."""
