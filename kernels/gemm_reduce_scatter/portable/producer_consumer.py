"""GEMM + reduce-scatter in kernels on two streams: GEMM kernels compute partial tiles, another pushes them, SMs split.

| kernel | stream | does | waits for |
|---|---|---|---|
| producer | current | computes the peers' shards, a flag per tile | nothing |
| consumer | side | pushes partial tiles to their owners, a flag each there | the peers' readiness, each tile's flag |
| sum | current, after the producer | computes the own shard and adds the peers' partials | the peers' flags |

The own shard has a kernel of its own, so no kernel waits for one that a rank queues later. All three kernels' programs
take part in ending the call. Pattern: arXiv 2511.12500, section 4 ("producer-consumer").
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.call import Device
from ...common.config import GemmConfig
from ...common.device.handshake import begin_call, current_call, finish_after_arrivals
from ...common.device.tile_scheduler import num_tiles, own_last, peers_first
from ...common.portable.partials import (
    COMPUTES_FOR_PEERS,
    PUSHES,
    SUMS,
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
from ..host import FAMILY, KEPT, ReduceCall
from ..problem import GemmReduceScatterProblem


@triton.jit(launch_metadata=COMPUTES_FOR_PEERS)
def gemm_reduce_scatter_producer_consumer(a, b, gemm, staging, peers, flags_ptr, total_programs, TILE: tl.constexpr):
    """Compute the partial tiles of the peers' shards."""
    epoch = begin_call(peers, TILE.WORLD_SIZE)
    shards = shards_of(staging)
    sent = (tl.program_id(0), tl.num_programs(0), num_tiles(shards, TILE) * (TILE.WORLD_SIZE - 1))
    target = (own_partials(staging), flags_ptr)
    compute_tiles(sent, a, b, gemm, shards, target, peers, epoch, peers_first, keep_and_signal, TILE)
    finish_after_arrivals(peers, epoch, total_programs, TILE.WORLD_SIZE)


@triton.jit(launch_metadata=PUSHES)
def gemm_reduce_scatter_producer_consumer_push(
    staging, peers, flags_ptr, total_programs, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """Push partial tiles as their flags are set."""
    epoch = current_call(peers, TILE.WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    push_partial_tiles(pid, step, epoch, staging, peers, flags_ptr, ROWS, TILE)
    finish_after_arrivals(peers, epoch, total_programs, TILE.WORLD_SIZE)


@triton.jit(launch_metadata=SUMS)
def gemm_reduce_scatter_producer_consumer_sum(a, b, gemm, out, staging, peers, total_programs, TILE: tl.constexpr):
    """Compute the own shard and add the peers' partials."""
    epoch = current_call(peers, TILE.WORLD_SIZE)
    shards = shards_of(staging)
    own = (tl.program_id(0), tl.num_programs(0), num_tiles(shards, TILE))
    compute_tiles(own, a, b, gemm, shards, Sums(out, staging, 0, 1), peers, epoch, own_last, sum_tile, TILE)
    finish_after_arrivals(peers, epoch, total_programs, TILE.WORLD_SIZE)


_COMM_SHARE = 16 / 132


def plan(problem: GemmReduceScatterProblem, device: Device) -> GemmConfig:
    """Return the family's plan with chunks of 64 rows, and 16 of an H200's SMs to send them."""
    # 0.533 ms for 8192x8192x8192 over 4 H200s, with 32 rows 0.592.
    config = default_plan(problem, device, comm_share=_COMM_SHARE)
    return config if config.block_m < 64 else replace(config, comm_rows=64)


def workspace(call: ReduceCall) -> dict[str, Buffer]:
    """Return the family's buffers, and that of the flags of computed tiles."""
    computed = local_flags(host.num_sent(call), "partial tile")
    return {**KEPT.workspace(call), **host.workspace(call), "computed": computed}


def launch(call: ReduceCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel of the peers' shards, beside it the one that pushes, then the sum."""
    config, pushes, computed = call.config, call.stream("pushes"), call.memory["computed"]
    compute_sms = config.num_sms - config.comm_sms
    total: dict[str, Any] = {"total_programs": 2 * compute_sms + config.comm_sms}
    multiply = host.multiply_arguments(call, a, b)
    pushes.wait_for_current()
    call.run(gemm_reduce_scatter_producer_consumer, compute_sms, **multiply, **total, flags_ptr=computed)
    with pushes.as_current():
        call.run(
            gemm_reduce_scatter_producer_consumer_push,
            config.comm_sms,
            num_warps=config.comm_warps,
            **host.push_arguments(call),
            **total,
            flags_ptr=computed,
        )
    call.run(gemm_reduce_scatter_producer_consumer_sum, compute_sms, **multiply, **total, out=KEPT.block(call))
    pushes.current_waits()


VARIANT = Implementation(
    FAMILY,
    "producer_consumer",
    plan,
    workspace,
    launch,
    KEPT.outputs,
    predict=partial(prediction.comm_kernel, comm_share=_COMM_SHARE),
    place=(Arrangement.CONCURRENT_KERNELS, Agent.COMM_KERNEL, Sync.TILE_FLAG),
    summary="GEMM kernels and a push kernel side by side, a flag per tile; own tiles last add the peers'",
)
