"""The families as functional torch ops: ``torch.ops.iris_overlap.<family>``, of tensors, numbers and a context's name.

An op finds or makes its operator when it runs, as a call of the family's function does, so a graph knows no operator,
and is the same for all layers of its sizes and for any number of rows. It returns memory of the caller's. All sizes are
those of the whole product; where ranks share a dimension, `torch.chunk` cuts it. B is a list: its parts along the
dimension that the ranks share, such as the weights of layers that read one x. They are copied to be one, unless they
were laid together (parts.py).

All ranks must queue their calls in the same order. The graph that AOTAutograd makes has the calls in program order, and
backends that run it node by node keep that. Inductor's scheduler reorders nodes that do not depend on each other by
sizes, which differ between ranks; it keeps collectives in the order of the graph (`decide_global_ordering_of_comms`).
So calls are lowered as what inductor takes for a collective: ordered among themselves and with functional collectives
(``torch.ops._c10d_functional``). The code that it writes enters the op's implementation itself: torch's dispatcher
would take the host as long as the rest of a call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from iris_core.context import context_named
from overlap_taxonomy import Partition, register_partition

from ..config import is_fp8
from ..device.epilogue import finish_with_torch
from ..fp8.scales import check_quantize, quantised_dtype
from ..problem import Problem
from .dispatch import Operators, operators_of, scales_of, want_gradients
from .operand_checks import PLAIN
from .operator import Operator
from .parts import joined
from .product import (
    ARGUMENTS,
    NUMBERS,
    READ,
    Family,
    Product,
    as_operators_take,
    epilogue_of,
    families,
    op_of,
    operands_of,
)

_MOST_FOUND = 4096  # products whose operators are looked up at once
_QUANTIZE = Product._fields.index("quantize")
_LIBRARY = torch.library.Library("iris_overlap", "DEF")
_found: dict[Any, Operators] = {}  # by all that an op is asked but the rows

# Of a product, its A (as gathered, where it is) and B's parts, the gradient of C, and which gradients are wanted.
Gradients = Callable[
    [Product, torch.Tensor, Sequence[torch.Tensor], torch.Tensor, tuple[bool, bool]],
    tuple[torch.Tensor | None, torch.Tensor | None],
]


def _all_columns(product: Product, grad: torch.Tensor) -> torch.Tensor:
    return grad


def define_op(
    family: str,
    problem_type: type[Problem],
    gradients: Gradients,
    *,
    dim: int,
    gathers: bool = False,
    own_columns: Callable[[Product, torch.Tensor], torch.Tensor] = _all_columns,
) -> None:
    """Define a family's op, with a fake implementation for any sizes, and with gradients; register its partition.

    Args:
        family: names it.
        problem_type: the family's problems.
        gradients: returns A's and B's gradients.
        dim: of B's, the one that the ranks share, and along which B may come in parts.
        gathers: whether B's gradient is made of the gathered A.
        own_columns: returns of C's gradient the columns that this rank's B gives.
    """

    def call_op(a: torch.Tensor, b: Sequence[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return call_op(a, b, *arguments)
        return multiply(family, a, b, arguments[:NUMBERS], operands_of(arguments))

    def fake(a: torch.Tensor, b: Sequence[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
        if "torch._inductor.lowering" in sys.modules:  # by now imported, if inductor is what compiles this graph
            _lower_as_collective(family)
        product, operands = Product(*arguments[:NUMBERS]), operands_of(arguments)
        ctx, a_scale = context_named(product.context), operands.get("a_scale")
        how: tuple[Any, ...] = (b[0].dtype, ("row", "column")) if product.quantize else ()
        problem = problem_of(family, product, ctx.get_num_ranks(), a.dtype, tuple(operands), *how)
        shape = problem.c_shape(ctx.get_rank())
        outputs = [a.new_empty(shape, dtype=problem.out_dtype)]
        if product.keep_gathered:
            outputs.append(a.new_empty((product.m, product.k), dtype=problem.dtype))
            if product.quantize or a_scale is not None:
                columns = a_scale.shape[1] if a_scale is not None and a_scale.ndim == 2 else 1
                outputs.append(a.new_empty((product.m, columns), dtype=torch.float32))
        normed = problem.normed_shapes(ctx.get_rank()).values()
        return outputs + [a.new_empty(shape, dtype=dtype) for shape, dtype in normed]

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any,
            a: torch.Tensor,
            bias: torch.Tensor | None,
            residual: torch.Tensor | None,
            scale: torch.Tensor | None,
            product: Product,
            of_operands: tuple[torch.Tensor | None, ...],
            *b: torch.Tensor,
        ) -> tuple[torch.Tensor, ...]:
            wants_b = any(ctx.needs_input_grad[6:])
            kept = product._replace(keep_gathered=product.keep_gathered or (gathers and wants_b))
            with torch._C._AutoDispatchBelowAutograd():
                outputs = op(a, b, *kept, bias, residual, scale, *of_operands)
            whole = outputs[1] if gathers and wants_b else a
            ctx.save_for_backward(whole if wants_b else None, scale, *b)
            ctx.product = product
            if product.keep_gathered:
                ctx.mark_non_differentiable(*outputs[1:])
            return tuple(outputs if product.keep_gathered else outputs[:1])

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            a, scale, *b = ctx.saved_tensors
            wants_a, wants_bias, wants_residual, _, _, _, *wanted = ctx.needs_input_grad
            own = own_columns(ctx.product, grads[0])
            of_bias, of_residual = own.sum(0) if wants_bias else None, own if wants_residual else None
            if not (wants_a or any(wanted)):
                return None, of_bias, of_residual, *[None] * (3 + len(b))
            sizes = [one.shape[dim] for one in b]
            scaled = b
            if scale is not None:  # the product of a scaled B
                factors = scale.split(sizes) if dim == 1 else [scale] * len(b)
                scaled = [one * factor for one, factor in zip(b, factors, strict=True)]
            of_a, of_b = gradients(ctx.product, a, scaled, grads[0].to(b[0].dtype), (wants_a, any(wanted)))
            if of_b is not None and scale is not None:
                of_b = of_b * scale
            parts = [None] * len(b) if of_b is None else of_b.split(sizes, dim)
            return of_a, of_bias, of_residual, None, None, None, *parts

    def differentiable(a: torch.Tensor, b: Sequence[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
        # Whether operands have memory, and no mode, subclass or transform of torch's is to see the call.
        are_plain = not torch._C._len_torch_dispatch_stack() and torch._C._functorch.peek_interpreter_stack() is None
        wants_gradients = False
        for one in (a, *b, *arguments[NUMBERS:]):
            if one is not None:
                wants_gradients = wants_gradients or one.requires_grad
                are_plain = are_plain and type(one) in PLAIN and not one.is_meta
        if wants_gradients and torch.is_grad_enabled():
            product, operands = Product(*arguments[:NUMBERS]), operands_of(arguments)
            bias, residual, scale, a_scale, b_scale, norm_weight = (operands.get(name) for name in READ)
            if product.normed_dtype is not None:
                raise ValueError(
                    f"normed_dtype is {product.normed_dtype}, which has no gradient: call under torch.no_grad(), or "
                    "leave it out"
                )
            if scale is not None and scale.requires_grad:
                raise ValueError("scale requires a gradient, which is not computed: multiply B or C by it, in torch")
            if (is_fp8(a.dtype) or product.quantize) and want_gradients(a, *b, a_scale, b_scale):
                raise ValueError(
                    f"{'A, which is quantised, an' if product.quantize else 'an'} fp8 operand or its scale requires a "
                    "gradient, which is not computed: call it with detach(), in an autograd.Function that multiplies "
                    "what was quantised"
                )
            # The gradients of an activation and of a norm are made of what these are applied to: torch applies them.
            linear = product._replace(activation=None, norm_eps=None)
            output, *others = Gradient.apply(a, bias, residual, scale, linear, (a_scale, b_scale), *b)
            output = finish_with_torch(output, epilogue_of((), product.activation), {})
            if product.norm_eps is not None:
                others.append(torch.nn.functional.rms_norm(output, output.shape[1:], norm_weight, product.norm_eps))
            return [output, *others]
        if are_plain:  # the dispatcher takes 5 us to come to the same
            return multiply(family, a, b, arguments[:NUMBERS], operands_of(arguments))
        with torch._C._AutoDispatchBelowAutograd():
            return op(a, b, *arguments)

    # Defined by itself, not by `torch.library.custom_op`, whose way to what it runs takes the host four times as long.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    _LIBRARY.define(f"{family}({ARGUMENTS}) -> Tensor[]", tags=tags)
    _LIBRARY.impl(family, call_op, "CompositeExplicitAutograd")
    _LIBRARY.impl(family, differentiable, "Autograd")
    torch.library.register_fake(f"iris_overlap::{family}", fake, lib=_LIBRARY)
    op = op_of(family)
    op.undispatched = call_op  # by this name inductor's code finds it
    families[family] = Family(problem_type, gathers, dim)
    register_partition(family, Partition(sums=dim == 0, gathers=gathers))


def multiply(
    family: str,
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    numbers: tuple[Any, ...],
    operands: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> list[torch.Tensor]:
    """Return what an op gives, without gradients; memory of the caller's.

    That is C, then the gathered A if it is kept, or the normed rows, and their scales.

    Args:
        family, a, b: what is called.
        numbers: a `Product`, or a tuple that makes one, which takes the host less.
        operands: what is read beside A and B, by name: bias, residual, scale, a_scale, b_scale, norm_weight.

    Raises:
        As `operators_for`, `Operators.of`, and a call of an operator.
    """
    whole_b = b[0] if len(b) == 1 else joined(b, families[family].dim)
    m = numbers[0]
    operator = operators_of_call(family, a, whole_b, numbers, operands).of(m)
    read = as_operators_take(operands) if "b_scale" in operands else operands
    return owned(operator, operator.call(a, whole_b, m=m, **read))


def operators_of_call(
    family: str, a: torch.Tensor, b: torch.Tensor, numbers: tuple[Any, ...], operands: Mapping[str, torch.Tensor]
) -> Operators:
    """Return the operators of which `multiply` calls one, with B as a whole; looked up, but the first time."""
    scales: tuple[str, ...] = ()
    quantize = numbers[_QUANTIZE] if len(numbers) > _QUANTIZE else None
    if quantize is not None or "a_scale" in operands or "b_scale" in operands:
        check_quantize(quantize, a.dtype, b.dtype, has_scale="a_scale" in operands)
        scales = scales_of(a, b, operands.get("a_scale"), operands.get("b_scale"), quantize)
    asked = (family, a.dtype, b.dtype, scales, *operands, numbers[1:])
    operators = _found.get(asked)
    if operators is None:
        product, reads = Product(*numbers), tuple(operands)
        operators = operators_for(family, a.dtype, product, reads=reads, b_dtype=b.dtype, scales=scales)
        if len(_found) >= _MOST_FOUND:
            _found.clear()
        if not context_named(product.context).debug_mode:  # in which the ranks compare each call
            _found[asked] = operators
    return operators


def operators_for(
    family: str,
    dtype: torch.dtype,
    product: Product,
    *,
    reads: tuple[str, ...] = (),
    b_dtype: torch.dtype | None = None,
    scales: tuple[str, ...] = (),
) -> Operators:
    """Return the operators of an op's calls of any number of rows; collective as `dispatch.operators_of`.

    Args:
        family, dtype, product: what is called.
        reads: what calls have beside A and B, by name, but scales.
        b_dtype: B's; None for A's, `dtype`.
        scales: of what the operands have a scale each, as a `Problem`'s.

    Raises:
        RuntimeError: there is no such context.
        As `dispatch.operators_of`.
    """
    ctx = context_named(product.context)
    if ctx.debug_mode:
        ctx.agree("the rows of the calls", product.m)
    problem = problem_of(family, product._replace(m=1), ctx.get_num_ranks(), dtype, reads, b_dtype, scales)
    options: dict[str, Any] = {"keep_gathered": product.keep_gathered} if families[family].gathers else {}
    return operators_of(ctx, family, problem, product.variant, None, **options)


def problem_of(
    family: str,
    product: Product,
    world_size: int,
    dtype: torch.dtype,
    reads: tuple[str, ...],
    b_dtype: torch.dtype | None = None,
    scales: tuple[str, ...] = (),
) -> Problem:
    """Return what the ranks of a product do together."""
    if (product.norm_eps is None) == ("norm_weight" in reads):
        raise ValueError("norm_eps and norm_weight go together: give both, or neither")
    a_dtype, b_dtype = dtype, b_dtype or dtype
    if product.quantize:
        dtype = quantised_dtype(b_dtype)
    problem_type: Any = families[family].problem_type
    problem: Problem = problem_type(
        product.m,
        product.n,
        product.k,
        world_size,
        dtype,
        epilogue_of(reads, product.activation),
        product.out_dtype,
        b_dtype,
        scales,
        product.partial_dtype,
        product.use_fast_accum,
        product.norm,
        a_dtype,
    )
    return problem


def owned(operator: Operator[Any], outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return what a call gave as matrices that its operator's next call does not overwrite, rows one behind the other.

    C is copied only where peers write it, or its rows lie apart.
    """
    output, *others = outputs
    matrix = operator.as_matrix(output)
    is_new = not operator.keeps_outputs or matrix.data_ptr() != output.data_ptr()
    gathered_or_normed = map(_copied, others) if operator.keeps_gathered else others
    return [matrix.contiguous() if is_new else _copied(matrix), *gathered_or_normed]


def _copied(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.clone(memory_format=torch.contiguous_format)


@functools.cache
def _lower_as_collective(family: str) -> None:
    """Have inductor lower a family's calls to the kind of node whose order it keeps."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    op = op_of(family)

    def lower(*args: Any) -> list[Any]:
        outputs: Any = ir._CollectiveKernel.create_out_of_place(op, *args)
        if not V.graph.cpp_wrapper:  # which dispatches by the op's name
            (call,) = outputs[0].inputs
            call.python_kernel_name = f"{call.python_kernel_name}.undispatched"
        return [ir.TensorBox.create(output) for output in outputs]

    lowering.add_needs_realized_inputs(op)
    lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)
    lowering.register_lowering(op, type_promotion_kind=None)(lower)
