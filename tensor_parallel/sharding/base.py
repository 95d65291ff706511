"""What layers sharded over the ranks have in common: sizes, a rank's shards, and products of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from iris_core import Context
from iris_kernels.common.config import is_fp8
from iris_kernels.common.device.epilogue import ACTIVATIONS, epilogue_ops, finish_with_torch
from iris_kernels.common.operators.dispatch import Operators
from iris_kernels.common.operators.parts import joined
from iris_kernels.common.operators.product import Product, epilogue_of, in_graph, op_of
from iris_kernels.common.operators.torch_op import multiply, operators_for, owned
from iris_kernels.common.problem import doublings, shard_bounds
from overlap_taxonomy import get_variant

from .checked_calls import CheckedCalls
from .float8 import Float8, Formats, Scaled, check_how
from .products import Step, Steps
from .waiting import waited

Tensors = tuple[torch.Tensor, ...]


class Wanted(NamedTuple):
    """Whether a call is to compute the gradients of these, which must be the same on all ranks."""

    x: bool
    weight: bool
    bias: bool


NOTHING = Wanted(False, False, False)


@dataclass(frozen=True, eq=False)
class Sharding(ABC):
    """A linear layer's sizes, and which part of its tensors a rank has. Call it with tensors.

    Args:
        ctx: the context.
        in_features, out_features: of the whole layer.
        sequence_parallel: whether the tokens outside of a pair of layers, before the first and after the second, are
            sharded over the ranks, too, as ``torch.chunk`` cuts them.
        sequence_dim: which dimension of x is cut then; not its last. Where it is not the first, and those before it are
            not 1, x is copied to bring it there, and a row-parallel layer keeps that copy for its weight's gradient.
        variant, backward_variant: the overlap patterns; "auto" chooses the fastest.
        activation: what is applied to the output, "relu", "gelu", "gelu_tanh" or "silu": by the kernel that computes
            it, or by torch where that one does not communicate, or a gradient is computed. None for nothing.
        quantize: how the layer multiplies in fp8; None for in x's dtype.

    Raises:
        ValueError: a size below one, a `sequence_dim` that is no integer, an activation that there is not, or
            `quantize` on a device without fp8.
    """

    ctx: Context
    in_features: int
    out_features: int
    _: KW_ONLY
    sequence_parallel: bool = False
    sequence_dim: int = 0
    variant: str = "auto"
    backward_variant: str = "auto"
    activation: str | None = None
    quantize: Float8 | None = None
    _formats: Formats | None = field(init=False, repr=False)
    _weight_shape: torch.Size = field(init=False, repr=False)
    _bias_shape: torch.Size = field(init=False, repr=False)
    _checked_calls: CheckedCalls = field(init=False, repr=False)

    kind: ClassVar[str]
    advice: ClassVar[str] = ""  # where ranks ask for different operators
    weight_dim: ClassVar[int]  # of the weight's, the one that is cut
    shards_bias: ClassVar[bool]  # else all ranks have the whole
    activations: ClassVar[tuple[str, ...]] = ACTIVATIONS  # that it may have

    def __post_init__(self) -> None:
        for name in ("in_features", "out_features"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes a positive number")
        if not isinstance(self.sequence_dim, int):
            raise ValueError(f"sequence_dim is {self.sequence_dim!r}; it takes an integer")
        check_how(self.quantize)
        epilogue_of((), self.activation, self.activations)
        object.__setattr__(self, "_formats", None if self.quantize is None else Formats.of(self.ctx))
        whole = torch.empty(self.out_features, self.in_features, device="meta")
        # No cached properties: the compiler cannot trace their lock. Merged layers' parts have the shape of one
        # layer's, and to join parts here would import the compiler, which takes seconds.
        object.__setattr__(self, "_weight_shape", Sharding.own_weight(self, whole).shape)
        object.__setattr__(self, "_bias_shape", Sharding.own_bias(self, whole[:, 0]).shape)
        object.__setattr__(self, "_checked_calls", CheckedCalls(self.ctx, are_kept=self.quantize is None))

    def __deepcopy__(self, memo: Any) -> Sharding:
        """A copy of a layer is cut alike, with the same context, of which a process has one."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a layer holds its rank's context, which cannot be saved; save its state_dict()")

    @abstractmethod
    def _steps(self, wanted: Wanted) -> Steps:
        """Return what a call multiplies."""

    def check_variants(self) -> None:
        """Raise ValueError for a variant that its family does not have, as a call does, which may come late."""
        steps = self._steps(Wanted(True, True, True))
        for step in (steps.forward, steps.backward):
            if step is not None:
                get_variant(step.family, step.variant)

    def shard(self, size: int) -> slice:
        """Return which of so many features are this rank's."""
        return slice(*shard_bounds(size, self.ctx.get_num_ranks(), self.ctx.get_rank()))

    def own_weight(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of (out_features, in_features), a view."""
        part = self.shard(whole.shape[self.weight_dim])
        return whole[part] if self.weight_dim == 0 else whole[:, part]

    def own_bias(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of (out_features,), a view; all of it where it is not cut."""
        return whole[self.shard(len(whole))] if self.shards_bias else whole

    def own_scale(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a weight's scale, (out_features, 1) or (); all of it where inputs are cut."""
        return self.own_weight(whole) if whole.ndim == 2 and self.weight_dim == 0 else whole

    def _checked(self, x: torch.Tensor, weights: Tensors, biases: Tensors) -> tuple[torch.Tensor, Tensors, Tensors]:
        """Return the tensors as autocast would have them; raise for those that are not this layer's.

        Several weights, or biases, are taken as one, one above the other.
        """
        device_type, are_fp8, dim = self.ctx.get_device().type, is_fp8(weights[0].dtype), self.sequence_dim
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            x, biases = x.to(dtype), tuple(bias.to(dtype) for bias in biases)
            weights = weights if are_fp8 else tuple(weight.to(dtype) for weight in weights)
        is_fit = x.ndim > 1 and x.shape[-1] == self._weight_shape[1] and _shape_of(weights) == self._weight_shape
        is_fit = is_fit and (len(biases) == 0 or _shape_of(biases) == self._bias_shape)  # no `not`: it is traced
        is_cut_where_it_can = not self.sequence_parallel or (-x.ndim <= dim < x.ndim - 1 and dim != -1)
        expected = self._formats if self._formats is not None and self.keeps_fp8 else (x.dtype,)
        is_fit = is_fit and all(one.dtype in expected for one in weights)
        if not (is_fit and all(one.dtype == x.dtype for one in biases) and is_cut_where_it_can):
            raise ValueError(f"{self._name}: {self._misfit(x, weights, biases)}")
        return x, weights, biases

    def _misfit(self, x: torch.Tensor, weights: Tensors, biases: Tensors) -> str:
        """Return why these are not this layer's."""
        if (found := _shape_of(weights)) != self._weight_shape:
            return f"weight is {tuple(found)}; this rank's must be {tuple(self._weight_shape)}"
        if biases and (found := _shape_of(biases)) != self._bias_shape:
            return f"bias is {tuple(found)}; this rank's must be {tuple(self._bias_shape)}"
        if x.ndim < 2 or x.shape[-1] != self._weight_shape[1]:
            is_last = self.sequence_parallel and self.sequence_dim == x.ndim - 1
            advice = "; a layout of the features is Shard(-1)" if is_last else ""
            return f"x is {tuple(x.shape)}; it must be (…, {self._weight_shape[1]}), tokens before features{advice}"
        dtype = weights[0].dtype
        are_fp8 = is_fp8(dtype)
        if self.keeps_fp8 and dtype not in (self._formats or ()):
            formats = " or ".join(map(str, self._formats or ()))
            return (
                f"weight is {dtype}; with quantize={self.quantize} it must be {formats}, beside its weight_scale: "
                "from_linear makes both, Module.to(dtype) spoils them; Float8(training=True) takes others"
            )
        if are_fp8 and not self.keeps_fp8:
            return f"weight is {dtype}, and quantize is {self.quantize}; fp8 weights take quantize=Float8()"
        named = [*(("weight", weight) for weight in weights if not are_fp8), *(("bias", bias) for bias in biases)]
        for name, tensor in named:
            if tensor.dtype != x.dtype:
                return f"x is {x.dtype} and {name} {tensor.dtype}; they must be the same"
        return (
            f"sequence_dim is {self.sequence_dim}; of x {tuple(x.shape)} it must be one of tokens, before the last "
            "(Shard(-1) in a style)"
        )

    @property
    def _name(self) -> str:
        return f"{self.kind}-parallel layer of {self.in_features} to {self.out_features} features"

    def _rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Size]:
        """Return x's tokens as rows, those of one place in the sequence together, and the shape behind that place."""
        if x.ndim == 2:
            return x, x.shape[1:1]
        if not self.sequence_parallel:
            return x.reshape(-1, x.shape[-1]), x.shape[:0]
        moved = x.movedim(self.sequence_dim, 0)
        return moved.reshape(-1, x.shape[-1]), moved.shape[1:-1]

    def _back(self, rows: torch.Tensor, x: torch.Tensor, behind: torch.Size) -> torch.Tensor:
        """Return rows in the order in which x came."""
        if x.ndim == 2:
            return rows
        if not self.sequence_parallel:
            return rows.reshape(*x.shape[:-1], rows.shape[-1])
        places = rows.shape[0] // max(1, behind.numel())
        return rows.reshape(places, *behind, rows.shape[-1]).movedim(0, self.sequence_dim)

    def _check_places(self, m: int, x: torch.Tensor, behind: torch.Size) -> None:
        """Raise if parts of a sequence, of `m` tokens of all ranks, do not begin where a place of it does."""
        each, world_size = behind.numel(), self.ctx.get_num_ranks()
        if self.sequence_parallel and each > 1 and m // each % world_size:
            raise ValueError(
                f"{self._name}: x is {tuple(x.shape)}, and all ranks have {m} tokens; where each place of a sequence "
                f"has {each}, its length must be a multiple of the {world_size} ranks"
            )

    def _of_nothing(
        self,
        x: torch.Tensor,
        weights: Tensors,
        biases: Tensors,
        features: int,
        places: int,
    ) -> torch.Tensor:
        """Return the output for no tokens on any rank, whose gradients are zero: there is nothing to communicate."""
        shape = [*x.shape[:-1], features]
        if self.sequence_parallel:
            shape[self.sequence_dim] = places
        trained = (one for one in (*weights, *biases) if one.requires_grad)  # of those kept in fp8 there is no sum
        return (x.sum() + sum(one.sum() for one in trained)).expand(shape)

    def _operand(self, steps: Steps, matrix: torch.Tensor, scale: torch.Tensor | None, name: str) -> Scaled:
        """Return x or a weight as the forward pass multiplies it; raise for a scale that is not the matrix's.

        Args:
            steps: of the call.
            matrix: x's rows, or this rank's weight.
            scale: a given one; None for none.
            name: "input_scale", of x, or "weight_scale".
        """
        is_weight = name == "weight_scale"
        if scale is None:
            if is_weight and is_fp8(matrix.dtype):
                raise ValueError(f"{self._name}: weight is {matrix.dtype}, and weight_scale is None; fp8 takes a scale")
            return steps.scaled(matrix)
        allowed = ((), (1,), (len(matrix), 1)) if is_weight else ((), (1,))
        if tuple(scale.shape) not in allowed or scale.dtype != torch.float32:
            raise ValueError(
                f"{self._name}: {name} is {tuple(scale.shape)}, {scale.dtype}; it takes {torch.float32} of shape "
                f"{', '.join(map(str, allowed))}"
            )
        return steps.scaled(matrix, scale if scale.ndim == 2 else scale.reshape(()))

    def _check_scales(self, **scales: torch.Tensor | None) -> None:
        """Raise for scales, by name, of a layer that takes none."""
        for name, scale in scales.items():
            if scale is not None and not self.keeps_fp8:
                raise ValueError(
                    f"{self._name}: {name} is given, and quantize is {self.quantize}; it goes with quantize=Float8()"
                )

    def _check_trainable(self, weights: Tensors, *others: torch.Tensor | None) -> None:
        """Raise for gradients that are wanted of a call whose weights are in fp8."""
        if is_fp8(weights[0].dtype) and torch.is_grad_enabled():
            if any(one is not None and one.requires_grad for one in (*weights, *others)):
                raise ValueError(
                    f"{self._name}: an operand requires a gradient, and none is computed beside a weight in "
                    f"{weights[0].dtype}: call it under torch.no_grad(), or train wider weights with "
                    "quantize=Float8(training=True)"
                )

    def _wanted(self, m: int, x: torch.Tensor, weights: Tensors, biases: Tensors) -> Wanted:
        """Return which gradients a call is to compute."""
        wanted = NOTHING
        if torch.is_grad_enabled():
            of_weights, of_biases = (any(one.requires_grad for one in some) for some in (weights, biases))
            wanted = Wanted(x.requires_grad, of_weights, of_biases)
        if self.ctx.debug_mode and not in_graph():
            asked = [self._name, m, str(x.dtype), wanted._asdict()]
            self.ctx.agree("the layers the ranks call, and the gradients they want", asked)
        return wanted

    def _product(self, step: Step, m: int, out_dtype: torch.dtype) -> Product:
        how: dict[str, Any] = {"keep_gathered": step.keep_gathered, "activation": step.activation}
        how |= {"norm_eps": step.norm_eps}
        if self._formats is not None:
            how |= {"out_dtype": out_dtype, "use_fast_accum": step.use_fast_accum}
        return Product(m, step.n, step.k, self.ctx.name, step.variant, **how)

    def _activated(self, output: torch.Tensor, steps: Steps) -> torch.Tensor:
        """Return an output with the activation, which the step may have applied."""
        if self.activation is None or (steps.forward is not None and steps.forward.activation is not None):
            return output
        return finish_with_torch(output, (self.activation,), {})

    @property
    def keeps_fp8(self) -> bool:
        """Whether weights are kept in fp8, over scales."""
        return self.quantize is not None and not self.quantize.training

    @property
    def _is_fast(self) -> bool:
        """Whether sums of fp8 products are left in the tensor cores' accumulators."""
        return self.quantize is not None and self.quantize.use_fast_accum

    @property
    def _narrowing(self) -> int:
        """How many output features the activation makes one."""
        return epilogue_ops((self.activation,))[0].narrowing if self.activation else 1

    def prepare(
        self,
        max_tokens: int,
        dtype: torch.dtype,
        wanted: Wanted = NOTHING,
        *,
        has_bias: bool = False,
        scales: tuple[str, ...] = (),
    ) -> None:
        """Make what calls of up to `max_tokens` tokens of all ranks need, whatever their number; collective.

        Args:
            max_tokens: the most.
            dtype: of x.
            wanted: the gradients that calls will be asked for.
            has_bias: whether calls have a bias.
            scales: of what x and the transposed weight have a scale each, as a `Problem`'s.
        """
        steps = self._steps(wanted)
        made = [(steps.forward, has_bias, scales), (steps.backward if any(wanted) else None, False, ("row", "column"))]
        forward, gradient = self._formats or (dtype, dtype)
        for step, adds_bias, kinds in made:
            for m in doublings(max_tokens):  # fewer tokens may take another variant, each with memory of its own
                if step is not None:
                    operand = forward if step is steps.forward else gradient
                    operators = operators_for(
                        step.family,
                        operand,
                        self._product(step, m, dtype),
                        reads=("bias",) if adds_bias else (),
                        b_dtype=forward,
                        scales=kinds if self._formats else (),
                    )
                    operators.of(m)

    def multiply(
        self, step: Step, a: torch.Tensor, b: Tensors, m: int, *, out_dtype: torch.dtype, **read: torch.Tensor | None
    ) -> Any:
        """Make a product for `m` tokens of all ranks; return its outputs, which are the caller's.

        B comes in parts, and what is `read` beside it by name, as the family's op takes it.

        Collective where there is no operator for it yet, or it has room for fewer tokens.

        Raises:
            ValueError: operands that are not this rank's; names the layer.
            HeapExhausted: the heap has no room for the operator's buffers.
        """
        product = self._product(step, m, out_dtype)
        a, operands = waited(a), {name: waited(one) for name, one in read.items() if one is not None}
        if in_graph() or isinstance(a, FakeTensor):
            return op_of(step.family)(a, list(b), *product, **operands)
        if m == 0:
            with self.ctx.collective_section(f"find {step.family}/{step.variant}"):  # as ranks with tokens do
                raise ValueError(
                    f"{self._name}: rank {self.ctx.get_rank()} has no tokens; where ranks have different numbers, "
                    "say how many all have together, tokens=..."
                )
        try:
            return multiply(step.family, a, b, product, operands)
        except ValueError as error:
            raise self._named(error, m) from error

    def _multiply_again(
        self, operators: Operators, a: torch.Tensor, weights: Tensors, m: int, **read: torch.Tensor | None
    ) -> torch.Tensor:
        """As `multiply`, by operators of `CheckedCalls`; of A and the transposes of weights, and the output alone."""
        b = weights[0].t() if len(weights) == 1 else joined([weight.t() for weight in weights], 1)
        operands = {}
        for name, one in read.items():  # no comprehension: a frame, a call
            if one is not None:
                operands[name] = waited(one)
        try:
            operator = operators.of(m)
            return owned(operator, operator.call(waited(a), b, m=m, **operands))[0]
        except ValueError as error:
            raise self._named(error, m) from error

    def _named(self, error: ValueError, m: int) -> ValueError:
        advice = self.advice if self.sequence_parallel else ""
        return ValueError(f"{self._name}, {m} tokens of all ranks: {error}{advice}")


def _shape_of(parameters: Tensors) -> torch.Size:
    """Return the shape of weights, or biases, one above the other."""
    first = parameters[0].shape
    if len(parameters) == 1 or any(one.shape[1:] != first[1:] for one in parameters):
        return first
    return torch.Size([sum(len(one) for one in parameters), *first[1:]])
