"""All-gather + GEMM, one after the other: all SMs push this rank's shard to the peers, then a GEMM multiplies.

The GEMM is a kernel of ours, or the library's, for which the push kernel copies the shard beside the peers', too. One
stream. The push kernel ends the call's communication as GEMM + all-scatter does: its last program waits until every
peer's shard has arrived, so the GEMM waits for nothing. The peers' next shards are held off by this rank's ready signal
at the start of its next call, behind the GEMM in stream order. Pattern: arXiv 2511.12500, section 4 ("bulk
synchronous").
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.device.handshake import begin_call, finish_call, wait_ready
from ...common.variants.implementation import default_plan
from ...common.variants.library import plain_product_reason, with_library
from .. import host, prediction
from ..host import GatherCall
from .shards import MULTIPLIES, PUSHES, copy_scales, copy_shard, multiply_shards, push_shard


@triton.jit(launch_metadata=PUSHES)
def all_gather_gemm_bulk_synchronous_push(
    shard,
    peers,
    WHOLE: tl.constexpr,
    FULLY_CONNECTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
):
    """Push this rank's shard to every peer, and wait for theirs; WHOLE: copy it to the gathered A here, too."""
    epoch = begin_call(peers, WORLD_SIZE)
    wait_ready(peers, epoch, WORLD_SIZE)
    push_shard(tl.program_id(0), tl.num_programs(0), shard, peers, False, FULLY_CONNECTED, ROWS, COLS, WORLD_SIZE)
    if WHOLE:
        copy_shard(tl.program_id(0), tl.num_programs(0), shard, shard.dst_ptr, ROWS, COLS)
        if shard.scale_src_ptr is not None:
            copy_scales(tl.program_id(0), tl.num_programs(0), shard, shard.scale_dst_ptr)
    finish_call(peers, epoch, tl.num_programs(0), WORLD_SIZE)


@triton.jit(launch_metadata=MULTIPLIES)
def all_gather_gemm_bulk_synchronous(a, b, gemm, gathered, gathered_gemm, block, shard_rows, peers, TILE: tl.constexpr):
    """Multiply the gathered A."""
    pid, step = tl.program_id(0), tl.num_programs(0)
    multiply_shards(pid, step, a, b, gemm, gathered, gathered_gemm, block, shard_rows, peers, None, TILE)


def launch(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel that pushes, then the one that multiplies."""
    a, b = host.prepare(call, a, b)
    push(call, a, whole=False)
    call.run(all_gather_gemm_bulk_synchronous, call.config.num_sms, **host.multiply_arguments(call, a, b))


def launch_with_torch(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel that pushes, then the library's GEMM."""
    gathered, scales = host.gathered(call), host.gathered_scale(call)
    push(call, host.quantised(call, a, gathered, scales, host.own_rows(call)), whole=True)
    call.queue_product(host.outputs(call)[0], is_output=True, a=gathered, a_scale=scales)


def push(call: GatherCall, a: torch.Tensor, *, whole: bool) -> None:
    """Queue the kernel that pushes; the `whole` A is gathered, or all but this rank's shard."""
    of_peers = {"FULLY_CONNECTED": call.device.is_fully_connected, "WORLD_SIZE": call.world_size}
    arguments, config = {**host.push_arguments(call, a), "WHOLE": whole, **of_peers}, call.config
    call.run(all_gather_gemm_bulk_synchronous_push, config.num_sms, num_warps=config.comm_warps, **arguments)


VARIANT = host.implementation(
    "bulk_synchronous",
    default_plan,
    host.workspace,
    launch,
    predict=prediction.bulk_synchronous,
    place=(Arrangement.SEQUENTIAL_KERNELS, Agent.ALL_SMS, Sync.STREAM_ORDER),
    summary="all SMs push the shard to the peers, then a GEMM kernel",
)
LIBRARY_VARIANT = with_library(
    VARIANT,
    launch_with_torch,
    predict=prediction.bulk_synchronous_library,
    summary="all SMs push the shard to the peers, then torch.mm",
    supports=plain_product_reason,
)
