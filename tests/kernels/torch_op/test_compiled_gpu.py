"""Operators under torch.compile on GPUs: inductor's kernels around ours, in a hurry, on data that change."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from checking import fault, make_data
from families import GPU_VARIANTS, make_problem, name
from ranks import Ranks, context

from overlap_taxonomy import Variant, get_variant

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("device", ["cuda"])]
CALLS = 20
OF_THE_HOST = 5  # calls of an operator at most, before what is recorded of one is replayed
NAMES = (
    "warp_specialized:sm90",
    "workgroup_specialized:sm90",
    "copy_engine:portable",
    "fused_sequential:portable:stream_k",
    "workgroup_specialized:portable",
    "async_tp",
)
COMPILED = [variant for variant in GPU_VARIANTS if variant.name in NAMES]


def call_in_a_graph(rank: int, world_size: int, family: str, variant: str, whole: bool) -> list[str]:
    """Call an operator twice in each graph; look at the outputs when all calls are queued."""
    problem = make_problem(family, 512, 1024, 768, world_size, torch.bfloat16)
    operator = get_variant(family, variant).build(context(), problem)
    data = [make_data(family, problem, rank, seed, context().get_device()) for seed in range(4)]
    torch._dynamo.reset()

    def two(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return operator(a * 2, b) * 0.5, operator(c * 2, d) * 0.5

    step, outputs = torch.compile(two, fullgraph=whole), []
    with torch.inference_mode():
        for call in range(CALLS):
            first, second = data[call % 4], data[(call + 1) % 4]
            outputs += [
                (output, one)
                for output, one in zip(step(first.a, first.b, second.a, second.b), (first, second), strict=True)
            ]
    wrong = [fault(output, one, torch.bfloat16) for output, one in outputs]
    operator.close()
    return [one for one in wrong if one]


@pytest.mark.parametrize("variant", COMPILED, ids=name)
def test_two_calls_in_a_graph_are_right(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    whole = not variant.is_baseline  # torch's own allocate what they return: they end the graph
    assert ranks(2).call(call_in_a_graph, variant.family, variant.name, whole) == [[], []]


def call_what_is_recorded(rank: int, world_size: int, family: str, variant: str) -> tuple[list[str], int]:
    """Call an operator in a graph that becomes a CUDA graph; return how often the host did, too."""
    problem = make_problem(family, 512, 1024, 768, world_size, torch.bfloat16)
    operator, of_the_host = get_variant(family, variant).build(context(), problem), 0
    data = [make_data(family, problem, rank, seed, context().get_device()) for seed in range(4)]
    call = operator._call

    def note(a: torch.Tensor, b: torch.Tensor, m: int | None) -> tuple[torch.Tensor, ...]:
        nonlocal of_the_host
        of_the_host += 1
        return call(a, b, m)

    torch._dynamo.reset()
    step = torch.compile(lambda a, b: operator(a * 2, b) * 0.5, mode="reduce-overhead", fullgraph=True)
    with torch.inference_mode(), mock.patch.object(operator, "_call", note):
        outputs = [(step(one.a, one.b).clone(), one) for _ in range(CALLS // len(data)) for one in data]
    wrong = [fault(output, one, torch.bfloat16) for output, one in outputs]
    operator.close()
    return [one for one in wrong if one], of_the_host


@pytest.mark.parametrize("variant", [one for one in COMPILED if not one.is_baseline], ids=name)
def test_a_call_is_replayed_where_overhead_is_reduced(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    """With data that change, in a hurry; the host hands over what it recorded."""
    for wrong, of_the_host in ranks(2).call(call_what_is_recorded, variant.family, variant.name):
        assert not wrong
        assert 1 <= of_the_host <= OF_THE_HOST
