"""The `tp_plan` of transformers' models, in styles of this package."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import parallel as torchs
from torch.distributed.tensor.parallel import ParallelStyle

from iris_core import Context

from .sequences import ShardSequences
from .sharding.float8 import Float8
from .styles import ColwiseParallel, RowwiseParallel


class SumGradients(ParallelStyle):
    """Of a module that ranks call with other heads or tokens: its parameters' gradients are summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # No hooks of parameters: FSDP and copies of a module have other ones.
        for one in module.modules():
            one.register_forward_pre_hook(functools.partial(_use_summed, device_mesh))
            one.register_forward_hook(_use_own, always_call=True)
        return module


def _use_summed(mesh: DeviceMesh, module: Any, inputs: tuple[Any, ...]) -> None:
    """Ahead of a call, have it use its parameters by way of what sums their gradients."""
    module._own = dict(module._parameters) if torch.is_grad_enabled() else {}
    for name, own in module._own.items():
        if own is not None and own.requires_grad:
            alike = DTensor.from_local(own, mesh, [Replicate()], run_check=False)
            module._parameters[name] = alike.to_local(grad_placements=[Partial()])


def _use_own(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
    module._parameters.update(module._own)
    module._own = {}


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
    sequence_parallel: bool = False,
) -> dict[str, ParallelStyle]:
    """Return what torch's ``parallelize_module`` takes, of the `tp_plan` that a transformers model has.

    Linear layers get styles of this package, embeddings torch's. Where there are fewer heads of keys and values than
    ranks, each rank has the one that its queries need, and its neighbours have the same (`ColwiseParallel`'s
    `replicas`). Weights that the model ties are parameters of their own once ``parallelize_module`` has cut them:
    ``model.tie_weights()`` ties them again, as `parallelize` does.

    Args:
        model: a ``PreTrainedModel``, or what has its `tp_plan` and `config`.
        world_size: the number of ranks.
        ctx: the context; None where `parallelize` makes it.
        others: styles for what there is none for here, by the names that the plan has for them.
        quantize: how linear layers multiply in fp8, all but a head whose output is gathered; None for in x's dtype.
        sequence_parallel: whether each rank has a part of every sequence between the model's layers, see
            `ShardSequences`. These must be of "colwise" and "rowwise" linear layers, and of what takes single tokens.

    Raises:
        ValueError: the model has no plan, or one with names that have no style here; or its heads cannot be cut, or
            replicated; or its sequences cannot be.
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
    if sequence_parallel:
        plan |= _of_sharded_sequences(model, named, ctx, quantize)
    replicas = _replicas_of_heads(model.config, world_size)
    return plan if replicas == 1 else plan | _replicated(plan, replicas, ctx)


def _of_sharded_sequences(
    model: nn.Module, named: Mapping[str, str], ctx: Context | None, quantize: Float8 | None
) -> dict[str, ParallelStyle]:
    """Return what to change in a plan, and to add, for sequences that are sharded between the model's layers.

    Raises:
        ValueError: what is between them is more than linear layers in pairs and operations on single tokens.
    """
    lists = sorted({path.split(".*.")[0] for path in named if ".*." in path})
    parent = "" if len(lists) != 1 else lists[0].rpartition(".")[0]
    if len(lists) != 1 or not hasattr(model.get_submodule(parent), "norm"):
        raise ValueError(
            "sequence_parallel takes a model with one list of layers, and `norm` beside it behind the last of them; "
            f"the tp_plan of {type(model).__name__} has {lists}: write a plan, with ShardSequences"
        )
    (layers,) = lists
    tokens = Shard(1)
    styles: dict[str | None, Callable[[], ParallelStyle]] = {
        "colwise": lambda: ColwiseParallel(ctx, input_layouts=tokens, quantize=quantize),
        "rowwise": lambda: RowwiseParallel(ctx, output_layouts=tokens, quantize=quantize),
        "replicated_with_grad_allreduce": SumGradients,
        None: SumGradients,  # a norm, whose gradient is of this rank's tokens
    }
    changed: dict[str, ParallelStyle] = {}
    for name, module in model.get_submodule(layers).named_modules():
        own = list(module.parameters(recurse=False))
        path = f"{layers}.*.{name.partition('.')[2]}"
        style = named.get(path)
        if own and (style not in styles or (style is None and any(one.ndim > 1 for one in own))):
            raise ValueError(
                f"sequence_parallel takes layers of linear ones, colwise and then rowwise, and norms; {path}, a "
                f"{type(module).__name__}, is {style or 'none of them'} in the tp_plan of {type(model).__name__}: "
                "write a plan, with ShardSequences, or leave sequence_parallel out"
            )
        if own:
            changed[path] = styles[style]()
    sharded = ShardSequences(layers.rpartition(".")[2])
    return changed | {f"{parent}.norm".removeprefix("."): SumGradients(), parent: sharded}


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
            cut = ColwiseParallel(ctx, replicas=replicas, input_layouts=style.input_layouts[0], **style.options)
            changed |= {path: cut, parent: DivideGroups(replicas)}
    if not changed:
        raise ValueError(
            f"there are {replicas} ranks for each head of keys and values, and the tp_plan has no k_proj and v_proj by "
            "columns that could be replicated; use as many ranks as there are such heads, or fewer"
        )
    return changed
