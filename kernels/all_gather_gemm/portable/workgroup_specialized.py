"""All-gather + GEMM in one kernel with two roles: some programs push this rank's shard, the others multiply.

| program | does | waits for |
|---|---|---|
| 0 … comm_sms - 1 | pushes chunks of this rank's shard to every peer | the peers' readiness |
| the rest | multiplies its own shard, then each peer's | all chunks of a peer's shard |

Pushing programs have the lower numbers, so they are scheduled first: the peers wait for them. Pattern: arXiv
2511.12500, section 4 ("workgroup specialization").
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.call import Device
from ...common.config import GemmConfig
from ...common.device.handshake import COUNTS_OF_A_CALL, begin_call, finish_after_arrivals, wait_ready
from ...common.variants.implementation import default_plan
from .. import host, prediction
from ..host import GatherCall
from ..problem import AllGatherGemmProblem
from .shards import PUSHES_AND_MULTIPLIES, Arrivals, multiply_shards, push_shard


@triton.jit(launch_metadata=PUSHES_AND_MULTIPLIES)
def all_gather_gemm_workgroup_specialized(
    a,
    b,
    gemm,
    gathered,
    gathered_gemm,
    block,
    shard_rows,
    shard,
    peers,
    COMM_PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Push this rank's shard and multiply all shards, each in its own programs."""
    epoch = begin_call(peers, TILE.WORLD_SIZE)
    pid = tl.program_id(0)
    if pid < COMM_PROGRAMS:
        wait_ready(peers, epoch, TILE.WORLD_SIZE)
        push_shard(pid, COMM_PROGRAMS, shard, peers, True, TILE.FULLY_CONNECTED, ROWS, COLS, TILE.WORLD_SIZE)
    else:
        first, step = pid - COMM_PROGRAMS, tl.num_programs(0) - COMM_PROGRAMS
        arrivals = Arrivals(peers.state_ptr + TILE.WORLD_SIZE, epoch * COUNTS_OF_A_CALL)
        multiply_shards(first, step, a, b, gemm, gathered, gathered_gemm, block, shard_rows, peers, arrivals, TILE)
    finish_after_arrivals(peers, epoch, tl.num_programs(0), TILE.WORLD_SIZE)


_COMM_SHARE = 16 / 132


def plan(problem: AllGatherGemmProblem, device: Device) -> GemmConfig:
    """Return the family's plan with narrower tiles, chunks of 64 rows, and 16 of an H200's SMs to send them."""
    # 0.493 ms for 8192x8192x8192 over 4 H200s, with 128x256 tiles 0.520.
    config = default_plan(problem, device, comm_share=_COMM_SHARE)
    if config.block_n == 256:
        config = replace(config, block_n=128, num_stages=4)
    return config if config.block_m < 64 else replace(config, comm_rows=64)


def launch(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel."""
    config = call.config
    a, b = host.prepare(call, a, b)
    arguments = {**host.multiply_arguments(call, a, b), **host.push_arguments(call, a)}
    call.run(all_gather_gemm_workgroup_specialized, config.num_sms, **arguments, COMM_PROGRAMS=config.comm_sms)


VARIANT = host.implementation(
    "workgroup_specialized",
    plan,
    host.workspace,
    launch,
    counts_chunks=True,
    predict=partial(prediction.comm_programs, comm_share=_COMM_SHARE, most_columns=128),
    place=(Arrangement.FUSED_KERNEL, Agent.COMM_PROGRAMS, Sync.SHARD_COUNTER),
    summary="one kernel; some programs push the shard, the others multiply each shard when it has come",
)
