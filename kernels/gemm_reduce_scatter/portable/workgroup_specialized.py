"""GEMM + reduce-scatter in one kernel with two roles: most programs compute, the others push partial tiles to owners.

| program | does | waits for |
|---|---|---|
| 0 … num_sms - comm_sms - 1 | computes the peers' shards, a flag per tile | nothing |
| the same, then | computes its own shard and adds the peers' partials | the peers' flags |
| the last comm_sms | pushes partial tiles to their owners, a flag each there | the peers' readiness, each tile's flag |

Flags hold call numbers and are never reset. Pattern: arXiv 2511.12500, section 4 ("workgroup specialization").
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.device.handshake import begin_call, finish_after_arrivals, finish_call
from ...common.device.tile_scheduler import next_index, num_tiles, own_last, peers_first
from ...common.portable.partials import (
    COMPUTES_AND_SUMS,
    Sums,
    own_partials,
    push_partial_tiles,
    shards_of,
    sum_tile,
)
from ...common.portable.tile_loop import compute_tiles, keep_and_signal
from ...common.variants.implementation import Implementation, default_plan
from ...common.workspace import Buffer, local_flags
from .. import host, prediction
from ..host import FAMILY, KEPT, Destination, ReduceCall


@triton.jit(launch_metadata=COMPUTES_AND_SUMS)
def gemm_reduce_scatter_workgroup_specialized(
    a,
    b,
    gemm,
    out,
    staging,
    peers,
    flags_ptr,
    comm_programs,
    ROWS: tl.constexpr,
    DESTINATIONS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute and sum in some programs, push in the others; the sum goes to DESTINATIONS ranks."""
    epoch = begin_call(peers, TILE.WORLD_SIZE)
    pid = tl.program_id(0)
    step = tl.num_programs(0) - comm_programs
    if pid < step:
        shards = shards_of(staging)
        tiles = num_tiles(shards, TILE)
        sent = tiles * (TILE.WORLD_SIZE - 1)
        other, kept = (pid, step, sent), (own_partials(staging), flags_ptr)
        compute_tiles(other, a, b, gemm, shards, kept, peers, epoch, peers_first, keep_and_signal, TILE)
        own = (next_index(pid, step, sent) - sent, step, tiles)
        compute_tiles(
            own, a, b, gemm, shards, Sums(out, staging, 0, DESTINATIONS), peers, epoch, own_last, sum_tile, TILE
        )
    else:
        push_partial_tiles(pid - step, comm_programs, epoch, staging, peers, flags_ptr, ROWS, TILE)
    if DESTINATIONS > 1:
        finish_call(peers, epoch, tl.num_programs(0), TILE.WORLD_SIZE)
    else:
        finish_after_arrivals(peers, epoch, tl.num_programs(0), TILE.WORLD_SIZE)


# Twice what pushing to all peers at once takes, as each tile is signalled: 0.516 ms for 8192x8192x8192 over 4 H200s,
# with 16 of 132 SMs 0.573, with 32 0.586.
_COMM_SHARE = 24 / 132


def implementation(
    family: str, destination: Destination, predict: Callable[..., float], summary: str
) -> Implementation:
    """Return the pattern for a family, with the destination of its sums, its prediction, and a line for tables."""

    def workspace(call: ReduceCall) -> dict[str, Buffer]:
        computed = local_flags(host.num_sent(call), "partial tile")
        return {**destination.workspace(call), **host.workspace(call), "computed": computed}

    def launch(call: ReduceCall, a: torch.Tensor, b: torch.Tensor) -> None:
        call.run(
            gemm_reduce_scatter_workgroup_specialized,
            call.config.num_sms,
            **host.multiply_arguments(call, a, b),
            out=destination.block(call),
            flags_ptr=call.memory["computed"],
            comm_programs=call.config.comm_sms,
            ROWS=call.config.comm_rows,
            DESTINATIONS=destination.ranks(call),
        )

    plan = partial(default_plan, comm_share=_COMM_SHARE)
    return Implementation(
        family,
        "workgroup_specialized",
        plan,
        workspace,
        launch,
        destination.outputs,
        predict=partial(predict, comm_share=_COMM_SHARE),
        place=(Arrangement.FUSED_KERNEL, Agent.COMM_PROGRAMS, Sync.TILE_FLAG),
        summary=summary,
    )


VARIANT = implementation(
    FAMILY,
    KEPT,
    prediction.comm_programs,
    "one kernel; some programs compute and sum, the others push each partial tile when its flag is set",
)
