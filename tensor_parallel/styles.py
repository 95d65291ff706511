"""Styles for torch's ``parallelize_module``, by the names of torch's own, whose linear layers are fused.

They take the same layouts, and leave the same DTensors as parameters, so that checkpoints and optimizers see what they
see with torch's. Where a fused product takes or gives another layout than is asked for, the tensor is redistributed, as
it is by torch's; each style says which are fused::

    up, down = ColwiseParallel(ctx, input_layouts=Shard(0)), RowwiseParallel(ctx, output_layouts=Shard(0))
    parallelize_module(model, mesh_of(ctx), {"layers.*.up": up, "layers.*.down": down})

With ``quantize=Float8()`` layers multiply in fp8: `torch.nn.Linear`s, whose weights are quantised, and layers whose
weights are fp8 already, beside a `weight_scale` or as torchao's Float8Tensor; in training torchao's Float8Linears, too.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from typing_extensions import Self

from iris_core import Context
from iris_kernels.common.config import is_fp8

from .layers.modules import ColumnParallelLinear, ParallelLinear, RowParallelLinear, checked_whole, class_of_cut
from .layers.quantising import SCALES, quantised
from .sharding.base import Sharding
from .sharding.linear import ColumnSharding, RowSharding

_FEW_TOKENS = 512  # up to so many, kernels of split products may be the fastest


def mesh_of(ctx: Context) -> DeviceMesh:
    """Return a mesh of a context's ranks, of one dimension, "tp"; collective.

    Raises:
        RuntimeError: see `Context.process_group`.
    """
    return DeviceMesh.from_group(ctx.process_group(), ctx.get_device().type, mesh_dim_names=("tp",))


def _mesh_of_replicas(ctx: Context, mesh: DeviceMesh, replicas: int) -> DeviceMesh:
    """Return a mesh's ranks as (shards, replicas), `replicas` neighbours with one shard; collective the first time."""
    meshes: dict[int, DeviceMesh] = ctx.kept.setdefault(_mesh_of_replicas, {})
    if replicas not in meshes:
        grid = mesh.mesh.view(-1, replicas)
        shard, replica = divmod(ctx.get_rank(), replicas)
        lines = grid[:, replica].tolist(), grid[shard].tolist()
        groups = [dist.new_group(line, use_local_synchronization=True) for line in lines]
        names = ("shard", "replica")
        meshes[replicas] = DeviceMesh.from_group(groups, mesh.device_type, mesh=grid, mesh_dim_names=names)
    return meshes[replicas]


class FusedStyle(ParallelStyle):
    """A layer of ours in the place of a `torch.nn.Linear`: what both styles are.

    Attributes:
        replicas: neighbouring ranks that have the same shard.
    """

    layer: type[ParallelLinear]
    defaults: tuple[Placement, Placement]  # of input and output
    replicas = 1

    def __init__(
        self,
        ctx: Context | None = None,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.ctx = ctx
        self.input_layouts = (input_layouts or self.defaults[0],)
        self.output_layouts = (output_layouts or self.defaults[1],)
        self.use_local_output = use_local_output
        self.options = options
        self.fused_layouts = self._fused(self.input_layouts[0], self.output_layouts[0])

    @abstractmethod
    def _fused(self, into: Placement, out_of: Placement) -> tuple[Placement, Placement]:
        """Return what the layer takes and gives, nearest to what is asked for."""

    @abstractmethod
    def _sharding(self, ctx: Context, linear: nn.Linear) -> Sharding:
        """Return how the layer is cut."""

    @abstractmethod
    def heap_elements(self, linear: nn.Linear, tokens: int, world_size: int, *, gradients: bool) -> int:
        """Return how many elements of a rank's heap operators of one variant take at most.

        Args:
            linear: the whole layer.
            tokens: the most tokens of a call, of all ranks.
            world_size: number of ranks.
            gradients: whether those of the backward pass are counted, too.
        """

    def on(self, ctx: Context) -> Self:
        """Return the same style with a context, where it has none."""
        style = copy.copy(self)
        style.ctx = self.ctx or ctx
        return style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.ctx is None:
            raise ValueError(f"{self!r} has no context; give it one, or use iris_tensor_parallel.parallelize")
        how = self.options.get("quantize")
        try:
            whole_layer = quantised(checked_whole(module, how), how, self.ctx)
        except ValueError as error:
            raise ValueError(f"{self!r}: {error}") from None
        ranks = dist.get_process_group_ranks(self.ctx.process_group())
        if device_mesh.ndim != 1 or device_mesh.mesh.tolist() != ranks:
            raise ValueError(
                f"{self!r} takes a mesh of the context's ranks, {ranks}, as mesh_of(ctx); this is {device_mesh}"
            )
        sharding = self._sharding(self.ctx, whole_layer)
        sharding.check_variants()
        of_features = Shard(0) if sharding.shards_bias else Replicate()
        placements = {"weight": Shard(sharding.weight_dim), "bias": of_features}
        if sharding.keeps_fp8:
            placements |= dict.fromkeys(SCALES, of_features)
        mesh, replicated = device_mesh, []
        if self.replicas > 1:
            mesh, replicated = _mesh_of_replicas(self.ctx, device_mesh, self.replicas), [Replicate()]
        for name, placement in placements.items():
            whole = getattr(whole_layer, name, None)
            if whole is not None:
                cut = placement if whole.ndim else Replicate()
                part = _distributed(whole, mesh, [cut, *replicated], self.src_data_rank)
                if name not in module._parameters and hasattr(module, name):
                    delattr(module, name)  # a scale that was a buffer, or a mere attribute
                module.register_parameter(name, nn.Parameter(part, whole.requires_grad))
        # `parallelize_module` keeps the module that it has; what others know of it stays, names and hooks.
        layer: Any = module
        kinds: tuple[Any, Any] = self.layer, type(module)
        layer.__class__, layer.sharding = class_of_cut(*kinds), sharding
        module.register_forward_pre_hook(self._to_local(device_mesh), with_kwargs=True)
        if not self.use_local_output or self.output_layouts[0] != self.fused_layouts[1]:
            module.register_forward_hook(self._from_local(device_mesh))
        return module

    def _to_local(self, mesh: DeviceMesh) -> Any:
        taken, given = self.fused_layouts[:1], self.fused_layouts[1:]

        def own(one: Any) -> Any:
            """Return this rank's part of a residual, cut as the output is."""
            return one.redistribute(mesh, given).to_local() if isinstance(one, DTensor) else one

        def hook(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
            for name in ("x", "input"):  # as `torch.nn.Linear` calls it
                if not inputs and name in options:
                    options = dict(options)
                    inputs = (options.pop(name),)
            if not inputs:
                return inputs, options
            if "residual" in options:
                options = options | {"residual": own(options["residual"])}
            x, *others = inputs[0], *map(own, inputs[1:])
            if taken != self.input_layouts and not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, self.input_layouts, run_check=False)
            if isinstance(x, DTensor):
                if isinstance(module, ColumnParallelLinear) and module.sharding.sequence_parallel:
                    # It knows how many there are, where ranks have different numbers.
                    options = {"tokens": x.shape[:-1].numel()} | options
                whole, shared = x, getattr(module, "shared", None)

                def to_local() -> Tensor:
                    return whole.redistribute(mesh, taken).to_local()

                x = to_local() if shared is None else shared.shard_of(whole, to_local)
            return (x, *others), options

        return hook

    def _from_local(self, mesh: DeviceMesh) -> Any:
        given = self.fused_layouts[1:]

        def hook(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
            if isinstance(output, tuple):  # a normed one comes first
                return tuple(hook(module, inputs, one) for one in output)
            # Of the whole, which torch would take to be as many times this rank's shard as there are ranks.
            all_tokens = (inputs[0] if isinstance(module, RowParallelLinear) else output).shape[:-1]
            shape = torch.Size([*all_tokens, module.sharding.out_features])
            stride = torch.empty(shape, device="meta").stride()
            whole = DTensor.from_local(output, mesh, given, run_check=False, shape=shape, stride=stride)
            whole = whole.redistribute(mesh, self.output_layouts)
            return whole.to_local() if self.use_local_output else whole

        return hook

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts[0]}, output_layouts={self.output_layouts[0]}, "
            f"use_local_output={self.use_local_output})"
        )


def _distributed(whole: Tensor, mesh: DeviceMesh, placements: list[Placement], src_data_rank: int | None) -> DTensor:
    """Return a whole tensor as a DTensor; of fp8, which not all backends send, the bytes are distributed."""
    if not is_fp8(whole.dtype):
        return distribute_tensor(whole, mesh, placements, src_data_rank=src_data_rank)
    part = distribute_tensor(whole.detach().view(torch.uint8), mesh, placements, src_data_rank=src_data_rank)
    own = part.to_local().view(whole.dtype)
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


class ColwiseParallel(FusedStyle):
    """As torch's: a `torch.nn.Linear` whose output features are cut; it becomes a `ColumnParallelLinear`.

    Args:
        ctx: the context; the mesh must be of its ranks (`mesh_of`). None for the one that `parallelize` has.
        input_layouts: how x lies. From ``Shard(dim)``, of tokens, all-gather and GEMM are fused, but to
            ``Replicate()``; there, and from others, x is redistributed to ``Replicate()``.
        output_layouts: how the output lies. To ``Replicate()`` GEMM and all-scatter are fused, as for the head of a
            model; what is neither that nor ``Shard(-1)`` is redistributed from ``Shard(-1)``.
        use_local_output: return a tensor, this rank's shard, and no DTensor.
        replicas: how many neighbouring ranks have the same output features, such as keys and values of fewer heads than
            there are ranks. The layer's output is that of `replicas` times as many features; its parameters are
            DTensors of a mesh (shards, replicas), whose gradients are summed over replicas.
        options: variant, backward_variant, quantize; see `ColumnSharding`.

    Raises:
        ValueError: replicas below one, or with all features on every rank.
    """

    layer = ColumnParallelLinear
    defaults = (Replicate(), Shard(-1))

    def __init__(self, ctx: Context | None = None, *, replicas: int = 1, **others: Any) -> None:
        super().__init__(ctx, **others)
        self.replicas = replicas
        if replicas < 1 or (replicas > 1 and self.fused_layouts[1] == Replicate()):
            raise ValueError(
                f"replicas is {replicas}; it takes a positive number, and 1 with output_layouts=Replicate(), which has "
                "each feature once"
            )

    def _fused(self, into: Placement, out_of: Placement) -> tuple[Placement, Placement]:
        if out_of == Replicate():
            return Replicate(), out_of
        return into if _is_of_tokens(into) else Replicate(), Shard(-1)

    def heap_elements(self, linear: nn.Linear, tokens: int, world_size: int, *, gradients: bool) -> int:
        into, out_of = self.fused_layouts
        if isinstance(into, Shard):
            return 2 * tokens * linear.in_features * (1 + gradients)
        scattered = tokens * linear.out_features if out_of == Replicate() else 0
        return scattered + gradients * _of_sums(linear.in_features, tokens, world_size)

    def _sharding(self, ctx: Context, linear: nn.Linear) -> ColumnSharding:
        into, out_of = self.fused_layouts
        features, world_size = linear.out_features * self.replicas, ctx.get_num_ranks()
        if self.replicas > 1 and (world_size % self.replicas or features % world_size):
            raise ValueError(
                f"{self!r}: replicas is {self.replicas}; it must divide the {world_size} ranks, and what is left of "
                f"them the {linear.out_features} output features"
            )
        return ColumnSharding(
            ctx,
            linear.in_features,
            features,
            sequence_parallel=isinstance(into, Shard),
            sequence_dim=into.dim if isinstance(into, Shard) else 0,
            gather_output=out_of == Replicate(),
            **self.options,
        )


class RowwiseParallel(FusedStyle):
    """As torch's: a `torch.nn.Linear` whose input features are cut; it becomes a `RowParallelLinear`.

    Args:
        ctx: the context; the mesh must be of its ranks (`mesh_of`). None for the one that `parallelize` has.
        input_layouts: how x lies; what is not ``Shard(-1)`` is redistributed to it.
        output_layouts: how the output lies. To ``Shard(dim)``, of tokens, GEMM and reduce-scatter are fused, to
            ``Replicate()`` GEMM and all-reduce; what is neither is redistributed from ``Replicate()``.
        use_local_output: return a tensor, this rank's shard, and no DTensor.
        options: variant, backward_variant, quantize; see `RowSharding`.
    """

    layer = RowParallelLinear
    defaults = (Shard(-1), Replicate())

    def _fused(self, into: Placement, out_of: Placement) -> tuple[Placement, Placement]:
        return Shard(-1), out_of if _is_of_tokens(out_of) else Replicate()

    def heap_elements(self, linear: nn.Linear, tokens: int, world_size: int, *, gradients: bool) -> int:
        if isinstance(self.fused_layouts[1], Shard):
            return 2 * tokens * linear.out_features * (1 + gradients)
        return _of_sums(linear.out_features, tokens, world_size)

    def _sharding(self, ctx: Context, linear: nn.Linear) -> RowSharding:
        out_of = self.fused_layouts[1]
        return RowSharding(
            ctx,
            linear.in_features,
            linear.out_features,
            sequence_parallel=isinstance(out_of, Shard),
            sequence_dim=out_of.dim if isinstance(out_of, Shard) else 0,
            **self.options,
        )


def _of_sums(features: int, tokens: int, world_size: int) -> int:
    """Return what a GEMM + all-reduce takes: each rank's sums, or of few tokens all ranks' partials, in two halves."""
    return 2 * features * (tokens + world_size * min(tokens, _FEW_TOKENS))


def _is_of_tokens(placement: Placement) -> bool:
    """Whether ranks have parts of another dimension than the features, as far as a layout can say: the last, -1."""
    return isinstance(placement, Shard) and placement.dim != -1
