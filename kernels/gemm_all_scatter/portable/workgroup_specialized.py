"""GEMM + all-scatter in one kernel with two roles: most programs compute tiles, the rest push them to the peers.

| program | does | waits for |
|---|---|---|
| 0 … num_sms - comm_sms - 1 | computes tiles, sets the tile's flag | nothing |
| the last comm_sms | pushes tiles in the order they are computed | the peers' readiness, then each tile's flag |

The flags hold call numbers and are never reset. Computing programs have the lower numbers, so they are scheduled, and
interpreted, first: programs that push never wait for one that has no SM. The last program to arrive, of either role,
ends the call.
Pattern: arXiv 2511.12500, section 4 ("workgroup specialization").
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.call import Call
from ...common.device.handshake import begin_call, finish_call
from ...common.device.tile_scheduler import num_tiles, row_grouped
from ...common.portable.tile_loop import compute_tiles, keep_and_signal, with_numbers
from ...common.variants.implementation import Implementation, default_plan
from .. import host, prediction
from ..host import FAMILY, MULTIPLIES_AND_PUSHES, push_tiles
from ..problem import GemmAllScatterProblem


@triton.jit(launch_metadata=MULTIPLIES_AND_PUSHES)
def gemm_all_scatter_workgroup_specialized(
    a, b, gemm, block, peers, flags_ptr, comm_programs, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """Compute this rank's block of C and push it, each in its own programs."""
    epoch = begin_call(peers, TILE.WORLD_SIZE)
    pid = tl.program_id(0)
    compute_programs = tl.num_programs(0) - comm_programs
    if pid < compute_programs:
        indices = (pid, compute_programs, num_tiles(block, TILE))
        target = (with_numbers(block), flags_ptr)
        compute_tiles(indices, a, b, gemm, block, target, peers, epoch, row_grouped, keep_and_signal, TILE)
    else:
        first = pid - compute_programs
        push_tiles(first, comm_programs, epoch, block, peers, flags_ptr, True, ROWS, TILE)
    finish_call(peers, epoch, tl.num_programs(0), TILE.WORLD_SIZE)


# 12 of an H200's 132 SMs saturate its link: 0.475 ms for 8192x8192x8192 over 4, with 16 SMs 0.489, with 20 0.512.
_COMM_SHARE = 12 / 132


def launch(call: Call[GemmAllScatterProblem], a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel."""
    call.run(
        gemm_all_scatter_workgroup_specialized,
        call.config.num_sms,
        **host.compute_arguments(call, a, b),
        flags_ptr=call.memory["flags"],
        comm_programs=call.config.comm_sms,
        ROWS=call.config.comm_rows,
    )


VARIANT = Implementation(
    FAMILY,
    "workgroup_specialized",
    partial(default_plan, comm_share=_COMM_SHARE),
    host.workspace_with_flags,
    launch,
    host.outputs,
    predict=partial(prediction.comm_programs, comm_share=_COMM_SHARE),
    place=(Arrangement.FUSED_KERNEL, Agent.COMM_PROGRAMS, Sync.TILE_FLAG),
    summary="one kernel; some programs compute, the others push each tile when its flag is set",
)
