"""Kernels compiled ahead of the first call: those that the call launches, together, and nothing is queued."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from driving import build, case_of, driven, operands, through_triton
from families import name
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from iris_kernels.common.launch.compile_ahead import compile_ahead
from overlap_taxonomy import Variant, get_variant

# Kernels alone, on a side stream, behind copies of a side stream, behind a copy of A, and in Gluon.
VARIANTS = [
    get_variant("gemm_all_scatter", "fused_sequential:portable:stream_k"),
    get_variant("gemm_reduce_scatter", "producer_consumer:portable"),
    get_variant("gemm_all_scatter", "copy_engine:portable"),
    get_variant("all_gather_gemm", "workgroup_specialized:portable"),
    get_variant("gemm_all_reduce", "warp_specialized:sm90"),
]


def alone(ctx: Any) -> Any:
    """Let a stub of a context be the only one that is asked."""
    ctx.control_plane.all_gather = lambda value, what: [value]
    return ctx


@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_a_call_finds_its_kernels_compiled(variant: Variant) -> None:
    case = case_of(variant)
    with driven(case) as (ctx, log, _):
        operator, data = build(case, alone(ctx)), operands(case)
        *_, (done, total) = compile_ahead(ctx, [(operator, data, {})])
        assert log.take() == []
        with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled late")):
            operator(*data)
            prepared = log.take()
        assert 0 < done == total <= sum(entry[0] == "launch" for entry in prepared)
        assert prepared == through_triton(operator, log, *data)


TWO_KERNELS = get_variant("all_gather_gemm", "producer_consumer:portable")


def test_kernels_compile_at_once() -> None:
    """Each has its launcher only as another one has; what compiling raises is this test's failure."""
    both = threading.Barrier(2)
    errors: list[BaseException] = []

    def fail(future: Future[Any], error: BaseException) -> None:
        errors.append(error)
        both.abort()  # no other kernel waits for this one
        set_exception(future, error)

    set_exception = Future.set_exception

    class Launcher(nvidia.CudaLauncher):
        def __init__(self, *arguments: Any) -> None:
            both.wait(120)

    case = case_of(TWO_KERNELS)
    with driven(case) as (ctx, _, _):
        operator, data = build(case, alone(ctx)), operands(case)
        with (
            mock.patch.object(driver.active, "launcher_cls", Launcher),
            mock.patch("os.sched_getaffinity", return_value=range(2 * case.world_size)),
            mock.patch.object(Future, "set_exception", fail),
        ):
            *_, last = compile_ahead(ctx, [(operator, data, {})])
    if errors:
        raise errors[0]
    assert last == (2, 2)


def test_one_thread_parses_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two do, Python 3.11 fails at random."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # what is in a cache is not parsed
    parse, two, met = JITFunction.parse, threading.Barrier(2), []

    def parse_if_alone(self: JITFunction) -> Any:
        if threading.current_thread() is not threading.main_thread():
            with contextlib.suppress(threading.BrokenBarrierError):
                met.append(two.wait(0.5))  # broken by the first that is alone, for all
        return parse(self)

    case = case_of(TWO_KERNELS)
    with driven(case) as (ctx, _, _):
        operator, data = build(case, alone(ctx)), operands(case)
        with (
            mock.patch.object(JITFunction, "parse", parse_if_alone),
            mock.patch("os.sched_getaffinity", return_value=range(2 * case.world_size)),
        ):
            list(compile_ahead(ctx, [(operator, data, {})]))
    assert two.broken
    assert not met


def test_what_cannot_be_compiled_is_left_to_the_call() -> None:
    case = case_of(TWO_KERNELS)
    with driven(case) as (ctx, log, _):
        operator, (a, b) = build(case, alone(ctx)), operands(case)
        no_compiler = mock.Mock(side_effect=RuntimeError("no C compiler"))
        with mock.patch.object(driver.active, "launcher_cls", no_compiler):
            *_, last = compile_ahead(ctx, [(operator, (a, b.float()), {}), (operator, (a, b), {})])
            assert no_compiler.called
            with pytest.raises(RuntimeError, match="no C compiler"):
                operator(a, b)
        assert last[0] == last[1] > 0
        operator(a, b)
        assert log.take() == through_triton(operator, log, a, b)


def test_calls_that_are_not_prepared_compile_as_they_come() -> None:
    case = case_of(TWO_KERNELS)
    with driven(case) as (ctx, log, _):
        ctx.backend.name = "hip"
        operator = build(case, alone(ctx))
        assert list(compile_ahead(ctx, [(operator, operands(case), {})])) == [(0, 0)]
    assert log.take() == []
