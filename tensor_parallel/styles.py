"""Styles for torch's ``parallelize_module``, by the names of torch's own, whose linear layers are fused.

They take the same layouts, and leave the same DTensors as parameters, so that checkpoints and optimizers see what they
see with torch's::

    up, down = ColwiseParallel(ctx, input_layouts=Shard(0)), RowwiseParallel(ctx, output_layouts=Shard(0))
    parallelize_module(model, mesh_of(ctx), {"layers.*.up": up, "layers.*.down": down})
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from iris_core import Context

from .layers import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from .sharding import Sharding
from .shardings import ColumnSharding, RowSharding


def mesh_of(ctx: Context) -> DeviceMesh:
    """Return a mesh of a context's ranks, of one dimension, "tp"; collective.

    Raises:
        RuntimeError: see `Context.process_group`.
    """
    return DeviceMesh.from_group(ctx.process_group(), ctx.get_device().type, mesh_dim_names=("tp",))


class _Style(ParallelStyle):
    """A layer of ours in the place of a `torch.nn.Linear`."""

    layer: type[ParallelLinear]
    defaults: tuple[Placement, Placement]  # of input and output
    known: str  # which layouts there are

    def __init__(
        self,
        ctx: Context,
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
        if not self._is_fused(self.input_layouts[0], self.output_layouts[0]):
            raise ValueError(f"{self!r} is no layout of a fused layer; {self.known}")

    @abstractmethod
    def _is_fused(self, into: Placement, out_of: Placement) -> bool:
        """Return whether a layer of ours takes and gives this."""

    @abstractmethod
    def _sharding(self, linear: nn.Linear) -> Sharding:
        """Return how the layer is cut."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not nn.Linear:
            raise ValueError(f"{self!r} is for a torch.nn.Linear, and was given a {type(module).__name__}")
        ranks = get_process_group_ranks(self.ctx.process_group())
        if device_mesh.ndim != 1 or device_mesh.mesh.tolist() != ranks:
            raise ValueError(
                f"{self!r} takes a mesh of the context's ranks, {ranks}, as mesh_of(ctx); this is {device_mesh}"
            )
        sharding = self._sharding(module)
        placements = {"weight": Shard(sharding.weight_dim), "bias": Shard(0) if sharding.shards_bias else Replicate()}
        for name, placement in placements.items():
            whole = getattr(module, name)
            if whole is not None:
                part = distribute_tensor(whole, device_mesh, [placement], src_data_rank=self.src_data_rank)
                module.register_parameter(name, nn.Parameter(part, whole.requires_grad))
        # `parallelize_module` keeps the module that it has; what others know of it stays, names and hooks.
        layer: Any = module
        layer.__class__, layer.sharding = self.layer, sharding
        module.register_forward_pre_hook(self._to_local(device_mesh), with_kwargs=True)
        if not self.use_local_output:
            module.register_forward_hook(self._from_local(device_mesh))
        return module

    def _to_local(self, mesh: DeviceMesh) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
            x, *others = inputs
            if isinstance(x, DTensor):
                if isinstance(module, ColumnParallelLinear) and module.sharding.sequence_parallel:
                    # It knows how many there are, where ranks have different numbers.
                    options = {"tokens": x.shape[:-1].numel()} | options
                whole, shared = x, getattr(module, "shared", None)

                def to_local() -> Tensor:
                    return whole.redistribute(mesh, self.input_layouts).to_local()

                x = to_local() if shared is None else shared.shard_of(whole, to_local)
            return (x, *others), options

        return hook

    def _from_local(self, mesh: DeviceMesh) -> Any:
        def hook(module: Any, inputs: tuple[Any, ...], output: Tensor) -> DTensor:
            # Of the whole, which torch would take to be as many times this rank's shard as there are ranks.
            all_tokens = (inputs[0] if isinstance(module, RowParallelLinear) else output).shape[:-1]
            shape = torch.Size([*all_tokens, module.out_features])
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(output, mesh, self.output_layouts, run_check=False, shape=shape, stride=stride)

        return hook

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts[0]}, output_layouts={self.output_layouts[0]}, "
            f"use_local_output={self.use_local_output})"
        )


class ColwiseParallel(_Style):
    """As torch's: a `torch.nn.Linear` whose output features are cut; it becomes a `ColumnParallelLinear`.

    Args:
        ctx: the context; the mesh must be of its ranks (`mesh_of`).
        input_layouts: ``Replicate()``, or ``Shard(dim)`` of a dimension before the last: all-gather and GEMM are fused.
        output_layouts: ``Shard(-1)``; or, of replicated inputs, ``Replicate()``: GEMM and all-scatter are fused.
        use_local_output: return a tensor, this rank's shard, and no DTensor.
        options: variant, backward_variant; see `ColumnSharding`.

    Raises:
        ValueError: layouts that no fused layer has.
    """

    layer = ColumnParallelLinear
    defaults = (Replicate(), Shard(-1))
    known = "from Replicate() to Shard(-1) or Replicate(), or from Shard(dim) of tokens to Shard(-1)"

    def _is_fused(self, into: Placement, out_of: Placement) -> bool:
        if into == Replicate():
            return out_of in (Shard(-1), Replicate())
        return isinstance(into, Shard) and into.dim != -1 and out_of == Shard(-1)

    def _sharding(self, linear: nn.Linear) -> ColumnSharding:
        into, out_of = self.input_layouts[0], self.output_layouts[0]
        return ColumnSharding(
            self.ctx,
            linear.in_features,
            linear.out_features,
            sequence_parallel=isinstance(into, Shard),
            sequence_dim=into.dim if isinstance(into, Shard) else 0,
            gather_output=out_of == Replicate(),
            **self.options,
        )


class RowwiseParallel(_Style):
    """As torch's: a `torch.nn.Linear` whose input features are cut; it becomes a `RowParallelLinear`.

    Args:
        ctx: the context; the mesh must be of its ranks (`mesh_of`).
        input_layouts: ``Shard(-1)``.
        output_layouts: ``Replicate()``: GEMM and all-reduce are fused; or ``Shard(dim)`` of a dimension before the
            last: GEMM and reduce-scatter are.
        use_local_output: return a tensor, this rank's shard, and no DTensor.
        options: variant, backward_variant; see `RowSharding`.

    Raises:
        ValueError: layouts that no fused layer has.
    """

    layer = RowParallelLinear
    defaults = (Shard(-1), Replicate())
    known = "from Shard(-1) to Replicate(), or to Shard(dim) of tokens"

    def _is_fused(self, into: Placement, out_of: Placement) -> bool:
        gives = out_of == Replicate() or (isinstance(out_of, Shard) and out_of.dim != -1)
        return into == Shard(-1) and gives

    def _sharding(self, linear: nn.Linear) -> RowSharding:
        out_of = self.output_layouts[0]
        return RowSharding(
            self.ctx,
            linear.in_features,
            linear.out_features,
            sequence_parallel=isinstance(out_of, Shard),
            sequence_dim=out_of.dim if isinstance(out_of, Shard) else 0,
            **self.options,
        )
