"""All-gather + GEMM in two kernels on two streams: one pushes this rank's shard, the other multiplies what has come.

| kernel | SMs | waits for |
|---|---|---|
| push | comm_sms | the peers' readiness |
| GEMM | the rest | its own shard: nothing; a peer's: all chunks of it |

The push kernel is queued first: the peers' GEMMs wait for it, it waits for no GEMM of this call. Both kernels' programs
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
from ...common.device.handshake import COUNTS_OF_A_CALL, begin_call, current_call, finish_after_arrivals, wait_ready
from ...common.variants.implementation import default_plan
from .. import host, prediction
from ..host import GatherCall
from ..problem import AllGatherGemmProblem
from .shards import MULTIPLIES, PUSHES, Arrivals, multiply_shards, push_shard


@triton.jit(launch_metadata=PUSHES)
def all_gather_gemm_producer_consumer_push(
    shard,
    peers,
    total_programs,
    FULLY_CONNECTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):
    """Push this rank's shard to every peer."""
    epoch = begin_call(peers, WORLD_SIZE)
    wait_ready(peers, epoch, WORLD_SIZE)
    push_shard(tl.program_id(0), tl.num_programs(0), shard, peers, True, FULLY_CONNECTED, ROWS, COLS, WORLD_SIZE)
    finish_after_arrivals(peers, epoch, total_programs, WORLD_SIZE)


@triton.jit(launch_metadata=MULTIPLIES)
def all_gather_gemm_producer_consumer(
    a, b, gemm, gathered, gathered_gemm, block, shard_rows, peers, total_programs, TILE: tl.constexpr
):
    """Multiply each shard when it has come."""
    epoch = current_call(peers, TILE.WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    arrivals = Arrivals(peers.state_ptr + TILE.WORLD_SIZE, epoch * COUNTS_OF_A_CALL)
    multiply_shards(pid, step, a, b, gemm, gathered, gathered_gemm, block, shard_rows, peers, arrivals, TILE)
    finish_after_arrivals(peers, epoch, total_programs, TILE.WORLD_SIZE)


_COMM_SHARE = 12 / 132


def plan(problem: AllGatherGemmProblem, device: Device) -> GemmConfig:
    """Return the family's plan with chunks of 64 rows, and 12 of an H200's SMs to send them."""
    # 0.510 ms for 8192x8192x8192 over 4 H200s, with 32 rows 0.523.
    config = default_plan(problem, device, comm_share=_COMM_SHARE)
    return config if config.block_m < 64 else replace(config, comm_rows=64)


def launch(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel that pushes, beside it the one that multiplies."""
    config, pushes = call.config, call.stream("pushes")
    shared: dict[str, Any] = {"total_programs": config.num_sms}
    a, b = host.prepare(call, a, b)
    pushes.wait_for_current()
    with pushes.as_current():
        call.run(
            all_gather_gemm_producer_consumer_push,
            config.comm_sms,
            num_warps=config.comm_warps,
            **host.push_arguments(call, a),
            **shared,
            FULLY_CONNECTED=call.device.is_fully_connected,
            WORLD_SIZE=call.world_size,
        )
    compute_sms = config.num_sms - config.comm_sms
    call.run(all_gather_gemm_producer_consumer, compute_sms, **host.multiply_arguments(call, a, b), **shared)
    pushes.current_waits()


VARIANT = host.implementation(
    "producer_consumer",
    plan,
    host.workspace,
    launch,
    counts_chunks=True,
    predict=partial(prediction.comm_programs, comm_share=_COMM_SHARE),
    place=(Arrangement.CONCURRENT_KERNELS, Agent.COMM_KERNEL, Sync.SHARD_COUNTER),
    summary="a push kernel and a GEMM kernel side by side, one counter per shard between them",
)
