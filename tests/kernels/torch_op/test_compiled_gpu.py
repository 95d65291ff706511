"""The families' ops under torch.compile on GPUs: inductor's kernels around ours, in a hurry, on data that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from checking import fault, make_data
from families import GPU_VARIANTS, make_problem, name
from ranks import Ranks, context
from torch_compiling import FUNCTIONS, sizes_of

from iris_kernels.common.operators import torch_op
from overlap_taxonomy import Variant

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("device", ["cuda"])]
CALLS = 20
OF_THE_HOST = 5  # calls of an op at most, before what is recorded of one is replayed
NAMES = (
    "warp_specialized:sm90",
    "workgroup_specialized:sm90",
    "copy_engine:portable",
    "fused_sequential:portable:stream_k",
    "workgroup_specialized:portable",
    "async_tp",
)
COMPILED = [variant for variant in GPU_VARIANTS if variant.name in NAMES]
SIZES = 512, 1024, 768
ROWS = (512, 384, 640, 512, 128)


def data_of(family: str, m: int, rank: int, world_size: int, seed: int) -> Any:
    problem = make_problem(family, m, *SIZES[1:], world_size, torch.bfloat16)
    return make_data(family, problem, rank, seed, context().get_device())


def call_in_a_graph(rank: int, world_size: int, family: str, variant: str) -> list[str]:
    """Call a function twice in each graph, of any number of rows; look at the outputs when all calls are queued."""
    ctx, outputs = context(), []
    torch._dynamo.reset()

    def two(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor, m: int) -> tuple[torch.Tensor, ...]:
        sizes = sizes_of(family, m, *SIZES[1:])
        call = FUNCTIONS[family]
        return call(ctx, a * 2, b, variant=variant, **sizes) * 0.5, call(ctx, c * 2, d, variant=variant, **sizes) * 0.5

    step = torch.compile(two, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for number in range(CALLS):
            m = ROWS[number % len(ROWS)]
            first, second = (data_of(family, m, rank, world_size, seed) for seed in (number % 4, (number + 1) % 4))
            found = step(first.a, first.b, second.a, second.b, m)
            outputs += zip(found, (first, second), strict=True)
    wrong = [fault(output, one, torch.bfloat16) for output, one in outputs]
    ctx.release_operators()
    return [one for one in wrong if one]


@pytest.mark.parametrize("variant", COMPILED, ids=name)
def test_two_calls_in_a_graph_are_right(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    assert ranks(2).call(call_in_a_graph, variant.family, variant.name) == [[], []]


def call_what_is_recorded(rank: int, world_size: int, family: str, variant: str) -> tuple[list[str], int]:
    """Call a function in a graph that becomes a CUDA graph; return how often the host did, too."""
    ctx, of_the_host = context(), 0
    data = [data_of(family, SIZES[0], rank, world_size, seed) for seed in range(4)]
    multiply, sizes = torch_op.multiply, sizes_of(family, *SIZES)

    def note(*arguments: Any) -> Any:
        nonlocal of_the_host
        of_the_host += 1
        return multiply(*arguments)

    torch._dynamo.reset()
    step = torch.compile(
        lambda a, b: FUNCTIONS[family](ctx, a * 2, b, variant=variant, **sizes) * 0.5,
        mode="reduce-overhead",
        fullgraph=True,
    )
    with torch.inference_mode(), mock.patch.object(torch_op, "multiply", note):
        outputs = [(step(one.a, one.b).clone(), one) for _ in range(CALLS // len(data)) for one in data]
    wrong = [fault(output, one, torch.bfloat16) for output, one in outputs]
    torch._dynamo.reset()
    ctx.release_operators(captured=True)
    return [one for one in wrong if one], of_the_host


@pytest.mark.parametrize("variant", [one for one in COMPILED if not one.is_baseline], ids=name)
def test_a_call_is_replayed_where_overhead_is_reduced(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    """With data that change, in a hurry; the host hands over what it recorded."""
    for wrong, of_the_host in ranks(2).call(call_what_is_recorded, variant.family, variant.name):
        assert not wrong
        assert 1 <= of_the_host <= OF_THE_HOST
