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
Pattern: arXiv 2511.12500, section 4, which names "wave specialization" and leaves it unbuilt.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core import fence_before_descriptor_loads, wait
from overlap_taxonomy import Agent, Arrangement, Mainloop, Sync

from ...common.call import Device
from ...common.config import GemmConfig
from ...common.device.handshake import current_call, finish_and_clear
from ...common.device.tile_scheduler import Shards, num_tiles, own_first
from ...common.hopper import host as hopper
from ...common.hopper.arguments import LoadGate, PendingStore, PlacedEpilogue
from ...common.hopper.epilogue_store import (
    load_and_send,
    load_prologue,
    make_epilogue_store,
    send_last,
    wait_stores_arrived,
)
from ...common.hopper.pipeline import make_operand_pipeline, with_gate
from ...common.hopper.roles import first_role, multiply_second, multiply_tiles, worker_registers, worker_warps
from ...common.hopper.tile_scheduler import split_waves, whole_waves, work_tile
from ...common.launch.launch_metadata import launch_metadata
from ...common.variants import variant_of
from ...common.workspace import Buffer
from .. import host, prediction
from ..copies import ShardChunks, begins_with_barrier, flags_buffer, num_programs, queue, shard_chunks
from ..host import GatherCall
from ..problem import AllGatherGemmProblem
from ..schedule import Gathering
from .workgroup_specialized import gathered_descriptor, output_buffer, outputs, product_of_shards, sizes_of


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
    peers,
    flags_ptr,
    ROW_CHUNKS: gl.constexpr,
    K_CHUNKS: gl.constexpr,
    WORLD_SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Multiply shards as they come; `sizes` are those of the largest shard's rows of C.

    A row chunk has `chunk_rows`, and each of its K_CHUNKS is for `chunk_steps` steps of a tile.
    """
    epoch = current_call(peers, WORLD_SIZE)
    pipeline = make_operand_pipeline(a, b, TILE)
    store = make_epilogue_store(out, TILE)
    placed = PlacedEpilogue(epilogue, (sizes, peers.rank, WORLD_SIZE))
    total_tiles = num_tiles(sizes, TILE) * WORLD_SIZE
    whole = whole_waves(total_tiles, TILE)
    num_steps = gl.cdiv(sizes.k, TILE.BLOCK_K)
    split = split_waves(total_tiles, whole, num_steps, TILE)
    gl.warp_specialize(
        [
            (multiply_second, (pipeline, store, placed, whole, num_steps, TILE)),
            (
                multiply_tiles,
                (pipeline, store, placed, workspace, total_tiles, whole, split, num_steps, peers, epoch, TILE),
            ),
            (
                _load_shards_and_store,
                (
                    a,
                    gathered,
                    b,
                    out,
                    pipeline,
                    store,
                    whole,
                    split,
                    sizes,
                    chunk_rows,
                    chunk_steps,
                    peers,
                    flags_ptr,
                    epoch,
                    ROW_CHUNKS,
                    K_CHUNKS,
                    WORLD_SIZE,
                    TILE,
                ),
            ),
        ][first_role(TILE.PINGPONG) :],
        worker_warps(1, TILE.PINGPONG),
        worker_registers(1, TILE.PINGPONG),
    )


@gluon.jit
def _origin(wave, place, TILE: gl.constexpr):
    sizes, rank, WORLD_SIZE = place
    total_tiles = num_tiles(sizes, TILE) * WORLD_SIZE
    work = work_tile(wave, total_tiles, whole_waves(total_tiles, TILE), gl.cdiv(sizes.k, TILE.BLOCK_K), TILE)
    tile = _tile_of(work.index, sizes, rank, WORLD_SIZE, TILE)
    return tile.a_row, tile.col


@gluon.jit
def _tile_of(index, sizes, rank, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    shards = Shards(sizes.m, sizes.n, sizes.m * WORLD_SIZE, sizes.m)
    return own_first(index, shards, rank, WORLD_SIZE, TILE)


@gluon.jit
def _load_shards_and_store(
    a,
    gathered,
    b,
    out,
    pipeline,
    store,
    whole,
    split,
    sizes,
    chunk_rows,
    chunk_steps,
    peers,
    flags_ptr,
    epoch,
    ROW_CHUNKS: gl.constexpr,
    K_CHUNKS: gl.constexpr,
    WORLD_SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    tiles = num_tiles(sizes, TILE)
    num_steps = gl.cdiv(sizes.k, TILE.BLOCK_K)
    waves = whole + split
    step = 0
    owner = 0
    row = 0
    col = 0
    subtile = 0
    num_subtiles = 0
    arrived = ROW_CHUNKS  # in the order in which they are used; the own shard's are there
    for wave in range(waves):
        pending = PendingStore(owner, row, col, subtile, num_subtiles, peers.trace_ptr)
        work = work_tile(wave, tiles * WORLD_SIZE, whole, num_steps, TILE)
        tile = _tile_of(work.index, sizes, peers.rank, WORLD_SIZE, TILE)
        start = work.start
        stop = work.stop
        subtile = work.subtile
        num_subtiles = work.num_subtiles
        owner = tile.owner
        row = tile.row
        col = tile.col
        if owner == peers.rank:
            here = pipeline
            if K_CHUNKS > 1:
                here = with_gate(pipeline, LoadGate(flags_ptr, 1, num_steps, start, True, peers.watchdog_ptr))
            step, start = load_prologue(a, b, here, step, row, col, start, stop, store, wave > 1, TILE)
            step = load_and_send(
                a, b, here, step, row, col, start, stop, out, store, pending, wave, 1, WORLD_SIZE, TILE
            )
        else:
            row_chunk = row // chunk_rows
            steps_a_flag = num_steps
            if K_CHUNKS > 1:
                is_cut = tile.turn == WORLD_SIZE - 1
                row_chunk = gl.where(is_cut, row_chunk, 0)
                steps_a_flag = gl.where(is_cut, chunk_steps, num_steps)
            needed = tile.turn * ROW_CHUNKS + row_chunk + 1
            flag_ptr = flags_ptr + (owner * ROW_CHUNKS + row_chunk) * K_CHUNKS
            coming = pipeline
            if K_CHUNKS > 1:
                coming = with_gate(
                    pipeline, LoadGate(flag_ptr, 1, steps_a_flag, start, needed <= arrived, peers.watchdog_ptr)
                )
                arrived = gl.where(work.splits == 1, needed, arrived)  # of a split tile only these k steps are awaited
            elif needed > arrived:
                wait(flag_ptr, 1, peers.watchdog_ptr)
                fence_before_descriptor_loads()
                arrived = needed
            step, start = load_prologue(gathered, b, coming, step, tile.a_row, col, start, stop, store, wave > 1, TILE)
            step = load_and_send(
                gathered, b, coming, step, tile.a_row, col, start, stop, out, store, pending, wave, 1, WORLD_SIZE, TILE
            )
    pending = PendingStore(owner, row, col, subtile, num_subtiles, peers.trace_ptr)
    send_last(out, store, pending, waves, waves > 1, 1, WORLD_SIZE, TILE)
    wait_stores_arrived()
    if (tiles == 0) & (gl.program_id(0) == 0):  # a rank without columns: its gathered A must be whole all the same
        for distance in gl.static_range(1, WORLD_SIZE):
            owner = (peers.rank + distance) % WORLD_SIZE
            for flag in gl.static_range(ROW_CHUNKS * K_CHUNKS if K_CHUNKS == 1 or distance == WORLD_SIZE - 1 else 1):
                wait(flags_ptr + owner * ROW_CHUNKS * K_CHUNKS + flag, 1, peers.watchdog_ptr)
    finish_and_clear(peers, epoch, gl.num_programs(0), flags_ptr, WORLD_SIZE * ROW_CHUNKS * K_CHUNKS, WORLD_SIZE)


def plan(problem: AllGatherGemmProblem, device: Device) -> GemmConfig:
    """Return the tiling, chunks and order of tiles that are predicted to be fastest.

    With every SM, or all but one where the kernel leaves one to others: the plan does not know of `keep_gathered`.
    """
    rows, k = problem.a_shape(0)
    columns, itemsize = problem.b_shape(0)[1], problem.dtype.itemsize
    programs = num_programs(device.num_sms, device, has_barrier=False)
    found = Gathering(rows, columns, k, problem.world_size, itemsize, programs).fastest()
    config = hopper.wide_enough(problem, hopper.config_of(found.tiling, device))
    return replace(config, row_chunks=found.row_chunks, k_chunks=found.k_chunks, group_m=found.group)


def _chunks(call: GatherCall) -> ShardChunks:
    return shard_chunks(call, call.config.row_chunks, call.config.k_chunks)


def workspace(call: GatherCall) -> dict[str, Buffer]:
    """Return the buffers of the gathered A, of C, of the chunks' flags, and of split tiles."""
    has_barrier = begins_with_barrier(call)
    programs = num_programs(call.config.num_sms, call.device, has_barrier=has_barrier)
    return {
        "gathered": host.gathered_buffer(call, call.problem.m),
        **output_buffer(call),
        **flags_buffer(call, _chunks(call)),
        **hopper.split_buffers(call, programs, sizes_of(call), call.world_size),
    }


def launch(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queue the copies, and beside them the kernel."""
    a, b = host.prepare(call, a, b)
    chunks = _chunks(call)
    are_gated = chunks.k_chunks > 1
    arguments = {
        **hopper.operands(call, a if a.shape[0] else host.gathered(call), b, _origin, are_gated=are_gated),
        "gathered": gathered_descriptor(call),
        "out": hopper.subtiles_of(call, call.memory["output"]),
        "workspace": hopper.split_workspace(call),
        "sizes": sizes_of(call),
        "chunk_rows": chunks.chunk_rows,
        "chunk_steps": chunks.chunk_steps,
        "epilogue": call.epilogue(),
        "K_CHUNKS": chunks.k_chunks,
    }
    kernel = all_gather_gemm_copy_engine_sm90
    queue(call, a, chunks, kernel, arguments, hopper.num_warps(call.config))
    return outputs(call)


VARIANT = variant_of(
    host.implementation(
        "copy_engine",
        plan,
        workspace,
        launch,
        outputs,
        supports=hopper.supports,
        can_describe=hopper.can_describe,
        mainloop=Mainloop.SM90,
        predict=partial(prediction.copy_engine, kind="specialized"),
    ),
    arrangement=Arrangement.KERNEL_AND_COPIES,
    agent=Agent.COPY_ENGINES,
    sync=Sync.SHARD_FLAG,
    summary="the copy engines push the shard; a warp of each program waits for shards, loads and stores (Hopper)",
    former_name="warp_specialized_copies",
)
