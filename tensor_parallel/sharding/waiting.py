"""What a collective of torch's may still fill: torch's ops wait for it themselves, a kernel does not."""

from __future__ import annotations

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, as of `DTensor.redistribute`, behind its collective on the current stream, without autograd."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
