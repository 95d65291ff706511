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
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from iris_core import Context
from iris_core.context import context_named
from overlap_taxonomy import Partition, register_partition

from ..config import GemmConfig, is_fp8
from ..device.epilogue import ACTIVATIONS, GATED_ACTIVATIONS, finish_with_torch
from ..fp8.scales import check_quantize, quantised_dtype
from ..portable.row_norm import RmsNorm
from ..problem import Problem
from .functional import operator_of, problem_for, scales_of
from .operand_checks import PLAIN
from .operator import Operator
from .parts import joined

_ARGUMENTS = (
    "Tensor a, Tensor[] b, SymInt m, SymInt n, SymInt k, str context, str variant='auto', str backward_variant='auto', "
    "bool keep_gathered=False, str? activation=None, ScalarType? out_dtype=None, ScalarType? partial_dtype=None, "
    "bool use_fast_accum=False, float? norm_eps=None, ScalarType? normed_dtype=None, str? quantize=None, "
    "Tensor? bias=None, Tensor? residual=None, Tensor? scale=None, Tensor? a_scale=None, Tensor? b_scale=None, "
    "Tensor? norm_weight=None"
)
_MOST_FOUND = 4096  # operators that are looked up at once
_LIBRARY = torch.library.Library("iris_overlap", "DEF")
_families: dict[str, _Family] = {}  # that have an op
_found: weakref.WeakValueDictionary[Any, Operator[Any]] = weakref.WeakValueDictionary()  # by all that an op is asked


class _Family(NamedTuple):
    """What is to be known of a family.

    Args:
        problem_type: its problems.
        gathers: whether it gathers A.
        dim: of B's, the one that the ranks share.
    """

    problem_type: type[Problem]
    gathers: bool
    dim: int


class Product(NamedTuple):
    """A call without its tensors, as an op takes it behind A and B.

    Args:
        m, n, k: of C (m, n) = A (m, k) @ B (k, n).
        context: the context's name.
        variant, backward_variant: of the product, and of those that give its gradients.
        keep_gathered: whether A as the family gathers it is returned, too.
        activation: what is applied to C last, by name; None for nothing.
        out_dtype, partial_dtype, use_fast_accum: as a `Problem`'s.
        norm_eps, normed_dtype: of an RMSNorm of C's rows (`RmsNorm`); None for none, and for C's dtype.
        quantize: "row" where A is quantised as it is gathered.
    """

    m: int
    n: int
    k: int
    context: str
    variant: str = "auto"
    backward_variant: str = "auto"
    keep_gathered: bool = False
    activation: str | None = None
    out_dtype: torch.dtype | None = None
    partial_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    norm_eps: float | None = None
    normed_dtype: torch.dtype | None = None
    quantize: str | None = None

    @property
    def norm(self) -> RmsNorm | None:
        """What is made of C's rows."""
        return None if self.norm_eps is None else RmsNorm(self.norm_eps, self.normed_dtype)

    def backward(
        self, family: str, a: torch.Tensor, b: Sequence[torch.Tensor], *sizes: int, keep_gathered: bool = False
    ) -> list[torch.Tensor]:
        """Return what another family's op gives, as part of a backward pass; `sizes` are its m, n and k."""
        return op_of(family)(a, b, *sizes, self.context, self.backward_variant, self.backward_variant, keep_gathered)


# What is read beside A and B, as an op takes it behind all others: what an epilogue reads, C being
# activation(scale · A @ B + bias + residual), the scales of A and of all parts of B, and what a norm reads.
_READ = ("bias", "residual", "scale", "a_scale", "b_scale", "norm_weight")
_LINEAR = ("scale", "bias", "residual")  # in the order in which they are applied
_NUMBERS = len(Product._fields)  # that an op takes between A and B and what it reads beside them


def op_of(family: str) -> Any:
    """Return a family's op, as graphs have it."""
    return getattr(torch.ops.iris_overlap, family).default


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
        return multiply(family, a, b, *_product_and_operands(arguments))

    def fake(a: torch.Tensor, b: Sequence[torch.Tensor], *arguments: Any) -> list[torch.Tensor]:
        if "torch._inductor.lowering" in sys.modules:  # by now imported, if inductor is what compiles this graph
            _lower_as_collective(family)
        product, operands = _product_and_operands(arguments)
        ctx, a_scale = context_named(product.context), operands.get("a_scale")
        how: tuple[Any, ...] = (b[0].dtype, ("row", "column")) if product.quantize else ()
        problem = _problem_of(family, product, ctx.get_num_ranks(), a.dtype, tuple(operands), *how)
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
        if _want_gradients(a, *b, *arguments[_NUMBERS:]):
            product, operands = _product_and_operands(arguments)
            bias, residual, scale, a_scale, b_scale, norm_weight = (operands.get(name) for name in _READ)
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
        if _are_plain(a, *b, *arguments[_NUMBERS:]):  # the dispatcher takes 5 us to come to the same
            return multiply(family, a, b, *_product_and_operands(arguments))
        with torch._C._AutoDispatchBelowAutograd():
            return op(a, b, *arguments)

    # Defined by itself, not by `torch.library.custom_op`, whose way to what it runs takes the host four times as long.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    _LIBRARY.define(f"{family}({_ARGUMENTS}) -> Tensor[]", tags=tags)
    _LIBRARY.impl(family, call_op, "CompositeExplicitAutograd")
    _LIBRARY.impl(family, differentiable, "Autograd")
    torch.library.register_fake(f"iris_overlap::{family}", fake, lib=_LIBRARY)
    op = op_of(family)
    op.undispatched = call_op  # by this name inductor's code finds it
    _families[family] = _Family(problem_type, gathers, dim)
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


def _product_and_operands(arguments: tuple[Any, ...]) -> tuple[Product, dict[str, torch.Tensor]]:
    """Return what an op is given behind A and B: what it reads beside them by name, where it is given."""
    if len(arguments) <= _NUMBERS:
        return Product(*arguments), {}
    read = zip(_READ, arguments[_NUMBERS:], strict=False)
    return Product(*arguments[:_NUMBERS]), {name: one for name, one in read if one is not None}


def multiply(
    family: str,
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    product: Product,
    operands: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> list[torch.Tensor]:
    """Return what an op gives, without gradients; memory of the caller's.

    That is C, then the gathered A if it is kept, or the normed rows, and their scales.

    Args:
        family, a, b, product: what is called.
        operands: what is read beside A and B, by name: bias, residual, scale, a_scale, b_scale, norm_weight.

    Raises:
        As `operator_for`, and as a call of an operator.
    """
    whole_b = joined(b, _families[family].dim)
    operator = operator_of_call(family, a, whole_b, product, operands)
    read = _as_operators_take(operands) if "b_scale" in operands else operands
    return owned(operator, operator.call(a, whole_b, m=product.m, **read))


def operator_of_call(
    family: str, a: torch.Tensor, b: torch.Tensor, product: Product, operands: Mapping[str, torch.Tensor]
) -> Operator[Any]:
    """Return the operator that `multiply` calls, with B as a whole; looked up, unless it must be made or grow."""
    reads = tuple(operands)
    scales: tuple[str, ...] = ()
    if product.quantize is not None or "a_scale" in operands or "b_scale" in operands:
        check_quantize(product.quantize, a.dtype, b.dtype, has_scale="a_scale" in operands)
        scales = scales_of(a, b, operands.get("a_scale"), operands.get("b_scale"), product.quantize)
    asked = (family, a.dtype, b.dtype, scales, reads, product)
    operator = _found.get(asked)
    if operator is None or operator.is_closed:
        operator = operator_for(family, a.dtype, product, reads=reads, b_dtype=b.dtype, scales=scales)
        if len(_found) >= _MOST_FOUND:
            _found.clear()
        _found[asked] = operator
    return operator


def operator_for(
    family: str,
    dtype: torch.dtype,
    product: Product,
    *,
    reads: tuple[str, ...] = (),
    b_dtype: torch.dtype | None = None,
    scales: tuple[str, ...] = (),
) -> Operator[Any]:
    """Return the operator of an op's calls; collective where it must be made, or make room for more rows.

    Args:
        family, dtype, product: what is called.
        reads: what calls have beside A and B, by name, but scales.
        b_dtype: B's; None for A's, `dtype`.
        scales: of what the operands have a scale each, as a `Problem`'s.

    Raises:
        RuntimeError: there is no such context.
        As `operator_of`.
    """
    ctx = context_named(product.context)
    problem = _problem_of_row(family, product._replace(m=1), ctx.get_num_ranks(), dtype, reads, b_dtype, scales)
    options: dict[str, Any] = {"keep_gathered": product.keep_gathered} if _families[family].gathers else {}
    return operator_of(ctx, family, problem.with_rows(product.m), product.variant, **options)


def _problem_of(
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
    problem_type: Any = _families[family].problem_type
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


_problem_of_row = functools.lru_cache(_MOST_FOUND)(_problem_of)  # for a number of rows that is no SymInt


def _as_operators_take(operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return operands with the scale of a tensor as a matrix of one."""
    return {
        name: one.reshape(1, 1) if name in ("a_scale", "b_scale") and one.ndim < 2 else one
        for name, one in operands.items()
    }


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
    return operator.call(a, b, m=problem.m, **(_as_operators_take(operands) if problem.scales else operands))


@functools.cache
def epilogue_of(
    reads: tuple[str, ...], activation: str | None, known: tuple[str, ...] = (*ACTIVATIONS, *GATED_ACTIVATIONS)
) -> tuple[str, ...]:
    """Return the epilogue of a product that reads these, and ends with an activation, one of those `known`.

    Raises:
        ValueError: there is no such activation.
    """
    if not (activation is None or activation in known):
        raise ValueError(f"activation is {activation!r}; it takes {', '.join(known)}, or None")
    return (*(name for name in _LINEAR if name in reads), *([activation] if activation else []))


def in_graph() -> bool:
    """Return whether a graph is being made of what is called, by `torch.compile` or `torch.export`."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


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
