"""The gradients of all-gather + GEMM: A's by a GEMM and a reduce-scatter, B's from the gathered A."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..common.operators.product import Product


def gradients(
    product: Product, a: torch.Tensor, b: Sequence[torch.Tensor], grad: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return A's and B's gradients, those that are wanted; see `torch_op.define_op`."""
    of_a = of_b = None
    if wanted[0]:
        (of_a,) = product.backward("gemm_reduce_scatter", grad, [one.t() for one in b], product.m, product.k, product.n)
    if wanted[1]:
        of_b = a.t() @ grad
    return of_a, of_b
