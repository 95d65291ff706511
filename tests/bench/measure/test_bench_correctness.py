"""The check lets right outputs pass and no wrong one."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from iris_bench.measure.correctness import Expectation
from iris_bench.measure.families import FAMILIES, PROMOTED_K, Block, Family
from iris_bench.measure.inputs import Draw
from iris_kernels.gemm_all_scatter.problem import GemmAllScatterProblem

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WORLD_SIZE = 4
FAMILY = FAMILIES["gemm_all_scatter"]


def case(dtype: torch.dtype = torch.bfloat16, *, m: int = 24, n: int = 40, k: int = 96, call: int = 0):
    """What a call must give, and an output that is right."""
    problem = GemmAllScatterProblem(m, n, k, WORLD_SIZE, dtype)
    draw = Draw(0, problem, call, torch.device("cpu"))
    right = torch.cat([torch.mm(*block.terms[0]) for block in FAMILY.blocks(problem, 0, draw)], dim=1)
    return Expectation(FAMILY.blocks(problem, 0, draw), shape=(m, n), dtype=dtype), right


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(24, 40, 96), (33, 37, 41), (1, 1, 1), (1, 5, 300), (64, 64, 2048)], ids=str)
def test_a_right_output_passes(dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    m, n, k = size
    expectation, right = case(dtype, m=m, n=n, k=k)
    verdict = expectation.judge(right)
    assert verdict.correct, verdict.reason
    assert 0 <= verdict.error < 5e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_order_of_summation_passes(dtype: torch.dtype) -> None:
    problem = GemmAllScatterProblem(32, 32, 4096, 1, dtype)
    draw = Draw(0, problem, 0, torch.device("cpu"))
    (block,) = FAMILY.blocks(problem, 0, draw)
    a, b = (operand.float() for operand in block.terms[0])
    sums = torch.zeros(32, 32)
    for k in range(4096):
        sums += a[:, k : k + 1] * b[k : k + 1]
    assert Expectation([block], shape=(32, 32), dtype=dtype).judge(sums.to(dtype)).correct


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e30, math.nan, math.inf])
def test_one_wrong_element_fails(dtype: torch.dtype, value: float) -> None:
    expectation, right = case(dtype)
    right[23, 39] = value
    verdict = expectation.judge(right)
    assert not verdict.correct
    assert verdict.reason.startswith("1 of 960 elements")
    assert "row 23, column 39" in verdict.reason
    assert math.isfinite(verdict.error) == math.isfinite(right[23, 39].item())


def test_what_is_left_of_the_poison_fails() -> None:
    expectation, right = case()
    right[:, 10:20] = math.nan  # a peer's block that never arrived
    verdict = expectation.judge(right)
    assert not verdict.correct
    assert "240 of 960 elements are wrong, 240 of them not finite" in verdict.reason


def test_the_output_of_another_call_fails() -> None:
    assert not case(call=1)[0].judge(case(call=0)[1]).correct


def test_a_stale_block_fails() -> None:
    expectation, right = case(call=1)
    right[:, 30:] = case(call=0)[1][:, 30:]
    assert not expectation.judge(right).correct


def test_swapped_blocks_fail() -> None:
    expectation, right = case()
    assert not expectation.judge(torch.cat([right[:, 10:20], right[:, :10], right[:, 20:]], dim=1)).correct


def test_swapped_rows_fail() -> None:
    expectation, right = case()
    assert not expectation.judge(right.roll(1, dims=0)).correct


def test_a_forgotten_product_fails() -> None:
    """Every element is off by little: only the norm tells."""
    problem = GemmAllScatterProblem(128, 128, 4096, 1, torch.bfloat16)
    (block,) = FAMILY.blocks(problem, 0, Draw(0, problem, 0, torch.device("cpu")))
    ((a, b),) = block.terms
    short = torch.mm(a[:, :-1].float(), b[:-1].float()).bfloat16()
    assert not Expectation([block], shape=(128, 128), dtype=torch.bfloat16).judge(short).correct


def test_rounding_twice_as_coarse_fails() -> None:
    expectation, right = case(torch.float16)
    verdict = expectation.judge(right.bfloat16().half())
    assert not verdict.correct


def test_partials_that_cancel_may_be_off_by_their_own_rounding() -> None:
    """257 travels as 256: the sum with -258 is -2 instead of -1, and nothing is wrong."""
    ones = torch.ones(1, 257, dtype=torch.bfloat16), torch.ones(257, 1, dtype=torch.bfloat16)
    others = torch.ones(1, 258, dtype=torch.bfloat16), -torch.ones(258, 1, dtype=torch.bfloat16)
    block = Block(slice(None), slice(None), [ones, others])
    expectation = Expectation([block], shape=(1, 1), dtype=torch.bfloat16)
    assert expectation.judge(torch.full((1, 1), -2.0, dtype=torch.bfloat16)).correct
    assert not expectation.judge(torch.full((1, 1), -4.0, dtype=torch.bfloat16)).correct


def test_another_shape_or_dtype_fails() -> None:
    expectation, right = case()
    assert not expectation.judge(right[:, :-1]).correct
    assert not expectation.judge(right.float()).correct


def test_parts_that_ranks_add_up_may_be_rounded_on_their_way() -> None:
    generator = torch.Generator().manual_seed(0)
    terms = [
        (torch.randn(64, 32, generator=generator).bfloat16(), torch.randn(32, 64, generator=generator).bfloat16())
        for _ in range(4)
    ]
    expectation = Expectation([Block(slice(None), slice(None), terms)], shape=(64, 64), dtype=torch.bfloat16)
    parts = [torch.mm(a, b) for a, b in terms]
    assert expectation.judge(parts[3] + parts[2] + parts[1] + parts[0]).correct
    verdict = expectation.judge(parts[0] + parts[1] + parts[2])
    assert not verdict.correct


def test_parts_may_be_wider_than_the_output() -> None:
    generator = torch.Generator().manual_seed(0)
    terms = [(torch.randn(64, 32, generator=generator), torch.randn(32, 64, generator=generator)) for _ in range(4)]
    block = Block(slice(None), slice(None), terms, dtype=torch.float32)
    expectation = Expectation([block], shape=(64, 64), dtype=torch.bfloat16)
    parts = [torch.mm(a, b) for a, b in terms]
    assert expectation.judge(sum(parts, torch.zeros(64, 64)).bfloat16()).correct
    assert not expectation.judge(sum(parts[1:], torch.zeros(64, 64)).bfloat16()).correct


def test_nothing_is_right_where_a_rank_has_nothing() -> None:
    block = Block(slice(None), slice(None), [(torch.zeros(0, 8), torch.zeros(8, 4))])
    assert Expectation([block], shape=(0, 4), dtype=torch.float32).judge(torch.zeros(0, 4)).correct


def test_operands_differ_by_rank_call_and_seed_alone() -> None:
    problem = GemmAllScatterProblem(8, 8, 8, 2, torch.float32)

    def draw(seed: int = 0, call: int = 0) -> Draw:
        return Draw(seed, problem, call, torch.device("cpu"))

    a, b = FAMILY.operands(problem, 0, draw())
    assert torch.equal(a, FAMILY.operands(problem, 1, draw())[0])  # A is replicated
    assert not torch.equal(b, FAMILY.operands(problem, 1, draw())[1])
    assert not torch.equal(a, FAMILY.operands(problem, 0, draw(call=1))[0])
    assert not torch.equal(a, FAMILY.operands(problem, 0, draw(seed=1))[0])
    assert b.t().is_contiguous()


def test_an_epilogue_is_part_of_what_is_expected() -> None:
    a, b = torch.randn(40, 16), torch.randn(16, 8)
    block = Block(slice(None), slice(None), [(a, b)], torch.relu)
    expectation = Expectation([block], shape=(40, 8), dtype=torch.float32)
    assert expectation.judge(torch.relu(a @ b)).correct
    assert not expectation.judge(a @ b).correct


FAST = torch.Generator().manual_seed(0)
FAST_A, FAST_B = (
    torch.randn(shape, generator=FAST).to(torch.float8_e4m3fn).float() for shape in ((16, 8192), (8192, 32))
)


@functools.cache
def summed_in_accumulators(a: torch.Tensor = FAST_A, b: torch.Tensor = FAST_B) -> torch.Tensor:
    """Return a @ b as an accumulator of 13 fraction bits has it, which takes 32 products at once."""
    acc = torch.zeros(16, 32)
    for columns, rows in zip(a.split(32, 1), b.split(32, 0), strict=True):
        addends = torch.cat([acc[..., None], columns[:, None, :] * rows.t()[None, :, :]], dim=-1)
        acc = truncated(truncated(addends, addends.abs().amax(-1, keepdim=True)).sum(-1))
    return acc


def truncated(values: torch.Tensor, largest: torch.Tensor | None = None) -> torch.Tensor:
    """Cut off what is below 13 fraction bits of the largest, or of each value."""
    _, exponent = torch.frexp(values if largest is None else largest)
    ulp = torch.exp2(exponent - 14)
    return torch.trunc(values / ulp) * ulp


def expected_of_accumulators(dtype: torch.dtype, truncated_k: int = 1 << 20) -> Expectation:
    block = Block(slice(None), slice(None), [(FAST_A, FAST_B)], dtype=dtype, truncated_k=truncated_k)
    return Expectation([block], shape=(16, 32), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_in_the_accumulators_of_fp8_may_be_truncated(dtype: torch.dtype) -> None:
    verdict = expected_of_accumulators(dtype).judge(summed_in_accumulators().to(dtype))
    assert verdict.correct, verdict.reason
    assert verdict.error == pytest.approx({torch.bfloat16: 2.6e-3, torch.float32: 2.0e-3}[dtype], rel=0.15)  # measured


def test_other_sums_may_not_be_truncated() -> None:
    expectation = expected_of_accumulators(torch.float32, 0)
    assert not expectation.judge(summed_in_accumulators()).correct


def test_promoted_sums_may_be_truncated_within_a_step() -> None:
    promoted = sum(map(summed_in_accumulators, FAST_A.split(PROMOTED_K, 1), FAST_B.split(PROMOTED_K, 0)))
    assert isinstance(promoted, torch.Tensor)
    assert expected_of_accumulators(torch.float32, PROMOTED_K).judge(promoted).correct
    assert not expected_of_accumulators(torch.float32, 0).judge(promoted).correct
    assert not expected_of_accumulators(torch.float32, PROMOTED_K).judge(summed_in_accumulators()).correct


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_step_that_is_left_out_fails_with_fast_accumulation(dtype: torch.dtype) -> None:
    """In one tile of 16 columns, or everywhere."""
    step = FAST_A[:, -128:] @ FAST_B[-128:]
    for columns in (16, 32):
        short = summed_in_accumulators().clone()
        short[:, :columns] -= step[:, :columns]
        assert "elements are wrong" in expected_of_accumulators(dtype).judge(short.to(dtype)).reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_scale_that_is_wrong_fails_with_fast_accumulation(dtype: torch.dtype) -> None:
    scaled = summed_in_accumulators().clone()
    scaled[5] *= 1.05
    assert "elements are wrong" in expected_of_accumulators(dtype).judge(scaled.to(dtype)).reason


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_blocks_say_whether_sums_stay_in_the_accumulators(family: Family) -> None:
    sums = {"dtype": torch.float8_e4m3fn, "scales": ("row", "column"), "use_fast_accum": True}
    for changed, truncated_k in (
        ({}, 4),
        ({"use_fast_accum": False}, PROMOTED_K),
        ({"scales": ("block", "block")}, PROMOTED_K),  # which are promoted always
        ({"dtype": torch.bfloat16}, 0),
    ):
        problem = family.problem(m=4, n=4, k=4, world_size=2, **(sums | changed))
        blocks = family.blocks(problem, 0, Draw(0, problem, 0, torch.device("cpu")))
        assert {block.truncated_k for block in blocks} == {truncated_k}
