"""Several layers of one x as one, such as query, key and value: one product, and one sum of the gradients of x."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from iris_core import Context
from iris_kernels.common.device.epilogue import ACTIVATIONS, GATED_ACTIVATIONS

from ..sharding.linear import ColumnSharding
from .modules import ColumnParallelLinear, checked_whole
from .quantising import merged_scales, quantised


@dataclass(frozen=True, eq=False, kw_only=True)
class MergedColumnSharding(ColumnSharding):
    """Layers of one x, each cut by its output features; a rank's weight is its part of each, one above the other.

    Args:
        sizes: output features of each layer, of all ranks, multiples of their number; `out_features` is the sum.
        others: those of `ColumnSharding`, but gather_output; as activation also "swiglu", of two layers of one size, a
            gate and its up: the output is silu(gate) · up. Then a rank's weight has a row of the one and a row of the
            other in turn.

    Raises:
        ValueError: as `ColumnSharding`; or sizes that cannot be cut evenly, or gated; or `gather_output`.
    """

    sizes: tuple[int, ...]

    activations = (*ACTIVATIONS, *GATED_ACTIVATIONS)

    def __post_init__(self) -> None:
        world_size = self.ctx.get_num_ranks()
        if not self.sizes or any(size < 1 or size % world_size for size in self.sizes):
            raise ValueError(
                f"out_features are {list(self.sizes)}; it takes one or more, each a multiple of the {world_size} ranks"
            )
        if self.gather_output:
            raise ValueError("gather_output is of one layer; of merged ones each rank has its own features")
        super().__post_init__()
        if self._narrowing > 1 and (len(self.sizes) != 2 or len(set(self.sizes)) != 1):
            raise ValueError(
                f"out_features are {list(self.sizes)}; {self.activation} takes two layers of one size, gate and up"
            )

    def own_weight(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shards of (out_features, in_features), the layers' one above the other; a copy.

        A gate and its up have their rows in turn.
        """
        parts = [part[self.shard(len(part))] for part in whole.split(self.sizes)]
        return torch.cat(parts) if self._narrowing == 1 else torch.stack(parts, 1).flatten(0, 1)

    def own_bias(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shards of (out_features,), the layers' one behind the other; a copy."""
        return self.own_weight(whole)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Layers of one x whose output features are sharded over the ranks; their outputs come beside each other.

    ``query, key, value = layer.split(layer(x))`` is what a `ColumnParallelLinear` for each gives; but these multiply,
    gather x if that is sharded, and sum its gradients over the ranks once each. Making one is collective. With the same
    seed on all ranks its parts are those of a `torch.nn.Linear` for each, made in turn.

    Args:
        ctx: the context.
        in_features: of x.
        out_features: of each layer, multiples of the number of ranks.
        bias: whether they have one.
        device, dtype: of the parameters; None for the context's device, and torch's default dtype.
        options: sequence_parallel, sequence_dim, variant, backward_variant, activation, quantize, as in
            `MergedColumnSharding`; in fp8 x is quantised once, by the largest of static scales if all layers have one.

    Attributes:
        weight, bias: this rank's shard of each layer's, one above the other: `sharding.own_weight` of whole ones so.

    Raises:
        ValueError: options that make no sense, or features that cannot be cut evenly.
    """

    sharding_type = MergedColumnSharding

    def __init__(
        self, ctx: Context, in_features: int, out_features: Sequence[int], bias: bool = True, **options: Any
    ) -> None:
        super().__init__(ctx, in_features, sum(out_features), bias, sizes=tuple(out_features), **options)

    @classmethod
    def from_linear(cls, ctx: Context, linear: nn.Linear, **options: Any) -> Self:
        """Return what `from_linears` does of one layer.

        Args:
            linear: the layer.
            ctx, options: as of `from_linears`.
        """
        return cls.from_linears(ctx, [linear], **options)

    @classmethod
    def from_linears(cls, ctx: Context, linears: Sequence[nn.Linear], **options: Any) -> Self:
        """Return a layer with copies of this rank's shards of whole ones, which are the same on all ranks.

        Args:
            ctx: the context.
            linears: the layers, in the order of the outputs; alike but for their output features.
            options: as to make a layer.

        Raises:
            ValueError: they are none, or not alike; one is no `torch.nn.Linear`; or an option makes no sense.
        """
        how = options.get("quantize")
        linears = cls._checked([quantised(checked_whole(linear, how), how, ctx) for linear in linears])
        sizes = tuple(linear.out_features for linear in linears)
        return super().from_linear(ctx, _merged(linears), sizes=sizes, **options)

    @classmethod
    def _drawn(cls, sharding: Any, bias: bool, device: torch.device, dtype: torch.dtype | None) -> nn.Linear:
        whole = [nn.Linear(sharding.in_features, size, bias, device=device, dtype=dtype) for size in sharding.sizes]
        return _merged([quantised(one, sharding.quantize, sharding.ctx) for one in whole])

    def split(self, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each layer's part of what a call gave: views, or copies of more than two where there are gradients.

        Raises:
            ValueError: the layers are a gate and its up, which give one output together.
        """
        if self.sharding.activation in GATED_ACTIVATIONS:
            raise ValueError(
                f"with {self.sharding.activation} a gate and its up give one output; nothing is to be split"
            )
        return split(output, [size // self.sharding.ctx.get_num_ranks() for size in self.sharding.sizes])

    def extra_repr(self) -> str:
        """As `ColumnParallelLinear`'s, and the layers' sizes."""
        return f"{super().extra_repr()}, sizes={list(self.sharding.sizes)}"

    @staticmethod
    def _checked(linears: Sequence[nn.Linear]) -> Sequence[nn.Linear]:
        if not linears:
            raise ValueError("linears is empty; it takes one torch.nn.Linear or more")
        kinds = [_kind(linear) for linear in linears]
        for kind in kinds:
            if kind != kinds[0]:
                raise ValueError(f"linears must differ in their output features alone; there are {kinds[0]} and {kind}")
        return linears


def split(output: torch.Tensor, widths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return the parts of what several layers gave, of these many columns each, of which one may be written in place.

    Of a view autograd keeps all that it is a view of. Of a query, a key and a value it keeps the value alone, a sixth
    of them in Llama-3-8B, so they are copied where there are gradients; of a gate and its up it keeps both.
    """
    starts = itertools.accumulate(widths[:-1], initial=0)
    # Not `split`, of whose views autograd lets none be written.
    parts = [output.narrow(-1, start, width) for start, width in zip(starts, widths, strict=True)]
    return tuple([part.contiguous() for part in parts] if output.requires_grad and len(parts) > 2 else parts)


def _kind(linear: nn.Linear) -> dict[str, Any]:
    """Return what must be the same of layers that become one."""
    weight, bias = linear.weight, linear.bias
    return {
        "in_features": linear.in_features,
        "bias": bias is not None,
        "dtype": str(weight.dtype),
        "device": str(weight.device),
        "requires_grad": [one.requires_grad for one in (weight, bias) if one is not None],
        "training": linear.training,
    }


def _merged(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Return layers of one kind as one, their output features one behind the other."""
    first = linears[0]
    merged = nn.Linear(
        first.in_features, sum(one.out_features for one in linears), first.bias is not None, device="meta"
    )
    for name in ("weight", "bias"):
        parts = [getattr(one, name) for one in linears]
        if parts[0] is not None:
            whole = torch.cat([part.detach() for part in parts])
            setattr(merged, name, nn.Parameter(whole, parts[0].requires_grad))
    for name, scale in merged_scales(linears).items():
        setattr(merged, name, nn.Parameter(scale, requires_grad=False))
    return merged.train(first.training)
