"""What an operator refuses: every rank raises, says what was given and what would work, and can go on afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from checking import fault, make_data
from families import FUSED, VARIANTS, make_problem, name
from ranks import Ranks, close_context, context, raised

from iris_core import HeapExhausted, iris
from iris_kernels.all_gather_gemm import all_gather_gemm
from iris_kernels.common.config import GemmConfig
from iris_kernels.common.operators.calls_by_rows import CallsByRows
from iris_kernels.gemm_all_scatter import gemm_all_scatter
from overlap_taxonomy import Variant, get_variant

# On GPUs, test_gpu.py has what there is time to compile.
pytestmark = pytest.mark.parametrize("device", ["cpu"])
FAMILY = "gemm_all_scatter"
DTYPE = torch.bfloat16


def matrix(ctx: Any, *shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.ones(*shape, device=ctx.get_device()).to(dtype)


def refuse_operands(rank: int, world_size: int, given: str) -> tuple[str, str]:
    close_context()  # which knows operands of these shapes
    ctx = context()
    a, b, options = matrix(ctx, 4, 6), matrix(ctx, 6, 5), {}
    if given == "rows of B" or (given == "rows of B on one rank" and rank == 1):
        b = matrix(ctx, 7, 5)
    elif given == "vector":
        a = a[0]
    elif given == "A of another rank" and rank == 1:
        a = matrix(ctx, 8, 6)
    elif given == "dtype of another rank" and rank == 1:
        a, b = a.half(), b.half()
    elif given == "columns of another rank" and rank == 1:
        b = matrix(ctx, 6, 6)
    elif given == "B of another dtype":
        b = b.half()
    elif given == "integers":
        a, b = a.int(), b.int()
    elif given == "meta":
        b = b.to("meta")
    elif given == "unknown variant":
        options = {"variant": "telepathic"}
    error = raised(gemm_all_scatter, ctx, a, b, **options)
    ctx.barrier()
    check_still_works(rank, world_size)
    return error


def give_no_rows(rank: int, world_size: int) -> tuple[tuple[str, str], int]:
    """Return what `m=0` is told behind a call in which one rank had no rows, and how many the next call gives."""
    close_context()
    ctx = context()
    b, one, nothing = matrix(ctx, 6, 5), matrix(ctx, 1, 6), matrix(ctx, 0, 6)
    all_gather_gemm(ctx, nothing if rank else one, b, m=1)
    error = raised(all_gather_gemm, ctx, nothing, b, m=0)
    rows = len(all_gather_gemm(ctx, one, b, m=2))
    ctx.barrier()
    return error, rows


def test_no_rows_are_refused_on_every_rank(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(give_no_rows) == [(("ValueError", "m is 0; it takes a positive integer"), 2)] * 2


def check_still_works(rank: int, world_size: int) -> None:
    ctx = context()
    problem = make_problem(FAMILY, 9, 10, 6, world_size, DTYPE)
    data = make_data(FAMILY, problem, rank, 0, ctx.get_device())
    output = gemm_all_scatter(ctx, data.a, data.b)
    assert ctx.heap.contains(output)
    assert fault(output, data, DTYPE) is None


OPERANDS = {
    "rows of B": ["(4, 6)", "(7, 5)", "A's columns must be B's rows"],
    "rows of B on one rank": ["(7, 5)", "A's columns must be B's rows"],
    "vector": ["A is (6,)", "matrix"],
    "A of another rank": ["[4, 6]", "[8, 6]"],
    "dtype of another rank": ["bfloat16", "float16", "rank 1"],
    "columns of another rank": ["[6, 5]", "[6, 6]", "torch.chunk"],
    "B of another dtype": ["B is torch.float16", "bfloat16"],
    "integers": ["int32", "supported", "float32"],
    "meta": ["B is on meta"],
    "unknown variant": ["telepathic", "known variants", "fused_sequential:portable"],
}


@pytest.mark.parametrize("given", OPERANDS)
def test_operands_are_refused_on_every_rank(ranks: Callable[[int], Ranks], given: str) -> None:
    for kind, message in ranks(2).call(refuse_operands, given):
        assert kind == "ValueError"
        for part in OPERANDS[given]:
            assert part in message


def refuse_call(rank: int, world_size: int, family: str, variant: str, given: str) -> tuple[str, str]:
    ctx = context()
    problem = make_problem(family, 8, 8, 8, world_size, DTYPE)
    operator = get_variant(family, variant).build(ctx, problem)
    data = make_data(family, problem, rank, 0, ctx.get_device())
    a, b = data.a, data.b
    if given == "A":
        a = torch.cat([a, a])
    elif given == "B":
        b = b[:, :-1]
    elif given == "dtype":
        a = a.half()
    elif given == "device":
        b = b.to("meta")
    error = raised(operator, a, b)
    good = operator.as_matrix(operator(data.a, data.b))
    assert fault(good, data, DTYPE) is None
    operator.close()
    return error


@pytest.mark.parametrize("given", ["A", "B", "dtype", "device"])
@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_an_operator_refuses_what_it_was_not_made_for(
    ranks: Callable[[int], Ranks], variant: Variant, given: str
) -> None:
    for kind, message in ranks(2).call(refuse_call, variant.family, variant.name, given):
        assert kind == "ValueError"
        assert str(variant.name) in message
        assert "made for" in message or "must be" in message


def refuse_one_ranks_call(rank: int, world_size: int) -> tuple[str, str]:
    ctx = context()
    problem = make_problem(FAMILY, 8, 8, 8, world_size, DTYPE)
    operator = get_variant(FAMILY, "fused_sequential:portable").build(ctx, problem)
    data = make_data(FAMILY, problem, rank, 0, ctx.get_device())
    ctx.debug_mode = True
    error = raised(operator, data.a.half() if rank == 1 else data.a, data.b)
    ctx.debug_mode = False
    assert fault(operator(data.a, data.b), data, DTYPE) is None
    operator.close()
    return error


def test_in_debug_mode_all_ranks_hear_of_one_ranks_mistake(ranks: Callable[[int], Ranks]) -> None:
    for kind, message in ranks(2).call(refuse_one_ranks_call):
        assert kind == "ValueError"
        assert "A is torch.float16" in message


def call_in_another_order(rank: int, world_size: int) -> tuple[str, str]:
    ctx = context()
    problems = [make_problem(FAMILY, m, 8, 8, world_size, DTYPE) for m in (8, 16)]
    operators = [get_variant(FAMILY, "fused_sequential:portable").build(ctx, problem) for problem in problems]
    data = [make_data(FAMILY, problem, rank, 0, ctx.get_device()) for problem in problems]
    ctx.debug_mode = True
    first = rank  # each rank starts with another operator, whose operands fit it
    error = raised(operators[first], data[first].a, data[first].b)
    ctx.debug_mode = False
    for operator, one in zip(operators, data, strict=True):
        assert fault(operator(one.a, one.b), one, DTYPE) is None
        operator.close()
    return error


def test_in_debug_mode_operators_of_one_variant_are_told_apart(ranks: Callable[[int], Ranks]) -> None:
    for kind, message in ranks(2).call(call_in_another_order):
        assert kind == "ValueError"
        for part in ("the operators the ranks call must be the same", "m=8", "m=16"):
            assert part in message


def do_different_things(rank: int, world_size: int) -> tuple[str, str]:
    ctx = context()
    error = raised(ctx.agree, "the weather", "fine") if rank else raised(ctx.barrier)
    ctx.barrier()
    return error


def test_ranks_that_do_different_things_are_told(ranks: Callable[[int], Ranks]) -> None:
    for kind, message in ranks(2).call(do_different_things):
        assert kind == "ValueError"
        for part in ("different collective calls", "rank 0: reach the barrier", "rank 1: compare the weather"):
            assert part in message


def gather_differently(rank: int, world_size: int) -> tuple[str, str]:
    ctx = context()
    data = make_data(
        "all_gather_gemm", make_problem("all_gather_gemm", 8, 8, 8, world_size, DTYPE), rank, 0, ctx.get_device()
    )
    return raised(all_gather_gemm, ctx, data.a, data.b, variant="copy_engine:portable", return_gathered=rank == 0)


def test_ranks_that_keep_different_things_are_told(ranks: Callable[[int], Ranks]) -> None:
    for kind, message in ranks(2).call(gather_differently):
        assert kind == "ValueError"
        assert "keep_gathered" in message


def fail_to_make(rank: int, world_size: int, family: str, variant: str, what: str) -> Any:
    """Rank 1 has no memory for a buffer of its own, or for one on the heap."""
    ctx = context()
    problem = make_problem(family, 8, 8, 8, world_size, DTYPE)
    watched, used = len(ctx.watchdog.watched), ctx.heap.allocator.used_bytes
    build = get_variant(family, variant).build
    if what == "heap":
        broken = mock.patch.object(ctx.heap, "allocate", side_effect=HeapExhausted("none left"))
    else:
        broken = mock.patch.object(CallsByRows, "open", side_effect=MemoryError("none left"))
    with broken if rank == 1 else contextlib.nullcontext():
        error = raised(build, ctx, problem)
    assert (len(ctx.watchdog.watched), ctx.heap.allocator.used_bytes) == (watched, used)
    ctx.barrier()  # the ranks' allocations are alike
    operator = build(ctx, problem)
    data = make_data(family, problem, rank, 0, ctx.get_device())
    wrong = fault(operator(data.a, data.b), data, DTYPE)
    operator.close()
    return error, wrong


@pytest.mark.parametrize(("what", "kinds"), [("heap", ("HeapExhausted",) * 2), ("own", ("PeerError", "MemoryError"))])
@pytest.mark.parametrize("variant", [v for v in FUSED if v.name == "fused_sequential:portable"], ids=name)
def test_an_allocation_that_fails_on_one_rank_fails_on_all(
    ranks: Callable[[int], Ranks], variant: Variant, what: str, kinds: tuple[str, str]
) -> None:
    results = ranks(2).call(fail_to_make, variant.family, variant.name, what)
    assert tuple(kind for (kind, _), _ in results) == kinds
    for (_, message), wrong in results:
        assert "none left" in message
        assert wrong is None
    assert f"rank 1 failed to make {variant.family}/{variant.name}" in results[0][0][1]


def ask_differently(rank: int, world_size: int, what: str) -> Any:
    close_context()
    asked: dict[str, Any] = {"heap_size": 1 << 20, "timeout_s": 5}
    if rank == 1:
        asked[what] = {"heap_size": 3 << 20, "timeout_s": 6.5}[what]
    return raised(iris, **asked)


@pytest.mark.parametrize("what", ["heap_size", "timeout_s"])
def test_a_context_is_asked_for_alike(ranks: Callable[[int], Ranks], what: str) -> None:
    pool = ranks(2)
    for kind, message in pool.call(ask_differently, what):
        assert kind == "ValueError"
        assert "what the ranks ask of their context must be the same" in message
        assert what in message
    pool.end()


def refuse_making(rank: int, world_size: int, family: str, variant: str, asked: str) -> tuple[str, str]:
    ctx = context()
    build = get_variant(family, variant).build
    if asked == "world size":
        return raised(build, ctx, make_problem(family, 8, 8, 8, world_size + 1, DTYPE))
    if asked == "another problem on one rank":
        return raised(build, ctx, make_problem(family, 8 + 8 * rank, 8, 8, world_size, DTYPE))
    if asked == "another dtype on one rank":
        dtype = DTYPE if rank else torch.float16
        return raised(build, ctx, make_problem(family, 8, 8, 8, world_size, dtype))
    assert asked == "room"
    size = ctx.heap.allocator.capacity // 2
    return raised(build, ctx, make_problem(family, size, 2 * world_size, 1, world_size, torch.float32))


MAKING = {
    "world size": ("ValueError", ["3 ranks", "has 2"]),
    "another problem on one rank": ("ValueError", ["same on all ranks", "rank 1"]),
    "another dtype on one rank": ("ValueError", ["same on all ranks", "float16"]),
    "room": ("HeapExhausted", ["needs", "in use", "free"]),
}


@pytest.mark.parametrize("asked", MAKING)
@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_an_operator_is_not_made_on_any_rank(ranks: Callable[[int], Ranks], variant: Variant, asked: str) -> None:
    if not variant.has_kernels and asked == "room":
        pytest.skip("the output of the library is not on the heap, and auto may choose them")
    kind, parts = MAKING[asked]
    for error, message in ranks(2).call(refuse_making, variant.family, variant.name, asked):
        assert error == kind
        for part in parts:
            assert part in message


def refuse_config(rank: int, world_size: int, family: str, variant: str) -> tuple[str, str]:
    ctx = context()
    problem = make_problem(family, 8, 8, 8, world_size, DTYPE)
    config = GemmConfig(48, 32, 32, num_sms=4, comm_sms=1, descriptors=False)
    return raised(get_variant(family, variant).build, ctx, problem, config)


@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_a_bad_configuration_is_refused_by_name(ranks: Callable[[int], Ranks], variant: Variant) -> None:
    for kind, message in ranks(2).call(refuse_config, variant.family, variant.name):
        assert kind == "ValueError"
        assert variant.name in message
        assert "takes no configuration" in message if not variant.has_kernels else "block_m is 48" in message


def call_all(rank: int, world_size: int) -> list[str | None]:
    ctx = context()
    problem = make_problem(FAMILY, 20, 11, 6, world_size, DTYPE)
    data = make_data(FAMILY, problem, rank, 0, ctx.get_device())
    before = len(ctx.operators)
    names = [variant.name for variant in VARIANTS if variant.family == FAMILY]
    outputs = [gemm_all_scatter(ctx, data.a, data.b, variant=variant) for variant in names]
    again = gemm_all_scatter(ctx, data.a, data.b, variant=names[-1])
    assert again.data_ptr() == outputs[-1].data_ptr()
    assert len(ctx.operators) == before + len(names)
    operators = list(ctx.operators.values())[-len(names) :]
    return [fault(op.as_matrix(out), data, DTYPE) for op, out in zip(operators, outputs, strict=True)]


def test_the_function_takes_every_variant_by_name(ranks: Callable[[int], Ranks]) -> None:
    for faults in ranks(2).call(call_all):
        assert set(faults) == {None}


def call_into(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Have C stored into memory of the caller's, and into what does not fit; return what that raised."""
    ctx = context()
    problem = make_problem("all_gather_gemm", 8, 2 * world_size, 6, world_size, DTYPE)
    data = make_data("all_gather_gemm", problem, rank, 0, ctx.get_device())
    build = get_variant("all_gather_gemm", "bulk_synchronous:portable").build
    fresh, kept = build(ctx, problem, new_outputs=True), build(ctx, problem)
    out = torch.full((8, 2), float("nan"), dtype=DTYPE, device=ctx.get_device())
    (output,) = fresh.call(data.a, data.b, out=out)
    assert output.data_ptr() == out.data_ptr()
    assert fault(out, data, DTYPE) is None
    wrong = [out.float(), out[:4], out.t().contiguous().t()]
    errors = [raised(fresh.call, data.a, data.b, out=one) for one in wrong]
    errors.append(raised(kept.call, data.a, data.b, out=out))
    ctx.barrier()
    for operator in (fresh, kept):
        operator.close()
    return errors


def test_what_c_cannot_be_stored_into_is_refused(ranks: Callable[[int], Ranks]) -> None:
    for errors in ranks(2).call(call_into):
        assert {kind for kind, _ in errors} == {"ValueError"}
        *of_place, (_, own) = errors
        assert all("this call takes a contiguous (8, 2) of torch.bfloat16" in said for _, said in of_place)
        assert "its output is the operator's own" in own
