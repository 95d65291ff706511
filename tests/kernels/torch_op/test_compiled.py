"""Operators under torch.compile: whole graphs, right outputs, and nothing that is silently otherwise.

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
from families import VARIANTS, make_problem, name
from ranks import Ranks, context, raised
from torch_compiling import DTYPE, PATTERN, are_close, compiled, each_backend, make_operator, operands, poison_all

from iris_kernels.all_gather_gemm import all_gather_gemm
from iris_kernels.common.operator import Operator
from overlap_taxonomy import Variant

pytestmark = pytest.mark.parametrize("device", ["cpu"])


def call_in_a_whole_graph(rank: int, world_size: int, family: str, variant: str) -> list[str | None]:
    operator = make_operator(family, variant, world_size)
    step = compiled(lambda a, b: operator.as_matrix(operator(a * 2, b)) * 0.5)
    faults = []
    for seed in range(3):
        data = operands(operator, seed)
        faults.append(fault(step(data.a, data.b), data, DTYPE))
    operator.close()
    return faults


@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_a_call_is_part_of_a_whole_graph(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    assert ranks(2).call(call_in_a_whole_graph, variant.family, variant.name) == [[None] * 3] * 2


# What one operator's calls in one graph are used for. The first call's output must not be the second's.


def both(call: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return call(a, b), call(c, d)


def cloned(call: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return call(a, b).clone(), call(c, d).clone()


def kept(call: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    first = call(a, b) * 1
    second = call(c, d)
    return first.sum(1), first * 2, second * 3


def mixed(call: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return (torch.softmax(call(a, b) @ call(c, d).t() / 100, -1),)


def layers(call: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    for weight in (b, d, b + d):
        a = a + torch.nn.functional.silu(call(torch.nn.functional.layer_norm(a, a.shape[-1:]), weight)).sum() / 100
    return (a + c,)


USES = {use.__name__: use for use in (both, cloned, kept, mixed, layers)}


def call_more_than_once(rank: int, world_size: int, backend: str, use: str) -> list[bool]:
    operator = make_operator("all_gather_gemm", PATTERN, world_size)
    step = compiled(lambda *operands: USES[use](operator, *operands), backend)
    same = []
    for seed in range(2):
        first, second = operands(operator, seed), operands(operator, seed + 10)
        given = first.a, first.b, second.a, second.b
        expected = USES[use](lambda a, b: operator(a, b).clone(), *given)
        poison_all(operator)
        with torch.inference_mode():
            found = step(*given)
        same.append(all(are_close(found, expected)))
    operator.close()
    return same


@each_backend
@pytest.mark.parametrize("use", USES)
def test_an_operator_may_be_called_more_than_once_in_a_graph(
    ranks: Callable[[int], Ranks], backend: str, use: str
) -> None:
    assert ranks(2).call(call_more_than_once, backend, use) == [[True] * 2] * 2


LAYERS = 12  # more than the compiler makes graphs of one code


class Layer(torch.nn.Module):
    def __init__(self, operator: Operator[Any], weight: torch.Tensor) -> None:
        super().__init__()
        self.operator = operator
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operator(x, self.weight) + 0


def call_layers(rank: int, world_size: int) -> list[str | None]:
    """Of one class, so of one code, which is compiled for the first and then for the others."""
    operators = [make_operator("all_gather_gemm", PATTERN, world_size) for _ in range(LAYERS)]
    torch._dynamo.reset()
    faults = []
    for seed, operator in enumerate(operators):
        data = operands(operator, seed)
        layer = torch.compile(Layer(operator, data.b), backend="aot_eager", fullgraph=True)
        faults += [fault(layer(data.a), data, DTYPE), fault(operator.output, data, DTYPE)]
    for operator in operators:
        operator.close()
    return faults


def test_layers_of_one_class_call_each_its_own_operator(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(call_layers) == [[None] * 2 * LAYERS] * 2


class Product(torch.autograd.Function):
    """This rank's columns of A @ B; backwards without ranks."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, operator: Any) -> torch.Tensor:
        output, gathered = operator.call(a, b)
        ctx.save_for_backward(gathered.clone(), b)
        ctx.rows = a.shape[0]
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gathered, b = ctx.saved_tensors
        return (grads[0] @ b.t())[: ctx.rows], gathered.t() @ grads[0], None


def train(rank: int, world_size: int, backend: str) -> list[bool]:
    """Of two products by one operator, and of two steps before either's gradients."""
    operator = make_operator("all_gather_gemm", PATTERN, world_size, keep_gathered=True)
    data, other = operands(operator, 1), operands(operator, 2)

    def loss(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return (torch.relu(Product.apply(a, b, operator)) * torch.relu(Product.apply(c, d, operator))).sum()

    def gradients(fn: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        leaves = [one.clone().requires_grad_() for one in (data.a, data.b, other.a, other.b)]
        losses = [fn(*leaves), fn(*leaves[2:], *leaves[:2])]
        return [*losses, *torch.autograd.grad(losses, leaves)]

    expected, found = gradients(loss), gradients(compiled(loss, backend))
    operator.close()
    return are_close(found, expected)


@each_backend
def test_an_autograd_function_that_calls_an_operator_is_part_of_a_whole_graph(
    ranks: Callable[[int], Ranks], backend: str
) -> None:
    assert ranks(2).call(train, backend) == [[True] * 6] * 2


def require_a_gradient(rank: int, world_size: int) -> Any:
    operator = make_operator("all_gather_gemm", PATTERN, world_size)
    data = operands(operator)
    step = compiled(lambda a, b: operator(a, b) + 0, whole=False)
    with_gradient = data.a.clone().requires_grad_()
    error = raised(step, with_gradient, data.b)
    wrong = fault(step(data.a, data.b), data, DTYPE)  # afterwards
    in_whole = raised(compiled(lambda a, b: operator(a, b) + 0), with_gradient, data.b)[0]
    operator.close()
    return error, wrong, in_whole


def test_a_gradient_is_refused_as_without_the_compiler(ranks: Callable[[int], Ranks]) -> None:
    for (kind, message), wrong, in_whole in ranks(2).call(require_a_gradient):
        assert kind == "ValueError"
        assert wrong is None
        assert "A requires a gradient, which an operator does not compute" in message
        assert in_whole == "Unsupported"


def read_attributes(rank: int, world_size: int) -> list[Any]:
    """Read what a call overwrites, in a whole graph and otherwise."""
    operator: Any = make_operator("all_gather_gemm", PATTERN, world_size, keep_gathered=True)
    data = operands(operator)

    def output(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        operator(a, b)
        return operator.output + 0

    def gathered(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        operator(a, b)
        return operator.gathered + 0

    found: list[Any] = [raised(compiled(fn), data.a, data.b)[0] for fn in (output, gathered)]
    for fn in (output, gathered):
        poison_all(operator)
        again = compiled(fn, whole=False)(data.a, data.b)
        found.append(torch.equal(again, fn(data.a, data.b)))
    operator.close()
    return found


def test_what_a_call_overwrites_cannot_be_read_in_a_graph(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(read_attributes) == [["Unsupported", "Unsupported", True, True]] * 2


def call_a_function(rank: int, world_size: int) -> Any:
    """Of operands alone, of two shapes, the first of them twice."""
    ctx = context()
    ctx.release_operators()  # those of other tests

    def call(a: torch.Tensor, b: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        output, gathered = all_gather_gemm(ctx, a, b, variant=PATTERN, m=m, return_gathered=True)
        return torch.relu(output * 2), gathered * 2

    step, same = compiled(call, whole=False), []
    for m in (18, 12, 18):
        problem = make_problem("all_gather_gemm", m, 34, 16, world_size, DTYPE)
        data = make_data("all_gather_gemm", problem, rank, m, ctx.get_device())
        same += map(torch.equal, step(data.a, data.b, m), call(data.a, data.b, m))
    found = torch._dynamo.explain(call)(data.a, data.b, 18)
    made = len(ctx.operators)
    ctx.release_operators()
    return same, made, found.graph_break_count


def test_a_function_of_operands_alone_ends_the_graph_and_goes_on(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(call_a_function) == [([True] * 6, 2, 1)] * 2


def call_what_keeps_no_outputs(rank: int, world_size: int) -> Any:
    operator = make_operator("all_gather_gemm", PATTERN, world_size)
    operator.keeps_outputs = False
    data = operands(operator)
    wrong = fault(compiled(lambda a, b: operator(a, b) + 0, whole=False)(data.a, data.b), data, DTYPE)
    in_whole = raised(compiled(lambda a, b: operator(a, b) + 0), data.a, data.b)[0]
    operator.close()
    return wrong, in_whole


def test_a_baseline_without_memory_of_its_own_is_called_outside_graphs(ranks: Callable[[int], Ranks]) -> None:
    """As torch's fused operators and kraken, which need GPUs."""
    assert ranks(2).call(call_what_keeps_no_outputs) == [(None, "Unsupported")] * 2


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
