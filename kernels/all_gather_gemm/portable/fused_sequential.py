"""All-gather + GEMM in one kernel: the program that computes a tile loads A from its owner, while it multiplies.

Each rank's shard is copied to the heap first, where the peers read it; "ready" says that it is there, "done" that this
rank has read all it needs, so the next call may overwrite the peers' shards. Nothing is gathered: every program that
needs a part of A pulls it again, which costs link bandwidth once for every column of tiles. Pattern: arXiv 2511.12500,
section 4 ("fused sequential").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from iris_core import translate
from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.call import Device
from ...common.config import GemmConfig
from ...common.device.handshake import begin_call, finish_call, wait_ready_of
from ...common.device.tile_scheduler import Shards, num_tiles, own_first
from ...common.device.trace import WAIT, trace_span, trace_time
from ...common.implementation import Implementation, default_plan, valid_config
from ...common.portable.tile_loop import compute_tiles, keep_tile
from ...common.variants import variant_of
from ...common.workspace import Buffer
from .. import host, prediction
from ..host import FAMILY, OPTIONS, GatherCall
from ..problem import AllGatherGemmProblem
from .shards import MULTIPLIES


@triton.jit
def at_owner(own_ptr, gate, work, peers, epoch, WAITS: tl.constexpr):
    """Wait until the owner of a tile's rows of A is ready, and return where its shard is: a gate of compute_tiles."""
    if WAITS:
        if work.owner != peers.rank:
            began = trace_time(peers)
            wait_ready_of(peers, work.owner, epoch)
            trace_span(peers, WAIT, work.index, began)
    return translate(own_ptr, peers.rank, work.owner, peers.heap_bases)


@triton.jit(launch_metadata=MULTIPLIES)
def all_gather_gemm_fused_sequential(
    own_ptr, b, gemm, block, shard_rows, peers, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Compute this rank's columns of C from every rank's shard."""
    epoch = begin_call(peers, WORLD_SIZE)
    shards = Shards(shard_rows, block.n, block.m, 0)
    indices = (tl.program_id(0), tl.num_programs(0), num_tiles(shards, TILE) * WORLD_SIZE)
    compute_tiles(
        indices, own_ptr, b, gemm, shards, block, peers, epoch, own_first, keep_tile, WORLD_SIZE, TILE, None, at_owner
    )
    finish_call(peers, epoch, tl.num_programs(0), WORLD_SIZE)


def supports(problem: AllGatherGemmProblem, config: GemmConfig | None) -> str | None:
    """Return why this variant cannot do a problem with a configuration, or None."""
    if config and config.descriptors:
        return "a peer's shard is read through pointers; the configuration must say descriptors=False"
    return valid_config(problem, config)


def plan(problem: AllGatherGemmProblem, device: Device) -> GemmConfig:
    """Return the family's plan without descriptors."""
    return replace(default_plan(problem, device), descriptors=False)


def workspace(call: GatherCall) -> dict[str, Buffer]:
    """Return the buffers of this rank's shard, as peers read it, and of C."""
    if host.keeps_gathered(call):
        raise ValueError(f"{FAMILY}/fused_sequential never gathers A; any other variant keeps it")
    problem = call.problem
    rows = problem.a_shape(0)[0]
    staged = Buffer((rows, problem.k), problem.dtype, is_symmetric=True)
    return {"staged": staged, **host.scale_buffer(call, rows), **host.output_buffer(call)}


def launch(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queue the copy of this rank's shard, or what quantises it, and the kernel."""
    staged, scales, rows = call.memory["staged"], call.memory.get("gathered_scale"), slice(a.shape[0])
    a = host.quantised(call, a, staged, scales, rows)
    call.copy(staged[rows], "A", a)
    if scales is not None:
        call.copy(scales[rows], "a_scale", call.operands["a_scale"])
    arguments: dict[str, Any] = call.main_loop(staged, b, a_scale=scales)
    arguments["own_ptr"] = arguments.pop("a")
    call.run(
        all_gather_gemm_fused_sequential,
        call.config.num_sms,
        **arguments,
        block=host.block_of(call),
        shard_rows=staged.shape[0],
        peers=call.peers(),
        WORLD_SIZE=call.world_size,
    )
    return host.outputs(call)


VARIANT = variant_of(
    Implementation(
        FAMILY,
        "fused_sequential",
        plan,
        workspace,
        launch,
        host.outputs,
        supports=supports,
        options=OPTIONS,
        predict=prediction.fused_sequential,
        reads_pointers=True,
    ),
    arrangement=Arrangement.FUSED_KERNEL,
    agent=Agent.COMPUTING_PROGRAM,
    sync=Sync.NONE,
    summary="one kernel; each program loads its rows of A from their owner",
)
