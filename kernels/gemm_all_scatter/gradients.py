"""The gradients of GEMM + all-scatter: C's is the same on all ranks; A's is summed over their columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from iris_core.context import context_named

from ..common.operators.product import Product
from ..common.problem import shard_bounds


def gradients(
    product: Product, a: torch.Tensor, b: Sequence[torch.Tensor], grad: torch.Tensor, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return A's and B's gradients, those that are wanted; see `torch_op.define_op`."""
    own = own_columns(product, grad)
    of_a = of_b = None
    if wanted[0]:
        (of_a,) = product.backward("gemm_all_reduce", own, [one.t() for one in b], product.m, product.k, product.n)
    if wanted[1]:
        of_b = a.t() @ own
    return of_a, of_b


def own_columns(product: Product, grad: torch.Tensor) -> torch.Tensor:
    """Return of C's gradient the columns that this rank's B gives."""
    ctx = context_named(product.context)
    return grad[:, slice(*shard_bounds(product.n, ctx.get_num_ranks(), ctx.get_rank()))]
