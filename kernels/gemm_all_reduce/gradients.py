"""The gradients of GEMM + all-reduce: C's is the same on all ranks, and nothing is communicated."""

from __future__ import annotations

import torch

from ..common.torch_op import Product


def gradients(
    product: Product, a: torch.Tensor, b: torch.Tensor, grad: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return A's and B's gradients, those that are wanted; see `torch_op.define_op`."""
    return grad @ b.t() if wanted[0] else None, a.t() @ grad if wanted[1] else None
