"""All-gather + GEMM in one kernel whose warps have different roles (Gluon, for Hopper).

| warps of a program | do | wait for |
|---|---|---|
| 8, two warp groups | multiply tiles, and stage each in shared memory | full stages; the epilogue store to be empty |
| 1 | loads operands, meanwhile stores the tile before | empty stages; chunks of the peers' shards; the staged tile |
| 1, of the comm programs | sends tiles of this rank's shard to every peer (comm_programs.py) | the peers' readiness |
| 1, of the comm programs | counts what was sent at the peers (../common/hopper/signal_pipeline.py) | its arrival |

The first programs are comm programs, which multiply nothing.

The own shard comes first, read where the caller has it; then a row chunk of each peer's shard, and so on. A tile of
a peer's rows is multiplied as its k chunks come, so where the link is slower than the multiplication, only
the last chunk's part of a tile is left when the last byte has come. The kernel is launched early
(../common/hopper/roles.py). Pattern: arXiv 2511.12500, section 4, which names "wave specialization" and leaves it
unbuilt.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris_core import gdc_launch_dependents, gdc_wait
from overlap_taxonomy import Agent, Arrangement, Mainloop, Sync

from ...common.call import Device
from ...common.config import GemmConfig
from ...common.device.handshake import begin_call, finish_after_counts
from ...common.device.tile_scheduler import num_tiles, tile_origin
from ...common.hopper import host as hopper
from ...common.hopper.arguments import PendingStore, PlacedEpilogue, Sizes
from ...common.hopper.epilogue_store import (
    load_and_send,
    load_prologue,
    make_epilogue_store,
    send_last,
    wait_stores_arrived,
)
from ...common.hopper.pipeline import make_operand_pipeline, make_pipeline, with_gate
from ...common.hopper.roles import first_role, multiply_second, multiply_tiles, worker_registers, worker_warps
from ...common.launch.launch_metadata import Arguments, launch_metadata, peers_of
from ...common.portable.operands import padded
from ...common.variants import variant_of
from ...common.workspace import Buffer, flags_by_source
from .. import host, prediction
from ..host import GatherCall
from ..problem import AllGatherGemmProblem
from .comm_programs import ShardChunks, load_gate, send_shard, signal_chunks, wait_all_chunks

_COMM_SMS = 16  # programs that send, of 132
# A chunk is counted and awaited at once: a shard's bytes over so many, within bounds.
_CHUNKS = 32
_CHUNK_BYTES = (1 << 19, 1 << 22)
_SMALL_SHARD_BYTES = 16 << 20


def product_of_shards(args: Arguments) -> tuple[int, int, int]:
    """Return the product of the gathered A with this rank's columns."""
    return args["gathered"].shape[0], args["sizes"].n, args["sizes"].k


def _sent(args: Arguments) -> int:
    return args["shard"].rows * args["shard"].k * peers_of(args)


@gluon.jit(launch_metadata=launch_metadata(product=product_of_shards, moved=_sent))
def all_gather_gemm_workgroup_specialized_sm90(
    a,
    gathered,
    b,
    out,
    everywhere,
    shard,
    sizes,
    row_chunk,
    epilogue,
    peers,
    WORLD_SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Multiply shards as they come; `sizes`: of the largest shard's rows of C, `row_chunk`: of a row chunk's."""
    pipeline = make_operand_pipeline(a, b, TILE)
    place = (sizes, row_chunk, shard.comm_programs, peers.rank, WORLD_SIZE)
    store = make_epilogue_store(out, TILE)
    placed = PlacedEpilogue(epilogue, place)
    signals = make_pipeline(1)
    gdc_wait()
    epoch = begin_call(peers, WORLD_SIZE)
    own_tiles = num_tiles(sizes, TILE)
    row_chunk_tiles = num_tiles(row_chunk, TILE)
    total_tiles = own_tiles + row_chunk_tiles * (shard.chunks // shard.k_chunks) * (WORLD_SIZE - 1)
    first = gl.program_id(0) - shard.comm_programs  # of the programs that multiply
    waves = gl.where(
        first < 0, 0, gl.cdiv(gl.maximum(total_tiles - first, 0), gl.num_programs(0) - shard.comm_programs)
    )
    num_steps = gl.cdiv(sizes.k, TILE.BLOCK_K)
    gl.warp_specialize(
        [
            (multiply_second, (pipeline, store, placed, waves, num_steps, TILE)),
            (multiply_tiles, (pipeline, store, placed, None, total_tiles, waves, 0, num_steps, peers, epoch, TILE)),
            (
                _load_shards_and_store,
                (
                    a,
                    gathered,
                    b,
                    out,
                    pipeline,
                    store,
                    waves,
                    own_tiles,
                    row_chunk_tiles,
                    num_steps,
                    shard,
                    sizes,
                    row_chunk,
                    peers,
                    epoch,
                    WORLD_SIZE,
                    TILE,
                ),
            ),
            (send_shard, (a, everywhere, pipeline, signals, shard, peers, epoch, WORLD_SIZE, TILE)),
            (signal_chunks, (signals, shard, peers, epoch, WORLD_SIZE)),
        ][first_role(TILE.PINGPONG) :],
        worker_warps(3, TILE.PINGPONG),
        worker_registers(3, TILE.PINGPONG),
    )


@gluon.jit
def _tile_of_wave(wave, comm_programs):
    """Return which tile a program that multiplies has, in the order of all."""
    return gl.program_id(0) - comm_programs + wave * (gl.num_programs(0) - comm_programs)


@gluon.jit
def _peers_tile(index, row_chunk_tiles, row_chunk, rank, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    """Return the row chunk of a tile of the peers', in the order of their use, its owner, and its origin there."""
    PEERS: gl.constexpr = max(WORLD_SIZE - 1, 1)
    chunk = index // row_chunk_tiles
    owner = (rank + 1 + chunk % PEERS) % WORLD_SIZE
    row, col = tile_origin(index % row_chunk_tiles, row_chunk, TILE)
    row += chunk // PEERS * row_chunk.m
    return chunk, owner, row, col


@gluon.jit
def _origin(wave, place, TILE: gl.constexpr):
    sizes, row_chunk, comm_programs, rank, WORLD_SIZE = place
    tile, own_tiles = _tile_of_wave(wave, comm_programs), num_tiles(sizes, TILE)
    owner = rank
    if tile < own_tiles:
        row, col = tile_origin(tile, sizes, TILE)
    else:
        row_chunk_tiles = num_tiles(row_chunk, TILE)
        _, owner, row, col = _peers_tile(tile - own_tiles, row_chunk_tiles, row_chunk, rank, WORLD_SIZE, TILE)
    return owner * sizes.m + row, col


@gluon.jit
def _load_shards_and_store(
    a,
    gathered,
    b,
    out,
    pipeline,
    store,
    waves,
    own_tiles,
    row_chunk_tiles,
    num_steps,
    shard,
    sizes,
    row_chunk,
    peers,
    epoch,
    WORLD_SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    PEERS: gl.constexpr = max(WORLD_SIZE - 1, 1)
    step = 0
    owner = 0
    row = 0
    col = 0
    opened = 0  # row chunks of the peers' shards, in the order of their use, that have come
    for wave in range(waves):
        pending = PendingStore(owner, row, col, 0, TILE.SUBTILES, peers.trace_ptr)
        tile = _tile_of_wave(wave, shard.comm_programs)
        if tile < own_tiles:
            owner = peers.rank
            row, col = tile_origin(tile, sizes, TILE)
            here = with_gate(pipeline, load_gate(shard, peers, owner, 0, True, TILE))
            step, start = load_prologue(a, b, here, step, row, col, 0, num_steps, store, wave > 1, TILE)
            step = load_and_send(
                a, b, here, step, row, col, start, num_steps, out, store, pending, wave, 1, WORLD_SIZE, TILE
            )
        else:
            index, owner, row, col = _peers_tile(
                tile - own_tiles, row_chunk_tiles, row_chunk, peers.rank, WORLD_SIZE, TILE
            )
            coming = with_gate(pipeline, load_gate(shard, peers, owner, index // PEERS, index < opened, TILE))
            a_row = owner * sizes.m + row
            step, start = load_prologue(gathered, b, coming, step, a_row, col, 0, num_steps, store, wave > 1, TILE)
            step = load_and_send(
                gathered, b, coming, step, a_row, col, start, num_steps, out, store, pending, wave, 1, WORLD_SIZE, TILE
            )
            opened = index + 1
    gdc_launch_dependents()  # the last operands have been asked for; a program without tiles needs none
    send_last(
        out,
        store,
        PendingStore(owner, row, col, 0, TILE.SUBTILES, peers.trace_ptr),
        waves,
        waves > 1,
        1,
        WORLD_SIZE,
        TILE,
    )
    wait_stores_arrived()
    if (own_tiles == 0) & (gl.program_id(0) == 0):  # a rank without columns: its gathered A must be whole all the same
        wait_all_chunks(shard, peers, WORLD_SIZE)
    finish_after_counts(peers, epoch, gl.num_programs(0), shard.counts_ptr, WORLD_SIZE * shard.chunks, WORLD_SIZE)


def output_buffer(call: GatherCall) -> dict[str, Buffer]:
    """Return the buffer of C: the rows of each shard are a matrix of their own, where TMA stops at its end."""
    problem = call.problem
    columns = max(1, padded(problem.c_shape(call.rank)[1], problem.dtype))
    return {"output": Buffer((problem.world_size, problem.a_shape(0)[0], columns), problem.dtype)}


def outputs(call: GatherCall) -> tuple[torch.Tensor, ...]:
    """Return C, and A if it is kept."""
    m, n = call.problem.c_shape(call.rank)
    return host.with_gathered(call, call.memory["output"].flatten(0, 1)[:m, :n])


def sizes_of(call: GatherCall) -> Sizes:
    """Return the sizes of a shard's product."""
    problem = call.problem
    return Sizes(problem.a_shape(0)[0], problem.b_shape(call.rank)[1], problem.k)


def gathered_descriptor(call: GatherCall) -> TensorDescriptor:
    """Return the descriptor of the gathered A."""
    return hopper.descriptor(host.gathered(call), (call.config.block_m, call.config.block_k))


def supports(problem: AllGatherGemmProblem, config: GemmConfig | None) -> str | None:
    """Return why this variant cannot do a problem here, or None."""
    return hopper.supports(problem, config, config_reason_of=_config_reason)


def _config_reason(problem: AllGatherGemmProblem, config: GemmConfig) -> str | None:
    return f"splits is {config.splits}; this variant splits no tiles" if config.splits > 1 else None


def plan(problem: AllGatherGemmProblem, device: Device) -> GemmConfig:
    """Return the tiling that is predicted to be fastest, but narrow tiles, and comm programs by the shard's size."""
    # Narrow tiles end sooner after the last chunk: 8192x4096x14336 over 4 H200s takes 553 us, with 256 columns 600.
    # Half the comm programs, and row chunks twice as large, take 109 us in place of 132 for 4096x4096x4096.
    k, n = problem.b_shape(0)
    config = hopper.plan(problem.m, n, k, device, peers=0, shards=problem.world_size)
    config = hopper.wide_enough(problem, config)
    if problem.world_size == 1:
        return config
    if config.block_n == 256:
        config = hopper.with_columns(config, 128)
    shard_bytes = problem.wire_bytes // (problem.world_size - 1)
    is_small = shard_bytes < _SMALL_SHARD_BYTES
    return replace(config, row_chunks=2, comm_sms=8) if is_small else replace(config, row_chunks=4, comm_sms=_COMM_SMS)


def chunks_of_shards(call: GatherCall) -> ShardChunks:
    """Return how the shards are cut into row chunks and k chunks; the same on all ranks."""
    problem, config = call.problem, call.config
    itemsize, rows = problem.dtype.itemsize, problem.a_shape(0)[0]
    row_tiles = -(-rows // config.block_m)
    row_chunks = fewest_empty(row_tiles, config.row_chunks)
    chunk_rows = -(-row_tiles // row_chunks) * config.block_m
    least, most = _CHUNK_BYTES
    chunk_bytes = max(least, min(rows * problem.k * itemsize // _CHUNKS, most))
    steps = max(1, chunk_bytes // (chunk_rows * itemsize) // config.block_k)
    steps = min(steps, -(-problem.k // config.block_k))
    k_chunks = -(-problem.k // (steps * config.block_k))
    return ShardChunks(
        None,
        rows=problem.a_shape(call.rank)[0],
        k=problem.k,
        chunk_rows=chunk_rows,
        chunk_columns=steps * config.block_k,
        k_chunks=k_chunks,
        chunks=row_chunks * k_chunks,
        chunk_tiles=chunk_rows // config.block_m * steps,
        comm_programs=config.comm_sms if problem.world_size > 1 else 0,
    )


def workspace(call: GatherCall) -> dict[str, Buffer]:
    """Return the buffers of the gathered A, of C, and of the chunks' counts."""
    counts = flags_by_source(
        call.world_size, chunks_of_shards(call).chunks, "tiles of chunk", "shard", are_numbered=False
    )
    return {"gathered": host.gathered_buffer(call, call.problem.m), **output_buffer(call), "counts": counts}


def launch(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queue the kernel."""
    config, sizes = call.config, sizes_of(call)
    a, b = host.prepare(call, a, b)
    shard = chunks_of_shards(call)._replace(counts_ptr=call.memory["counts"])
    # Where this rank has no rows, nothing is sent, but a descriptor needs some.
    own = host.own_rows(call) if shard.rows else slice(0, 1)
    everywhere = call.peer_view(host.gathered(call))[:, own]
    call.run(
        all_gather_gemm_workgroup_specialized_sm90,
        config.num_sms,
        num_warps=hopper.num_warps(config),
        early=True,
        **hopper.operands(call, a if a.shape[0] else host.gathered(call), b, _origin, are_gated=True),
        gathered=gathered_descriptor(call),
        out=hopper.subtiles_of(call, call.memory["output"]),
        everywhere=hopper.descriptor(everywhere, (1, config.block_m, config.block_k)),
        shard=shard,
        sizes=sizes,
        row_chunk=sizes._replace(m=shard.chunk_rows),
        epilogue=call.epilogue(),
        peers=call.peers(),
        WORLD_SIZE=call.world_size,
    )
    return outputs(call)


def fewest_empty(row_tiles: int, most: int) -> int:
    """Return into how many chunks, `most` at most, rows of tiles are cut: many, yet one in ten at most is empty."""
    counts = range(1, min(row_tiles, most) + 1)
    return max(count for count in counts if -(-row_tiles // count) * count <= 1.1 * row_tiles)


VARIANT = variant_of(
    host.implementation(
        "workgroup_specialized",
        plan,
        workspace,
        launch,
        outputs,
        supports=supports,
        can_describe=hopper.can_describe,
        mainloop=Mainloop.SM90,
        predict=partial(prediction.workgroup_specialized_sm90, comm_share=_COMM_SMS / 132),
    ),
    arrangement=Arrangement.FUSED_KERNEL,
    agent=Agent.COMM_PROGRAMS,
    sync=Sync.SHARD_COUNTER,
    summary="one kernel; some programs send the shard by TMA; of the others a warp loads what has come (Hopper)",
    former_name="warp_specialized",
)
