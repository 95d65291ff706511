"""torch's modes, and operands that are more than their memory: the same for every variant."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import fault, make_data, poison
from families import FUSED, VARIANTS, make_problem, name
from ranks import Ranks, close_context, context, raised

from iris_core import iris
from overlap_taxonomy import Variant, get_variant

pytestmark = pytest.mark.parametrize("device", ["cpu"])
DTYPE = torch.float32
MODES: list[Any] = [torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode]


def call_in_every_mode(rank: int, world_size: int, family: str, variant: str) -> list[str]:
    """Make an operator in inference mode, and call it in this and others; return what is wrong."""
    ctx = context()
    problem = make_problem(family, 9, 20, 16, world_size, DTYPE)
    with torch.inference_mode():
        operator = get_variant(family, variant).build(ctx, problem)
    wrong = []
    for number, mode in enumerate(MODES):
        with mode():
            data = make_data(family, problem, rank, number, ctx.get_device(), layout="nk" if number % 2 else "strided")
            b = torch.nn.Parameter(data.b) if mode is torch.no_grad else data.b
            poison(operator)
            ctx.barrier()
            output = operator.as_matrix(operator(data.a, b))
            wrong += [f"{mode.__name__}: {said}"] if (said := fault(output, data, DTYPE)) else []
            wrong += ["requires a gradient"] if output.requires_grad else []
    ctx.barrier()
    operator.close()
    return wrong


@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_a_call_is_right_in_every_mode(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    assert ranks(2).call(call_in_every_mode, variant.family, variant.name) == [[], []]


def keep_for_a_gradient(rank: int, world_size: int, family: str, variant: str) -> list[tuple[str, str]]:
    """Have autograd keep what a call returns, and call again; return the errors of the gradients that need it."""
    ctx = context()
    problem = make_problem(family, 8, 8, 8, world_size, DTYPE)
    options = {"keep_gathered": True} if family == "all_gather_gemm" else {}
    operator = get_variant(family, variant).build(ctx, problem, **options)
    data = make_data(family, problem, rank, 0, ctx.get_device())
    kept = [operator(data.a, data.b), *([operator.gathered] if options else [])]
    weights = [torch.ones_like(tensor, requires_grad=True) for tensor in kept]
    products = [(weight * tensor).sum() for weight, tensor in zip(weights, kept, strict=True)]
    operator(data.a, data.b)
    errors = [raised(product.backward) for product in products]
    ctx.barrier()
    operator.close()
    return errors


@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_what_autograd_kept_is_known_to_be_overwritten(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    """Kernels write past torch, which would compute wrong gradients in silence."""
    for errors in ranks(2).call(keep_for_a_gradient, variant.family, variant.name):
        assert errors
        for kind, said in errors:
            assert kind == "RuntimeError"
            assert "modified by an inplace operation" in said


class Identity(torch.autograd.Function):
    """Returns what a call returns, which autograd then takes for the function's."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, operator: Any) -> torch.Tensor:
        return operator(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None, None


def collect_since() -> None:
    """Collect what was made since `gc.freeze`; what torch has made before takes half a second."""
    gc.collect()
    gc.unfreeze()


def write_on_the_output(rank: int, world_size: int, family: str, variant: str) -> tuple[list[str | None], list[bool]]:
    """Have autograd write on the tensor that a call returns; return what is wrong with the next, and what is kept."""
    gc.freeze()
    ctx = context()
    problem = make_problem(family, 8, 8, 8, world_size, DTYPE)
    operator = get_variant(family, variant).build(ctx, problem)
    data = make_data(family, problem, rank, 0, ctx.get_device())
    bias = torch.ones(1, requires_grad=True)
    added = operator(data.a, data.b)
    added += bias
    returned = Identity.apply(data.a.clone().requires_grad_(), data.b, operator)
    graph = weakref.ref(returned.grad_fn)
    del returned
    wrong, has_history = [], []
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            output = operator(data.a, data.b)
            wrong.append(fault(operator.as_matrix(output), data, DTYPE))
            has_history.append(output.requires_grad)
    collect_since()
    has_history.append(graph() is not None)
    operator.close()
    return wrong, has_history


@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_what_autograd_writes_on_one_output_is_not_on_the_next(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    expected = [None, None], [False, False, False]
    assert ranks(2).call(write_on_the_output, variant.family, variant.name) == [expected] * 2


def refuse(rank: int, world_size: int, family: str, variant: str) -> tuple[list[tuple[str, str]], int]:
    """Call with operands that are refused; return the errors, and how many graphs of gradients are kept."""
    gc.freeze()
    ctx = context()
    problem = make_problem(family, 8, 8, 8, world_size, DTYPE)
    operator = get_variant(family, variant).build(ctx, problem)
    data = make_data(family, problem, rank, 0, ctx.get_device())
    wanted = data.a.clone().requires_grad_() * 2
    errors = [
        raised(operator, wanted, data.b),
        raised(operator, data.a, torch.nn.Parameter(data.b)),
        raised(operator, torch.complex(data.a, data.a).conj().imag, data.b),
        raised(operator, data.a, data.b.to_sparse()),
        raised(operator, data.a, data.b.numpy()),
        raised(operator, operator.output.as_strided(data.a.shape, (data.a.shape[1], 1)), data.b),
        raised(operator, data.a, operator.output.as_strided(data.b.shape, (1, data.b.shape[0]))),
    ]
    good = operator.as_matrix(operator(data.a, data.b))
    assert fault(good, data, DTYPE) is None
    operator(wanted.detach(), data.b)
    graph = weakref.ref(wanted)
    del wanted
    collect_since()
    operator.close()
    return errors, int(graph() is not None)


REFUSED = [["A requires a gradient", "no_grad"], ["B requires a gradient"], ["A is a negated view", "resolve_neg"]]
REFUSED += [["B is a Tensor of layout torch.sparse_coo", "dense"], ["B is a ndarray"]]
REFUSED += [[f"{name} lies in memory of this operator", "clone()"] for name in "AB"]


@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_operands_that_are_more_than_their_memory_are_refused(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    for errors, kept in ranks(2).call(refuse, variant.family, variant.name):
        assert kept == 0
        for (kind, message), parts in zip(errors, REFUSED, strict=True):
            assert kind == "ValueError"
            assert all(part in message for part in [variant.name, *parts]), message


def reset_after_inference(rank: int, world_size: int) -> float:
    close_context()
    with torch.inference_mode():
        ctx = iris(1 << 20)
        words = ctx.zeros(4)
    ctx.reset()
    words.fill_(rank + 1)
    ctx.barrier()
    total = float(ctx.peer_view(words).sum())
    ctx.close()
    return total


def lie_near_the_output(rank: int, world_size: int) -> Any:
    """Give A as every rank's copy of a buffer, between whose rows lie the ranks' outputs; return what is wrong."""
    ctx = context()
    problem = make_problem("gemm_all_scatter", world_size, 20, 16, world_size, DTYPE)
    operator = get_variant("gemm_all_scatter", "fused_sequential:portable").build(ctx, problem)
    data = make_data("gemm_all_scatter", problem, rank, 0, ctx.get_device())
    buffer = ctx.empty(16, dtype=DTYPE)
    buffer.copy_(data.a[rank])
    ctx.barrier()
    view = ctx.peer_view(buffer)
    is_between = view[0].data_ptr() < operator.output.data_ptr() < view[-1].data_ptr()
    wrong = fault(operator(view, data.b), data, DTYPE)
    ctx.barrier()
    ctx.free(buffer)
    operator.close()
    return wrong, is_between


def test_operands_beside_the_output_are_taken(ranks: Callable[[int], Ranks]) -> None:
    found = ranks(2).call(lie_near_the_output)
    assert [wrong for wrong, _ in found] == [None, None]
    assert any(is_between for _, is_between in found)


def lie_where_peers_send(rank: int, world_size: int, variant: str) -> Any:
    """Give A as a peer's rows of what was gathered, then as the own ones, which is right."""
    ctx = context()
    problem = make_problem("all_gather_gemm", 8, 8, 16, world_size, DTYPE)
    operator: Any = get_variant("all_gather_gemm", variant).build(ctx, problem, keep_gathered=True)
    data = make_data("all_gather_gemm", problem, rank, 0, ctx.get_device())
    operator(data.a, data.b)
    peer = (rank + 1) % world_size
    error = raised(operator, operator.gathered[slice(*problem.rows(peer))], data.b)
    own = operator.gathered[slice(*problem.rows(rank))]
    own.copy_(data.a)
    wrong = fault(operator(own, data.b), data, DTYPE)
    ctx.barrier()
    operator.close()
    return error, wrong


GATHERING = [one for one in VARIANTS if one.family == "all_gather_gemm"]


@pytest.mark.parametrize("variant", GATHERING, ids=name)
def test_only_the_own_rows_of_what_was_gathered_are_taken(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    for (kind, message), wrong in ranks(2).call(lie_where_peers_send, variant.name):
        assert kind == "ValueError"
        assert "A lies in memory of this operator" in message
        assert wrong is None


def be_elsewhere(rank: int, world_size: int) -> Any:
    """Make a context, operators and calls where torch makes tensors on another device, of another dtype."""
    close_context()
    problem = make_problem("gemm_all_scatter", 9, 20, 16, world_size, DTYPE)
    data = make_data("gemm_all_scatter", problem, rank, 0, torch.device("cpu"))
    torch.set_default_dtype(torch.bfloat16)
    wrong = []
    try:
        with torch.device("meta"), iris(1 << 20) as ctx:
            for variant in [one for one in VARIANTS if one.family == "gemm_all_scatter"]:
                operator = variant.build(ctx, problem)
                output = operator.as_matrix(operator(data.a, data.b))
                wrong.append(f"{variant.name}: {output.device}" if output.device.type != "cpu" else None)
                with torch.device("cpu"):
                    wrong.append(fault(output, data, DTYPE))
    finally:
        torch.set_default_dtype(torch.float32)
    return [one for one in wrong if one]


def test_torchs_default_device_and_dtype_are_the_callers_own(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(be_elsewhere) == [[], []]


def test_a_context_outlives_the_mode_it_was_made_in(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(reset_after_inference) == [12.0, 12.0]
