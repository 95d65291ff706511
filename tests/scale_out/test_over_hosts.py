"""All families over simulated hosts: right with ragged sizes, in many calls, with a host that comes late."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from checking import fault, make_data
from families import make_problem
from ranks import Pools, Ranks
from scaled import KINDS, TENSOR_CORE_ROUNDOFF, make_scaled_data

from iris_core import iris
from iris_core.context.hierarchical import HierarchicalContext
from iris_kernels.all_gather_gemm import all_gather_gemm
from iris_kernels.common.fp8.scales import quantise
from iris_kernels.common.hierarchical import choosing
from iris_kernels.gemm_all_reduce import gemm_all_reduce, gemm_all_reduce_rms_norm
from iris_kernels.gemm_all_scatter import gemm_all_scatter
from iris_kernels.gemm_reduce_scatter import gemm_reduce_scatter, gemm_reduce_scatter_rms_norm
from overlap_taxonomy import get_variant, list_variants

CALLS = int(os.environ.get("IRIS_SCALE_OUT_CALLS", "4"))  # of each operator
DELAY_S = 0.02  # of a host before a call, at most
MOST_ROWS = 70
SIZES = [(132, 48), (37, 41), (3, 7)]  # (n, k): more than a chunk of columns, ragged, and fewer than ranks
FAMILIES = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_scatter")
WORLDS = {"2x1": (2, 1), "2x2": (2, 2), "3x2": (3, 2)}  # hosts, and ranks on each
GPU_WORLDS = {"2x1 on GPUs": (2, 1), "2x2 on GPUs": (2, 2)}

_contexts: list[HierarchicalContext] = []


def context() -> HierarchicalContext:
    """Return this rank's context, made at the first call; collective."""
    if not _contexts:
        made = iris((1 << 30) if torch.cuda.is_available() else (1 << 24))
        assert isinstance(made, HierarchicalContext)
        _contexts.append(made)
    return _contexts[0]


@pytest.fixture(
    scope="module",
    params=[*WORLDS, *(pytest.param(name, marks=pytest.mark.gpu) for name in GPU_WORLDS)],
)
def pool(request: pytest.FixtureRequest, pools: Pools) -> Iterator[Ranks]:
    """Ranks of simulated hosts, fresh ones after an error."""
    on_gpus = request.param in GPU_WORLDS
    hosts, size = (WORLDS | GPU_WORLDS)[request.param]
    if on_gpus and torch.cuda.device_count() < hosts * size:
        pytest.skip(f"needs {hosts * size} GPUs; there are {torch.cuda.device_count()}")
    made = pools.ranks(hosts * size, "cuda" if on_gpus else "cpu", hosts)
    yield made
    made.end()


def many_calls(
    rank: int,
    world_size: int,
    family: str,
    variant: str,
    calls: int,
    sizes: Sequence[tuple[int, int]] = SIZES,
    most_rows: int = MOST_ROWS,
) -> list[str]:
    """Call an operator per size, with fresh data and another number of rows each time; return what was wrong."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # sums of slices of k in bf16
    ctx, dtype, faults = context(), torch.bfloat16, []
    same, own = random.Random(family), random.Random(ctx.rail.host)  # the same on all ranks, on all of a host
    for n, k in sizes:
        operator = get_variant(family, variant).build(ctx, make_problem(family, most_rows, n, k, world_size, dtype))
        for call in range(calls):
            problem = make_problem(family, same.choice([1, 7, 33, 64, most_rows]), n, k, world_size, dtype)
            data = make_data(family, problem, rank, call, ctx.get_device(), layout=("nk", "kn", "strided")[call % 3])
            data = replace(data, bound=2 * data.bound)  # what a host sums is rounded once more
            time.sleep(own.uniform(0, DELAY_S))
            output = operator.as_matrix(operator(data.a, data.b, m=problem.m))
            if wrong := fault(output, data, dtype):
                faults.append(f"rank {rank}, {problem}, call {call}: {wrong}")
        operator.close()
    return faults


@pytest.mark.parametrize(("variant", "calls"), [("auto", CALLS), ("library", 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_many_calls_with_delays_are_right(pool: Ranks, family: str, variant: str, calls: int) -> None:
    assert [said for of_rank in pool.call(many_calls, family, variant, calls) for said in of_rank] == []


def calls_in_chunks(rank: int, world_size: int, family: str, variant: str) -> list[str]:
    """Call an operator whose transfers of a chunk overlap the products of later ones."""
    with mock.patch.object(choosing, "best_chunks", return_value=(4, 1.0)):
        return many_calls(rank, world_size, family, variant, CALLS, [(2048, 1024)], 8192)


@pytest.mark.parametrize("pool", [pytest.param(name, marks=pytest.mark.gpu) for name in GPU_WORLDS], indirect=True)
@pytest.mark.parametrize(
    ("family", "variant"),
    [(one.family, one.name) for one in list_variants() if one.family in FAMILIES and one.name.endswith(":sm90")],
)
def test_kernels_for_hopper_inside_a_host(pool: Ranks, family: str, variant: str) -> None:
    assert [said for of_rank in pool.call(calls_in_chunks, family, variant) for said in of_rank] == []


def finished_calls(rank: int, world_size: int) -> list[str]:
    """Call the families' functions with all that an epilogue has; return which gave something else than torch."""
    ctx, m, n, k = context(), 21, 2 * 3 * world_size, 24
    device = ctx.get_device()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    a, b, residual, bias, scale = draw(m, k), draw(k, n), draw(m, n), draw(n), draw(n)
    whole = (a @ b) * scale + bias + residual
    rows, columns, inner = (slice(*_bounds(size, world_size, rank)) for size in (m, n, k))
    own = {"scale": scale[columns], "bias": bias[columns], "residual": residual[:, columns]}
    every = {"scale": scale, "bias": bias, "activation": "gelu"}
    gelu, silu = torch.nn.functional.gelu, torch.nn.functional.silu
    gated = silu(whole[:, columns][:, ::2]) * whole[:, columns][:, 1::2]
    given: dict[str, tuple[Any, torch.Tensor]] = {
        "all-gather": (all_gather_gemm(ctx, a[rows], b[:, columns], **own, m=m, n=n), whole[:, columns]),
        "gated": (all_gather_gemm(ctx, a[rows], b[:, columns], **own, activation="swiglu", m=m, n=n), gated),
        "gathered": (all_gather_gemm(ctx, a[rows], b[:, columns], m=m, n=n, return_gathered=True)[1], a),
        "all-scatter": (gemm_all_scatter(ctx, a, b[:, columns], **own, n=n), whole),
        "reduce-scatter": (
            gemm_reduce_scatter(ctx, a[:, inner], b[inner], **every, residual=residual[rows], k=k),
            gelu(whole)[rows],
        ),
        "all-reduce": (gemm_all_reduce(ctx, a[:, inner], b[inner], **every, residual=residual, k=k), gelu(whole)),
    }
    tolerance = {"atol": 1e-4, "rtol": 1e-4}
    return [name for name, (output, expected) in given.items() if not torch.allclose(output, expected, **tolerance)]


def _bounds(size: int, world_size: int, rank: int) -> tuple[int, int]:
    step = -(-size // world_size)
    return min(rank * step, size), min((rank + 1) * step, size)


def test_functions_finish_what_crosses_hosts(pool: Ranks) -> None:
    assert [said for of_rank in pool.call(finished_calls) for said in of_rank] == []


def scaled_calls(rank: int, world_size: int, family: str, scales: tuple[str, ...]) -> list[str]:
    """Call an operator on fp8 operands, each rank's with scales of its own; return what was wrong."""
    ctx, fp8, faults = context(), (torch.float8_e4m3fn, torch.float8_e5m2), []
    for (n, k), rows in {(132, 300): (33, 1, MOST_ROWS), SIZES[1]: (1,), SIZES[2]: (33,)}.items():
        most = replace(make_problem(family, MOST_ROWS, n, k, world_size, fp8[0]), b_dtype=fp8[1], scales=scales)
        operator = get_variant(family, "auto").build(ctx, most)
        for seed, m in enumerate(rows):
            problem = most.with_rows(m)
            made = make_scaled_data(family, problem, rank, seed, ctx.get_device())
            data = replace(made.data, bound=2 * made.data.bound)  # what a host sums is rounded once more
            output = operator.as_matrix(operator(made.a, made.b, m=m, **made.scales))
            if wrong := fault(output, data, problem.out_dtype):
                faults.append(f"rank {rank}, {problem}: {wrong}")
        operator.close()
    return faults


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_cross_hosts_with_what_they_scale(pool: Ranks, family: str) -> None:
    """Of all kinds; where hosts have one rank, or are three, of the kind that has most to send."""
    kinds = KINDS if pool.world_size == 4 else KINDS[-1:]
    faults = [pool.call(scaled_calls, family, scales) for scales in kinds]
    assert [said for of_kind in faults for of_rank in of_kind for said in of_rank] == []


def quantised_calls(rank: int, world_size: int) -> list[str]:
    """Return which of C, the gathered A and its scales differ from those of what torch quantised.

    They are equal to the bit, but C on GPUs, where the two may be multiplied by kernels that round sums otherwise.
    """
    ctx, n, k, wrong = context(), 2 * world_size + 1, 40, []
    draw = torch.Generator().manual_seed(1)
    for m in (33, 2):
        whole = torch.randn(m, k, generator=draw) * torch.arange(m)[:, None]
        b = torch.randn(k, n, generator=draw)
        rows, columns = (slice(*_bounds(size, world_size, rank)) for size in (m, n))
        a = whole[rows].bfloat16().to(ctx.get_device())
        weight, b_scale = quantise(b[:, columns].to(a.device), torch.float8_e4m3fn, "column", is_b=True)
        how: dict[str, Any] = {"m": m, "n": n, "return_gathered": True, "b_scale": b_scale}
        weight = weight.t().contiguous().t()
        small, a_scale = quantise(a, torch.float8_e4m3fn, "row")
        expected = all_gather_gemm(ctx, small, weight, a_scale=a_scale, out_dtype=a.dtype, **how)
        found = all_gather_gemm(ctx, a, weight, quantize="row", **how)
        gathered, scales = quantise(whole.bfloat16(), torch.float8_e4m3fn, "row")
        sums = (gathered.float() * scales).abs() @ (b[:, columns].abs())
        allowed = found[0].cpu().float().abs() * torch.finfo(a.dtype).eps + 2 * TENSOR_CORE_ROUNDOFF * sums
        bounds = {"C": allowed if a.is_cuda else 0.0, "A": 0.0, "scales": 0.0}
        for (name, bound), one, other in zip(bounds.items(), found, (expected[0], gathered, scales), strict=True):
            difference = (one.cpu().float() - other.cpu().float()).abs()
            if not (difference <= bound).all():
                wrong.append(f"rank {rank}, {m} rows: {name} by as much as {difference.max()}")
    return wrong


def test_a_shard_is_quantised_before_it_crosses_hosts(pool: Ranks) -> None:
    assert [said for of_rank in pool.call(quantised_calls) for said in of_rank] == []


def normed_calls(rank: int, world_size: int) -> list[str]:
    """Call the functions that norm rows, with a residual; return which gave something else than torch."""
    ctx, m, n, k = context(), 21, 40, 8 * world_size
    device, draw = ctx.get_device(), torch.Generator().manual_seed(0)
    a, b, residual, weight = (torch.randn(*s, generator=draw).to(device) for s in ((m, k), (k, n), (m, n), (n,)))
    inner, rows = (slice(*_bounds(size, world_size, rank)) for size in (k, m))
    hidden = a @ b + residual
    normed = torch.nn.functional.rms_norm(hidden, (n,), weight, 0.5)
    # Each of the k products and sums is rounded, here and there; the norm adds n squares, and is off as its rows are.
    eps = torch.finfo(torch.float32).eps
    of_hidden = (k + 2) * eps * (a.abs() @ b.abs() + residual.abs())
    rms = (hidden.square().mean(1, keepdim=True) + 0.5).sqrt()
    of_normed = weight.abs() * of_hidden / rms + normed.abs() * (of_hidden.amax(1, keepdim=True) / rms + n * eps)
    wrong = []
    for name, function, own in (
        ("reduce-scatter", gemm_reduce_scatter_rms_norm, rows),
        ("all-reduce", gemm_all_reduce_rms_norm, slice(None)),
    ):
        how: dict[str, Any] = {"norm_weight": weight, "eps": 0.5, "k": k, "residual": residual[own]}
        outputs = function(ctx, a[:, inner], b[inner], **how)
        fp8, c, scales = function(ctx, a[:, inner], b[inner], **how, normed_dtype=torch.float8_e4m3fn)
        expected = (normed[own], hidden[own], hidden[own])
        bounds = (of_normed[own], of_hidden[own], of_hidden[own])
        close = [
            bool(((found - to).abs() <= bound).all())
            for found, to, bound in zip((*outputs, c), expected, bounds, strict=True)
        ]
        close.append(torch.allclose(fp8.float() * scales, normed[own], atol=0.05, rtol=0.07))
        wrong += [] if all(close) else [f"rank {rank}, {name}: {close}"]
    return wrong


def test_whole_rows_are_normed_behind_the_sum_over_hosts(pool: Ranks) -> None:
    assert [said for of_rank in pool.call(normed_calls) for said in of_rank] == []


def compiled_calls(rank: int, world_size: int) -> list[str]:
    """Call a function in a graph, and by the library over all ranks; return which gave something else than torch."""
    ctx, m, n, k = context(), 12, 8 * world_size, 16
    device = ctx.get_device()
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).to(device) for shape in ((m, k), (k, n)))
    rows, columns = (slice(*_bounds(size, world_size, rank)) for size in (m, n))

    def call(a: torch.Tensor, b: torch.Tensor, variant: str) -> torch.Tensor:
        return all_gather_gemm(ctx, a, b, m=m, n=n, variant=variant).relu()

    in_graph = torch.compile(call, backend="aot_eager", fullgraph=True)
    given = {"in a graph": in_graph(a[rows], b[:, columns], "auto"), "library": call(a[rows], b[:, columns], "library")}
    expected = (a @ b).relu()[:, columns]
    allowed = k * torch.finfo(torch.float32).eps * (a.abs() @ b.abs())[:, columns]  # k roundings, here and there
    return [name for name, output in given.items() if not ((output - expected).abs() <= allowed).all()]


def test_functions_are_the_same_in_graphs_and_by_the_library(pool: Ranks) -> None:
    assert [said for of_rank in pool.call(compiled_calls) for said in of_rank] == []


def close(rank: int, world_size: int) -> int:
    """Close the context; return how many groups of torch's are left."""
    _contexts.pop().close()
    return len(torch.distributed.distributed_c10d._world.pg_map)


def test_nothing_is_left_of_a_context_that_was_closed(pool: Ranks) -> None:
    context_of_each = pool.call(many_calls, FAMILIES[0], "auto", 1)
    assert context_of_each == [[]] * pool.world_size
    assert pool.call(close) == [0] * pool.world_size
