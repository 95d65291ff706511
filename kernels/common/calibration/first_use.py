"""The machine as it was measured: kept, or measured now, at the first use of GPUs that the library does not know."""

from __future__ import annotations

import itertools
import os
import statistics
import zlib

import torch

from iris_core import Context
from iris_core.utils.settings import switch_in
from overlap_taxonomy import Machine, machine_for

from .calibrate import calibrate, facts_of
from .kept import is_shipped, machine_in, read_calibration, to_text, write_calibration
from .timing import DeviceClock

_SWITCH = "IRIS_CALIBRATE"
_RUNS, _WARM_RUNS, _SIZE = 200, 50, 2048
_BUSY = 1.5  # times the median, of the slowest tenth of runs


def calibrated_machine(ctx: Context, gpu: str) -> Machine | None:
    """Return the machine as rank 0 has kept it; an unknown GPU is measured, and rank 0 keeps that; collective.

    Args:
        ctx: the context.
        gpu: the device's name, rank 0's.

    Returns:
        The machine. None where constants of such a machine come with the library, and where nothing is kept or
        measured: of a known GPU in other numbers nothing is measured unasked.

    Raises:
        ValueError: ``IRIS_CALIBRATE`` holds what makes no sense.
    """
    world_size = ctx.get_num_ranks()
    if is_shipped(gpu, world_size):
        return None
    text = ctx.broadcast(read_calibration(gpu, world_size) if ctx.get_rank() == 0 else None, 0)
    if text is None and machine_for(gpu, world_size) is None:
        text = _measured(ctx, gpu)
    return machine_in(text) if text else None


def _measured(ctx: Context, gpu: str) -> str | None:
    """Measure the machine; return what rank 0 keeps of it, as `to_text` gives it, or None.

    Nothing is measured where ``IRIS_CALIBRATE=0`` is set, kernels are interpreted, a stream is being captured, a graph
    compiled, or the GPU is busy, on any rank. How the times of one GEMM spread tells whether others use the GPU: those
    that rest at that moment, or have a part of the GPU (MPS, MIG), are not seen.
    """
    world_size = ctx.get_num_ranks()
    with ctx.collective_section("find out whether to measure the machine"):
        reason = _reason_not_to(ctx)
    reasons = [one for one in ctx.control_plane.all_gather(reason, "measure the machine") if one]
    if reasons:
        _say(ctx, f"the cost model does not know {gpu}, and it is not measured now: {reasons[0]}")
        return None
    _say(ctx, f"measuring {world_size} x {gpu} once, for 15 to 60 s; {_SWITCH}=0 turns that off")
    result = calibrate(ctx)
    text = ctx.broadcast(to_text(facts_of(ctx), result.constants), 0)
    ctx.agree("the calibration", zlib.crc32(text.encode()))
    if not result.constants:
        _say(ctx, f"nothing could be measured: {'; '.join(result.left)}")
        return None
    if ctx.get_rank() == 0:
        _keep(ctx, gpu, text, result.left)
    return str(text)


def _keep(ctx: Context, gpu: str, text: str, left: list[str]) -> None:
    try:
        where = f"kept in {write_calibration(gpu, ctx.get_num_ranks(), text)}"
    except ValueError as error:
        where = str(error)
    _say(ctx, f"measured; {where}" + (f"; as assumed: {'; '.join(left)}" if left else ""))


def _reason_not_to(ctx: Context) -> str:
    if _SWITCH in os.environ and not switch_in(_SWITCH):
        return f"{_SWITCH} is {os.environ[_SWITCH]}"
    if ctx.is_interpreted():
        return "kernels are interpreted"
    if ctx.backend.is_capturing():
        return "a stream is being captured"
    # Within a backend of the compiler `is_compiling()` may be False.
    if torch.compiler.is_compiling() or torch._guards.CompileContext.try_get() is not None:
        return "a graph is being compiled"
    return busy_reason(ctx)


def busy_reason(ctx: Context) -> str:
    """Return how the times of one GEMM spread, where that says that others use the GPU."""
    clock, matrix = DeviceClock(), torch.zeros(_SIZE, _SIZE, dtype=torch.bfloat16, device=ctx.get_device())
    ctx.backend.synchronize()  # with what this process has queued
    marks = [clock.mark()]
    for _ in range(_RUNS):
        torch.mm(matrix, matrix)
        marks.append(clock.mark())
    ctx.backend.synchronize()
    return spread_reason([clock.elapsed_us(*pair) for pair in itertools.pairwise(marks)][_WARM_RUNS:])


def spread_reason(times_us: list[float]) -> str:
    """Return what times of one call say of others on the GPU; nothing where a tenth are not much longer than most."""
    median, slow = statistics.median(times_us), statistics.quantiles(times_us, n=10)[-1]
    if slow <= _BUSY * median:
        return ""
    return f"the GPU is busy: a tenth of one GEMM's runs take {slow / median:.1f} times the median"


def _say(ctx: Context, what: str) -> None:
    if ctx.get_rank() == 0:
        ctx.info(what)
