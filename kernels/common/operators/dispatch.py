"""From a family's function to an operator: made at the first call of a product's sizes, kept with the context.

Operators are found by all but the number of rows, and make room for more where a call has more than any before. What
`auto` chooses depends on the rows, too: so a product may have operators of several variants (`Operators`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from typing_extensions import Unpack

from iris_core import Context, HeapExhausted
from iris_core.context import context_named
from overlap_taxonomy import Variant, get_variant

from ..config import GemmConfig
from ..fp8.scales import check_quantize, check_scales, kinds_of, quantised_dtype
from ..portable.row_norm import RmsNorm
from ..problem import Problem
from ..workspace import with_room_to_grow
from .operand_checks import check_is_tensor, check_matrices, check_sizes, check_types
from .operator import Operator
from .product import How, as_operators_take, epilogue_of, families, in_graph, op_of

_MOST_FOUND = 4096  # products, and numbers of rows of one, whose operator is looked up once


@dataclass
class _Product:
    """What the ranks' operands of some shapes make together: the problem of the first, and m by a rank's own rows."""

    problem: Problem
    m_of_rows: dict[int, int] = field(default_factory=dict)


class _Found(NamedTuple):
    """What a call of a function calls: a problem's operators, with `m` rows."""

    operators: Operators
    problem: Problem
    m: int


@dataclass
class _Known:
    """What calls have found out in a context; all of it can be found out again."""

    products: dict[Any, _Product] = field(default_factory=dict)
    operators: dict[Any, Operators] = field(default_factory=dict)  # by what was asked for: the problem of any m
    calls: dict[Any, _Found] = field(default_factory=dict)  # of functions, by all that decides what they call


def _known_in(ctx: Context) -> _Known:
    known: _Known | None = ctx.kept.get(_Known)
    if known is None:
        known = ctx.kept[_Known] = _Known()
    return known


def call(
    family: str,
    ctx: Context,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    sizes: Mapping[str, int | None],
    operands: Mapping[str, torch.Tensor | None],
    variant: str,
    config: GemmConfig | None,
    accumulation_dtype: torch.dtype = torch.float32,
    **how: Unpack[How],
) -> Sequence[torch.Tensor]:
    """Return the outputs of a call of a family's function: C, then the family's others, or what the norm gives.

    In a graph of `torch.compile`, and where an operand requires a gradient, it is a call of the op (torch_op.py).

    Args:
        family: whose function is called.
        ctx, a, b: the context, and this rank's operands.
        sizes: of the whole problem, those that the family cuts, by name; None where the caller gives none. A rank
            cannot tell 9 rows of all ranks from 10 by its own 3: without them, it takes what its shapes made before;
            in a graph, what all ranks have as much of as this one.
        operands: what is read beside A and B (`READ`), by name and in that order; None for what is not. The scale of C
            may be a single number ().
        variant, config: what is asked for.
        accumulation_dtype: float32, in which sums are.
        how: what else the product is.
    """
    read = {}
    for name, operand in operands.items():  # no comprehension: a frame, a call
        if operand is not None:
            check_is_tensor(f"{family}: {name}", operand)
            read[name] = operand.expand(b.shape[1]) if name == "scale" and operand.ndim == 0 else operand
    if in_graph():
        if config is not None:
            given: dict[str, Any] = {"sizes": sizes, "operands": operands, "variant": variant, "config": config}
            given["accumulation_dtype"] = accumulation_dtype
            return torch.compiler.disable(call)(family, ctx, a, b, **given, **how)
        whole = {"m": a.shape[0], "n": b.shape[1], "k": a.shape[1]}
        for name, size in sizes.items():
            whole[name] = whole[name] * ctx.get_num_ranks() if size is None else size
        return op_of(family)(a, [b], *whole.values(), ctx.name, variant, **how, **read)
    check_types(ctx, a, b, config)
    asked: tuple[Any, ...] = (family, variant, config, accumulation_dtype, a.shape, b.shape, a.dtype, b.dtype)
    asked += (*sizes.values(), *how.items())
    for name, operand in read.items():  # no comprehension: a frame, a call
        asked += (name, operand.shape)
    calls = _known_in(ctx).calls
    found = calls.get(asked)
    if found is None or ctx.debug_mode:
        problem, m = problem_for(family, ctx, a, b, sizes, read, variant, accumulation_dtype, how)
        options = {"keep_gathered": how["keep_gathered"]} if "keep_gathered" in how else {}
        found = _Found(operators_of(ctx, family, problem, variant, config, **options), problem, m)
        if len(calls) >= _MOST_FOUND:
            calls.clear()
        calls[asked] = found
    operators, problem, m = found
    if config is None and want_gradients(a, b, *read.values()):
        return op_of(family)(a, [b], m, problem.n, problem.k, ctx.name, variant, **how, **read)
    return operators.of(m).call(a, b, m=m, **(as_operators_take(read) if problem.scales else read))


def want_gradients(*operands: torch.Tensor | None) -> bool:
    """Return whether one of these requires a gradient, and gradients are recorded."""
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in operands)


def problem_for(
    family: str,
    ctx: Context,
    a: torch.Tensor,
    b: torch.Tensor,
    sizes: Mapping[str, int | None],
    operands: Mapping[str, torch.Tensor],
    variant: str,
    accumulation_dtype: torch.dtype,
    how: How,
) -> tuple[Problem, int]:
    """Return what the ranks' operands make together, of some number of rows, and how many there are in this call.

    Collective the first time, when the ranks compare the operands.

    Arguments are `call`'s; of the operands that are given, those of the same names on all ranks, and `how` the same.

    Raises:
        ValueError: operands that do not fit each other, the other ranks' or `sizes`, an unknown variant.
    """
    quantize, activation, norm_eps = how.get("quantize"), how.get("activation"), how.get("norm_eps")
    epilogue = epilogue_of(tuple(operands), activation) if operands or activation is not None else ()
    key: tuple[Any, ...] = (family, a.shape[1:], b.shape, a.dtype, b.dtype, quantize, accumulation_dtype)
    for name, size in sizes.items():  # no comprehension: a frame, a call
        if name != "m":
            key += (size,)
    products = _known_in(ctx).products
    product, rows = products.get(key), a.shape[0] if a.ndim else 0
    m = None
    if product is not None:
        m = sizes.get("m")  # 0, too, which all ranks refuse
        if m is None:
            m = product.m_of_rows.get(rows) or product.problem.m_of(rows, ctx.get_rank())
    if ctx.debug_mode:
        asked = [family, variant, m, *operands, str(how)]
        ctx.agree("the calls, and their rows where the ranks know these", asked)
    a_scale, b_scale = operands.get("a_scale"), operands.get("b_scale")
    scales: tuple[str, ...] = ()
    if product is None or m is None:
        with ctx.collective_section(f"call {family}"):
            check_sizes(sizes)
            get_variant(family, variant)
            check_matrices(a, b)
            if accumulation_dtype != torch.float32:
                raise ValueError(
                    f"accumulation_dtype is {accumulation_dtype}; partial sums are accumulated in {torch.float32} alone"
                )
            check_quantize(quantize, a.dtype, b.dtype, has_scale=a_scale is not None)
            scales = scales_of(a, b, a_scale, b_scale, quantize)
            check_scales(scales, quantised_dtype(b.dtype) if quantize else a.dtype)
        problem = _problem(ctx, a, b, families[family].problem_type, sizes, scales if quantize else ())
        product = products.setdefault(key, _Product(problem))
        m = product.m_of_rows[rows] = problem.m
    else:
        check_sizes(sizes)
        if a_scale is not None or b_scale is not None or quantize:
            scales = scales_of(a, b, a_scale, b_scale, quantize)
    problem = product.problem
    norm = None if norm_eps is None else RmsNorm(norm_eps, how.get("normed_dtype"))
    out_dtype, use_fast_accum = how.get("out_dtype") or problem.out_dtype, how.get("use_fast_accum", False)
    finish = (epilogue, out_dtype, scales, how.get("partial_dtype"), use_fast_accum, norm)
    if finish == ((), problem.out_dtype, (), None, False, None):
        return problem, m
    return _finished(problem, *finish), m


@functools.lru_cache(_MOST_FOUND)
def _finished(
    problem: Problem,
    epilogue: tuple[str, ...],
    out_dtype: torch.dtype,
    scales: tuple[str, ...],
    partial_dtype: torch.dtype | None,
    use_fast_accum: bool,
    norm: RmsNorm | None,
) -> Problem:
    return replace(
        problem,
        epilogue=epilogue,
        out_dtype=out_dtype,
        scales=scales,
        partial_dtype=partial_dtype,
        use_fast_accum=use_fast_accum,
        norm=norm,
    )


def scales_of(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    quantize: str | None = None,
) -> tuple[str, ...]:
    """Return of what the operands have a scale each; an A that is quantised has one a row."""
    if a_scale is None and b_scale is None and not quantize:
        return ()
    of_a, of_b = (None if scale is None else tuple(scale.shape) for scale in (a_scale, b_scale))
    if quantize:
        of_a = (a.shape[0], 1)
    return kinds_of(tuple(a.shape), tuple(b.shape), of_a, of_b)


def operators_of(
    ctx: Context, family: str, problem: Problem, variant: str = "auto", config: GemmConfig | None = None, **options: Any
) -> Operators:
    """Return the context's operators for a problem of any number of rows.

    Collective where they are asked for first, and always in debug mode. They return new memory in each call where peers
    do not write their output.

    Args:
        ctx, family, problem: what is to be done; the same on all ranks. They are for any m, and found by this one.
        variant: the overlap pattern, which may choose another.
        config: tunables of a variant that is named; None for the plan's.
        options: the family's own.

    Raises:
        ValueError: an unknown variant, or what it cannot do.
    """
    known, asked = _known_in(ctx).operators, (family, problem, variant, config, *options.items())
    operators = known.get(asked)
    if operators is None or ctx.debug_mode:
        with ctx.collective_section(f"find {family}/{variant}"):
            found = get_variant(family, variant)
            if found.choose and (reason := found.unsupported_reason(problem, config)):
                raise ValueError(f"{family}/{variant} cannot do this: {reason}")
        if operators is None:
            if len(known) >= _MOST_FOUND:
                known.clear()
            operators = known[asked] = Operators(ctx, found, variant, problem, config, options)
    return operators


class Operators:
    """The operators of a product, by its number of rows: one of a variant that is named, of `auto` as many as it takes.

    The context has them (`Context.operators`); neither these nor the context is kept.

    Args:
        ctx: the context.
        found: the variant, which may choose another.
        variant, problem, config, options: as `operators_of`'s; the problem of any m.
    """

    def __init__(
        self,
        ctx: Context,
        found: Variant,
        variant: str,
        problem: Problem,
        config: GemmConfig | None,
        options: Mapping[str, Any],
    ) -> None:
        self._context, self._found, self._problem, self._options = ctx.name, found, problem.with_rows(1), options
        self._asked, self._config = variant, config
        self._name = None if found.choose else found.name
        self._choices: dict[int, str] = {}  # names of the variants that are chosen, by rows
        self._operators: dict[str, weakref.ref[Operator[Any]]] = {}  # by these

    def of(self, m: int) -> Operator[Any]:
        """Return the operator for calls of so many rows; collective where it must be made, or make room for more.

        Raises:
            ValueError: the variant cannot do so many.
            RuntimeError: it must be made or grow, and a stream is being captured; or the context is gone.
            HeapExhausted: the heap has no room; says how many operators there are.
        """
        name = self._name or self._choices.get(m) or self._chosen(m)
        found = self._operators.get(name)
        operator = None if found is None else found()
        if operator is None or operator.is_closed or operator.problem.m < m:
            operator = self._made(name, m)
            self._operators[name] = weakref.ref(operator)
        return operator

    def _chosen(self, m: int) -> str:
        if len(self._choices) >= _MOST_FOUND:
            self._choices.clear()
        choose, problem = self._found.choose, self._problem.with_rows(m)
        assert choose is not None
        self._choices[m] = choose(context_named(self._context), problem, self._config).variant
        return self._choices[m]

    def _made(self, name: str, m: int) -> Operator[Any]:
        """Return the context's operator of a variant, made if there is none, with room for so many rows."""
        ctx, found, config = context_named(self._context), self._found, self._config
        family, problem = found.family, self._problem.with_rows(m)
        more: dict[str, Any] = {}
        if choose := found.choose:
            found = get_variant(family, name)

            def config_of(other: Problem) -> GemmConfig | None:
                choice = choose(ctx, other, config)
                return choice.config if choice.variant == name else None

            more["config_of"] = config_of
        key = (found.name, family, self._asked, self._problem, config, *self._options.items())
        operator: Operator[Any] | None = ctx.operators.get(key)
        try:
            if operator is None or operator.is_closed:
                operator = found.build(ctx, problem, config, new_outputs=True, **more, **self._options)
                operator.chosen_by = self._asked if more and self._asked != found.pattern else ""
                ctx.operators[key] = operator
            elif operator.problem.m < m:
                _make_room(operator, m)
        except HeapExhausted as error:
            room = operator.problem.m if operator is not None and not operator.is_closed else 0
            raise HeapExhausted(
                f"{family} of {m}x{problem.n}x{problem.k}, with room for {room} rows: {error}; {len(ctx.operators)} "
                "operators are kept for calls of other sizes: ctx.release_operators() gives their memory back"
            ) from error
        return operator


def _make_room(operator: Operator[Any], m: int) -> None:
    """Make an operator one of `m` rows, or of some more than it had, if there is room for these."""
    more = with_room_to_grow(operator.problem.m)
    if m < more:
        try:
            operator.reserve(more)
        except (HeapExhausted, ValueError):  # no room, or more than the variant can do: the same on all ranks
            pass
        else:
            return
    operator.reserve(m)


def _problem(
    ctx: Context,
    a: torch.Tensor,
    b: torch.Tensor,
    problem_type: type[Problem],
    sizes: Mapping[str, int | None],
    scales_of_quantised: tuple[str, ...],
) -> Problem:
    """Return the problem of the ranks' shapes and dtypes, with scales where A is quantised; collective."""
    ctx.agree(
        "A's and B's dtypes, and the scales with which A is quantised",
        [*map(str, (a.dtype, b.dtype)), *scales_of_quantised],
    )
    ctx.agree("the sizes of the whole that the ranks give", dict(sizes))
    with ctx.recovery.raising_root_cause():
        shapes = ctx.control_plane.all_gather([list(a.shape), list(b.shape)], "compare shapes")
    a_shapes, b_shapes = [shape for shape, _ in shapes], [shape for _, shape in shapes]
    how: dict[str, Any] = {"b_dtype": b.dtype}
    if scales_of_quantised:
        how |= {"dtype": quantised_dtype(b.dtype), "a_dtype": a.dtype, "scales": scales_of_quantised}
    problem = replace(problem_type.from_shapes(a_shapes, b_shapes, a.dtype), **how)
    for name, given, expected_of in (("A", a_shapes, problem.a_shape), ("B", b_shapes, problem.b_shape)):
        expected = [list(expected_of(rank)) for rank in range(problem.world_size)]
        if given != expected:
            raise ValueError(
                f"the ranks' {name} are {given}; for M={problem.m}, N={problem.n}, K={problem.k} over "
                f"{problem.world_size} ranks they must be {expected}, as torch.chunk cuts them"
            )
    for name, size in sizes.items():
        if size is not None and size != getattr(problem, name):
            raise ValueError(f"{name} is {size}; the ranks' operands make {getattr(problem, name)}")
    return problem
