"""What the variants with stream-K share on the host: their configuration, and the workspace of split tiles."""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.jit import JITFunction

from overlap_taxonomy.cost import LOW_ROWS

from ..call import Call, Device
from ..config import GemmConfig, is_hopper_or_later, operand_room, warps_of, widest_tile
from ..device.handshake import OwnCalls
from ..problem import Problem
from ..workspace import Buffer, local_flags
from .stream_k import StreamK
from .stream_k_plan import (
    GROUP_M,
    StreamKGemm,
    StreamKPlan,
    StreamKTiling,
    fastest_tiling,
    known_splits,
    plan_of_tiling,
    tiling_us,
)

# Weights on their way to all SMs, at most: 12288 x 12288 takes one row 73 us with 13 MB of them, 79 with 19 MB (H200).
_FLIGHT_BYTES = 15e6
LEAST_STAGES = 4
_SHORT_US = 45.0  # worth an early launch


def default_stream_k_config(
    arch: str, num_sms: int, *, m: int, n: int, k: int, dtype: torch.dtype, is_promoted: bool = False
) -> GemmConfig:
    """Return what to start from for an (m, n) output over k of one rank's GEMM; arguments as `default_config`'s."""
    if arch == "cpu":
        return GemmConfig(
            32, 32, 32, group_m=2, num_warps=4, num_sms=num_sms, comm_sms=1, row_chunks=1, splits=2, descriptors=False
        )
    is_amd = arch.startswith("gfx")
    is_exact = dtype == torch.float32
    block_k = 16 if is_exact else 128 // dtype.itemsize
    # Exact products run on the ordinary cores: small tiles, in registers.
    largest = 64 if is_exact else widest_tile(arch, is_promoted=is_promoted)
    # Two sums of 256 columns do not fit the registers on sm_100, nor two accumulators.
    widest_split = 256 if arch == "sm_90" and not is_promoted else 128
    low_block_k = block_k if is_amd or is_exact else 128
    gemm = StreamKGemm(m, n, k, num_sms, block_k, dtype.itemsize)
    tiling = fastest_tiling(gemm, low_block_k=low_block_k, largest=largest, widest_split=widest_split)
    if tiling.block_m <= LOW_ROWS:
        block_k = low_block_k
    if is_amd:
        stages = 2
    elif is_exact:
        stages = 4
    else:  # as much on its way as shared memory takes, and the memory takes well: it is what hides the latency
        stages = stages_within(operand_room(arch), (tiling.block_m + tiling.block_n) * block_k * dtype.itemsize)
        plan = plan_of_tiling(tiling, gemm._replace(block_k=block_k))
        in_flight = int(_FLIGHT_BYTES // (max(1, plan.programs) * tiling.block_n * block_k * dtype.itemsize))
        stages = min(stages, max(LEAST_STAGES, in_flight))
    return GemmConfig(
        tiling.block_m,
        tiling.block_n,
        block_k,
        group_m=GROUP_M,
        num_warps=warps_of(tiling.block_m, tiling.block_n),
        num_stages=stages,
        epilogue_subtiles=2 if tiling.block_n == 256 else 1,
        num_sms=num_sms,
        comm_rows=4 if m > 16 else 1,  # a chunk of A is 8 KB, or what a program loads at once of a row
        row_chunks=1,
        splits=tiling.splits,
        descriptors=not is_exact and is_hopper_or_later(arch),
    )


def stages_within(room: int, stage: int) -> int:
    """Return how many stages of a size to have within some room, in whatever unit: at least two, no more than help."""
    return max(2, min(6, room // stage))


def plan(problem: Problem, device: Device) -> GemmConfig:
    """Return what to start from for the rank that has most to do."""
    k, n = problem.b_shape(0)
    how: dict[str, Any] = {"dtype": problem.dtype, "is_promoted": problem.is_promoted}
    return default_stream_k_config(device.arch, device.num_sms, m=problem.m, n=n, k=k, **how)


def stream_k_plan(call: Call[Any]) -> StreamKPlan:
    """Return how this rank's programs take its tiles; it may have fewer steps of k than others."""
    return call.kept("stream-K plan", lambda: plan_of_tiling(_tiling(call), _gemm(call)))


def is_short(call: Call[Any]) -> bool:
    """Return whether the kernel is worth an early launch: it saves 3 µs, and costs a long kernel up to 10.

    Programs that come early get SMs as they fall free, not evenly. That slows what is bound by memory (measured; the
    reason is a guess).
    """
    return call.kept("is short", lambda: tiling_us(_tiling(call), _gemm(call)) < _SHORT_US)


def columns(call: Call[Any]) -> int:
    """Return the columns of the rank with the most."""
    return int(call.problem.b_shape(0)[1])


def all_tiles(call: Call[Any]) -> int:
    """Return the tiles of that rank."""
    return call.num_tiles(call.problem.m, columns(call))


def workspace(call: Call[Any]) -> dict[str, Buffer]:
    """Return the buffers of the partials of split tiles, and of the numbers of calls."""
    config, split_programs = call.config, stream_k_plan(call).split_programs
    return {
        "partial_tiles": Buffer((split_programs * config.block_m * config.block_n,), torch.float32),
        "partial_flags": local_flags(split_programs, "the partial of a split tile by program"),
        # Of every program that a call may have.
        "calls": local_flags(max(config.num_sms, call.device.num_sms), "the number of calls ended by program"),
    }


def run(
    call: Call[Any],
    kernel: JITFunction[Any],
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None = None,
    **arguments: Any,
) -> None:
    """Queue a kernel of `compute_stream_k`, early if it is short.

    `a_scale` is A's, where that is not the call's; `arguments` are those that not all of these kernels take.
    """
    programs, early = stream_k_plan(call).programs, is_short(call)
    multiply = call.main_loop(a, b, a_scale=a_scale)
    call.run(kernel, programs, early=early, **{**multiply, **_arguments(call), **arguments})


def _arguments(call: Call[Any]) -> dict[str, Any]:
    plan, memory = stream_k_plan(call), call.memory
    return {
        "stream_k": StreamK(
            memory["partial_tiles"], memory["partial_flags"], plan.split_programs, plan.height, plan.head
        ),
        "own": OwnCalls(memory["calls"], memory["calls"].numel()),
        "peers": call.peers(),
        "HAS_WHOLE": plan.whole > 0,
        "SPLITS": known_splits(plan, call.config.block_m, call.config.block_n),
    }


def _tiling(call: Call[Any]) -> StreamKTiling:
    return StreamKTiling(call.config.block_m, call.config.block_n, call.config.splits)


def _gemm(call: Call[Any]) -> StreamKGemm:
    problem, config = call.problem, call.config
    m = int(-(-problem.m // config.block_m)) * config.block_m  # so it is the same for all that take as many tiles
    sizes = m, columns(call), problem.a_shape(call.rank)[1]
    return StreamKGemm(*sizes, config.num_sms, config.block_k, problem.dtype.itemsize, config.group_m)
