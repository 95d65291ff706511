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

from .sharding.float8 import Float8
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


class DivideGroups(ParallelStyle):
    """Of an attention whose keys and values are replicated: fewer of a rank's queries share each.

    Args:
        replicas: ranks that have the same keys and values.
    """

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self._replicas = replicas

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        groups: Any = getattr(module, "num_key_value_groups", None)
        if groups is None or groups % self._replicas:
            raise ValueError(
                f"{type(module).__name__}.num_key_value_groups is {groups}; where keys and values have "
                f"{self._replicas} replicas, it must be a multiple of them"
            )
        attention: Any = module
        attention.num_key_value_groups = groups // self._replicas
        return module


# By transformers' names; the later of two for the same are those of its older versions. Heads of models, whose output
# is gathered, are not quantised.
_STYLES: dict[str, Callable[[Context | None, Float8 | None], ParallelStyle]] = {
    "colwise": lambda ctx, how: ColwiseParallel(ctx, quantize=how),
    "rowwise": lambda ctx, how: RowwiseParallel(ctx, quantize=how),
    "colwise_gather_output": lambda ctx, how: ColwiseParallel(ctx, output_layouts=Replicate()),
    "colwise_rep": lambda ctx, how: ColwiseParallel(ctx, output_layouts=Replicate()),
    "rowwise_split_input": lambda ctx, how: RowwiseParallel(ctx, input_layouts=Replicate(), quantize=how),
    "rowwise_rep": lambda ctx, how: RowwiseParallel(ctx, input_layouts=Replicate(), quantize=how),
    "embedding_rowwise": lambda ctx, how: torchs.RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda ctx, how: torchs.ColwiseParallel(output_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda ctx, how: SumGradients(),
}


def plan_of(
    model: Any,
    world_size: int,
    ctx: Context | None = None,
    *,
    others: Mapping[str, ParallelStyle] | None = None,
    quantize: Float8 | None = None,
) -> dict[str, ParallelStyle]:
    """Return what torch's ``parallelize_module`` takes, of the `tp_plan` that a transformers model has.

    Linear layers get styles of this package, embeddings torch's. Where there are fewer heads of keys and values than
    ranks, each rank has the one that its queries need, and its neighbours have the same (`ColwiseParallel`'s
    `replicas`). Weights that the model ties are parameters of their own once they are cut: ``model.tie_weights()`` ties
    them again.

    Args:
        model: a ``PreTrainedModel``, or what has its `tp_plan` and `config`.
        world_size: the number of ranks.
        ctx: the context; None where `parallelize` makes it.
        others: styles for what there is none for here, by the names that the plan has for them.
        quantize: how linear layers multiply in fp8, all but a head whose output is gathered; None for in x's dtype.

    Raises:
        ValueError: the model has no plan, or one with names that have no style here; or its heads cannot be cut, or
            replicated.
    """
    named = getattr(model, "tp_plan", None)
    if not named:
        raise ValueError(f"{type(model).__name__} has no tp_plan; write a plan, of layers' names and styles")
    known = {name: make(ctx, quantize) for name, make in _STYLES.items()} | dict(others or {})
    if unknown := {path: name for path, name in named.items() if name not in known}:
        raise ValueError(
            f"the tp_plan of {type(model).__name__} has styles that have none here: {unknown}; give some, "
            f"others={{name: style}}. Known are {', '.join(_STYLES)}"
        )
    plan = {path: known[name] for path, name in named.items()}
    replicas = _replicas_of_heads(model.config, world_size)
    return plan if replicas == 1 else plan | _replicated(plan, replicas, ctx)


def _replicas_of_heads(config: Any, world_size: int) -> int:
    """Return how many ranks have the same keys and values.

    Raises:
        ValueError: heads cannot be cut for so many ranks.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    queries, keys = (getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if queries is not None and queries % world_size:
        raise ValueError(
            f"num_attention_heads is {queries}, which cannot be cut for {world_size} ranks; use a number of ranks that "
            "divides it"
        )
    if keys is None or keys % world_size == 0:
        return 1
    if world_size % keys:
        raise ValueError(
            f"num_key_value_heads is {keys}, which can be neither cut nor replicated for {world_size} ranks; use a "
            "number of ranks that divides it, or a multiple of it"
        )
    return world_size // keys


def _replicated(plan: Mapping[str, ParallelStyle], replicas: int, ctx: Context | None) -> dict[str, ParallelStyle]:
    """Return what to change in a plan of fewer heads of keys and values than ranks.

    Raises:
        ValueError: the plan does not cut keys and values as layers of their own.
    """
    changed: dict[str, ParallelStyle] = {}
    for path, style in plan.items():
        parent, _, name = path.rpartition(".")
        if name in ("k_proj", "v_proj") and isinstance(style, ColwiseParallel):
            changed |= {path: ColwiseParallel(ctx, replicas=replicas, **style.options), parent: DivideGroups(replicas)}
    if not changed:
        raise ValueError(
            f"there are {replicas} ranks for each head of keys and values, and the tp_plan has no k_proj and v_proj by "
            "columns that could be replicated; use as many ranks as there are such heads, or fewer"
        )
    return changed
