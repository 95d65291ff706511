"""What fp8 operands and scales are refused: named, with what would work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from families import make_problem
from ranks import Ranks, context, raised
from torch_compiling import FUNCTIONS

from iris_kernels.common.call import Device
from iris_kernels.common.fp8.scales import kinds_of, quantise
from iris_kernels.common.operators.calls_by_rows import fp8_reason

E4M3, E5M2, FNUZ = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz


def refuse(rank: int, world_size: int) -> list[str]:
    ctx = context()
    multiply = FUNCTIONS["gemm_all_reduce"]
    a, b = torch.ones(4, 300).to(E4M3), torch.ones(300, 6).to(E4M3)
    of_rows, of_columns = torch.ones(4, 1), torch.ones(1, 6)
    wide = torch.ones(4, 300)
    refused = [
        raised(multiply, ctx, a, b, a_scale=of_rows),
        raised(multiply, ctx, a, b, a_scale=torch.ones(5, 1), b_scale=of_columns),
        raised(multiply, ctx, a, b, a_scale=torch.ones(4, 2), b_scale=torch.ones(3, 1)),
        raised(multiply, ctx, a, b, a_scale=of_rows, b_scale=torch.ones(6)),
        raised(multiply, ctx, a, b, a_scale=of_rows.double(), b_scale=of_columns),
        raised(multiply, ctx, wide, torch.ones(300, 6), a_scale=of_rows, b_scale=of_columns),
        raised(multiply, ctx, a, torch.ones(300, 6)),
        raised(multiply, ctx, a, b.float().to(FNUZ)),
        raised(multiply, ctx, a, b, out_dtype=E4M3),
        raised(multiply, ctx, a, b, a_scale=of_rows.clone().requires_grad_(), b_scale=of_columns),
    ]
    return [message for _, message in refused]


@pytest.mark.parametrize("device", ["cpu"])
def test_what_does_not_fit_is_named(ranks: Callable[[int], Ranks]) -> None:
    expected = [
        "b_scale is missing; A and B have a scale both or neither",
        "a_scale is (5, 1), of A (4, 300); it takes () for the tensor, (4, 1) for each row",
        "a_scale is (4, 2), of A (4, 300); it takes () for the tensor, (4, 1) for each row, or, with the other of "
        "blocks too, (4, 3) for blocks of 128 of k",
        "b_scale is (6,), of B (300, 6); it takes () for the tensor, (1, 6) for each column",
        "a_scale is torch.float64; the operator was made for torch.float32",
        "a_scale and b_scale are those of fp8 operands, and A is torch.float32",
        "A is torch.float8_e4m3fn and B is torch.float32; torch.float8_e4m3fn is multiplied by torch.float8_e4m3fn or",
        "A is torch.float8_e4m3fn and B is torch.float8_e4m3fnuz",
        "out_dtype torch.float8_e4m3fn is not supported; supported: torch.bfloat16",
        "an fp8 operand or its scale requires a gradient, which is not computed: call it with detach()",
    ]
    for messages in ranks(2).call(refuse):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


@pytest.mark.parametrize(
    ("arch", "dtype", "said"),
    [
        ("sm_80", E4M3, "sm_80 does not multiply torch.float8_e4m3fn; it has no fp8: bf16 and fp16 work"),
        ("gfx90a", FNUZ, "it has no fp8"),
        ("gfx942", E4M3, "it multiplies torch.float8_e4m3fnuz and torch.float8_e5m2fnuz"),
        ("sm_90", FNUZ, "it multiplies torch.float8_e4m3fn and torch.float8_e5m2"),
        ("sm_89", E4M3, None),
        ("sm_90", E5M2, None),
        ("gfx942", FNUZ, None),
        ("gfx950", E4M3, None),
        ("cpu", FNUZ, "it multiplies torch.float8_e4m3fn and torch.float8_e5m2"),
        ("sm_80", torch.bfloat16, None),
    ],
)
def test_a_gpu_that_lacks_a_format_says_so(arch: str, dtype: torch.dtype, said: str | None) -> None:
    reason = fp8_reason(make_problem("all_gather_gemm", 64, 64, 64, 2, dtype), Device(arch, 132))
    assert (reason is None) == (said is None)
    assert said is None or (reason is not None and said in reason)


def test_a_scale_of_a_tensor_is_taken_as_quantise_gives_it() -> None:
    scales = [quantise(torch.ones(shape), E4M3, "tensor")[1].shape for shape in ((4, 300), (300, 6))]
    assert kinds_of((4, 300), (300, 6), *map(tuple, scales)) == ("tensor", "tensor")


@pytest.mark.parametrize("scales", [("row",), ("block", "column"), ("row", "row"), ("column", "row")])
def test_scales_that_do_not_go_together_are_named(scales: tuple[str, ...]) -> None:
    problem = make_problem("all_gather_gemm", 64, 64, 64, 2, E4M3)
    with pytest.raises(ValueError, match="they are of tensor or row for A and tensor or column for B"):
        replace(problem, scales=scales)
