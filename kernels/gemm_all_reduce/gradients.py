"""The gradients of GEMM + all-reduce: C's is the same on all ranks, and nothing is communicated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.operators.product import Product


def gradients(
    product: Product, a: torch.Tensor, b: Sequence[torch.Tensor], grad: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return A's and B's gradients, those that are wanted; see `torch_op.define_op`."""
    of_a = torch.cat([grad @ one.t() for one in b], 1) if wanted[0] else None
    return of_a, a.t() @ grad if wanted[1] else None
