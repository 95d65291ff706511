"""A whole model in one call: a context with room for it, its layers cut, their operators' memory made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from iris_core import Context, iris

from .layers.preparing import prepare
from .layers.shared import share_gathers
from .sequences import ShardSequences
from .styles import FusedStyle, RowwiseParallel
from .tp_plan import plan_of

_ALWAYS_BYTES = 64 << 20  # the context's own, and flags
_VARIANTS = 2  # calls of fewer tokens may be of others, with memory of their own: of a half, a quarter, …


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle] | None = None,
    *,
    max_tokens: int,
    gradients: bool = False,
    sequence_parallel: bool = False,
    ctx: Context | None = None,
) -> Context:
    """Cut a model, in place, and make room for calls of up to so many tokens; collective.

    Layers of one x gather it once, as after `share_gathers`.

    Args:
        model: the whole model, the same on all ranks of the mesh.
        mesh: of one dimension, such as ``mesh["tp"]``.
        plan: styles by layers' names, as ``parallelize_module`` takes them, those of this package without a context;
            None for the model's `tp_plan`, see `plan_of`.
        max_tokens: of all ranks together.
        gradients: whether calls will compute them.
        sequence_parallel: whether the model's own plan shards sequences between layers, see `plan_of`.
        ctx: the context; None to make one of the mesh's ranks, with a heap of `heap_bytes`.

    Returns:
        The context: close it when the model is no longer called.

    Raises:
        ValueError: the plan has no layer of this package that the model has, or max_tokens is below 1;
            sequence_parallel with a plan, which says that itself; as `plan_of` and the styles raise.
        HeapExhausted: the context given has no room.
        RuntimeError: see `iris`.
    """
    if plan is not None and sequence_parallel:
        raise ValueError(
            "sequence_parallel is of the model's own plan, and a plan is given: have it from "
            "plan_of(..., sequence_parallel=True), or leave it out"
        )
    plan = plan_of(model, mesh.size(), sequence_parallel=sequence_parallel) if plan is None else plan
    needed = heap_bytes(model, plan, max_tokens, world_size=mesh.size(), gradients=gradients)
    if ctx is None:
        ctx = iris(needed, mesh.device_type, group=mesh.get_group())
    bound = {path: style.on(ctx) if isinstance(style, FusedStyle) else style for path, style in plan.items()}
    parallelize_module(model, mesh, bound)
    share_gathers(model)
    prepare(model, max_tokens, gradients=gradients)
    return ctx


def heap_bytes(
    model: nn.Module, plan: Mapping[str, ParallelStyle], max_tokens: int, *, world_size: int, gradients: bool = False
) -> int:
    """Return how many bytes of each rank's heap a model needs, at most, for calls of up to so many tokens.

    Args:
        model: the whole model; parameters may be on the meta device.
        plan: what it will be cut by.
        max_tokens: of all ranks together.
        world_size: the number of ranks.
        gradients: whether calls will compute them.

    Raises:
        ValueError: the plan has no layer of this package that the model has, or max_tokens is below 1.
    """
    found = list(_fused(model, plan))
    if not found or max_tokens < 1:
        raise ValueError(
            f"max_tokens is {max_tokens}; it takes a positive number"
            if found
            else f"no style of iris_tensor_parallel in the plan is for a linear layer of this {type(model).__name__}"
        )
    calls = [(linear, style, gradients) for linear, style in found]
    if any(isinstance(style, ShardSequences) for style in plan.values()):
        calls += [(linear, RowwiseParallel(), False) for linear, style in found if isinstance(style, RowwiseParallel)]
    # Layers of one size share the memory of their operators.
    sizes = {
        (type(style), style.fused_layouts, linear.weight.shape, linear.weight.dtype): _bytes_of_element(linear)
        * style.heap_elements(linear, max_tokens, world_size, gradients=has_gradients)
        for linear, style, has_gradients in calls
    }
    return _ALWAYS_BYTES + _VARIANTS * sum(sizes.values())


def _bytes_of_element(linear: nn.Linear) -> int:
    """Return how large elements on the heap are at most; beside fp8 weights partial sums have 16 bits."""
    return max(linear.weight.itemsize, torch.bfloat16.itemsize)


def _fused(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> Iterator[tuple[nn.Linear, FusedStyle]]:
    """Yield the linear layers that a plan's styles of this package are for."""
    for path, style in plan.items():
        if isinstance(style, FusedStyle):
            for name, module in model.named_modules():
                parts, names = path.split("."), name.split(".")
                if len(parts) == len(names) and all(map(fnmatch, names, parts)) and isinstance(module, nn.Linear):
                    yield module, style
