"""fp8 operands by functions and ops: formats, dtypes of C and of partial sums, gathered scales, graphs, opcheck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from checking import fault
from families import make_problem
from ranks import Ranks, context
from scaled import make_scaled_data
from torch_compiling import FUNCTIONS, PATTERN, each_backend, sizes_of

pytestmark = pytest.mark.parametrize("device", ["cpu"])
each_family = pytest.mark.parametrize("family", FUNCTIONS)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, TENSOR, BLOCKS = ("row", "column"), ("tensor", "tensor"), ("block", "block")
N, K = 36, 272


def data_of(family: str, m: int, rank: int, world_size: int, seed: int = 0, **more: Any) -> tuple[Any, Any]:
    problem = make_problem(family, m, N, K, world_size, more.pop("dtype", E4M3))
    problem = replace(problem, **{"scales": ROWS, **more})
    return problem, make_scaled_data(family, problem, rank, seed)


def call_functions(rank: int, world_size: int, family: str) -> list[str | None]:
    """Return what is wrong with a function's output, for formats, scales and dtypes of C and of partial sums."""
    ctx, faults = context(), []
    cases: list[dict[str, Any]] = [
        {"scales": TENSOR},
        {"scales": BLOCKS, "out_dtype": torch.float16},
        {"dtype": E5M2, "b_dtype": E4M3, "out_dtype": torch.float32},
        {"dtype": E5M2, "use_fast_accum": True},
    ]
    if "reduce" in family:
        cases.append({"partial_dtype": torch.float32})
    for case in cases:
        for m in (18, 7):
            problem, made = data_of(family, m, rank, world_size, **case)
            scales = {
                name: scale.reshape(()) if scale.numel() == 1 and problem.scales == TENSOR else scale
                for name, scale in made.scales.items()
            }
            how = {name: case[name] for name in ("out_dtype", "partial_dtype", "use_fast_accum") if name in case}
            output = FUNCTIONS[family](ctx, made.a, made.b, **scales, **how, **sizes_of(family, m, N, K))
            faults.append(fault(output, made.data, problem.out_dtype))
    return faults


@each_family
def test_functions_take_formats_scales_and_dtypes(ranks: Callable[[int], Ranks], family: str) -> None:
    for faults in ranks(2).call(call_functions, family):
        assert not any(faults)


def partial_errors(rank: int, world_size: int) -> list[float]:
    """Return how far sums are from exact ones whose partials travel in bf16, and in fp32."""
    ctx, found, norm = context(), [], torch.linalg.vector_norm
    for dtype in (torch.bfloat16, torch.float32):
        _, made = data_of("gemm_reduce_scatter", 18, rank, world_size)
        how = {"out_dtype": torch.float32, "partial_dtype": dtype, **made.scales}
        output = FUNCTIONS["gemm_reduce_scatter"](ctx, made.a, made.b, k=K, **how)
        found.append(float(norm(output - made.data.expected) / norm(made.data.expected)))
    return found


def test_partials_in_fp32_are_as_exact_as_the_sum(ranks: Callable[[int], Ranks]) -> None:
    for bf16, fp32 in ranks(3).call(partial_errors):
        assert fp32 < 1e-6 < 1e-4 < bf16


def gather(rank: int, world_size: int, variant: str, scales: tuple[str, ...]) -> list[bool]:
    """Return whether the gathered A, and its scales, are those of all ranks, of both of two calls."""
    ctx, right = context(), []
    for seed in range(2):
        _, made = data_of("all_gather_gemm", 18, rank, world_size, seed, scales=scales)
        how = {"m": 18, "n": N, "return_gathered": True, "variant": variant, **made.scales}
        if scales == TENSOR:
            how |= {name: scale.reshape(1) for name, scale in made.scales.items()}
        _, a, a_scale = FUNCTIONS["all_gather_gemm"](ctx, made.a, made.b, **how)
        parts = [data_of("all_gather_gemm", 18, peer, world_size, seed, scales=scales)[1] for peer in range(world_size)]
        gathered = torch.cat([part.scales["a_scale"].expand(len(part.a), a_scale.shape[1]) for part in parts])
        whole = torch.cat([part.a for part in parts])
        right += [torch.equal(a.float(), whole.float()), torch.equal(a_scale, gathered)]
    return right


@pytest.mark.parametrize("scales", [TENSOR, ROWS, BLOCKS], ids="-".join)
@pytest.mark.parametrize(
    "variant", ["library", "bulk_synchronous", "copy_engine:portable", "fused_sequential:portable:stream_k"]
)
def test_scales_are_gathered_with_their_rows(
    ranks: Callable[[int], Ranks], variant: str, scales: tuple[str, ...]
) -> None:
    assert ranks(3).call(gather, variant, scales) == [[True] * 4] * 3


def call_compiled(rank: int, world_size: int, family: str, backend: str) -> tuple[list[str | None], int]:
    """Return what is wrong with calls of a compiled function for any number of rows, and how many graphs there are."""
    ctx = context()

    def multiply(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, m: int) -> Any:
        sizes = sizes_of(family, m, N, K)
        return FUNCTIONS[family](ctx, a, b, a_scale=a_scale, b_scale=b_scale * 1, **sizes) * 1.0

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(multiply, backend=backend, fullgraph=True, dynamic=True)
    faults = []
    for seed, m in enumerate((20, 7, 33, 12)):
        problem, made = data_of(family, m, rank, world_size, seed)
        output = step(made.a, made.b, made.scales["a_scale"], made.scales["b_scale"], m)
        faults.append(fault(output, made.data, problem.out_dtype))
    return faults, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@each_backend
@each_family
def test_a_graph_is_that_of_any_number_of_rows(ranks: Callable[[int], Ranks], family: str, backend: str) -> None:
    assert ranks(2).call(call_compiled, family, backend) == [([None] * 4, 1)] * 2


def check_op(rank: int, world_size: int, family: str) -> dict[str, str]:
    """Have torch check the op: its fake implementation, and with dynamic shapes; its test of schemas has no fp8."""
    ctx = context()
    _, made = data_of(family, 18, rank, world_size)
    arguments = made.a, [made.b], 18, N, K, ctx.name, PATTERN
    more = {"bias": torch.ones(made.b.shape[1], dtype=torch.bfloat16), **made.scales}
    if family == "all_gather_gemm":
        more["keep_gathered"] = True
    op, tests = getattr(torch.ops.iris_overlap, family).default, ("test_faketensor", "test_aot_dispatch_dynamic")
    found = torch.library.opcheck(op, arguments, more, test_utils=tests)
    return {name: str(result) for name, result in found.items()}


@each_family
def test_torch_finds_nothing_wrong_with_the_op(ranks: Callable[[int], Ranks], family: str) -> None:
    for found in ranks(2).call(check_op, family):
        assert set(found.values()) == {"SUCCESS"}


def differentiate_bias(rank: int, world_size: int) -> list[bool]:
    """Return whether a bias beside fp8 operands has its gradient."""
    ctx = context()
    _, made = data_of("gemm_all_reduce", 18, rank, world_size)
    bias = torch.ones(N, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(18, N, generator=torch.Generator().manual_seed(1)).bfloat16()
    FUNCTIONS["gemm_all_reduce"](ctx, made.a, made.b, bias=bias, k=K, **made.scales).backward(grad)
    return [torch.equal(bias.grad, grad.sum(0))]


def test_a_bias_has_a_gradient(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(differentiate_bias) == [[True]] * 2


def quantised_data(m: int, rank: int, world_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a rank's A in bf16, its B in fp8, and the scales of its columns."""
    problem, made = data_of("all_gather_gemm", m, rank, world_size, seed)
    a = torch.randn(problem.a_shape(rank), generator=torch.Generator().manual_seed(seed + 10 * rank)).bfloat16()
    return a, made.b, made.scales["b_scale"]


def quantise_compiled(rank: int, world_size: int, backend: str) -> tuple[list[bool], int]:
    """Return whether compiled calls give the bits of eager ones, for any rows, and how many graphs there are."""
    ctx, gather = context(), FUNCTIONS["all_gather_gemm"]
    how: dict[str, Any] = {"n": N, "quantize": "row", "return_gathered": True, "variant": PATTERN}

    def multiply(a: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, m: int) -> Any:
        return [one.float() for one in gather(ctx, a, b, b_scale=b_scale * 1, m=m, **how)]

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(multiply, backend=backend, fullgraph=True, dynamic=True)
    same = []
    for seed, m in enumerate((20, 7, 33)):
        a, b, b_scale = quantised_data(m, rank, world_size, seed)
        found, eager = step(a, b, b_scale, m), multiply(a, b, b_scale, m)
        same += [len(found) == len(eager) == 3, *map(torch.equal, found, eager)]
    return same, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@each_backend
def test_a_graph_quantises_what_it_gathers(ranks: Callable[[int], Ranks], backend: str) -> None:
    assert ranks(2).call(quantise_compiled, backend) == [([True] * 12, 1)] * 2


def check_quantising_op(rank: int, world_size: int) -> dict[str, str]:
    ctx = context()
    a, b, b_scale = quantised_data(18, rank, world_size, 0)
    more: dict[str, Any] = {"keep_gathered": True, "quantize": "row", "b_scale": b_scale}
    op, tests = torch.ops.iris_overlap.all_gather_gemm.default, ("test_faketensor", "test_aot_dispatch_dynamic")
    found = torch.library.opcheck(op, (a, [b], 18, N, K, ctx.name, PATTERN), more, test_utils=tests)
    return {name: str(result) for name, result in found.items()}


def test_torch_finds_nothing_wrong_with_an_op_that_quantises(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).call(check_quantising_op):
        assert set(found.values()) == {"SUCCESS"}


def differentiate_residual(rank: int, world_size: int) -> list[bool]:
    """Return whether a residual beside an A that is quantised has its gradient."""
    ctx = context()
    a, b, b_scale = quantised_data(18, rank, world_size, 0)
    residual = torch.ones(18, b.shape[1], dtype=torch.bfloat16, requires_grad=True)
    c = FUNCTIONS["all_gather_gemm"](ctx, a, b, b_scale=b_scale, residual=residual, m=18, n=N, quantize="row")
    grad = torch.randn(c.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    c.backward(grad)
    return [torch.equal(residual.grad, grad)]


def test_a_residual_beside_a_quantised_a_has_a_gradient(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(differentiate_residual) == [[True]] * 2
