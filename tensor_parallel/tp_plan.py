"""The `tp_plan` of transformers' models, in styles of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import parallel as torchs
from torch.distributed.tensor.parallel import ParallelStyle

from iris_core import Context

from .styles import ColwiseParallel, RowwiseParallel


class SumGradients(ParallelStyle):
    """Of a module whose parameters each rank uses for its own heads: their gradients are summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def summed(grad: torch.Tensor) -> torch.Tensor:
            whole = grad.clone()
            dist.all_reduce(whole, group=group)
            return whole

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(summed)
        return module


# By transformers' names; the later of two for the same are those of its older versions.
_STYLES: dict[str, Callable[[Context | None], ParallelStyle]] = {
    "colwise": lambda ctx: ColwiseParallel(ctx),
    "rowwise": lambda ctx: RowwiseParallel(ctx),
    "colwise_gather_output": lambda ctx: ColwiseParallel(ctx, output_layouts=Replicate()),
    "colwise_rep": lambda ctx: ColwiseParallel(ctx, output_layouts=Replicate()),
    "rowwise_split_input": lambda ctx: RowwiseParallel(ctx, input_layouts=Replicate()),
    "rowwise_rep": lambda ctx: RowwiseParallel(ctx, input_layouts=Replicate()),
    "embedding_rowwise": lambda ctx: torchs.RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda ctx: torchs.ColwiseParallel(output_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda ctx: SumGradients(),
}


def plan_of(
    model: Any, world_size: int, ctx: Context | None = None, *, others: Mapping[str, ParallelStyle] | None = None
) -> dict[str, ParallelStyle]:
    """Return what torch's ``parallelize_module`` takes, of the `tp_plan` that a transformers model has.

    Linear layers get styles of this package, embeddings torch's. Weights that the model ties are parameters of their
    own once they are cut: ``model.tie_weights()`` ties them again.

    Args:
        model: a ``PreTrainedModel``, or what has its `tp_plan` and `config`.
        world_size: the number of ranks.
        ctx: the context; None where `parallelize` makes it.
        others: styles for what there is none for here, by the names that the plan has for them.

    Raises:
        ValueError: the model has no plan, or one with names that have no style here; or its heads cannot be cut.
    """
    named = getattr(model, "tp_plan", None)
    if not named:
        raise ValueError(f"{type(model).__name__} has no tp_plan; write a plan, of layers' names and styles")
    known = {name: make(ctx) for name, make in _STYLES.items()} | dict(others or {})
    if unknown := {path: name for path, name in named.items() if name not in known}:
        raise ValueError(
            f"the tp_plan of {type(model).__name__} has styles that have none here: {unknown}; give some, "
            f"others={{name: style}}. Known are {', '.join(_STYLES)}"
        )
    _check_heads(model.config, world_size)
    return {path: known[name] for path, name in named.items()}


def _check_heads(config: Any, world_size: int) -> None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None)
        if heads is not None and heads % world_size:
            repeated = (
                ", or repeat each of them before: k_proj.weight.unflatten(0, (heads, -1)).repeat_interleave(times, 0)"
                ".flatten(0, 1), v_proj's likewise, with the attention's num_key_value_groups divided by times"
            )
            fewer = world_size % heads == 0 and name == "num_key_value_heads"
            raise ValueError(
                f"{name} is {heads}, which cannot be cut for {world_size} ranks; use a number of ranks that divides it"
                f"{repeated if fewer else ''}"
            )
