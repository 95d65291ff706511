"""Linear layers of which each rank has a part, as modules that take the place of `torch.nn.Linear`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from typing_extensions import Self

from iris_core import Context
from iris_kernels.common.config import is_fp8

from ..sharding.base import Sharding
from ..sharding.float8 import Float8, check_how
from ..sharding.linear import ColumnSharding, RowSharding
from .quantising import SCALES, is_multiplied_here, quantised


class ParallelLinear(nn.Linear):
    """What both layers are: a rank's shards of a weight and a bias, and how they were cut.

    Attributes:
        in_features, out_features: of all ranks.
        sharding: sizes and options.
        weight, bias: this rank's shards, parameters; DTensors where torch's ``parallelize_module`` made the layer.
        weight_scale, input_scale: where the weight is kept in fp8, its scale, (this rank's output features, 1) or (),
            and, if the layer has one, that of x, (); fp32 parameters without gradients.
    """

    sharding_type: ClassVar[type[Sharding]]
    sharding: Any
    sequences: Any = None  # of a model whose steps may have all tokens on every rank: `sequences.ShardSequences`
    sharding_of_all_tokens: Any = None  # of such steps

    def __init__(
        self,
        ctx: Context,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        nn.Module.__init__(self)
        device = ctx.get_device() if device is None else torch.device(device)
        sharding = self.sharding_type(ctx, in_features, out_features, **options)
        self._take(quantised(self._drawn(sharding, bias, device, dtype), sharding.quantize, ctx), sharding)
        self._agree_on_bias()

    @classmethod
    def from_linear(cls, ctx: Context, linear: nn.Linear, **options: Any) -> Self:
        """Return a layer with copies of this rank's shards of a whole one, which is the same on all ranks.

        Args:
            ctx: the context.
            linear: the layer; of its parameters those require a gradient here that do there. With `quantize` its weight
                may be fp8, beside an attribute `weight_scale`, and `input_scale` if there is one, or be torchao's
                Float8Tensor; the layer may be torchao's Float8Linear.
            options: as to make a layer.

        Raises:
            ValueError: it is no `torch.nn.Linear`, or one with a forward of its own; an option makes no sense; or fp8
                has no scale, or another than of the tensor or of output features.
        """
        checked_whole(linear, options.get("quantize"))
        linear = quantised(linear, options.get("quantize"), ctx)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(linear, cls.sharding_type(ctx, linear.in_features, linear.out_features, **options))
        return layer.train(linear.training)

    @classmethod
    def _drawn(cls, sharding: Any, bias: bool, device: torch.device, dtype: torch.dtype | None) -> nn.Linear:
        """Return a whole layer of a sharding's sizes, with new parameters."""
        return nn.Linear(sharding.in_features, sharding.out_features, bias, device=device, dtype=dtype)

    def _take(self, whole: nn.Linear, sharding: Sharding) -> None:
        def part(own: torch.Tensor) -> nn.Parameter:
            return nn.Parameter(own.detach().clone(memory_format=torch.contiguous_format), own.requires_grad)

        sharding.check_variants()
        self.sharding, self.in_features, self.out_features = sharding, sharding.in_features, sharding.out_features
        self.weight = part(sharding.own_weight(whole.weight))
        self.register_parameter("bias", None if whole.bias is None else part(sharding.own_bias(whole.bias)))
        for name in SCALES if sharding.keeps_fp8 else ():
            if (scale := getattr(whole, name, None)) is not None:
                self.register_parameter(name, part(sharding.own_scale(scale)))

    def reset_parameters(self) -> None:
        """Draw new parameters, as `torch.nn.Linear` of the whole size does; collective."""
        weight, bias = self._parts()
        scale = self._scales()["weight_scale"]
        dtype = weight.dtype if scale is None else None
        sharding, replicas = self.sharding, self._replicas
        if replicas > 1:  # which have each feature so many times
            sharding = dataclasses.replace(sharding, out_features=sharding.out_features // replicas)
        drawn = self._drawn(sharding, bias is not None, weight.device, dtype)
        whole: Any = quantised(drawn, sharding.quantize, sharding.ctx)

        def own(cut: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
            if replicas == 1 or tensor.ndim == 0:
                return cut(tensor)
            return tensor.chunk(sharding.ctx.get_num_ranks() // replicas)[sharding.ctx.get_rank() // replicas]

        with torch.no_grad():
            weight.copy_(own(sharding.own_weight, whole.weight))
            if scale is not None:
                scale.copy_(own(sharding.own_scale, whole.weight_scale))
            if bias is not None:
                bias.copy_(own(sharding.own_bias, whole.bias))
        self._agree_on_bias()

    @property
    def _replicas(self) -> int:
        """How many neighbouring ranks have the same shard: of a style that has replicas."""
        return self.sharding.out_features // len(self.weight) if isinstance(self.weight, DTensor) else 1

    def _agree_on_bias(self) -> None:
        """Give all ranks rank 0's bias, if each has the whole: of different seeds they drew different ones."""
        _, bias = self._parts()
        if bias is not None and not self.sharding.shards_bias and not bias.is_meta:
            with torch.no_grad():
                bias.copy_(self.sharding.ctx.broadcast(bias, 0))

    @property
    def has_all_tokens(self) -> bool:
        """Whether a call is of a step that has all tokens on every rank, where others have their sequences sharded."""
        return self.sequences is not None and not self.sequences.are_sharded

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        bias: torch.Tensor | None = self.bias
        return local(self.weight), None if bias is None else local(bias)

    def _scales(self) -> dict[str, torch.Tensor | None]:
        """Return the scales that a call takes, by name."""
        if not self.sharding.keeps_fp8:  # one that trains may have scales that it does not use, of what was made it
            return dict.fromkeys(SCALES)
        given = [(name, getattr(self, name, None)) for name in SCALES]
        return {name: None if scale is None else local(scale) for name, scale in given}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """As `torch.nn.Linear`'s; raise for a wider weight, which would be rounded to fp8 without a scale."""
        given = state_dict.get(f"{prefix}weight")
        if given is not None and is_fp8(self.weight.dtype) and given.dtype != self.weight.dtype:
            raise ValueError(
                f"{prefix}weight is {given.dtype}, and the layer's is {self.weight.dtype}; load_whole quantises whole "
                "weights, unless they are DTensors: these are loaded before parallelize_module, or in fp8 with scales"
            )
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        """As `torch.nn.Linear`'s, and how it is cut."""
        sharding = self.sharding
        options = [name for name in ("sequence_parallel", "gather_output") if getattr(sharding, name, False)]
        return ", ".join(
            [
                f"in_features={sharding.in_features}",
                f"out_features={sharding.out_features}",
                f"bias={self.bias is not None}",
                *(f"{name}=True" for name in options),
                *([] if sharding.quantize is None else [f"quantize={sharding.quantize}"]),
                f"rank={sharding.ctx.get_rank()} of {sharding.ctx.get_num_ranks()}",
            ]
        )


class ColumnParallelLinear(ParallelLinear):
    """`torch.nn.Linear` whose output features are sharded over the ranks; making one is collective.

    With the same seed on all ranks its parts are those of the `torch.nn.Linear` of the whole size.

    Args:
        ctx: the context.
        in_features, out_features: of the whole layer.
        bias: whether it has one.
        device, dtype: of the parameters; None for the context's device, and torch's default dtype.
        options: sequence_parallel, gather_output, sequence_dim, variant, backward_variant, activation, quantize, as
            `ColumnSharding` takes them.

    Raises:
        ValueError: options that make no sense.
    """

    sharding_type: ClassVar[type[Sharding]] = ColumnSharding
    shared: Any = None  # with which other layers it is multiplied as one: `shared.share_products`

    def _apply(self, *args: Any, **options: Any) -> Self:
        """As `torch.nn.Module`'s, by which `to` and others move parameters; those that lay together do again."""
        super()._apply(*args, **options)
        if self.shared is not None:
            self.shared.lay_together()
        return self

    def forward(self, x: torch.Tensor, tokens: int | None = None) -> torch.Tensor:
        """Return the layer's output; errors are those of `column_parallel_linear`.

        Args:
            x: (…, in_features), of all tokens on every rank; with `sequence_parallel` of this rank's tokens.
            tokens: of all ranks together, if each has a part; None where all ranks have as many.
        """
        tokens = None if self.has_all_tokens else tokens
        return self.by_itself(x, tokens) if self.shared is None else self.shared(self, x, tokens)

    def by_itself(self, x: torch.Tensor, tokens: int | None = None) -> torch.Tensor:
        """As `forward`, but without the layers that share its x.

        Args:
            x, tokens: as of `forward`.
        """
        sharding = self.sharding_of_all_tokens if self.has_all_tokens else self.sharding
        return sharding(x, *self._parts(), tokens=tokens, **self._scales())


class RowParallelLinear(ParallelLinear):
    """`torch.nn.Linear` whose input features are sharded over the ranks; making one is collective.

    With the same seed on all ranks its parts are those of the `torch.nn.Linear` of the whole size; its bias, which all
    ranks have, is rank 0's.

    Args:
        ctx, in_features, out_features, bias, device, dtype: as in `ColumnParallelLinear`.
        options: sequence_parallel, sequence_dim, variant, backward_variant, activation, quantize; see `RowSharding`.

    Raises:
        ValueError: options that make no sense.
    """

    sharding_type = RowSharding

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 1e-6,
    ) -> Any:
        """Return the layer's output of x, with a norm also its normed rows; errors are those of `row_parallel_linear`.

        Args:
            x: this rank's features of all tokens.
            residual: what is added to the output, of its shape and dtype; None for nothing.
            norm_weight: of an RMSNorm of the output's rows (features,); None for no norm.
            eps: the norm's.
        """
        weight = None if norm_weight is None else local(norm_weight)
        sharding = self.sharding_of_all_tokens if self.has_all_tokens else self.sharding
        return sharding(x, *self._parts(), residual=residual, norm_weight=weight, eps=eps, **self._scales())


def checked_whole(linear: object, quantize: Float8 | None = None) -> nn.Linear:
    """Return a whole `torch.nn.Linear`, or one of a class of it that multiplies as it does, or with `quantize` in fp8.

    Raises:
        ValueError: this is none, or `quantize` no `Float8`.
    """
    check_how(quantize)
    kind: Any = type(linear)
    if not isinstance(linear, nn.Linear):
        raise ValueError(f"a layer is a {kind.__name__}; it must be a torch.nn.Linear")
    if isinstance(linear, ParallelLinear) or isinstance(linear._parameters.get("weight"), DTensor):
        raise ValueError(
            f"a layer is a {kind.__name__} that is cut already, as by tp_plan=, parallelize_module or an earlier call; "
            "it must be a whole torch.nn.Linear"
        )
    is_replaced = quantize is not None and is_multiplied_here(linear)
    if (kind.forward is not nn.Linear.forward or "forward" in vars(linear)) and not is_replaced:
        raise ValueError(
            f"a layer is a {kind.__name__}, with a forward of its own, whose place a cut layer's would take; cut the "
            "torch.nn.Linear that it is made of, such as base_layer and lora_B, or have it keep torch.nn.Linear's"
        )
    if "weight" not in linear._parameters:
        raise ValueError(
            f"a layer is a {kind.__name__} whose weight is computed from other parameters; make it a parameter first, "
            "as torch.nn.utils.parametrize.remove_parametrizations does"
        )
    return linear


@functools.cache
def class_of_cut(layer: Any, whole: Any) -> Any:
    """Return the class that a layer of a class of `torch.nn.Linear` has once it is cut: it is of both.

    Args:
        layer: `ColumnParallelLinear` or `RowParallelLinear`.
        whole: the class.
    """
    if whole is nn.Linear:
        return layer
    return type(f"{layer.__name__}Of{whole.__name__}", (layer, whole), {"__module__": layer.__module__})


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or of a DTensor this rank's shard, with gradients; summed over ranks that have the same shard.

    These are replicas along a second dimension of the mesh; see `styles.ColwiseParallel`. What is replicated on all
    ranks is used alike by all, and its gradient is the same.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.device_mesh.ndim == 1:
        return tensor.to_local()
    placements = tensor.placements
    summed = tensor.redistribute(placements=placements)  # backwards, from parts of sums to these
    return summed.to_local(grad_placements=[Partial() if one == Replicate() else one for one in placements])
