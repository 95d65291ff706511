"""fp8 operands and their scales: C is within what rounding allows of the product of what they stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from checking import FP32_ROUNDOFF, fault, poison
from families import VARIANTS, make_problem, name
from ranks import Ranks, context
from scaled import KINDS, TENSOR_CORE_ROUNDOFF, make_scaled_data

from iris_kernels.common.fp8.scaled_mm import multiply_scaled, scaled_mm_reason
from iris_kernels.common.fp8.scales import dequantised, scale_shapes
from iris_kernels.common.portable.operands import rows_on_16_bytes
from overlap_taxonomy import Variant, get_variant

SIZES = [(33, 37, 41), (70, 132, 32), (1, 2, 7)]  # one that divides nothing; more tiles than programs; empty ranks
BLOCKS = ("block", "block")
SEVERAL_BLOCKS = (35, 300, 420)  # of k and of n
EACH = [one for one in VARIANTS if not one.delegates]
# A scale of a tensor is one of rows or columns with a stride of 0; what exchanges scales is a family's.
OF_TENSORS = [one for one in EACH if one.name in ("library", "fused_sequential:portable")]
CASES = [(variant, scales) for scales in KINDS for variant in (OF_TENSORS if "tensor" in scales else EACH)]


def run(rank: int, world_size: int, family: str, variant: str, scales: tuple[str, ...]) -> list[str]:
    """Call an operator on fp8 operands, twice where these are small; return what was wrong."""
    ctx, faults = context(), []
    for m, n, k in [*SIZES, *[SEVERAL_BLOCKS] * (scales == BLOCKS)]:
        problem = replace(make_problem(family, m, n, k, world_size, torch.float8_e4m3fn), scales=scales)
        operator = get_variant(family, variant).build(ctx, problem)
        for seed in range(1 if (m, n, k) == SEVERAL_BLOCKS else 2):
            made = make_scaled_data(family, problem, rank, seed)
            poison(operator)
            ctx.barrier()
            output = operator.as_matrix(operator(made.a, made.b, **made.scales))
            if wrong := fault(output, made.data, problem.out_dtype):
                faults.append(f"{m}x{n}x{k}, rank {rank}: {wrong}")
        operator.close()
    return faults


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(
    ("variant", "scales"), CASES, ids=lambda value: name(value) if isinstance(value, Variant) else "-".join(value)
)
def test_every_variant_scales_them(ranks: Callable[[int], Ranks], variant: Variant, scales: tuple[str, ...]) -> None:
    assert ranks(3).call(run, variant.family, variant.name, scales) == [[]] * 3


def test_torch_is_given_rows_on_16_bytes_and_copies_of_others() -> None:
    room = torch.randn(40, 64).to(torch.float8_e4m3fn)
    rows_24_apart = room.view(-1)[:960].view(40, 24)
    for fits in (room, room[3:], room[:, 16:32], room[:1, :8]):
        assert rows_on_16_bytes(fits) is fits
    for other in (room[:, 1:17], room[:1, 8:24], rows_24_apart[:, :16], room.t(), room[:, ::2]):
        found = rows_on_16_bytes(other)
        assert torch.equal(found.float(), other.float())
        assert found.is_contiguous()
        assert found.data_ptr() % 16 == 0
        assert found.data_ptr() not in range(room.data_ptr(), room.data_ptr() + room.nbytes)


def test_torch_multiplies_blocks_of_e4m3_alone() -> None:
    """Others end in its error that the configuration is invalid; with other scales one may be e5m2."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for scales in KINDS:
        for a, b in ((e4m3, e4m3), (e4m3, e5m2), (e5m2, e4m3)):
            plain = make_problem("gemm_all_reduce", 32, 256, 512, 2, a)
            reason = scaled_mm_reason(replace(plain, b_dtype=b, scales=scales))
            if scales == BLOCKS and a != b:
                assert reason == f"torch multiplies e4m3 alone where scales are of blocks, not {a} by {b}"
            else:
                assert reason is None


@pytest.mark.gpu
def test_torch_multiplies_what_lies_anyhow() -> None:
    room, (m, n, k) = torch.randn(200, 200, device="cuda").to(torch.float8_e4m3fn), (48, 32, 64)
    ones = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")
    for a, b in ((room[:m, 1 : 1 + k], room[:k, 1 : 1 + n]), (room[:m, : 2 * k : 2], room.t()[8 : 8 + k, 8 : 8 + n])):
        found = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        multiply_scaled(a, b, found, ("row", "column"), *ones, use_fast_accum=False)
        product, sums = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        bound = (
            torch.finfo(found.dtype).eps / 2 * product.abs() + (TENSOR_CORE_ROUNDOFF + (k + 3) * FP32_ROUNDOFF) * sums
        )
        assert ((found - product).abs() <= bound).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scales", KINDS)
@pytest.mark.parametrize("is_hopper", [True, False])
def test_torch_rounds_once_to_the_dtype_that_is_asked_for(
    scales: tuple[str, ...], dtype: torch.dtype, is_hopper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of small whole numbers by powers of two are exact in fp16 and fp32, and most are not in bf16."""
    if not is_hopper:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    m, n, k = 256, 128, 256
    drawn = functools.partial(torch.randint, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    a, b = (drawn(-4, 5, shape).to(torch.float8_e4m3fn) for shape in ((m, k), (k, n)))
    shapes = scale_shapes(scales, (m, k), (k, n)).values()
    a_scale, b_scale = (torch.exp2(drawn(-1, 2, shape).float()) for shape in shapes)
    found = torch.empty(m, n, dtype=dtype, device="cuda")
    multiply_scaled(a, b, found, scales, a_scale, b_scale, use_fast_accum=False)
    exact = dequantised(a, a_scale).double() @ dequantised(b, b_scale).double()
    assert torch.equal(found, exact.to(dtype))
    assert not torch.equal(found.bfloat16(), exact)
