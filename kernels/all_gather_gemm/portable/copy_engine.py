"""All-gather + GEMM with the copy engines: they push this rank's shard while a GEMM kernel multiplies.

The streams, the copies and their order are in copies.py; here is the GEMM, on all SMs, or all but one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.call import Device
from ...common.config import GemmConfig
from ...common.device.handshake import current_call, finish_and_clear
from ...common.variants.implementation import default_plan
from ...common.workspace import Buffer
from .. import host, prediction
from ..copies import flags_buffer, prepare, queue, shard_chunks
from ..host import GatherCall
from ..problem import AllGatherGemmProblem
from .shards import MULTIPLIES, Arrivals, multiply_shards


@triton.jit(launch_metadata=MULTIPLIES)
def all_gather_gemm_copy_engine(
    a,
    b,
    gemm,
    gathered,
    gathered_gemm,
    block,
    shard_rows,
    peers,
    flags_ptr,
    ROW_CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Multiply each shard when it has come, whole."""
    tl.static_assert(ROW_CHUNKS == 1)
    epoch = current_call(peers, TILE.WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    arrivals = Arrivals(flags_ptr, 1)
    multiply_shards(pid, step, a, b, gemm, gathered, gathered_gemm, block, shard_rows, peers, arrivals, TILE)
    finish_and_clear(peers, epoch, step, flags_ptr, TILE.WORLD_SIZE * ROW_CHUNKS, TILE.WORLD_SIZE)


def plan(problem: AllGatherGemmProblem, device: Device) -> GemmConfig:
    """Return the family's plan, wide tiles with four stages and the epilogue in halves."""
    # 0.425 ms for 8192x8192x8192 over 4 H200s, with three stages 0.435.
    config = default_plan(problem, device)
    return replace(config, num_stages=4, epilogue_subtiles=2) if config.block_n == 256 else config


def workspace(call: GatherCall) -> dict[str, Buffer]:
    """Return the family's buffers, and that of the shards' flags."""
    return {**host.workspace(call), **flags_buffer(call, shard_chunks(call))}


def launch(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the copies, and beside them the kernel."""
    a, b = prepare(call, a, b)
    queue(call, a, shard_chunks(call), all_gather_gemm_copy_engine, host.multiply_arguments(call, a, b))


VARIANT = host.implementation(
    "copy_engine",
    plan,
    workspace,
    launch,
    predict=prediction.copy_engine,
    place=(Arrangement.KERNEL_AND_COPIES, Agent.COPY_ENGINES, Sync.SHARD_FLAG),
    summary="the copy engines push the shard; a GEMM kernel multiplies each shard when it has come",
)
