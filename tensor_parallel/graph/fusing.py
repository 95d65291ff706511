"""Collectives beside matrix products in a model of torch's, fused where `torch.compile` finds them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from iris_core import Context
from iris_core.utils.settings import is_whole


def fuse_collectives(
    ctx: Context, *, min_tokens: int | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Return options of ``torch.compile`` that fuse functional collectives with the matrix products beside them.

    ``torch.compile(model, options=fuse_collectives(ctx))``, for a model of torch's styles, or of collectives of its
    own, forward and backward. Collective. In each graph, where it is compiled,

    - an all-gather of tokens and the product that reads them become ``iris_overlap.all_gather_gemm``,
    - a product and a reduce-scatter along tokens become ``iris_overlap.gemm_reduce_scatter``,
    - a product and an all-reduce become ``iris_overlap.gemm_all_reduce``.

    The logger ``iris_tensor_parallel.graph.fuse_pass`` says at the level INFO what was replaced, and what not, and why.

    Args:
        ctx: the context.
        min_tokens: replace from so many rows of the product on, of all ranks together; None for those numbers of rows
            for which `auto` takes kernels of this library. Of a graph for any number, that of its first call decides.
        group: whose collectives are replaced, ``mesh["tp"].get_group()``; its ranks are the context's, in their order.
            None for ``ctx.process_group()``, which `mesh_of` is made of.

    Returns:
        The option ``post_grad_custom_pre_pass``: a function of an FX graph, which another pass can call.

    Raises:
        ValueError: there is no such context, number or group; or the ranks give different numbers.
        RuntimeError: see `Context.process_group`.
    """
    if not isinstance(ctx, Context):
        raise ValueError(f"ctx is a {type(ctx).__name__}; it must be an iris_core.Context, as iris_core.iris() returns")
    own = ctx.process_group()
    with ctx.collective_section("fuse collectives"):
        if not (min_tokens is None or is_whole(min_tokens)):
            raise ValueError(f"min_tokens is {min_tokens!r}; it takes a positive number of rows, or None")
        group = own if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group is a {type(group).__name__}; it must be a torch.distributed.ProcessGroup")
        ranks, asked = dist.get_process_group_ranks(own), dist.get_process_group_ranks(group)
        if ranks != asked:
            raise ValueError(f"group is of the ranks {asked}; it must be of the context's, {ranks}, in this order")
    ctx.agree("from how many tokens on collectives are fused", min_tokens)

    from .fuse_pass import FuseCollectives  # which imports the compiler

    return {"post_grad_custom_pre_pass": FuseCollectives(ctx, group.group_name, min_tokens)}
