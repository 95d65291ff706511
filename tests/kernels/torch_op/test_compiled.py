"""The families' functions and ops under torch.compile: whole graphs for any number of rows, and right outputs.

The compiler's own backends are torch's; here they are "aot_eager", which traces and orders what is written as all do,
and "inductor", which moves and merges steps and decides where their results lie.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import fault, make_data
from families import make_problem
from ranks import Ranks, close_context, context, raised
from torch_compiling import (
    DTYPE,
    FUNCTIONS,
    PATTERN,
    are_close,
    compiled,
    each_backend,
    make_operator,
    operands,
    sizes_of,
)

from iris_kernels.all_gather_gemm import all_gather_gemm
from iris_kernels.common.config import GemmConfig
from overlap_taxonomy import list_families

pytestmark = pytest.mark.parametrize("device", ["cpu"])
each_family = pytest.mark.parametrize("family", list_families())
DIM = {"all_gather_gemm": 1, "gemm_all_scatter": 1, "gemm_reduce_scatter": 0, "gemm_all_reduce": 0}  # that ranks share
LENGTHS = (18, 12, 33, 7, 18, 64, 5, 40, 9, 28, 50, 20)


def data_of(family: str, m: int, rank: int, world_size: int, seed: int = 0) -> Any:
    problem = make_problem(family, m, 34, 16, world_size, DTYPE)
    return make_data(family, problem, rank, seed, context().get_device())


def call_any_length(rank: int, world_size: int, family: str, backend: str) -> tuple[list[str | None], int, int]:
    """Return what is wrong with each call of a function that was never called before, graphs, and operators."""
    ctx = context()
    ctx.release_operators()  # those of other tests
    step = torch.compile(
        lambda a, b, m: FUNCTIONS[family](ctx, a * 2, b, **sizes_of(family, m, 34, 16)) * 0.5,
        backend=backend,
        fullgraph=True,
        dynamic=True,
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    faults = []
    for seed, m in enumerate(LENGTHS):
        data = data_of(family, m, rank, world_size, seed)
        faults.append(fault(step(data.a, data.b, m), data, DTYPE))
    made = len(ctx.operators)
    ctx.release_operators()
    return faults, torch._dynamo.utils.counters["stats"]["unique_graphs"], made


@each_backend
@each_family
def test_any_number_of_rows_is_one_whole_graph(ranks: Callable[[int], Ranks], family: str, backend: str) -> None:
    """The first call of a product makes its operator in the graph; a call of more rows makes room there."""
    assert ranks(2).call(call_any_length, family, backend) == [([None] * len(LENGTHS), 1, 1)] * 2


def differentiate(rank: int, world_size: int, family: str) -> list[bool]:
    """Return whether gradients are those of torch's own product of the whole, eager and compiled."""
    ctx = context()
    problem = make_problem(family, 18, 34, 16, world_size, DTYPE)
    whole = [torch.randn(18, 16, generator=(draws := torch.Generator().manual_seed(1))), None, None]
    whole[1:] = torch.randn(16, 34, generator=draws), torch.randn(18, 34, generator=draws)
    leaves = [one.clone().requires_grad_() for one in whole[:2]]
    product = leaves[0] @ leaves[1]
    product.backward(whole[2])
    mine = problem.shards(rank, *(one.detach() for one in leaves))
    expected = [*problem.shards(rank, leaves[0].grad, leaves[1].grad)]
    rows, columns = problem.c_shape(rank)
    first_row = problem.rows(rank)[0] if rows < 18 else 0
    first_column = problem.columns(rank)[0] if columns < 34 else 0
    part = slice(first_row, first_row + rows), slice(first_column, first_column + columns)

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return FUNCTIONS[family](ctx, a, b, **sizes_of(family, 18, 34, 16))

    same = []
    for fn in (step, compiled(step)):
        a, b = (one.clone().requires_grad_() for one in mine)
        output = fn(a, b)
        output.backward(whole[2][part])
        same += are_close([output, a.grad, b.grad], [product[part], *expected])
        a, b = mine[0].clone(), mine[1].clone().requires_grad_()  # of one alone
        fn(a, b).backward(whole[2][part])
        same += are_close([b.grad], expected[1:])
    ctx.release_operators()
    return same


@each_family
def test_gradients_are_those_of_the_whole_product(ranks: Callable[[int], Ranks], family: str) -> None:
    assert ranks(2).call(differentiate, family) == [[True] * 8] * 2


def differentiate_by_a_pattern(rank: int, world_size: int) -> list[bool]:
    """By a pattern that the family has, and that of A's gradient, GEMM + all-reduce, has not."""
    ctx, data = context(), data_of("gemm_all_scatter", 18, rank, world_size)

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return FUNCTIONS["gemm_all_scatter"](ctx, a, b, variant="producer_consumer", n=34)

    found = []
    for fn in (step, compiled(step)):
        a, b = data.a.clone().requires_grad_(), data.b.clone().requires_grad_()
        fn(a, b).square().sum().backward()
        found.append([a.grad, b.grad])
    ctx.release_operators()
    return are_close(*found)


def test_a_pattern_is_that_of_the_product_and_not_of_its_gradients(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(differentiate_by_a_pattern) == [[True] * 2] * 2


def check_op(rank: int, world_size: int, family: str) -> dict[str, str]:
    """Have torch check the op: schema, gradients registered, fake implementation, and with dynamic shapes."""
    ctx, data = context(), data_of(family, 18, rank, world_size)
    parts = data.b.chunk(2, DIM[family])  # which lie one behind the other where they are rows
    b = [part.detach().requires_grad_() for part in parts]
    arguments = data.a.requires_grad_(), b, 18, 34, 16, ctx.name, PATTERN
    finish = {"activation": "silu", "bias": data.b[0].detach().clone().requires_grad_()}
    found = torch.library.opcheck(getattr(torch.ops.iris_overlap, family).default, arguments, finish)
    ctx.release_operators()
    return found


@each_family
def test_ops_are_as_torch_wants_them(ranks: Callable[[int], Ranks], family: str) -> None:
    for found in ranks(2).call(check_op, family):
        assert len(found) >= 4
        assert set(found.values()) == {"SUCCESS"}


# What one function's calls in one graph are used for. The first call's output must not be the second's.


def both(call: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return call(a, b), call(c, d)


def kept(call: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    first = call(a, b) * 1
    second = call(c, d)
    return first.sum(1), first * 2, second * 3


def mixed(call: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return (torch.softmax(call(a, b) @ call(c, d).t() / 100, -1),)


USES = {use.__name__: use for use in (both, kept, mixed)}


def call_more_than_once(rank: int, world_size: int, backend: str, use: str) -> list[bool]:
    ctx, same = context(), []

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return all_gather_gemm(ctx, a, b, variant=PATTERN, m=18)

    step = compiled(lambda *operands: USES[use](call, *operands), backend)
    for seed in range(2):
        first, second = (data_of("all_gather_gemm", 18, rank, world_size, one) for one in (seed, seed + 10))
        given = first.a, first.b, second.a, second.b
        with torch.inference_mode():
            found = step(*given)
        same += are_close(found, USES[use](call, *given))
    ctx.release_operators()
    return same


@each_backend
@pytest.mark.parametrize("use", USES)
def test_a_function_may_be_called_more_than_once_in_a_graph(
    ranks: Callable[[int], Ranks], backend: str, use: str
) -> None:
    for same in ranks(2).call(call_more_than_once, backend, use):
        assert same
        assert all(same)


def configure(rank: int, world_size: int) -> Any:
    """A configuration is no argument of an op: the graph ends there, or cannot be whole."""
    ctx, data = context(), data_of("all_gather_gemm", 18, rank, world_size)
    config = GemmConfig(16, 16, 16)

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return all_gather_gemm(ctx, a, b, variant=PATTERN, config=config, m=18) + 0

    wrong = fault(compiled(step, whole=False)(data.a, data.b), data, DTYPE)
    in_whole = raised(compiled(step), data.a, data.b)[0]
    ctx.release_operators()
    return wrong, in_whole


def test_a_configuration_ends_the_graph(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(configure) == [(None, "Unsupported")] * 2


def call_an_operator(rank: int, world_size: int) -> Any:
    operator = make_operator("all_gather_gemm", PATTERN, world_size)
    data = operands(operator)
    wrong = fault(compiled(lambda a, b: operator(a, b) + 0, whole=False)(data.a, data.b), data, DTYPE)
    in_whole = raised(compiled(lambda a, b: operator(a, b) + 0), data.a, data.b)[0]
    operator.close()
    return wrong, in_whole


def test_an_operator_is_called_outside_graphs(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(call_an_operator) == [(None, "Unsupported")] * 2


def call_in_another_context(rank: int, world_size: int) -> tuple[str, str]:
    """A graph that was made for a context that is closed; this process has another."""
    step = compiled(lambda a, b, name: torch.ops.iris_overlap.gemm_all_reduce(a, [b], 4, 4, 8, name)[0] + 0)
    name, a = context().name, torch.zeros(4, 8 // world_size)
    step(a, a.t(), name)
    close_context()
    error = raised(step, a, a.t(), name)
    context().barrier()
    return error


def test_a_graph_of_a_closed_context_says_so(ranks: Callable[[int], Ranks]) -> None:
    for kind, message in ranks(2).call(call_in_another_context):
        assert kind == "RuntimeError"
        assert "closed" in message


def call_while_a_thread_compiles(rank: int, world_size: int) -> tuple[str | None, bool]:
    operator = make_operator("all_gather_gemm", PATTERN, world_size)
    data, began, may_end = operands(operator), threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        began.set()
        may_end.wait(60)
        return graph.forward

    thread = threading.Thread(target=compiled(lambda x: x + 1, backend), args=(torch.ones(3),))
    thread.start()
    assert began.wait(60)
    try:
        output = operator(data.a, data.b)
        return fault(output, data, DTYPE), output.data_ptr() == operator.output.data_ptr()
    finally:
        may_end.set()
        thread.join()
        operator.close()


def test_who_calls_while_a_thread_compiles_is_in_no_graph(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(call_while_a_thread_compiles) == [(None, True)] * 2
