"""RMSNorm of rows of C, with a residual before it: by every variant that sums over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from checking import FP32_ROUNDOFF, fault, make_data
from epilogues import finished_data, own_operands, own_rows
from families import FAMILIES, VARIANTS, make_problem, name
from ranks import Ranks, context, raised
from torch_compiling import are_close

from iris_kernels.common.portable import quantise
from iris_kernels.common.portable.row_norm import RmsNorm
from iris_kernels.gemm_all_reduce import gemm_all_reduce_rms_norm
from iris_kernels.gemm_reduce_scatter import gemm_reduce_scatter_rms_norm
from overlap_taxonomy import Variant, get_variant

FUNCTIONS = {
    "gemm_all_reduce": gemm_all_reduce_rms_norm,
    "gemm_reduce_scatter": gemm_reduce_scatter_rms_norm,
}

EPS = 0.25  # large: left out, it shows
# One that divides nothing; several rows of tiles, rows in parts, and more tiles than programs; ranks without rows.
SIZES = {
    "cpu": [(33, 37, 41), (40, 300, 16), (1, 2, 7)],
    "cuda": [(33, 37, 41), (301, 8200, 1088), (1, 4096, 512), (512, 20000, 256), (2048, 4096, 1024)],
}
FP8 = torch.float8_e4m3fn
SUMMING = [one for one in VARIANTS if one.family in ("gemm_reduce_scatter", "gemm_all_reduce") and not one.delegates]
# Those that norm the rows they sum; and of those that leave it to one and the same kernel, where C is finished by then,
# and where it is not. The others only have to launch it.
NORMING = [one for one in SUMMING if one.name.startswith(("fused_sequential", "bulk_synchronous", "library"))]
RUNS = [(one, 4, torch.bfloat16, FP8) for one in SUMMING]
RUNS += [(one, *world) for one in NORMING for world in ((3, torch.float32, None), (2, torch.bfloat16, None))]


def weight_of(n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a norm's weights, with gaps between them in memory."""
    return torch.randn(2 * n, generator=torch.Generator().manual_seed(5)).to(device, dtype)[::2]


def normed_fault(c: torch.Tensor, weight: torch.Tensor, normed: torch.Tensor, scales: torch.Tensor | None) -> str:
    """Return what is wrong with what the norm made of a C, or "".

    With v and u the roundoffs of fp32 and of the result, a mean square of n columns is off by at most n v of itself,
    its root by half of that, and the few operations behind it by v each; the result is rounded to u of itself, or in
    fp8 to half of the spacing of subnormals. Scales are of the row's largest element.
    """
    c = c.double()
    expected = c * (c.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.double()
    info = torch.finfo(normed.dtype)
    relative = info.eps / 2 + (c.shape[1] / 2 + 8) * FP32_ROUNDOFF
    values, least = normed.to(torch.float64), info.smallest_normal * info.eps / 2
    if scales is not None:
        largest = expected.abs().amax(1, keepdim=True) / info.max
        if not torch.allclose(scales.double(), largest, rtol=(c.shape[1] + 8) * FP32_ROUNDOFF, atol=0.0):
            return f"scales are {scales.tolist()}, expected {largest.tolist()}"
        values, least = values * scales.double(), least * scales.double()
    outside = ~((values - expected).abs() <= relative * expected.abs() + least)
    return f"{int(outside.sum())} of {outside.numel()} normed elements are off" if outside.any() else ""


def poison_kept(operator: Any) -> None:
    """Fill what an operator keeps its outputs in, so that an element that is not written cannot pass."""
    for output in operator.outputs():
        output.view(torch.uint8).fill_(0xFF) if output.dtype == FP8 else output.fill_(float("nan"))


def run(rank: int, world_size: int, family: str, variant: str, dtype: torch.dtype, normed_dtype: Any) -> list[str]:
    """Call an operator with a residual and a norm, twice for the same data; return what was wrong."""
    ctx, faults, epilogue = context(), [], ("bias", "residual")
    device = ctx.get_device()
    for m, n, k in SIZES[device.type]:
        norm = RmsNorm(EPS, normed_dtype)
        problem = replace(make_problem(family, m, n, k, world_size, dtype), epilogue=epilogue, norm=norm)
        if get_variant(family, variant).unsupported_reason(problem, None):
            continue
        operator = get_variant(family, variant).build(ctx, problem)
        operands, weight = own_operands(family, problem, rank, device), weight_of(n, dtype, device)
        data = make_data(family, problem, rank, seed=m, device=device)
        answers = []
        for _ in range(2):
            poison_kept(operator)
            ctx.barrier()
            outputs = operator.call(data.a, data.b, **operands, norm_weight=weight)
            answers.append([one.contiguous().clone() for one in outputs])
        c, normed, *scales = answers[0]
        if wrong := fault(c, finished_data(data, family, problem, rank), dtype):
            faults.append(f"{m}x{n}x{k}: C: {wrong}")
        if c.numel() and (wrong := normed_fault(c, weight, normed, scales[0] if scales else None)):
            faults.append(f"{m}x{n}x{k}: {wrong}")
        if any(one.view(torch.uint8).ne(other.view(torch.uint8)).any() for one, other in zip(*answers, strict=True)):
            faults.append(f"{m}x{n}x{k}: the bits differ between two calls")
        operator.close()
    return faults


def run_in_parts(rank: int, world_size: int, *arguments: Any) -> list[str]:
    """As `run`, where a thread has an element of a row at a time: rows are in several parts."""
    with mock.patch.object(quantise, "ELEMENTS_OF_A_THREAD", 1):
        return run(rank, world_size, *arguments)


@pytest.mark.parametrize(
    ("variant", "world_size", "dtype", "normed_dtype"),
    RUNS,
    ids=lambda value: name(value) if isinstance(value, Variant) else str(value).removeprefix("torch."),
)
def test_every_variant_norms_rows(
    ranks: Callable[[int], Ranks], variant: Variant, world_size: int, dtype: torch.dtype, normed_dtype: Any
) -> None:
    call = run_in_parts if variant in NORMING and normed_dtype is FP8 else run
    assert ranks(world_size).call(call, variant.family, variant.name, dtype, normed_dtype) == [[]] * world_size


def call_functions(rank: int, world_size: int, family: str) -> list[str]:
    """Return what is wrong with a function's outputs, with all that it takes and with little of it."""
    ctx, faults = context(), []
    for epilogue, normed_dtype in ((("scale", "bias", "residual"), None), ((), FP8)):
        problem = replace(make_problem(family, 18, 34, 16, world_size, torch.float32), epilogue=epilogue)
        data, weight = make_data(family, problem, rank, 0, ctx.get_device()), weight_of(34, problem.dtype, "cpu")
        operands = own_operands(family, problem, rank)
        options = {"norm_weight": weight, "eps": EPS, "normed_dtype": normed_dtype}
        normed, c, *scales = FUNCTIONS[family](ctx, data.a, data.b, k=16, **operands, **options)
        faults += [fault(c, finished_data(data, family, problem, rank), problem.dtype) or ""]
        faults += [normed_fault(c, weight, normed, scales[0] if scales else None)]
    return faults


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("family", FUNCTIONS)
def test_functions_norm_rows(ranks: Callable[[int], Ranks], family: str) -> None:
    assert ranks(2).call(call_functions, family) == [[""] * 4] * 2


def differentiate(rank: int, world_size: int, family: str, backend: str | None) -> list[bool]:
    """Return whether outputs and all gradients are those of torch's own operations on the whole."""
    ctx, draw = context(), torch.Generator().manual_seed(1)
    problem = make_problem(family, 18, 34, 16, world_size, torch.float32)
    shards = FAMILIES[family]
    shapes = ((18, 16), (16, 34), (18, 34), (34,), (18, 34), (18, 34))
    whole_a, whole_b, whole_residual, whole_weight, *grads = (torch.randn(*shape, generator=draw) for shape in shapes)
    leaves = [one.clone().requires_grad_() for one in (whole_a, whole_b, whole_residual, whole_weight)]
    c = leaves[0] @ leaves[1] + leaves[2]
    normed = torch.nn.functional.rms_norm(c, (34,), leaves[3], EPS)
    torch.autograd.backward([normed, c], grads)
    rows = own_rows(family, problem, rank)
    parts = (
        shards.own_a(problem, rank, whole_a),
        shards.own_b(problem, rank, whole_b),
        whole_residual[rows],
        whole_weight,
    )
    own = [one.clone().requires_grad_() for one in parts]

    def step(
        a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return FUNCTIONS[family](ctx, a, b, k=16, residual=residual, norm_weight=weight, eps=EPS)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True) if backend else step
    outputs = compiled(*own)
    torch.autograd.backward(outputs, [one[rows] for one in grads])
    with torch.no_grad():
        without = compiled(*own)
    own_normed = torch.nn.functional.rms_norm(c[rows], (34,), whole_weight, EPS)
    of_weight = torch.autograd.grad(
        torch.nn.functional.rms_norm(c.detach()[rows], (34,), leaves[3], EPS), leaves[3], grads[0][rows]
    )[0]
    expected = [
        own_normed,
        c[rows],
        own_normed,
        c[rows],
        shards.own_a(problem, rank, leaves[0].grad),
        shards.own_b(problem, rank, leaves[1].grad),
        leaves[2].grad[rows],
        of_weight,
    ]
    return are_close([*outputs, *without, *(one.grad for one in own)], expected)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("family", FUNCTIONS)
def test_gradients_are_those_of_torch(ranks: Callable[[int], Ranks], family: str, backend: str | None) -> None:
    assert ranks(2).call(differentiate, family, backend) == [[True] * 8] * 2


def check_op(rank: int, world_size: int, family: str) -> None:
    """Let torch check the op: its schema, its fake implementation, and dispatch, for both kinds of normed rows."""
    ctx, problem = context(), make_problem(family, 18, 34, 16, world_size, torch.float32)
    data, weight = make_data(family, problem, rank, 0, ctx.get_device()), weight_of(34, torch.float32, "cpu")
    op = getattr(torch.ops.iris_overlap, family).default
    for normed_dtype in (None, FP8):
        options = {"norm_eps": EPS, "normed_dtype": normed_dtype, "norm_weight": weight}
        tests = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(op, (data.a, [data.b], 18, 34, 16, ctx.name), options, test_utils=tests)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("family", FUNCTIONS)
def test_the_op_is_sound(ranks: Callable[[int], Ranks], family: str) -> None:
    ranks(2).call(check_op, family)


def refuse(rank: int, world_size: int) -> list[str]:
    ctx, family = context(), "gemm_all_reduce"
    a, b, weight = torch.ones(4, 6), torch.ones(6, 5), torch.ones(5)
    function, problem = FUNCTIONS[family], make_problem(family, 4, 5, 6 * world_size, world_size, a.dtype)
    op = getattr(torch.ops.iris_overlap, family).default
    sizes = (4, 5, 6 * world_size, ctx.name)
    refused = [
        raised(function, ctx, a, b, norm_weight=torch.ones(6)),
        raised(function, ctx, a, b, norm_weight=weight.double()),
        raised(function, ctx, a, b, norm_weight=weight, eps=-1.0),
        raised(function, ctx, a, b, norm_weight=weight, normed_dtype=torch.int8),
        raised(function, ctx, a, b, norm_weight=weight, residual=torch.ones(5, 4)),
        raised(function, ctx, a.clone().requires_grad_(), b, norm_weight=weight, normed_dtype=FP8),
        raised(op, a, [b], *sizes, norm_weight=weight),
        raised(op, a, [b], *sizes, norm_eps=EPS),
        raised(replace, make_problem("all_gather_gemm", 4, 6, 8, world_size, a.dtype), norm=RmsNorm(EPS)),
    ]
    with_norm = replace(problem, norm=RmsNorm(EPS))
    operator = get_variant(family, "fused_sequential:portable:stream_k").build(ctx, with_norm)
    refused += [raised(operator, a, b), raised(operator, a, b, norm_weight=operator.outputs()[1][0])]
    operator.close()
    return [message for _, message in refused]


@pytest.mark.parametrize("device", ["cpu"])
def test_what_makes_no_sense_is_named(ranks: Callable[[int], Ranks]) -> None:
    expected = [
        "norm_weight is (6,) on rank",
        "norm_weight is torch.float64; the operator was made for torch.float32",
        "eps is -1.0; it takes a number of at least 0, such as 1e-6",
        "normed_dtype is torch.int8; it takes torch.float8_e4m3fn, torch.float8_e4m3fnuz, or None for C's",
        "residual is (5, 4) on rank",
        "normed_dtype is torch.float8_e4m3fn, which has no gradient: call under torch.no_grad(), or leave it out",
        "norm_eps and norm_weight go together: give both, or neither",
        "norm_eps and norm_weight go together: give both, or neither",
        "a norm takes whole rows of sums over ranks, which GEMM + reduce-scatter and GEMM + all-reduce give",
        "the operands are A, B; it takes A, B, norm_weight",
        "norm_weight lies in memory of this operator, which the call overwrites while it reads norm_weight",
    ]
    for messages in ranks(2).call(refuse):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def test_gpus_without_an_fp8_dtype_are_named() -> None:
    for dtype, arch, instead in (
        (FP8, "gfx942", "torch.float8_e4m3fnuz, None"),
        (FP8, "sm_80", "None"),
        (torch.float8_e4m3fnuz, "sm_90", "torch.float8_e4m3fn, None"),
    ):
        reason = f"{arch} does not round to {dtype}; as normed_dtype it takes {instead}"
        assert RmsNorm(EPS, dtype).unsupported_reason(arch) == reason
    assert RmsNorm(EPS, FP8).unsupported_reason("sm_90") is None
    assert RmsNorm(EPS).unsupported_reason("gfx942") is None
