"""All-gather + GEMM with the copy engines and a kernel whose warps have different roles (Gluon, for Hopper).

| who | does | waits for |
|---|---|---|
| the copy engines | push this rank's shard of A to every peer, by chunks (copies.py) | the call before |
| 8 warps of every program | multiply tiles, and stage each in shared memory | full stages; an empty epilogue store |
| 1 warp | loads operands, meanwhile stores the tile before | empty stages; chunks of peers' shards; the staged tile |

The Hopper form of `copy_engine`, whose protocol this is: its multiplication keeps cuBLAS's rate beside the copies. The
own shard comes first, read where the caller has it. A tile of a peer's rows waits for their row chunk before its first
load. Where the link is slower than the multiplication, what counts is what is left to multiply when the last byte has
come: then the shard that is used last comes in k chunks, and its tiles are multiplied chunk by chunk, while the others
come whole, for the copy engine pauses after every chunk. Programs may split the last tiles (../common/hopper/fixup.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core import fence_before_descriptor_loads, wait
from iris_core.device.cache_key import in_cache_key
from overlap_taxonomy import Agent, Arrangement, Mainloop, Sync

from ...common.call import Device
from ...common.config import GemmConfig
from ...common.device.handshake import current_call, finish_and_clear
from ...common.device.tile_scheduler import Shards, num_tiles, own_first
from ...common.hopper import host as hopper
from ...common.hopper.arguments import LoadGate, LoadWarp, TileStaging
from ...common.hopper.epilogue_store import make_epilogue_store, send_last, wait_stores_arrived
from ...common.hopper.pipeline import make_operand_pipeline
from ...common.hopper.roles import first_role, worker_registers, worker_warps
from ...common.hopper.tile_loop import load_tiles, multiply_second, multiply_tiles, send_to_owner
from ...common.hopper.waves import make_waves
from ...common.launch.launch_metadata import launch_metadata
from ...common.workspace import Buffer
from .. import host, prediction
from ..copies import ShardChunks, begins_with_barrier, flags_buffer, num_programs, prepare, queue, shard_chunks
from ..gather_plan import Gathering
from ..host import GatherCall
from ..problem import AllGatherGemmProblem
from .workgroup_specialized import (
    gathered_buffer,
    gathered_descriptor,
    output_buffer,
    outputs,
    product_of_shards,
    sizes_of,
)


@in_cache_key
class ChunkFlags(NamedTuple):
    """The flags of chunks of the shards, ROW_CHUNKS * K_CHUNKS a rank.

    A row chunk has `chunk_rows`, and each of its K_CHUNKS is for `chunk_steps` steps of a tile.
    """

    flags_ptr: Any
    chunk_rows: Any
    chunk_steps: Any
    ROW_CHUNKS: Any
    K_CHUNKS: Any


@gluon.jit(launch_metadata=launch_metadata(product=product_of_shards))
def all_gather_gemm_copy_engine_sm90(
    a,
    gathered,
    b,
    out,
    workspace,
    sizes,
    chunk_rows,
    chunk_steps,
    epilogue,
    scales,
    own_scales,
    peers,
    flags_ptr,
    ROW_CHUNKS: gl.constexpr,
    K_CHUNKS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Multiply shards as they come; `sizes` are those of the largest shard's rows of C, the chunks as in ChunkFlags."""
    epoch = current_call(peers, TILE.WORLD_SIZE)
    pipeline = make_operand_pipeline(a, b, TILE)
    store = make_epilogue_store(out, TILE)
    shards = Shards(sizes.m, sizes.n, sizes.m * TILE.WORLD_SIZE, sizes.m)
    waves = make_waves(num_tiles(shards, TILE) * TILE.WORLD_SIZE, gl.cdiv(sizes.k, TILE.BLOCK_K), TILE)
    staging = TileStaging(store, None, epilogue, shards, scales, own_scales)
    warp = LoadWarp(pipeline, store, out)
    gl.warp_specialize(
        [
            (multiply_second, (pipeline, staging, waves, peers, TILE)),
            (multiply_tiles, (pipeline, staging, waves, workspace, peers, epoch, TILE)),
            (
                _load_shards_and_store,
                (
                    a,
                    gathered,
                    b,
                    warp,
                    waves,
                    shards,
                    # Not a variable, which would have tensors in the place of constants.
                    ChunkFlags(flags_ptr, chunk_rows, chunk_steps, ROW_CHUNKS, K_CHUNKS),
                    peers,
                    epoch,
                    TILE,
                ),
            ),
        ][first_role(TILE.PINGPONG) :],
        worker_warps(1, TILE.PINGPONG),
        worker_registers(1, TILE.PINGPONG),
    )


@gluon.jit
def _load_shards_and_store(a, gathered, b, warp, waves, shards, flags, peers, epoch, TILE: gl.constexpr):
    WORLD_SIZE: gl.constexpr = TILE.WORLD_SIZE
    last, _ = load_tiles(
        *(a, b, warp, waves, shards, (), peers, epoch, send_to_owner, TILE),
        *(gathered, flags, await_row_chunk),
    )
    num_waves = waves.whole + waves.split
    send_last(warp, warp.out, last, num_waves, num_waves > 1, peers, 1, WORLD_SIZE, TILE)
    wait_stores_arrived()
    NUM_FLAGS: gl.constexpr = flags.ROW_CHUNKS * flags.K_CHUNKS
    if (waves.total_tiles == 0) & (gl.program_id(0) == 0):  # no columns: its gathered A must be whole all the same
        for distance in gl.static_range(1, WORLD_SIZE):
            owner = (peers.rank + distance) % WORLD_SIZE
            for flag in gl.static_range(NUM_FLAGS if flags.K_CHUNKS == 1 or distance == WORLD_SIZE - 1 else 1):
                wait(flags.flags_ptr + owner * NUM_FLAGS + flag, 1, peers.watchdog_ptr)
    finish_and_clear(peers, epoch, gl.num_programs(0), flags.flags_ptr, WORLD_SIZE * NUM_FLAGS, WORLD_SIZE)


@gluon.jit
def await_row_chunk(flags, work, split, arrived, peers, TILE: gl.constexpr):
    """Wait until the row chunk of a tile has come, or leave that to the loads from its k chunks: a gate of load_tiles.

    `arrived` counts the row chunks that have come, in the order in which they are used.
    """
    row_chunk = work.row // flags.chunk_rows
    steps_a_flag = flags.chunk_steps * flags.K_CHUNKS
    if flags.K_CHUNKS > 1:
        is_cut = work.turn == TILE.WORLD_SIZE - 1
        row_chunk = gl.where(is_cut, row_chunk, 0)
        steps_a_flag = gl.where(is_cut, flags.chunk_steps, steps_a_flag)
    needed = work.turn * flags.ROW_CHUNKS + row_chunk + 1
    flag_ptr = flags.flags_ptr + (work.owner * flags.ROW_CHUNKS + row_chunk) * flags.K_CHUNKS
    is_open = needed <= arrived
    if flags.K_CHUNKS > 1:
        arrived = gl.where(split.splits == 1, needed, arrived)  # of a split tile only these k steps are awaited
        return LoadGate(flag_ptr, 1, steps_a_flag, split.start, is_open, peers.watchdog_ptr), arrived
    else:
        if needed > arrived:
            wait(flag_ptr, 1, peers.watchdog_ptr)
            fence_before_descriptor_loads()
            arrived = needed
        return LoadGate(flag_ptr, 1, steps_a_flag, split.start, True, peers.watchdog_ptr), arrived


def plan(problem: AllGatherGemmProblem, device: Device) -> GemmConfig:
    """Return the tiling, chunks and order of tiles that are predicted to be fastest.

    With every SM, or all but one where the kernel leaves one to others: the plan does not know of `keep_gathered`.
    """
    rows = problem.a_shape(0)[0]
    columns, programs = problem.b_shape(0)[1], num_programs(device.num_sms, device, has_barrier=False)
    k, promotion = hopper.k_of_costs(problem), hopper.promotion_of(problem)  # fp8 as half as many elements of two bytes
    found = Gathering(rows, columns, k, problem.world_size, 2, programs, promotion).fastest(hopper.widest(problem))
    config = hopper.wide_enough(problem, hopper.config_of(problem, found.tiling, device))
    return replace(config, row_chunks=found.row_chunks, k_chunks=found.k_chunks, group_m=found.group)


def _chunks(call: GatherCall) -> ShardChunks:
    return shard_chunks(call, call.config.row_chunks, call.config.k_chunks)


def workspace(call: GatherCall) -> dict[str, Buffer]:
    """Return the buffers of the gathered A, of C, of the chunks' flags, and of split tiles."""
    has_barrier = begins_with_barrier(call)
    programs = num_programs(call.config.num_sms, call.device, has_barrier=has_barrier)
    return {
        "gathered": gathered_buffer(call),
        **host.scale_buffer(call, call.problem.m),
        **output_buffer(call),
        **flags_buffer(call, _chunks(call)),
        **hopper.split_buffers(call, programs, sizes_of(call), call.world_size),
    }


def launch(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the copies, and beside them the kernel."""
    a, b = prepare(call, a, b)
    chunks = _chunks(call)
    arguments = {
        **hopper.operands(call, a if a.shape[0] else host.gathered(call), b, own_first),
        "gathered": gathered_descriptor(call),
        "out": hopper.subtiles_of(call, call.memory["output"]),
        "workspace": hopper.split_workspace(call),
        "sizes": sizes_of(call),
        "chunk_rows": chunks.chunk_rows,
        "chunk_steps": chunks.chunk_steps,
        "epilogue": call.epilogue(),
        "scales": hopper.scales_of(call, host.gathered(call), b, host.gathered_scale(call)),
        "own_scales": hopper.scales_of(call, a, b),
        "K_CHUNKS": chunks.k_chunks,
    }
    kernel = all_gather_gemm_copy_engine_sm90
    queue(call, a, chunks, kernel, arguments, hopper.num_warps(call.config))


VARIANT = host.implementation(
    "copy_engine",
    plan,
    workspace,
    launch,
    outputs,
    supports=hopper.supports,
    can_describe=hopper.can_describe,
    mainloop=Mainloop.SM90,
    predict=prediction.copy_engine_sm90,
    place=(Arrangement.KERNEL_AND_COPIES, Agent.COPY_ENGINES, Sync.SHARD_FLAG),
    summary="the copy engines push the shard; a warp of each program waits for shards, loads and stores (Hopper)",
    former_name="warp_specialized_copies",
)
