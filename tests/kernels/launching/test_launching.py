"""Prepared calls queue what Triton would queue, and are prepared anew when operands need other kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from compiling import make_problem
from driving import (
    HAS_COMPILED_LAUNCHERS,
    build,
    case_of,
    counted,
    driven,
    flat,
    matrix,
    on_stream,
    operands,
    same_outputs,
    through_triton,
)
from families import name
from triton.runtime.jit import JITFunction

from iris_kernels.all_gather_gemm import Problem
from iris_kernels.common.hopper import host as hopper
from iris_kernels.common.operators.operator import Operator
from overlap_taxonomy import Mainloop, Variant, get_variant, list_variants

FUSED = [variant for variant in list_variants() if variant.has_kernels]
COPYING_B = [one for one in FUSED if one.family == "all_gather_gemm" and one.mainloop is not Mainloop.LIBRARY]


@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_a_prepared_call_queues_what_triton_would(variant: Variant) -> None:
    case = case_of(variant)
    with driven(case) as (ctx, log, streams):
        operator = build(case, ctx)
        data, others = operands(case), operands(case)
        expected, expected_of_others = through_triton(operator, log, *data), through_triton(operator, log, *others)
        config = operator.ran_config
        assert expected != expected_of_others
        assert any(entry[0] == "launch" for entry in expected)
        with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as run:
            for _ in range(2):
                operator(*data)
                assert log.take() == expected
            compiled = run.call_count
            operator(*others)  # elsewhere, and otherwise the same
            assert log.take() == expected_of_others
            operator(*data)
            assert log.take() == expected
            assert run.call_count == compiled <= sum(entry[0] == "launch" for entry in expected)
        assert operator.ran_config == config
        streams[0] = 5  # another current stream
        operator(*data)
        moved = log.take()
    assert moved == [on_stream(entry, 5) for entry in expected]


@pytest.mark.parametrize("new_outputs", [True, False])
@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_a_call_with_operands_elsewhere_is_made_of_one_that_was_prepared(variant: Variant, new_outputs: bool) -> None:
    """Its variant is not asked for it: it queues what the variant would, with the other addresses."""
    case = case_of(variant)
    with driven(case) as (ctx, log, _), same_outputs(), asked_to_launch() as asked:
        operator = build(case, ctx, new_outputs=new_outputs)
        held = []
        for _ in range(3):
            data = operands(case)
            held += [operator(*data), *data]
            assert asked.call_count == 1
            queued = log.take()
            assert queued == through_triton(operator, log, *data)
            asked.call_count = 1


@pytest.mark.parametrize("new_outputs", [True, False])
@pytest.mark.parametrize("variant", [one for one in FUSED if one.family == "all_gather_gemm"], ids=name)
def test_a_call_that_quantises_is_prepared_and_made_again(variant: Variant, new_outputs: bool) -> None:
    """The kernel that quantises reads A where it lies in each call, and nothing is copied by A's name."""
    fp8 = {"dtype": torch.float8_e4m3fn, "given": torch.bfloat16, "scales": ("row", "column")}
    case = case_of(variant, **fp8)
    b_scale = torch.empty(make_problem(case).operand_shapes(case.rank)["b_scale"])
    with driven(case) as (ctx, log, _), same_outputs(), asked_to_launch() as asked:
        operator = build(case, ctx, new_outputs=new_outputs)
        held = []
        for _ in range(3):
            data = operands(case)
            held += [operator(*data, b_scale=b_scale), *data]
            assert asked.call_count == 1
            queued = log.take()
            assert data[0].data_ptr() in flat(queued[0])
            assert queued == through_triton(operator, log, *data, b_scale=b_scale)
            asked.call_count = 1


@pytest.mark.parametrize("why", ["on the heap", "overlapping", "other rows", "other alignment", "other strides"])
def test_the_variant_is_asked_for_calls_that_lie_otherwise(why: str) -> None:
    case = case_of(get_variant("gemm_reduce_scatter", "warp_specialized:sm90"))
    with driven(case) as (ctx, log, _), asked_to_launch() as asked:
        operator = build(case, ctx)
        a, b = operands(case)
        m, k = a.shape
        both = matrix((m + b.shape[1], k))
        if why == "overlapping":
            operator(both[:m], both[1 : 1 + b.shape[1]].t())
        else:
            operator(both[:m], both[m:].t())
        if why == "on the heap":
            a = ctx.zeros((m, k), dtype=a.dtype)
        elif why == "other alignment":
            a = matrix((m, k), shift=1)
        elif why == "other rows":
            a = matrix((m - 8, k))
        elif why == "other strides":
            a = matrix((m, 2 * k))[:, :k]
        log.take()
        operator(a, b)
        assert asked.call_count == 1 + (why in ("other alignment", "other strides"))
        assert log.take() == through_triton(operator, log, a, b)


def test_operands_in_the_output_are_refused_elsewhere_too() -> None:
    case = case_of(get_variant("all_gather_gemm", "workgroup_specialized:sm90"))
    with driven(case) as (ctx, _, _):
        operator = build(case, ctx)
        operator(*operands(case))
        a, b = operands(case)
        inside = operator.output.view(-1)[: b.numel()].view(b.t().shape).t()
        with pytest.raises(ValueError, match="B lies in memory of this operator"):
            operator(a, inside)


@contextlib.contextmanager
def asked_to_launch() -> Iterator[mock.Mock]:
    """Within the block, count how often operators have their variant queue a call."""
    with mock.patch.object(Operator, "_launch", autospec=True, side_effect=Operator._launch) as asked:
        yield asked


@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_each_call_writes_its_own_output_where_peers_do_not(variant: Variant) -> None:
    """Its memory is new in each call, and the operator's kernels are queued with it."""
    case = case_of(variant)
    with driven(case) as (ctx, log, _):
        operator = build(case, ctx, new_outputs=True)
        data = operands(case)
        outputs, launched = [], []
        for _ in range(3):
            outputs.append(operator(*data))
            launched.append([one for entry in log.take() for one in flat(entry)])
        addresses = [output.data_ptr() for output in outputs]
        if operator.keeps_outputs:
            assert len(set(addresses)) == 1
            assert ctx.heap.contains(outputs[0])
            return
        assert len(set(addresses)) == 3
        for number, address in enumerate(addresses):
            assert [address in one for one in launched] == [other == number for other in range(3)]
        assert "output" not in operator.last_call.memory


def test_calls_are_noted_unless_they_are_captured() -> None:
    """The host has no part in replays, of which ranks may make as many from other captures."""
    case = case_of(FUSED[0])
    with driven(case) as (ctx, _, _):
        operator = build(case, ctx)
        data = operands(case)
        for _ in range(2):
            operator(*data)
        assert ctx.recovery.note_call.call_count == 2
        ctx.backend.is_capturing = lambda: True
        operator(*data)
        assert ctx.recovery.note_call.call_count == 2


COPY_ENGINE = get_variant("gemm_all_scatter", "copy_engine:portable")


@pytest.mark.parametrize("change", ["alignment", "stride", "columns", "back"])
def test_operands_that_need_other_kernels_go_to_triton(change: str) -> None:
    case = case_of(COPY_ENGINE)
    with driven(case) as (ctx, log, _):
        operator = build(case, ctx)
        a, b = operands(case)
        operator(a, b)
        first = operator.ran_config
        assert first.descriptors
        if change == "alignment":
            a = matrix(tuple(a.shape), shift=1)
        elif change == "stride":
            a = matrix((a.shape[0], 2 * a.shape[1]))[:, ::2]
        elif change == "columns":
            a = matrix(tuple(a.shape), by_columns=True)
        log.take()
        with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as run:
            operator(a, b)
        prepared = log.take()
        assert (run.call_count > 0) == (change != "back")
        assert operator.ran_config == first
        assert operator.describe_config().endswith("" if change == "back" else " copied=A")
        assert prepared == through_triton(operator, log, a, b)


PUSHES = get_variant("all_gather_gemm", "copy_engine:portable")


def test_another_dtype_is_refused_at_a_prepared_address() -> None:
    case = case_of(COPY_ENGINE)
    with driven(case) as (ctx, log, _):
        operator = build(case, ctx)
        a, b = operands(case)
        operator(a, b)
        log.take()
        with pytest.raises(ValueError, match=r"A is torch\.float16"):
            operator(a.view(torch.float16), b)
        with pytest.raises(ValueError, match="the operator was made for"):
            operator(a.view(2 * a.shape[0], a.shape[1] // 2), b[: a.shape[1] // 2])
        assert log.take() == []


@pytest.mark.parametrize(
    "name", ["copy_engine:portable", "workgroup_specialized:sm90", "workgroup_specialized:portable"]
)
def test_a_is_copied_in_every_call_that_needs_a_copy(name: str) -> None:
    case = case_of(get_variant("all_gather_gemm", name))
    with driven(case) as (ctx, _, _):
        operator = build(case, ctx, keep_gathered=True)
        a, b = operands(case)
        rows = slice(*operator.problem.rows(case.rank))
        copied = operator.gathered[rows]
        for value in (1.0, 2.0):
            a.fill_(value)
            operator(a, b)
            assert copied[: len(a)].eq(value).all()


@pytest.mark.parametrize("name", ["copy_engine:portable", "copy_engine:sm90"])
def test_rows_that_overlap_are_copied_ahead_of_the_rest(name: str) -> None:
    case = case_of(get_variant("all_gather_gemm", name))
    with driven(case) as (ctx, log, _):
        operator = build(case, ctx)
        m, k = make_problem(case).a_shape(case.rank)
        a, b = matrix((1, k)).expand(m, k), matrix(make_problem(case).b_shape(case.rank), shift=1)
        operator(a, b)
        assert operator.describe_config().endswith("copied=A,B")
        assert log.take() == through_triton(operator, log, a, b)


@pytest.mark.parametrize("keep_gathered", [False, True])
@pytest.mark.parametrize("scales", [("tensor", "tensor"), ("row", "column")], ids="-".join)
@pytest.mark.parametrize(
    "variant", [one for one in FUSED if one.family == "all_gather_gemm" and one.can_trace], ids=name
)
def test_scales_are_copied_ahead_of_the_kernel_that_copies_b(
    variant: Variant, scales: tuple[str, str], keep_gathered: bool
) -> None:
    """Scales of A that do not lie as they are sent, beside a B whose columns do not begin on 16 bytes."""
    case = case_of(variant, scales=scales, dtype=torch.float8_e4m3fn)
    problem = make_problem(case)
    shapes = problem.operand_shapes(case.rank)
    with driven(case) as (ctx, log, _):
        operator = build(case, ctx, keep_gathered=keep_gathered)
        a, _ = operands(case)
        k, n = problem.b_shape(case.rank)
        b = torch.empty(n, k + 1, dtype=problem.b_dtype).t()[:k]
        a_scale = torch.ones(*shapes["a_scale"], 2)[..., 0]
        others = {"a_scale": a_scale, "b_scale": torch.ones(shapes["b_scale"])}
        operator(a, b, **others)
        assert operator.describe_config().endswith("copied=B")
        assert log.take() == through_triton(operator, log, a, b, **others)


@pytest.mark.parametrize("name", ["copy_engine:portable", "copy_engine:sm90"])
def test_a_rank_without_rows_copies_none(name: str) -> None:
    case = replace(case_of(get_variant("all_gather_gemm", name)), rank=3)
    problem = Problem(9, 516, 129, 4, torch.bfloat16)
    with driven(case) as (ctx, log, _):
        with mock.patch.object(hopper, "machine_reason", return_value=None):
            operator = get_variant("all_gather_gemm", name).build(ctx, problem)
        a = torch.empty(problem.k, problem.m, dtype=problem.dtype).t()[slice(*problem.rows(case.rank))]
        operator(a, torch.empty(problem.b_shape(case.rank), dtype=problem.dtype))
        assert operator.describe_config().endswith("copied=B")
        assert "copy" not in {entry[0] for entry in log.take()}


@pytest.mark.parametrize("variant", FUSED, ids=name)
def test_programs_that_may_wait_for_each_other_must_all_find_room(variant: Variant) -> None:
    case = case_of(variant)
    with driven(case) as (ctx, _, _), mock.patch.object(hopper, "machine_reason", return_value=None):
        config = variant.build(ctx, make_problem(case)).config
        with pytest.raises(ValueError, match=r"num_sms is 133; .* room for 132 at once: num_sms=132"):
            variant.build(ctx, make_problem(case), replace(config, num_sms=133))


@pytest.mark.parametrize("descriptors", [True, False])
def test_copy_engines_push_rows_of_a_matrix_by_columns_from_the_heap(descriptors: bool) -> None:
    case = case_of(PUSHES)
    with driven(case) as (ctx, log, _):
        config = replace(build(case, ctx).config, descriptors=descriptors)
        operator = PUSHES.build(ctx, make_problem(case), config)
        _, b = operands(case)
        a = matrix(make_problem(case).a_shape(case.rank), by_columns=True)
        own = operator.gathered[slice(*operator.problem.rows(case.rank))]
        for value in (1.0, 2.0):
            a.fill_(value)
            operator(a, b)
            entries = log.take()
            assert {entry[2] for entry in entries if entry[0] == "copy"} == {own.data_ptr()}
            if descriptors:  # a kernel copies it, ahead of the rest
                assert entries[0][0] == "launch"
                assert {a.data_ptr(), own.data_ptr()} <= set(flat(entries[0]))
            else:
                assert own.eq(value).all()


def test_no_call_is_prepared_in_debug_mode_or_under_a_profiler() -> None:
    case = case_of(COPY_ENGINE)
    with driven(case) as (ctx, log, _):
        operator = build(case, ctx)
        data = operands(case)
        operator(*data)
        with mock.patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as run:
            through_triton(operator, log, *data)
            hooked = run.call_count
            ctx.debug_mode = True
            ctx.agree = mock.Mock()  # type: ignore[method-assign]
            operator(*data)
            assert run.call_count == 2 * hooked > 0
            assert ctx.agree.called


def test_a_prepared_call_keeps_no_operand() -> None:
    case = case_of(COPY_ENGINE)
    with driven(case) as (ctx, _, _):
        operator = build(case, ctx)
        a, b = operands(case)
        operator(a, b)
        with mock.patch.object(torch.Tensor, "data_ptr", side_effect=AssertionError):
            next(iter(operator._channel.prepared.values())).queue()  # addresses are numbers


OTHERS = {"triton.__version__": "3.10.0"}
if HAS_COMPILED_LAUNCHERS:
    OTHERS["triton.backends.nvidia.driver._BASE_ARGS_FORMAT"] = "iiiKKOOOOOO"


@pytest.mark.parametrize("what", OTHERS)
def test_another_launcher_is_refused(what: str) -> None:
    case = case_of(COPY_ENGINE)
    with driven(case) as (ctx, log, _), mock.patch(what, OTHERS[what]):
        operator = build(case, ctx)
        with pytest.raises(RuntimeError, match=r"install triton>=3\.6,<3\.9"):
            operator(*operands(case))
        assert log.take() == []


def test_a_prepared_call_takes_the_host_few_operations() -> None:
    """Each costs a GPU's host 0.05 to 1.5 us; torch's own product of matrices takes it about 6 us in all."""
    case = case_of(get_variant("gemm_reduce_scatter", "workgroup_specialized:portable"))
    with driven(case) as (ctx, log, _):
        operator = build(case, ctx, new_outputs=True)
        data, m = operands(case), operator.problem.m
        output = operator(*data)
        with mock.patch.object(torch, "empty_like", return_value=output):
            for _ in range(2):
                operator(*data, m=m)
            log.take()
            ctx.recovery.note_call.reset_mock()
            ctx.backend.is_capturing = mock.Mock(return_value=False)
            of_torch, frames = counted(lambda: operator(*data, m=m))
    assert ctx.backend.is_capturing.call_count == ctx.recovery.note_call.call_count == 1
    of_operands = {"data_ptr": 2, "stride": 2, "get_device": 2, "is_neg": 2}
    assert of_torch == of_operands | {"data_ptr": 3, "is_grad_enabled": 1}  # and the output's address
    assert frames <= 10
    assert len(log.take()) == 1
