"""The gradients of GEMM + reduce-scatter: C's is gathered, once, for both."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.operators.product import Product


def gradients(
    product: Product, a: torch.Tensor, b: Sequence[torch.Tensor], grad: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return A's and B's gradients, those that are wanted; see `torch_op.define_op`."""
    sizes = product.m, product.k, product.n
    of_a, whole = product.backward("all_gather_gemm", grad, [one.t() for one in b], *sizes, keep_gathered=True)
    return of_a if wanted[0] else None, a.t() @ whole if wanted[1] else None
