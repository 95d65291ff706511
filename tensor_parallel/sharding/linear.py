"""Linear layers cut by output and by input features: what they take and give on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from iris_kernels import all_gather_gemm, gemm_all_reduce, gemm_all_scatter, gemm_reduce_scatter

from .base import Sharding, Tensors, Wanted
from .float8 import stacked
from .products import Columns, Rows, Step, Steps, multiply_columns, multiply_rows

Scales = Sequence[torch.Tensor | None]


@dataclass(frozen=True, eq=False, kw_only=True)
class ColumnSharding(Sharding):
    """A layer whose output features are cut: its weight by the first dimension, its bias likewise.

    | sequence_parallel | gather_output | x | output |
    |---|---|---|---|
    | | | all tokens, the same on all ranks | all tokens, this rank's features |
    | yes | | this rank's tokens | all tokens, this rank's features |
    | | yes | all tokens, the same on all ranks | all tokens, all features; its gradient is the same on all ranks |

    Args:
        gather_output: all ranks get all features.
        others: those of `Sharding`.

    Raises:
        ValueError: as `Sharding`; or `sequence_parallel` and `gather_output` together.
    """

    gather_output: bool = False

    kind = "column"
    advice = "; where ranks have different numbers of tokens, say how many all have together, tokens=..."
    weight_dim = 0
    shards_bias = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gather_output and self.sequence_parallel:
            raise ValueError("gather_output is of tokens that all ranks have, sequence_parallel cuts them: one of both")

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        tokens: int | None = None,
        weight_scale: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the layer's output of x; arguments and errors are those of `column_parallel_linear`."""
        biases = () if bias is None else (bias,)
        return self.of_several(x, (weight,), biases, (weight_scale,), input_scale, tokens=tokens)

    def of_several(
        self,
        x: torch.Tensor,
        weights: Tensors,
        biases: Tensors,
        weight_scales: Scales,
        input_scale: torch.Tensor | None,
        *,
        tokens: int | None,
    ) -> torch.Tensor:
        """Return the output of x by one weight, or by several, one above the other, and their biases, if any."""
        self._check_scales(weight_scale=weight_scales[0], input_scale=input_scale)
        kind = self._checked_calls.kind(x, *weights, *biases)
        operators = self._checked_calls.operators(kind)
        if operators is None:
            x, weights, biases = self._checked(x, weights, biases)
        rows, behind = self._rows(x)
        m = self._tokens(rows, tokens)
        if not self.sequence_parallel and m != rows.shape[0]:
            raise ValueError(f"{self._name}: tokens is {m}, but x has {rows.shape[0]}, which all ranks have alike")
        if m == 0 and (tokens == 0 or not self.sequence_parallel or 0 in behind):
            features = self.out_features if self.gather_output else self._weight_shape[0] // self._narrowing
            return self._of_nothing(x, weights, biases, features, x.shape[self.sequence_dim] * self.ctx.get_num_ranks())
        if len(behind) > 0:
            if m % max(1, behind.numel()):
                raise ValueError(f"{self._name}: tokens is {m}; of x {tuple(x.shape)} each place has {behind.numel()}")
            self._check_places(m, x, behind)
        if operators is not None and m > 0:
            bias = stacked(biases) if len(biases) > 0 else None
            return self._back(self._multiply_again(operators, rows, weights, m, bias=bias), x, behind)
        self._check_trainable(weights, rows, *biases)
        wanted = self._wanted(m, rows, weights, biases)
        steps = self._steps(wanted)
        if any(wanted):
            output = Columns.apply(rows, m, self, steps, len(weights), *weights, *biases)
        else:
            given = zip(weights, weight_scales, strict=True)
            scaled = [self._operand(steps, weight, scale, "weight_scale") for weight, scale in given]
            activations = self._operand(steps, rows, input_scale, "input_scale")
            output, _ = multiply_columns(self, steps, m, activations, scaled, biases, x.dtype)
            if kind is not None and steps.forward is not None:
                product, bias = self._product(steps.forward, m, rows.dtype), biases[0] if len(biases) > 0 else None
                self._checked_calls.keep(kind, steps.forward.family, rows, weights, product, bias=bias)
        return self._back(self._activated(output, steps), x, behind)

    def _tokens(self, rows: torch.Tensor, tokens: int | None) -> int:
        """Return how many tokens all ranks have together; `tokens` where that is given."""
        own = rows.shape[0]  # no len(): it would make a number of a symbol in a graph
        if tokens is not None:
            return tokens
        return own * self.ctx.get_num_ranks() if self.sequence_parallel else own

    def _steps(self, wanted: Wanted) -> Steps:
        forward = None
        if self.sequence_parallel or self.gather_output:
            forth = all_gather_gemm if self.sequence_parallel else gemm_all_scatter
            keeps = self.sequence_parallel and wanted.weight
            activation = None if any(wanted) else self.activation
            sizes, fast = (self.out_features, self.in_features), self._is_fast
            forward = Step(forth.FAMILY, *sizes, self.variant, keeps, activation, use_fast_accum=fast)
        back = gemm_reduce_scatter if self.sequence_parallel else gemm_all_reduce
        backward = Step(back.FAMILY, self.in_features, self.out_features, self.backward_variant)
        own = self.shard(self.out_features) if self.gather_output else None
        return Steps(forward, backward, wanted.weight, own, self._formats, self._is_fast)


@dataclass(frozen=True, eq=False)
class RowSharding(Sharding):
    """A layer whose input features are cut: its weight by the second dimension; its bias is the same on all ranks.

    It takes all tokens with this rank's features, and gives all features, of all tokens on every rank, or with
    `sequence_parallel` of this rank's tokens. Without that, the output's gradient is the same on all ranks.

    Args:
        others: those of `Sharding`.
    """

    kind = "row"
    weight_dim = 1
    shards_bias = False

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        residual: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        eps: float = 1e-6,
        weight_scale: torch.Tensor | None = None,
        input_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's output of x; arguments and errors are those of `row_parallel_linear`."""
        self._check_scales(weight_scale=weight_scale, input_scale=input_scale)
        kind = None
        if norm_weight is None:
            kind = self._checked_calls.kind(x, weight, bias, is_added_to=residual is not None)
        operators = self._checked_calls.operators(kind)
        biases: Tensors = () if bias is None else (bias,)
        if operators is None:
            x, (weight,), biases = self._checked(x, (weight,), biases)
            bias = biases[0] if biases else None
        if residual is not None or norm_weight is not None:
            residual, norm_weight = self._checked_read(x, residual, norm_weight)
        rows, behind = self._rows(x)
        m = rows.shape[0]
        if m == 0:
            own = self.shard(x.shape[self.sequence_dim])
            nothing = self._of_nothing(x, (weight,), biases, self.out_features, own.stop - own.start)
            output = nothing if residual is None else nothing + residual
            return output if norm_weight is None else (_normed(output, norm_weight, eps), output)
        if len(behind) > 0:
            self._check_places(m, x, behind)
        added = None if residual is None else self._rows(residual)[0]
        if operators is not None:
            output = self._multiply_again(operators, rows, (weight,), m, bias=bias, residual=added)
            return self._back(output, x, behind)
        self._check_trainable((weight,), rows, bias, residual, norm_weight)
        wanted = self._wanted(m, rows, (weight,), biases)
        wants_more = torch.is_grad_enabled() and any(
            one is not None and one.requires_grad for one in (residual, norm_weight)
        )
        if any(wanted) or wants_more:
            steps = self._steps(wanted)
            output = self._activated(Rows.apply(rows, weight, bias, added, m, self, steps), steps)
            outputs = [output] if norm_weight is None else [output, _normed(output, norm_weight, eps)]
        else:
            steps = self._steps(wanted, None if norm_weight is None else eps)
            scaled = self._operand(steps, rows, input_scale, "input_scale")
            by = self._operand(steps, weight, weight_scale, "weight_scale")
            outputs = list(multiply_rows(self, steps, m, scaled, by, bias, x.dtype, added, norm_weight))
            if kind is not None and steps.forward is not None:
                product, read = self._product(steps.forward, m, rows.dtype), {"bias": bias, "residual": added}
                self._checked_calls.keep(kind, steps.forward.family, rows, (weight,), product, **read)
        output, *normed = [self._back(one, x, behind) for one in outputs]
        return (normed[0], output) if normed else output

    def _checked_read(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm_weight: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return a residual and a norm's weight as autocast would have them; raise for one of another output."""
        shape = [*x.shape[:-1], self.out_features]
        if self.sequence_parallel:
            own = self.shard(x.shape[self.sequence_dim])
            shape[self.sequence_dim] = own.stop - own.start
        if torch.is_autocast_enabled(x.device.type):  # x is in its dtype
            residual, norm_weight = (None if one is None else one.to(x.dtype) for one in (residual, norm_weight))
        read = (("residual", residual, shape), ("norm_weight", norm_weight, [self.out_features]))
        for name, one, expected in read:
            if one is not None and list(one.shape) != expected:
                raise ValueError(f"{self._name}: {name} is {tuple(one.shape)}; it must be {tuple(expected)}")
            if one is not None and one.dtype != x.dtype:
                raise ValueError(f"{self._name}: x is {x.dtype} and {name} {one.dtype}; they must be the same")
        return residual, norm_weight

    def _steps(self, wanted: Wanted, norm_eps: float | None = None) -> Steps:
        forth = gemm_reduce_scatter if self.sequence_parallel else gemm_all_reduce
        activation = None if any(wanted) else self.activation
        sizes = self.out_features, self.in_features
        forward = Step(
            forth.FAMILY,
            *sizes,
            self.variant,
            activation=activation,
            norm_eps=norm_eps,
            use_fast_accum=self._is_fast,
        )
        backward = None
        if self.sequence_parallel:
            keeps = wanted.weight or wanted.bias
            backward = Step(all_gather_gemm.FAMILY, self.in_features, self.out_features, self.backward_variant, keeps)
        return Steps(forward, backward, wanted.weight, formats=self._formats)


def _normed(output: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(output, norm_weight.shape, norm_weight, eps)
