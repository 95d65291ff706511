"""How graphs of torch.compile know an operator: by the address of a tensor, of which no two operators have the same."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks, raised
from torch_compiling import PATTERN, compiled, make_operator, operands

pytestmark = pytest.mark.parametrize("device", ["cpu"])


def call_what_is_not_there(rank: int, world_size: int) -> Any:
    operator = make_operator("all_gather_gemm", PATTERN, world_size)
    data = operands(operator)
    given = [data.a, data.b, operator.name.clone(), [1, 1], []]
    error = raised(torch.ops.iris_overlap.call, *given)
    operator.close()
    return error


def test_a_graph_from_elsewhere_finds_no_operator(ranks: Callable[[int], Ranks]) -> None:
    """One that was exported and loaded again has copies of the tensors that name operators."""
    for kind, message in ranks(2).call(call_what_is_not_there):
        assert kind == "RuntimeError"
        assert "an operator that is not of this process" in message


def call_what_was_closed(rank: int, world_size: int) -> Any:
    """A graph that was made before; how many there are then."""
    operator = make_operator("all_gather_gemm", PATTERN, world_size)
    data, runs = operands(operator), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            runs.append(len(runs))
            return graph.forward(*args)

        return run

    step = compiled(lambda a, b: operator(a, b) + 1, backend, whole=False)
    step(data.a, data.b)
    before = len(runs)
    operator.close()
    return before, raised(step, data.a, data.b), len(runs)


def test_a_graph_of_an_operator_that_was_closed_is_not_run(ranks: Callable[[int], Ranks]) -> None:
    """Where it was recorded, it would be replayed over memory that was given back, and nobody would look."""
    for before, (kind, message), after in ranks(2).call(call_what_was_closed):
        assert kind == "RuntimeError"
        assert "was closed" in message
        assert before == after == 1


def name_many(rank: int, world_size: int) -> int:
    """Return how many names operators have that were made and closed one after the other."""
    names = set()
    gc.freeze()  # to look through what torch has made takes most of a collection
    for _ in range(30):
        operator = make_operator("gemm_all_scatter", PATTERN, world_size)
        names.add(operator.name.data_ptr())
        operator.close()
        del operator
        gc.collect()
    gc.unfreeze()
    return len(names)


def test_no_name_is_given_twice(ranks: Callable[[int], Ranks]) -> None:
    """A graph that was recorded knows an operator by the address alone."""
    assert ranks(1).call(name_many) == [30]


def call_transposed(rank: int, world_size: int) -> tuple[int, ...]:
    """Of an operator whose output has columns one behind the other."""
    operator = make_operator("gemm_reduce_scatter", PATTERN, world_size)
    data, rows = operands(operator), torch.zeros(34, 9).t()
    with mock.patch.object(operator, "outputs", return_value=(rows,)):
        (output,) = torch.ops.iris_overlap.call(data.a, data.b, operator.name, [9, 34], [])
    operator.close()
    return output.stride()


def test_outputs_lie_as_the_compiler_was_told(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(call_transposed) == [(34, 1)] * 2


def marks(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    operator = make_operator("all_gather_gemm", PATTERN, world_size)
    marked = torch.zeros(1)
    torch._dynamo.mark_static_address(marked)
    found = vars(operator.name), vars(marked)
    operator.close()
    return found


def test_what_graphs_know_an_operator_by_is_marked_as_staying(ranks: Callable[[int], Ranks]) -> None:
    """As the compiler marks what it need not copy for CUDA graphs."""
    for found, marked in ranks(1).call(marks):
        assert marked
        assert found == marked
