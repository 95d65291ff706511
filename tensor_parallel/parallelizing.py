"""A whole model in one call: a context with room for it, its layers cut, their operators' memory made."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from iris_core import Context, iris
from iris_core.utils.settings import is_whole

from .layers.modules import checked_whole
from .layers.preparing import prepare
from .layers.shared import share_products
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

    Layers of one x are multiplied as one, as after `share_products`. Weights that are tied, such as an embedding's and
    the head's, stay tied. In debug mode (``IRIS_DEBUG=1``) ranks compare the sizes of the model's inputs at each call,
    ahead of what torch cuts, such as an embedding, whose collectives know no named error.

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
        ValueError: the plan has no layer of this package that the model has, or one that is cut already or has a
            forward of its own, or a layer twice, in which case nothing is cut; max_tokens is no positive integer; the
            mesh has several dimensions; sequence_parallel with a plan, which says that itself; tied weights that the
            plan cuts in different ways, with gradients; as `plan_of` and the styles raise.
        HeapExhausted: the context given has no room.
        RuntimeError: see `iris`.
    """
    if plan is not None and sequence_parallel:
        raise ValueError(
            "sequence_parallel is of the model's own plan, and a plan is given: have it from "
            "plan_of(..., sequence_parallel=True), or leave it out"
        )
    if mesh.ndim != 1:
        raise ValueError(f'mesh is {mesh}; it takes one of a single dimension, such as mesh["tp"]')
    plan = plan_of(model, mesh.size(), sequence_parallel=sequence_parallel) if plan is None else plan
    needed = heap_bytes(model, plan, max_tokens, world_size=mesh.size(), gradients=gradients)
    matched: dict[nn.Module, str] = {}
    for name, module, style in _fused(model, plan):
        try:
            checked_whole(module, style.options.get("quantize"))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if module in matched:
            raise ValueError(
                f"{name} is {matched[module]} too" if matched[module] != name else f"{name} is in the plan twice"
            )
        matched[module] = name
    with contextlib.ExitStack() as opened:
        if ctx is None:
            ctx = opened.enter_context(iris(needed, mesh.device_type, group=mesh.get_group()))
        bound = {path: style.on(ctx) if isinstance(style, FusedStyle) else style for path, style in plan.items()}
        tied = _tied(model)
        parallelize_module(model, mesh, bound)
        _tie(model, tied, gradients=gradients)
        share_products(model)
        prepare(model, max_tokens, gradients=gradients)
        if ctx.debug_mode:
            model.register_forward_pre_hook(functools.partial(_compare_inputs, ctx), with_kwargs=True)
        opened.pop_all()
    return ctx


def _compare_inputs(ctx: Context, model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        given = [*enumerate(inputs), *options.items()]
        sizes = {str(name): list(one.shape) for name, one in given if isinstance(one, torch.Tensor)}
        ctx.agree(f"the sizes of the inputs of {type(model).__name__}", sizes)


def _tied(model: nn.Module) -> list[list[str]]:
    """Return the names of parameters that are one, each of these together."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _tie(model: nn.Module, tied: Sequence[Sequence[str]], *, gradients: bool) -> None:
    """Make one again of parameters that were, where they are cut alike.

    Raises:
        ValueError: gradients are to be of them, and they are cut in different ways.
    """
    for names in tied:
        parameters = [model.get_parameter(name) for name in names]
        cuts = [
            (one.device_mesh, one.placements, one.dtype) if isinstance(one, DTensor) else None for one in parameters
        ]
        if all(cut == cuts[0] for cut in cuts):
            for name in names[1:]:
                path, _, last = name.rpartition(".")
                setattr(model.get_submodule(path), last, parameters[0])
        elif gradients:
            ways = {name: "whole" if cut is None else cut[1] for name, cut in zip(names, cuts, strict=True)}
            raise ValueError(
                f"{' and '.join(names)} are tied, and the plan cuts them in different ways, which leaves each with "
                f"gradients of its own: {ways}; give them styles that cut alike, or untie them first"
            )


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
        ValueError: the plan has no layer of this package that the model has, or max_tokens is no positive integer.
    """
    found = [(module, style) for _, module, style in _fused(model, plan) if isinstance(module, nn.Linear)]
    if not found or not is_whole(max_tokens):
        raise ValueError(
            f"max_tokens is {max_tokens!r}; it takes a positive integer"
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


def _fused(model: nn.Module, plan: Mapping[str, ParallelStyle]) -> Iterator[tuple[str, nn.Module, FusedStyle]]:
    """Yield the modules that a plan's styles of this package are for, with their names."""
    for path, style in plan.items():
        if isinstance(style, FusedStyle):
            for name, module in model.named_modules(remove_duplicate=False):
                parts, names = path.split("."), name.split(".")
                is_model = name == ""  # which no pattern names
                if is_model == (path == "") and len(parts) == len(names) and all(map(fnmatch, names, parts)):
                    yield name, module, style
