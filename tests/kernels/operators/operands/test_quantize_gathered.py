"""A that is quantised as it is gathered: the bits of quantising with torch, and of the plain call on that."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import VARIANTS, make_problem, name
from ranks import Ranks, context, raised

from iris_kernels.all_gather_gemm import all_gather_gemm
from iris_kernels.common.fp8.scales import quantise
from overlap_taxonomy import Variant, get_variant

FAMILY = "all_gather_gemm"
GATHERING = [one for one in VARIANTS if one.family == FAMILY and not one.delegates]
FP8 = torch.float8_e4m3fn
# One that divides nothing; several tiles, and several blocks of k; empty ranks.
SIZES = [(33, 37, 41), (70, 48, 300), (1, 2, 7)]


def shards_of(rank: int, problem: Any, dtype: torch.dtype, b_dtype: torch.dtype, kind: str, seed: int) -> list[Any]:
    """Return a rank's A, rows of all sizes, some of zeros, inf or NaN, with gaps between them; its B and B's scale."""
    draw = torch.Generator().manual_seed(seed)
    whole = torch.randn(problem.m, 2 * problem.k, generator=draw) * 10.0 ** (torch.arange(problem.m)[:, None] % 7 - 3)
    if problem.m > 20:
        whole[3], whole[9, 4], whole[17, 0] = 0.0, torch.inf, torch.nan
    b = torch.randn(problem.k, problem.n, generator=draw)
    a, b = problem.shards(rank, whole[:, :: 1 + seed % 2][:, : problem.k].to(dtype), b)
    small, scale = quantise(b, b_dtype, kind, is_b=True)
    return [a, small.t().contiguous().t(), scale]


def bits(outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [output.contiguous().view(torch.uint8).clone() for output in outputs]


def compare(
    rank: int, world_size: int, variant: str, dtype: torch.dtype, b_dtype: torch.dtype, kind: str, keep: bool
) -> list[str]:
    """Call an operator that quantises twice, and one on what torch quantised; return where they differ in a bit."""
    ctx, found, options = context(), get_variant(FAMILY, variant), {"keep_gathered": True} if keep else {}
    wrong = []
    for m, n, k in SIZES:
        plain = make_problem(FAMILY, m, n, k, world_size, FP8)
        plain = replace(plain, b_dtype=b_dtype, scales=("row", kind), out_dtype=dtype)
        operator = found.build(ctx, replace(plain, a_dtype=dtype), **options)
        scaled = found.build(ctx, plain, **options)
        for seed in range(2):
            a, b, b_scale = shards_of(rank, plain, dtype, b_dtype, kind, seed)
            small, a_scale = quantise(a, FP8, "row")
            expected = scaled.call(small, b, a_scale=a_scale, b_scale=b_scale)
            for output in operator.outputs():
                output.view(torch.uint8).fill_(0xFF)
            ctx.barrier()
            outputs = operator.call(a, b, b_scale=b_scale)
            if not all(map(torch.equal, bits(expected), bits(outputs))) or len(expected) != len(outputs):
                wrong.append(f"{m}x{n}x{k}, seed {seed}, rank {rank}")
            if m > 20 and b.shape[1]:
                rows = outputs[0].isnan().any(1)
                wrong += [] if rows.nonzero().flatten().tolist() == [9, 17] else [f"NaN in rows {rows.nonzero()}"]
        operator.close()
        scaled.close()
    return wrong


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


# All variants launch the same kernel that quantises, so each has one of the dtypes that this reads.
@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(
    ("variant", "dtype"),
    list(zip(GATHERING, itertools.cycle(DTYPES), strict=False)),
    ids=lambda value: name(value) if isinstance(value, Variant) else str(value).removeprefix("torch."),
)
def test_every_variant_quantises_as_torch_does(
    ranks: Callable[[int], Ranks], variant: Variant, dtype: torch.dtype
) -> None:
    kind, b_dtype = ("tensor", torch.float8_e5m2) if dtype == torch.float16 else ("column", FP8)
    assert ranks(3).call(compare, variant.name, dtype, b_dtype, kind, False) == [[]] * 3


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("variant", GATHERING, ids=name)
def test_the_gathered_a_is_fp8_with_the_scales_of_its_rows(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    assert ranks(3).call(compare, variant.name, torch.bfloat16, FP8, "column", True) == [[]] * 3


def call_function(rank: int, world_size: int, variant: str) -> list[str]:
    """Return what differs between calls of the function and of what torch quantised, for several numbers of rows."""
    ctx, n, k, wrong = context(), 9, 40, []
    for m in (12, 5, 30):
        problem = make_problem(FAMILY, m, n, k, world_size, FP8)
        a, b, b_scale = shards_of(rank, problem, torch.bfloat16, FP8, "column", m)
        small, a_scale = quantise(a, FP8, "row")
        how: dict[str, Any] = {"m": m, "n": n, "variant": variant, "return_gathered": True, "b_scale": b_scale}
        how["residual"] = torch.ones(m, b.shape[1], dtype=torch.bfloat16)
        plain = bits(all_gather_gemm(ctx, small, b, a_scale=a_scale, **how))
        outputs = all_gather_gemm(ctx, a, b, quantize="row", **how)
        wrong += [f"m={m}"] if not all(map(torch.equal, bits(outputs), plain)) else []
        how["residual"] = None
        wide = all_gather_gemm(ctx, a.float(), b, quantize="row", **how)[0]
        wrong += [f"m={m}: C is {wide.dtype}"] if wide.dtype != torch.float32 else []
    return wrong


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("variant", ["auto", "library", "copy_engine"])
def test_the_function_does_for_any_number_of_rows(ranks: Callable[[int], Ranks], variant: str) -> None:
    assert ranks(3).call(call_function, variant) == [[]] * 3


def call_debugged(rank: int, world_size: int) -> list[str]:
    """Return what is said where the ranks compare their calls, and one quantises in another way; then it goes on."""
    ctx = context()
    ctx.debug_mode = True
    try:
        wrong = call_function(rank, world_size, "bulk_synchronous")
        problem = make_problem(FAMILY, 12, 9, 40, world_size, FP8)
        a, b, b_scale = shards_of(rank, problem, torch.bfloat16, FP8, "column", 0)
        given = {"quantize": "row"} if rank else {"a_scale": torch.ones(len(a), 1)}
        _, message = raised(all_gather_gemm, ctx, a if rank else a.to(FP8), b, b_scale=b_scale, m=12, n=9, **given)
        return [*wrong, message]
    finally:
        ctx.debug_mode = False


@pytest.mark.parametrize("device", ["cpu"])
def test_debug_mode_names_a_rank_that_quantises_alone(ranks: Callable[[int], Ranks]) -> None:
    for (message,) in ranks(2).call(call_debugged):
        assert "the calls, and their rows where the ranks know these" in message


def refuse(rank: int, world_size: int) -> list[str]:
    ctx = context()
    a, b, b_scale = torch.ones(4, 40).bfloat16(), torch.ones(40, 6).to(FP8), torch.ones(1, 6)
    given: dict[str, Any] = {"b_scale": b_scale, "quantize": "row"}
    blocks = torch.ones(1, 1)
    refused = [
        raised(all_gather_gemm, ctx, a, b, b_scale=b_scale, quantize="tensor"),
        raised(all_gather_gemm, ctx, a.to(FP8), b, **given),
        raised(all_gather_gemm, ctx, a, b, a_scale=torch.ones(4, 1), **given),
        raised(all_gather_gemm, ctx, a, b.bfloat16(), **given),
        raised(all_gather_gemm, ctx, a, b, quantize="row"),
        raised(all_gather_gemm, ctx, a, b, b_scale=blocks, quantize="row"),
        raised(all_gather_gemm, ctx, a, b),
        raised(all_gather_gemm, ctx, a.clone().requires_grad_(), b, **given),
        raised(op, a, [b], 8, 12, 40, ctx.name, b_scale=b_scale, quantize="column"),
        raised(other_op, a, [b], 4, 12, 40, ctx.name, b_scale=b_scale, quantize="row"),
    ]
    return [message for _, message in refused]


op, other_op = torch.ops.iris_overlap.all_gather_gemm.default, torch.ops.iris_overlap.gemm_all_scatter.default


@pytest.mark.parametrize("device", ["cpu"])
def test_what_is_not_quantised_is_named(ranks: Callable[[int], Ranks]) -> None:
    expected = [
        "quantize is 'tensor'; it takes 'row', for a scale of each row of A, or None",
        "quantize is 'row' and A is torch.float8_e4m3fn; leave quantize out",
        "quantize is 'row' and a_scale is given; leave quantize out",
        "quantize is 'row' and B is torch.bfloat16; A is quantised for a B of torch.float8_e4m3fn",
        "b_scale is missing",
        "with scales of rows; this is from torch.bfloat16 to torch.float8_e4m3fn, with scales ('block', 'block')",
        "torch.bfloat16 is multiplied by torch.bfloat16, or quantised: all_gather_gemm takes quantize='row'",
        "A, which is quantised, an fp8 operand or its scale requires a gradient",
        "quantize is 'column'; it takes 'row'",
        "a GemmAllScatterProblem gathers no A; all-gather + GEMM does, and quantises it",
    ]
    for messages in ranks(2).call(refuse):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def lie_in_the_gathered(rank: int, world_size: int) -> str:
    """Return what is said of an A that lies where it would be quantised to."""
    ctx = context()
    problem = make_problem(FAMILY, 8, 6, 32, world_size, FP8)
    problem = replace(problem, scales=("row", "column"), a_dtype=torch.bfloat16)
    operator = get_variant(FAMILY, "bulk_synchronous:portable").build(ctx, problem)
    a, b, b_scale = shards_of(rank, problem, torch.bfloat16, FP8, "column", 0)
    inside = operator.gathered[slice(*problem.rows(rank))].flatten().view(torch.bfloat16).as_strided(a.shape, (0, 1))
    _, message = raised(operator, inside, b, b_scale=b_scale)
    operator.close()
    return message


@pytest.mark.parametrize("device", ["cpu"])
def test_an_a_where_it_is_quantised_to_is_refused(ranks: Callable[[int], Ranks]) -> None:
    for message in ranks(2).call(lie_in_the_gathered):
        assert "A lies in memory of this operator" in message
