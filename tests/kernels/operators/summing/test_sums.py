"""What families promise beyond right outputs: the same bits every time and everywhere, a whole gathered A, refusals."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import make_data
from families import FAMILIES, FUSED, make_problem, name
from ranks import Ranks, context, raised
from scaled import FP8, make_any_data

from iris_kernels.all_gather_gemm import all_gather_gemm
from iris_kernels.gemm_all_scatter import gemm_all_scatter
from overlap_taxonomy import Variant, get_variant

SUMMING = [variant for variant in FUSED if FAMILIES[variant.family].sums_partials]
# By scales: () is bf16, others fp8. Scales of tensors are read as those of rows are, with a stride of 0.
OF_TENSORS = [variant for variant in SUMMING if variant.name == "fused_sequential:portable:stream_k"]
SCALES = (("tensor", "tensor"), ("row", "column"), ("block", "block"))
CASES = [(variant, scales) for scales in ((), *SCALES) for variant in (OF_TENSORS if "tensor" in scales else SUMMING)]
GATHERING = [variant for variant in FUSED if variant.family == "all_gather_gemm"]
CALLS = {"cuda": 100, "cpu": 12}  # interpreted calls are slow,
SCALED_CALLS = {"cuda": 100, "cpu": 4}  # and those of fp8 take four times as long
each_case = pytest.mark.parametrize(
    ("variant", "scales"),
    CASES,
    ids=lambda value: name(value) if isinstance(value, Variant) else "-".join(value) or "bf16",
)


def problem_of(family: str, m: int, n: int, k: int, world_size: int, scales: tuple[str, ...]) -> Any:
    return make_problem(family, m, n, k, world_size, FP8 if scales else torch.bfloat16, scales=scales)


def digests(rank: int, world_size: int, family: str, variant: str, scales: tuple[str, ...]) -> list[str]:
    """Make the same call often; return the different outputs that came, as digests."""
    ctx = context()
    n, k = (48, 352) if scales else (35, 24)  # of fp8 torch multiplies multiples of 16; of k more than a block
    problem = problem_of(family, 40, n, k, world_size, scales)
    operator = get_variant(family, variant).build(ctx, problem)
    data = make_any_data(family, problem, rank, 1, ctx.get_device())
    found = set()
    for _ in range((SCALED_CALLS if scales else CALLS)[ctx.get_device().type]):
        output = operator(data.a, data.b, **data.scales).contiguous().cpu()
        found.add(hashlib.sha256(output.view(torch.int16).numpy().tobytes()).hexdigest())
    operator.close()
    return sorted(found)


@each_case
def test_sums_have_the_same_bits_in_every_run(
    ranks: Callable[[int], Ranks], variant: Variant, scales: tuple[str, ...]
) -> None:
    found = ranks(2).call(digests, variant.family, variant.name, scales)
    assert [len(of_rank) for of_rank in found] == [1, 1]
    if variant.family == "gemm_all_reduce":
        assert found[0] == found[1]  # replicas must not drift apart


def errors(rank: int, world_size: int, family: str, variant: str, scales: tuple[str, ...]) -> tuple[float, float]:
    """Return the sums of squared errors of a variant and of the library on the same data, over this rank."""
    ctx = context()
    k = 640 if "block" in scales else 256  # for a rank, several blocks
    problem = problem_of(family, 96, 64, k, world_size, scales)
    data = make_any_data(family, problem, rank, 2, ctx.get_device())
    squares = []
    for which in (variant, "library"):
        operator = get_variant(family, which).build(ctx, problem)
        output = operator(data.a, data.b, **data.scales).to(data.expected.dtype)
        squares.append(float((output - data.expected).square().sum()))
        operator.close()
    return squares[0], squares[1]


@each_case
def test_sums_are_no_worse_than_the_library(
    ranks: Callable[[int], Ranks], variant: Variant, scales: tuple[str, ...]
) -> None:
    found = ranks(4).call(errors, variant.family, variant.name, scales)
    assert sum(own for own, _ in found) <= sum(library for _, library in found)


def ask_for_sums_in(rank: int, world_size: int, family: str, wrong_on: list[int]) -> tuple[str, str]:
    """Ask for sums in fp16 on some ranks; return the error, after which the ranks must still agree."""
    ctx = context()
    call = getattr(importlib.import_module(f"iris_kernels.{family}"), family)
    a, b = torch.ones(4, 3, device=ctx.get_device()), torch.ones(3, 5, device=ctx.get_device())
    dtype = torch.float16 if rank in wrong_on else torch.float32
    error = raised(call, ctx, a, b, accumulation_dtype=dtype)
    ctx.barrier()
    return error


@pytest.mark.parametrize("wrong_on", [[0, 1], [1]], ids=["everywhere", "on one rank"])
@pytest.mark.parametrize("family", ["gemm_reduce_scatter", "gemm_all_reduce"])
def test_sums_in_another_dtype_are_refused(ranks: Callable[[int], Ranks], family: str, wrong_on: list[int]) -> None:
    for kind, message in ranks(2).call(ask_for_sums_in, family, wrong_on):
        assert kind == "ValueError"
        assert "torch.float16" in message
        assert "torch.float32" in message


def call_another_shape(rank: int, world_size: int, has_op: bool) -> tuple[str, str]:
    """In debug mode, call with a known shape on rank 0 and with a new one on the others; return the error."""
    ctx = context()
    b = torch.ones(6, 5, device=ctx.get_device())

    def call(m: int) -> None:
        a = torch.ones(m, 6, device=ctx.get_device())
        if has_op:
            torch.ops.iris_overlap.gemm_all_scatter(a, [b], m, 5 * world_size, 6, ctx.name)
        else:
            gemm_all_scatter(ctx, a, b)

    ctx.debug_mode = True
    call(4)
    error = raised(call, 4 if rank == 0 else 8)
    ctx.debug_mode = False
    ctx.operators.popitem()[1].close()
    return error


@pytest.mark.parametrize("has_op", [False, True])
def test_in_debug_mode_other_shapes_are_refused_on_every_rank(ranks: Callable[[int], Ranks], has_op: bool) -> None:
    for kind, message in ranks(2).call(call_another_shape, has_op):
        assert kind == "ValueError"
        assert "rank 1" in message


def gather(rank: int, world_size: int, variant: str, n: int) -> bool:
    """Return whether every call gave the whole A of that call."""
    ctx = context()
    problem = make_problem("all_gather_gemm", 7, n, 40, world_size, torch.float16)
    whole = []
    for call in range(3):
        data = make_data("all_gather_gemm", problem, rank, call, ctx.get_device())
        _, gathered = all_gather_gemm(ctx, data.a, data.b, variant=variant, return_gathered=True)
        shards = [make_data("all_gather_gemm", problem, peer, call, ctx.get_device()).a for peer in range(world_size)]
        whole.append(torch.equal(gathered.clone(), torch.cat(shards)))
    ctx.operators.popitem()[1].close()
    return all(whole)


@pytest.mark.parametrize("n", [1, 40])  # with one column a rank has nothing to multiply, and must wait all the same
@pytest.mark.parametrize("variant", GATHERING, ids=name)
def test_the_gathered_operand_is_whole(ranks: Callable[[int], Ranks], variant: Variant, n: int) -> None:
    assert ranks(2).call(gather, variant.name, n) == [True, True]
