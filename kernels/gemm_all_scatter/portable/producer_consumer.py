"""GEMM + all-scatter in two kernels on two streams: one computes tiles, the other pushes them, SMs split between them.

The GEMM kernel sets one flag per tile, and the push kernel waits for it. Flags hold call numbers and are never reset.
The GEMM kernel is queued first: the push kernel spins, and could keep the GEMM kernel's module from being loaded. The
program of either kernel that arrives last ends the call. Pattern: arXiv 2511.12500, section 4 ("producer-consumer").
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.call import Call
from ...common.device.handshake import begin_call, current_call, finish_call
from ...common.device.tile_scheduler import num_tiles, row_grouped
from ...common.portable.tile_loop import compute_tiles, keep_and_signal, with_numbers
from ...common.variants.implementation import Implementation, default_plan
from .. import host, prediction
from ..host import FAMILY, MULTIPLIES, PUSHES, push_tiles
from ..problem import GemmAllScatterProblem


@triton.jit(launch_metadata=MULTIPLIES)
def gemm_all_scatter_producer_consumer(a, b, gemm, block, peers, flags_ptr, total_programs, TILE: tl.constexpr):
    """Compute this rank's block of C, and set one flag per tile."""
    epoch = begin_call(peers, TILE.WORLD_SIZE)
    indices = (tl.program_id(0), tl.num_programs(0), num_tiles(block, TILE))
    target = (with_numbers(block), flags_ptr)
    compute_tiles(indices, a, b, gemm, block, target, peers, epoch, row_grouped, keep_and_signal, TILE)
    finish_call(peers, epoch, total_programs, TILE.WORLD_SIZE)


@triton.jit(launch_metadata=PUSHES)
def gemm_all_scatter_producer_consumer_push(
    block, peers, flags_ptr, total_programs, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """Push tiles as their flags are set."""
    # The call ends when all programs of both kernels have arrived, so neither kernel reads its number too late.
    epoch = current_call(peers, TILE.WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    push_tiles(pid, step, epoch, block, peers, flags_ptr, True, ROWS, TILE)
    finish_call(peers, epoch, total_programs, TILE.WORLD_SIZE)


# 12 of an H200's 132 SMs saturate its link: 0.478 ms for 8192x8192x8192 over 4, with 8 SMs 0.510, with 16 0.502.
_COMM_SHARE = 12 / 132


def launch(call: Call[GemmAllScatterProblem], a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the GEMM kernel, and beside it the one that pushes."""
    config, pushes = call.config, call.stream("pushes")
    shared: dict[str, Any] = {"flags_ptr": call.memory["flags"], "total_programs": config.num_sms}
    pushes.wait_for_current()
    call.run(
        gemm_all_scatter_producer_consumer,
        config.num_sms - config.comm_sms,
        **host.compute_arguments(call, a, b),
        **shared,
    )
    with pushes.as_current():
        call.run(
            gemm_all_scatter_producer_consumer_push,
            config.comm_sms,
            num_warps=config.comm_warps,
            **host.push_arguments(call),
            **shared,
        )
    pushes.current_waits()


VARIANT = Implementation(
    FAMILY,
    "producer_consumer",
    partial(default_plan, comm_share=_COMM_SHARE),
    host.workspace_with_flags,
    launch,
    host.outputs,
    predict=partial(prediction.comm_programs, comm_share=_COMM_SHARE),
    place=(Arrangement.CONCURRENT_KERNELS, Agent.COMM_KERNEL, Sync.TILE_FLAG),
    summary="a GEMM kernel and a push kernel side by side, with one flag per tile",
)
