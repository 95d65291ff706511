"""All-gather + GEMM with the copy engines: they push this rank's shard while a GEMM multiplies.

The streams, the copies and their order are in copies.py; here is the GEMM: a kernel of ours, on all SMs, or all but
one, or the library's. That multiplies this rank's rows, then those behind them and those before them, each when a
kernel of one program has seen the flags of their shards; another one ends the call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from iris_core import wait
from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.call import Device
from ...common.config import GemmConfig
from ...common.device.handshake import current_call, finish_and_clear
from ...common.variants.implementation import default_plan
from ...common.variants.library import plain_product_reason, with_library
from ...common.workspace import Buffer
from .. import host, prediction
from ..copies import flags_buffer, prepare, queue, queue_copies, shard_chunks
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


@triton.jit
def all_gather_gemm_copy_engine_await(first, stop, flags_ptr, peers):
    """Wait until the shards of the ranks from `first` to `stop`, and without, have come."""
    for source in range(first, stop):
        wait(flags_ptr + source, 1, peers.watchdog_ptr)


@triton.jit
def all_gather_gemm_copy_engine_end(flags_ptr, peers, WORLD_SIZE: tl.constexpr):
    """Await the flags that are left, those of shards without rows, and end the call."""
    for distance in tl.static_range(1, WORLD_SIZE):
        wait(flags_ptr + (peers.rank + distance) % WORLD_SIZE, 1, peers.watchdog_ptr)
    finish_and_clear(peers, current_call(peers, WORLD_SIZE), 1, flags_ptr, WORLD_SIZE, WORLD_SIZE)


def plan(problem: AllGatherGemmProblem, device: Device) -> GemmConfig:
    """Return the family's plan, wide tiles with four stages and the epilogue in halves."""
    # 0.425 ms for 8192x8192x8192 over 4 H200s, with three stages 0.435.
    config = default_plan(problem, device)
    return replace(config, num_stages=4, epilogue_subtiles=2) if config.block_n == 256 else config


def plan_with_torch(problem: AllGatherGemmProblem, device: Device) -> GemmConfig:
    """Return the same without descriptors: the library reads rows of any length."""
    return replace(plan(problem, device), descriptors=False)


def workspace(call: GatherCall) -> dict[str, Buffer]:
    """Return the family's buffers, and that of the shards' flags."""
    return {**host.workspace(call), **flags_buffer(call, shard_chunks(call))}


def launch(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the copies, and beside them the kernel."""
    a, b = prepare(call, a, b)
    queue(call, a, shard_chunks(call), all_gather_gemm_copy_engine, host.multiply_arguments(call, a, b))


def launch_with_torch(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the copies, and beside them the library's products: of this rank's shard, then of what has come."""
    a, _ = prepare(call, a, b)
    streams = queue_copies(call, a, shard_chunks(call), has_barrier_beside=False)
    output, gathered, scales = host.outputs(call)[0], host.gathered(call), host.gathered_scale(call)
    of_peers: dict[str, Any] = {"flags_ptr": call.memory["flags"], "peers": call.peers()}
    problem, rank, world_size = call.problem, call.rank, call.world_size
    start, stop = problem.rows(rank)
    for first, last, begin, end in (
        (rank, rank + 1, start, stop),
        (rank + 1, world_size, stop, problem.m),
        (0, rank, 0, start),
    ):
        if end == begin:
            continue
        of: dict[str, Any] = {}
        if first != rank:
            call.run(all_gather_gemm_copy_engine_await, 1, num_warps=1, first=first, stop=last, **of_peers)
        if first != rank or problem.is_quantised:
            of = {"a": gathered[begin:end], "a_scale": None if scales is None else scales[begin:end]}
        call.queue_product(output, is_output=True, rows=(begin, end), **of)
    call.run(all_gather_gemm_copy_engine_end, 1, num_warps=1, **of_peers, WORLD_SIZE=world_size)
    for copies in streams:
        copies.current_waits()


VARIANT = host.implementation(
    "copy_engine",
    plan,
    workspace,
    launch,
    predict=prediction.copy_engine,
    place=(Arrangement.KERNEL_AND_COPIES, Agent.COPY_ENGINES, Sync.SHARD_FLAG),
    summary="the copy engines push the shard; a GEMM kernel multiplies each shard when it has come",
)
LIBRARY_VARIANT = with_library(
    replace(VARIANT, plan=plan_with_torch),
    launch_with_torch,
    predict=prediction.copy_engine_library,
    summary="the copy engines push the shard; torch.mm multiplies the own shard, then those that have come",
    supports=plain_product_reason,
)
