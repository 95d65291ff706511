"""Sequence parallelism of a whole model: between its layers each rank has a part of the tokens of every sequence.

| step | between layers | column-parallel layers | row-parallel layers |
|---|---|---|---|
| sequences are a multiple of the ranks | this rank's tokens | all-gather + GEMM | GEMM + reduce-scatter |
| others, such as of decoding | all tokens on every rank | GEMM | GEMM + all-reduce |

Ahead of the first layer and behind the last norm all ranks have all tokens in either case, so that what a model does
there, positions, masks, logits and caches, is as in one process.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from .layers.modules import ColumnParallelLinear, ParallelLinear

_DIM = 1  # of x, (batch, tokens, features)


class Sequences:
    """The sequences of one model's steps.

    Args:
        mesh: of the ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._can_be_cut = True  # the latest step's

    @property
    def are_sharded(self) -> bool:
        """Whether this step's are, over the ranks; where gradients are enabled they must be.

        So they are where a backward pass computes activations again, whatever steps came between.
        """
        return torch.is_grad_enabled() or self._can_be_cut

    def __deepcopy__(self, memo: Any) -> Sequences:
        """A copy of a model may share this: each step says anew what it has."""
        return self

    def shard(self, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Ahead of the first layer: take this rank's part of x, if it can be cut.

        Raises:
            ValueError: x has no sequences; or one that cannot be cut, where gradients are enabled.
        """
        x, ranks = _x_of(inputs, options), self._mesh.size()
        if x.ndim != 3:
            raise ValueError(f"the layers' input is {tuple(x.shape)}; it must be (batch, tokens, features)")
        self._can_be_cut = x.shape[_DIM] % ranks == 0
        if self._can_be_cut:
            return _with_x(inputs, options, self._laid_out(x, Replicate(), Shard(_DIM)))
        if torch.is_grad_enabled():
            raise ValueError(
                f"sequences of {x.shape[_DIM]} tokens cannot be cut for {ranks} ranks, as gradients are to be of them: "
                f"pad them to a multiple of {ranks}, or call the model under torch.no_grad()"
            )
        return None

    def with_whole_shape(self, module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Ahead of a module that may read x's shape, such as attention: give it that of all ranks' tokens."""
        if not self.are_sharded:
            return None
        x = DTensor.from_local(_x_of(inputs, options), self._mesh, [Shard(_DIM)], run_check=False)
        return _with_x(inputs, options, x)

    def gather(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """Behind the last norm: return all tokens."""
        return self._laid_out(output, Shard(_DIM), Replicate()) if self._can_be_cut else output

    def _laid_out(self, x: Tensor, now: Placement, then: Placement) -> Tensor:
        whole = DTensor.from_local(x, self._mesh, [now], run_check=False)
        return whole.redistribute(self._mesh, [then]).to_local()


def _x_of(inputs: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    return inputs[0] if inputs else options["hidden_states"]


def _with_x(inputs: tuple[Any, ...], options: dict[str, Any], x: Tensor) -> Any:
    return ((x, *inputs[1:]), options) if inputs else (inputs, options | {"hidden_states": x})


class ShardSequences(ParallelStyle):
    """Of a model whose layers have `Shard(1)` between them: sequences are sharded ahead of them, and gathered behind.

    In a plan it stands behind the styles of its linear layers, `ColwiseParallel(input_layouts=Shard(1))` and
    `RowwiseParallel(output_layouts=Shard(1))`, and beside `SumGradients` of the norms. `plan_of` writes such a plan.

    A step whose sequences are no multiple of the ranks, such as of decoding, has all tokens on every rank between the
    layers: it multiplies as without sequence parallelism, by what "auto" takes whatever the styles' `variant`, and
    computes no gradients.

    Args:
        layers: the name of the model's list of layers, whose input is (batch, tokens, features).
        norm: the name of the module behind the last of them.
    """

    def __init__(self, layers: str = "layers", norm: str = "norm") -> None:
        super().__init__()
        self.layers, self.norm = layers, norm

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layers: Any = module.get_submodule(self.layers)
        linears = [one for one in layers.modules() if isinstance(one, ParallelLinear)]
        others = [one for one in linears if not one.sharding.sequence_parallel or one.sharding.sequence_dim != _DIM]
        if not linears or others:
            found = f"has {others[0]}" if others else "has none"
            raise ValueError(
                f"ShardSequences takes linear layers by styles of this package with Shard({_DIM}), ahead of it in the "
                f"plan; {type(module).__name__}.{self.layers} {found}"
            )
        sequences = Sequences(device_mesh)
        for linear in linears:
            linear.sequences = sequences
            # Of other families, which may have no variant of that name.
            linear.sharding_of_all_tokens = dataclasses.replace(
                linear.sharding, sequence_parallel=False, variant="auto", backward_variant="auto"
            )
        layers[0].register_forward_pre_hook(sequences.shard, with_kwargs=True)
        for parent in layers.modules():
            if any(isinstance(child, ColumnParallelLinear) for child in parent.children()):
                parent.register_forward_pre_hook(sequences.with_whole_shape, with_kwargs=True)
        module.get_submodule(self.norm).register_forward_hook(sequences.gather)
        return module
