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
from typing import Any

import torch

from iris_core import Context
from iris_core.context import context_named
from overlap_taxonomy import Partition, register_partition

from ..config import GemmConfig, is_fp8
from ..device.epilogue import finish_with_torch
from ..portable.row_norm import RmsNorm
from ..problem import Problem
from .functional import operator_of, problem_for
from .multiply import Family, as_operators_take, families, multiply, problem_of
from .operand_checks import PLAIN
from .product import ARGUMENTS, NUMBERS, READ, Product, epilogue_of, op_of, product_and_operands

_LIBRARY = torch.library.Library("iris_overlap", "DEF")


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
        return multiply(family, a, b, *product_and_operands(arguments))

    def fake(a: torch.Tensor, b: Sequence[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
        if "torch._inductor.lowering" in sys.modules:  # by now imported, if inductor is what compiles this graph
            _lower_as_collective(family)
        product, operands = product_and_operands(arguments)
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
        if _want_gradients(a, *b, *arguments[NUMBERS:]):
            product, operands = product_and_operands(arguments)
            bias, residual, scale, a_scale, b_scale, norm_weight = (operands.get(name) for name in READ)
            if product.normed_dtype is not None:
                raise ValueError(
                    f"normed_dtype is {product.normed_dtype}, which has no gradient: call under torch.no_grad(), or "
                    "leave it out"
                )
            if scale is not None and scale.requires_grad:
                raise ValueError("scale requires a gradient, which is not computed: multiply B or C by it, in torch")
            if (is_fp8(a.dtype) or product.quantize) and _want_gradients(a, *b, a_scale, b_scale):
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
        if _are_plain(a, *b, *arguments[NUMBERS:]):  # the dispatcher takes 5 us to come to the same
            return multiply(family, a, b, *product_and_operands(arguments))
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


def _want_gradients(*operands: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in operands)


def _are_plain(*operands: torch.Tensor | None) -> bool:
    """Whether operands have memory, and no mode, subclass or transform of torch's is to see the call."""
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    are_plain = True
    for one in operands:  # no comprehension: a frame, a call
        are_plain = are_plain and (one is None or (type(one) in PLAIN and not one.is_meta))
    return are_plain


def call(
    ctx: Context,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    family: str,
    sizes: Mapping[str, int | None],
    config: GemmConfig | None = None,
    variant: str = "auto",
    options: Mapping[str, Any] | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    partial_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float | None = None,
    normed_dtype: torch.dtype | None = None,
    quantize: str | None = None,
    **asked: Any,
) -> Sequence[torch.Tensor]:
    """Return the outputs of a call of a family's function: C, then the family's others, or what the norm gives.

    In a graph of `torch.compile`, and where an operand requires a gradient, it is a call of the op.

    Args:
        ctx, a, b, family, sizes, config, variant, asked: as `problem_for`'s. In a graph a size that is not given is
            taken as what all ranks have as much of as this one.
        options: the family's own, of the op's; None for none.
        activation, bias, residual, scale: what is done to C, which is activation(scale · A @ B + bias + residual); the
            scale may be a single number (). None for nothing.
        out_dtype: C's; None for the operands', or for bf16 where these are fp8.
        a_scale, b_scale: of fp8 operands (scales.py); None for none.
        partial_dtype, use_fast_accum: as a `Problem`'s.
        norm_weight, norm_eps, normed_dtype: of an RMSNorm of C's rows (`RmsNorm`), which are returned beside C; the
            first two None for none.
        quantize: "row" where A is quantised as it is gathered; None for A as it is.
    """
    options = options or {}
    operands = {}
    if bias is not None:
        operands["bias"] = bias
    if residual is not None:
        operands["residual"] = residual
    if scale is not None:
        operands["scale"] = scale.expand(b.shape[1]) if scale.ndim == 0 else scale
    if a_scale is not None:
        operands["a_scale"] = a_scale
    if b_scale is not None:
        operands["b_scale"] = b_scale
    if norm_weight is not None:
        operands["norm_weight"] = norm_weight
    rounding: dict[str, Any] = {
        "out_dtype": out_dtype,
        "partial_dtype": partial_dtype,
        "use_fast_accum": use_fast_accum,
        "quantize": quantize,
    }
    how: dict[str, Any] = {"activation": activation, **rounding}
    how |= {"norm_eps": norm_eps, "normed_dtype": normed_dtype, **operands}
    if in_graph():
        if config is not None:
            asked = {**asked, **how, "family": family, "sizes": sizes, "config": config, "variant": variant}
            return torch.compiler.disable(call)(ctx, a, b, options=options, **asked)
        whole = {"m": a.shape[0], "n": b.shape[1], "k": a.shape[1]}
        for name, size in sizes.items():
            whole[name] = whole[name] * ctx.get_num_ranks() if size is None else size
        return op_of(family)(a, [b], *whole.values(), ctx.name, variant, **options, **how)
    epilogue = epilogue_of(tuple(operands), activation) if operands or activation is not None else ()
    asked = {**asked, "family": family, "sizes": sizes, "config": config, "variant": variant}
    norm = None if norm_eps is None else RmsNorm(norm_eps, normed_dtype)
    problem = problem_for(
        ctx, a, b, epilogue=epilogue, a_scale=a_scale, b_scale=b_scale, norm=norm, **rounding, **asked
    )
    if config is None and _want_gradients(a, b, *operands.values()):
        return op_of(family)(a, [b], problem.m, problem.n, problem.k, ctx.name, variant, **options, **how)
    operator = operator_of(ctx, family, problem, variant, config, **options)
    return operator.call(a, b, m=problem.m, **(as_operators_take(operands) if problem.scales else operands))


def in_graph() -> bool:
    """Return whether a graph is being made of what is called, by `torch.compile` or `torch.export`."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


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
