"""Operators under torch.compile: whole graphs, right outputs, no copies, and nothing that is silently otherwise.

The compiler's own backends are torch's; here they are "aot_eager", which traces and orders what is written as all do,
and "inductor", which decides where outputs lie.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import fault, make_data
from families import FAMILIES, VARIANTS, make_problem, name
from functorch.compile import make_boxed_func
from ranks import Ranks, context, raised
from torch._dynamo.backends.common import aot_autograd

from iris_kernels.all_gather_gemm import all_gather_gemm
from iris_kernels.common.compiled import _operators
from iris_kernels.common.operator import Operator
from overlap_taxonomy import Variant, get_variant

DTYPE = torch.float32
PATTERN = "workgroup_specialized"  # which every family has
on_cpu = pytest.mark.parametrize("device", ["cpu"])


def make_operator(family: str, variant: str, world_size: int, **options: Any) -> Operator[Any]:
    """Return an operator over poisoned outputs."""
    operator = get_variant(family, variant).build(
        context(), make_problem(family, 18, 34, 16, world_size, DTYPE), **options
    )
    for output in operator.outputs():
        output.fill_(float("nan"))
    context().barrier()
    return operator


def operands(operator: Operator[Any], seed: int = 0) -> Any:
    return make_data(operator.family, operator.problem, operator.rank, seed, operator.ctx.get_device())


def compiled(fn: Callable[..., Any], backend: Any = "aot_eager", *, whole: bool = True) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, fullgraph=whole)


def call_in_a_whole_graph(rank: int, world_size: int, family: str, variant: str) -> list[str | None]:
    operator = make_operator(family, variant, world_size)
    step = compiled(lambda a, b: operator.as_matrix(operator(a * 2, b)) * 0.5)
    faults = []
    for seed in range(3):
        data = operands(operator, seed)
        faults.append(fault(step(data.a, data.b), data, DTYPE))
    operator.close()
    return faults


@on_cpu
@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_a_call_is_part_of_a_whole_graph(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    assert ranks(2).call(call_in_a_whole_graph, variant.family, variant.name) == [[None] * 3] * 2


class Elsewhere:
    """An operator that says that its outputs are elsewhere, and more by one: so a graph's own memory gets that."""

    def __init__(self, operator: Operator[Any]) -> None:
        self._call = operator._call
        self._outputs = operator.outputs

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self._call(a, b)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(output + 1 for output in self._outputs())


def count_copies(fn: Callable[..., Any], data: Any) -> int:
    """Return how many copies a call makes; the interpreter makes some."""
    with torch.profiler.profile() as profile:
        fn(data.a, data.b)
    return sum(event.name == "aten::copy_" for event in profile.events())


def compile_with_inductor(rank: int, world_size: int, family: str) -> Any:
    """Return what is wrong with outputs, whether the graph's memory is the operator's own, and how much it copies."""
    operator = make_operator(family, PATTERN, world_size)
    step = compiled(lambda a, b: torch.relu(operator(a, b)), "inductor")
    data = operands(operator)
    faults = []
    for _ in range(2):
        output = step(data.a, data.b)
        expected = torch.relu(operator(data.a, data.b))
        faults.append(fault(operator.output, data, DTYPE))
        is_right = torch.equal(output, expected)
    copies = count_copies(step, data) - count_copies(operator, data)
    own = operator.output.clone()
    elsewhere = _operators[operator.number] = Elsewhere(operator)  # type: ignore[assignment]
    step(data.a, data.b)
    is_own = torch.equal(operator.output, own + 1)
    del elsewhere
    operator.close()
    return faults, is_right, is_own, copies


with_inductor = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++ on the CPU")


@with_inductor
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_of_inductor_has_the_outputs_where_the_operator_writes_them(
    ranks: Callable[[int], Ranks], family: str
) -> None:
    assert ranks(2).call(compile_with_inductor, family) == [([None, None], True, True, 0)] * 2


def gather_twice(rank: int, world_size: int) -> bool:
    operator: Any = make_operator("all_gather_gemm", PATTERN, world_size, keep_gathered=True)
    first, second = operands(operator, 1), operands(operator, 2)
    operator(first.a, first.b)

    def step(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = operator.gathered * 2
        operator(a, b)
        return before, operator.gathered * 2

    before, after = compiled(step, "inductor")(second.a, second.b)
    operator.close()
    return bool(before.ne(after).all())


@on_cpu
@with_inductor
def test_what_is_gathered_is_known_to_change(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(gather_twice) == [True] * 2


def call_twice(rank: int, world_size: int, family: str) -> Any:
    """What was made of the first call's output stays; the output itself is the second call's."""
    operator = make_operator(family, PATTERN, world_size)
    first, second = operands(operator, 1), operands(operator, 2)

    def step(a: Any, b: Any, other_a: Any, other_b: Any) -> Any:
        output = operator(a, b)
        kept = output + 0
        return output, kept, operator(other_a, other_b)

    output, kept, again = compiled(step)(first.a, first.b, second.a, second.b)
    faults = [fault(kept, first, DTYPE), fault(again, second, DTYPE), fault(output, second, DTYPE)]
    operator.close()
    return faults


@on_cpu
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_made_of_an_output_stays_when_it_is_overwritten(ranks: Callable[[int], Ranks], family: str) -> None:
    assert ranks(2).call(call_twice, family) == [[None] * 3] * 2


def call_two(rank: int, world_size: int) -> list[str]:
    """Return where the second call of a graph has its order from, of two that do not depend on each other."""
    first, second = (make_operator(family, PATTERN, world_size) for family in ("all_gather_gemm", "gemm_all_scatter"))
    found = []

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls = [node for node in graph.graph.nodes if "iris_overlap.call" in str(node.args[:1])]
        order = [node.kwargs["_all_bases"][-1] for node in calls]
        found.extend([len(calls), order[0].op, order[1].args[0] is calls[0]])
        return make_boxed_func(graph.forward)

    one, other = operands(first), operands(second)

    def step(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return first(*operands[:2]) + 0, second(*operands[2:]) + 0

    outputs = compiled(step, aot_autograd(fw_compiler=note))(one.a, one.b, other.a, other.b)
    found += [fault(outputs[0], one, DTYPE), fault(outputs[1], other, DTYPE)]
    first.close()
    second.close()
    return found


@on_cpu
def test_calls_that_do_not_depend_on_each_other_keep_their_order(ranks: Callable[[int], Ranks]) -> None:
    """Ranks that queued two calls in different orders would wait for each other for ever."""
    assert ranks(2).call(call_two) == [[2, "placeholder", True, None, None]] * 2


class Layer(torch.nn.Module):
    def __init__(self, operator: Operator[Any], weight: torch.Tensor) -> None:
        super().__init__()
        self.operator = operator
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operator(x, self.weight) + 0


def call_layers(rank: int, world_size: int) -> list[str | None]:
    """Of one class, so of one code, which is compiled for the first and then for the others."""
    operators = [make_operator("all_gather_gemm", pattern, world_size) for pattern in (PATTERN, "library", PATTERN)]
    torch._dynamo.reset()
    faults = []
    for seed, operator in enumerate(operators):
        data = operands(operator, seed)
        layer = torch.compile(Layer(operator, data.b), backend="aot_eager", fullgraph=True)
        faults += [fault(layer(data.a), data, DTYPE), fault(operator.output, data, DTYPE)]
    for operator in operators:
        operator.close()
    return faults


@on_cpu
def test_layers_of_one_class_call_each_its_own_operator(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(call_layers) == [[None] * 6] * 2


class Product(torch.autograd.Function):
    """All columns of A @ B, as far as the rank's own; backwards without ranks."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, operator: Any) -> torch.Tensor:
        output = operator(a, b)
        ctx.save_for_backward(operator.gathered.clone(), b)
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gathered, b = ctx.saved_tensors
        return (grads[0] @ b.t())[: gathered.shape[0] // 2], gathered.t() @ grads[0], None


def train(rank: int, world_size: int) -> list[bool]:
    operator = make_operator("all_gather_gemm", PATTERN, world_size, keep_gathered=True)
    data = operands(operator)

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (Product.apply(a, b, operator) ** 2).sum()

    def gradients(fn: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [one.clone().requires_grad_() for one in (data.a, data.b)]
        return torch.autograd.grad(fn(*leaves), leaves)

    step, expected = compiled(loss), gradients(loss)
    same = [torch.allclose(*pair) for _ in range(2) for pair in zip(gradients(step), expected, strict=True)]
    operator.close()
    return same


@on_cpu
def test_an_autograd_function_that_calls_an_operator_is_part_of_a_whole_graph(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(train) == [[True] * 4] * 2


def require_a_gradient(rank: int, world_size: int) -> Any:
    operator = make_operator("all_gather_gemm", PATTERN, world_size)
    data = operands(operator)
    error = raised(compiled(operator, whole=False), data.a.requires_grad_(), data.b)
    operator.close()
    return error


@on_cpu
def test_a_gradient_is_refused_as_without_the_compiler(ranks: Callable[[int], Ranks]) -> None:
    for kind, message in ranks(2).call(require_a_gradient):
        assert kind == "ValueError"
        assert "A requires a gradient, which an operator does not compute" in message


def call_a_function(rank: int, world_size: int) -> Any:
    """Of operands alone, of two shapes, the first of them twice."""
    ctx = context()
    ctx.release_operators()  # those of other tests

    def call(a: torch.Tensor, b: torch.Tensor, m: int) -> torch.Tensor:
        return torch.relu(all_gather_gemm(ctx, a, b, variant=PATTERN, m=m) * 2)

    step, wrong = compiled(call, whole=False), []
    for m in (18, 12, 18):
        problem = make_problem("all_gather_gemm", m, 34, 16, world_size, DTYPE)
        data = make_data("all_gather_gemm", problem, rank, m, ctx.get_device())
        output = step(data.a, data.b, m)
        wrong.append(not torch.equal(output, call(data.a, data.b, m)))
    found = torch._dynamo.explain(call)(data.a, data.b, 18)
    made = len(ctx.operators)
    ctx.release_operators()
    return wrong, made, found.graph_break_count


@on_cpu
def test_a_function_of_operands_alone_ends_the_graph_and_goes_on(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(call_a_function) == [([False] * 3, 2, 1)] * 2


def call_what_keeps_no_outputs(rank: int, world_size: int) -> Any:
    operator = make_operator("all_gather_gemm", PATTERN, world_size)
    operator.keeps_outputs = False
    data = operands(operator)
    wrong = fault(compiled(lambda a, b: operator(a, b) + 0, whole=False)(data.a, data.b), data, DTYPE)
    in_whole = raised(compiled(lambda a, b: operator(a, b) + 0), data.a, data.b)[0]
    operator.close()
    return wrong, in_whole


@on_cpu
def test_a_baseline_without_memory_of_its_own_is_called_outside_graphs(ranks: Callable[[int], Ranks]) -> None:
    """As torch's fused operators and kraken, which need GPUs."""
    assert ranks(2).call(call_what_keeps_no_outputs) == [(None, "Unsupported")] * 2


def call_what_has_ended(rank: int, world_size: int) -> Any:
    operator = make_operator("all_gather_gemm", PATTERN, world_size)
    data, outputs = operands(operator), [output.clone() for output in operator.outputs()]
    order, number = operator.order, operator.number
    operator.close()
    del operator
    gc.collect()
    return raised(torch.ops.iris_overlap.call, data.a, data.b, outputs, order, number)


@on_cpu
def test_a_graph_whose_operator_has_ended_says_so(ranks: Callable[[int], Ranks]) -> None:
    for kind, message in ranks(2).call(call_what_has_ended):
        assert kind == "RuntimeError"
        assert "calls an operator that nobody has kept" in message
