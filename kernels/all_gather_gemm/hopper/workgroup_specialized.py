"""All-gather + GEMM in one kernel whose warps have different roles (Gluon, for Hopper).

| warps of a program | do | wait for |
|---|---|---|
| 8, two warp groups | multiply tiles, and stage each in shared memory | full stages; the epilogue store to be empty |
| 1 | loads operands, meanwhile stores the tile before | empty stages; chunks of the peers' shards; the staged tile |
| 1, of the comm programs | sends tiles of this rank's shard to every peer (comm_programs.py) | the peers' readiness |
| 1, of the comm programs | counts what was sent at the peers (../common/hopper/pipeline.py) | its arrival |

The first programs are comm programs, which multiply nothing.

The own shard comes first, read where the caller has it; then a row chunk of each peer's shard, and so on. A tile of
a peer's rows is multiplied as its k chunks come, so where the link is slower than the multiplication, only
the last chunk's part of a tile is left when the last byte has come. The kernel is launched early
(../common/hopper/roles.py). Pattern: arXiv 2511.12500, section 4, "workgroup specialization".
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris_core import gdc_launch_dependents, gdc_wait
from iris_core.device.cache_key import in_cache_key
from overlap_taxonomy import Agent, Arrangement, Mainloop, Sync

from ...common.call import Device
from ...common.config import GemmConfig
from ...common.device.handshake import begin_call, finish_after_counts
from ...common.device.tile_scheduler import WorkTile, num_tiles, tile_origin
from ...common.hopper import host as hopper
from ...common.hopper.arguments import LoadWarp, Sizes, TileStaging
from ...common.hopper.epilogue_store import make_epilogue_store, send_last, wait_stores_arrived
from ...common.hopper.pipeline import make_operand_pipeline, make_pipeline
from ...common.hopper.roles import first_role, worker_registers, worker_warps
from ...common.hopper.tile_loop import load_tiles, multiply_second, multiply_tiles, send_to_owner
from ...common.hopper.waves import make_waves
from ...common.launch.launch_metadata import Arguments, launch_metadata, peers_of
from ...common.portable.operands import padded
from ...common.workspace import Buffer, flags_by_source
from .. import host, prediction
from ..host import GatherCall
from ..problem import AllGatherGemmProblem
from .comm_programs import SentShard, await_k_chunks, send_shard, signal_chunks, wait_all_shards

_COMM_PROGRAMS = 16  # that send, of 132
_COMM_PROGRAMS_SMALL = 8  # the same where the shard is small
# A chunk is counted and awaited at once: a shard's bytes over so many, within bounds.
_CHUNKS = 32
_CHUNK_BYTES = (1 << 19, 1 << 22)
_SMALL_SHARD_BYTES = 16 << 20


def product_of_shards(args: Arguments) -> tuple[int, int, int]:
    """Return the product of the gathered A with this rank's columns."""
    return args["gathered"].base.shape[0], args["sizes"].n, args["sizes"].k


def _sent(args: Arguments) -> int:
    return args["shard"].rows * args["shard"].k * peers_of(args)


@in_cache_key
class ChunkedShards(NamedTuple):
    """The sizes of the largest shard's rows of C, and of a row chunk's."""

    sizes: Any
    row_chunk: Any


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
    scales,
    own_scales,
    sent_scales,
    peers,
    TILE: gl.constexpr,
):
    """Multiply shards as they come; `sizes`: of the largest shard's rows of C, `row_chunk`: of a row chunk's."""
    pipeline = make_operand_pipeline(a, b, TILE)
    store = make_epilogue_store(out, TILE)
    signals = make_pipeline(1)
    gdc_wait()
    epoch = begin_call(peers, TILE.WORLD_SIZE)
    shards = ChunkedShards(sizes, row_chunk)
    peers_tiles = num_tiles(row_chunk, TILE) * (shard.chunks // shard.k_chunks) * (TILE.WORLD_SIZE - 1)
    total_tiles = num_tiles(sizes, TILE) + peers_tiles
    waves = make_waves(total_tiles, gl.cdiv(sizes.k, TILE.BLOCK_K), TILE, shard.comm_programs)
    staging = TileStaging(store, None, epilogue, shards, scales, own_scales)
    warp = LoadWarp(pipeline, store, out)
    gl.warp_specialize(
        [
            (multiply_second, (pipeline, staging, waves, peers, TILE)),
            (multiply_tiles, (pipeline, staging, waves, None, peers, epoch, TILE)),
            (_load_shards_and_store, (a, gathered, b, warp, waves, shards, shard, peers, epoch, TILE)),
            (send_shard, (a, everywhere, pipeline, signals, shard, sent_scales, peers, epoch, TILE)),
            (signal_chunks, (signals, shard, peers, epoch, TILE)),
        ][first_role(TILE.PINGPONG) :],
        worker_warps(3, TILE.PINGPONG),
        worker_registers(3, TILE.PINGPONG),
    )


@gluon.jit
def own_then_row_chunks(index, shards, rank, TILE: gl.constexpr):
    """Return the work tile of an index in the order of this rank's shard, then a row chunk of each peer's, and so on.

    `turn` counts the row chunks of the peers' shards before it.
    """
    PEERS: gl.constexpr = max(TILE.WORLD_SIZE - 1, 1)
    sizes = shards.sizes
    own_tiles = num_tiles(sizes, TILE)
    if index < own_tiles:
        owner = rank
        turn = index * 0
        row, col = tile_origin(index, sizes, TILE)
    else:
        tiles = num_tiles(shards.row_chunk, TILE)
        turn = (index - own_tiles) // tiles
        owner = (rank + 1 + turn % PEERS) % TILE.WORLD_SIZE
        row, col = tile_origin((index - own_tiles) % tiles, shards.row_chunk, TILE)
        row += turn // PEERS * shards.row_chunk.m
    return WorkTile(index, index, turn, owner, owner * sizes.m, row, col, owner * sizes.m + row, col, sizes.m, sizes.n)


@gluon.jit
def _load_shards_and_store(a, gathered, b, warp, waves, shards, shard, peers, epoch, TILE: gl.constexpr):
    last, _ = load_tiles(
        *(a, b, warp, waves, shards, (), peers, epoch, send_to_owner, TILE),
        *(gathered, shard, await_k_chunks),
    )
    gdc_launch_dependents()  # the last operands have been asked for; a program without tiles needs none
    send_last(warp, warp.out, last, waves.whole, waves.whole > 1, peers, 1, TILE.WORLD_SIZE, TILE)
    wait_stores_arrived()
    if (num_tiles(shards.sizes, TILE) == 0) & (
        gl.program_id(0) == 0
    ):  # a rank without columns: its gathered A must be whole all the same
        wait_all_shards(shard, peers, TILE)
    finish_after_counts(
        peers, epoch, gl.num_programs(0), shard.counts_ptr, TILE.WORLD_SIZE * shard.chunks, TILE.WORLD_SIZE
    )


def output_buffer(call: GatherCall) -> dict[str, Buffer]:
    """Return the buffer of C: the rows of each shard are a matrix of their own, where TMA stops at its end."""
    problem = call.problem
    columns = max(1, padded(problem.c_shape(call.rank)[1], problem.out_dtype))
    return {"output": Buffer((problem.world_size, problem.a_shape(0)[0], columns), problem.out_dtype)}


def outputs(call: GatherCall) -> tuple[torch.Tensor, ...]:
    """Return C, and A if it is kept."""
    m, n = call.problem.c_shape(call.rank)
    return host.with_gathered(call, call.memory["output"].flatten(0, 1)[:m, :n])


def sizes_of(call: GatherCall) -> Sizes:
    """Return the sizes of a shard's product."""
    problem = call.problem
    return Sizes(problem.a_shape(0)[0], problem.b_shape(call.rank)[1], problem.k)


def gathered_buffer(call: GatherCall) -> Buffer:
    """Return the buffer of the gathered A, and of rows behind it up to a whole tile: tiles are loaded whole."""
    return host.gathered_buffer(call, _rows_of_tiles(call))


def gathered_descriptor(call: GatherCall) -> TensorDescriptor:
    """Return the descriptor of these, whose base is the gathered A."""
    described = hopper.descriptor(host.gathered(call), (call.config.block_m, call.config.block_k))
    return replace(described, shape=[_rows_of_tiles(call), call.problem.k])


def _rows_of_tiles(call: GatherCall) -> int:
    return -(-call.problem.m // call.config.block_m) * call.config.block_m


def plan(problem: AllGatherGemmProblem, device: Device) -> GemmConfig:
    """Return the tiling that is predicted to be fastest, but narrow tiles, and comm programs by the shard's size."""
    # Narrow tiles end sooner after the last chunk: 8192x4096x14336 over 4 H200s takes 553 us, with 256 columns 600.
    # Half the comm programs, and row chunks twice as large, take 109 us in place of 132 for 4096x4096x4096.
    config = hopper.plan(problem, device, peers=0, shards=problem.world_size)
    config = hopper.wide_enough(problem, config)
    if problem.world_size == 1:
        return config
    if config.block_n == 256:
        config = hopper.with_columns(config, 128)
    shard_bytes = problem.wire_bytes // (problem.world_size - 1)
    row_chunks = 2 if shard_bytes < _SMALL_SHARD_BYTES else 4
    return replace(config, row_chunks=row_chunks, comm_sms=num_comm_programs(shard_bytes))


def num_comm_programs(shard_bytes: int) -> int:
    """Return how many programs send a rank's shard of so many bytes."""
    return _COMM_PROGRAMS_SMALL if shard_bytes < _SMALL_SHARD_BYTES else _COMM_PROGRAMS


def chunks_of_shards(call: GatherCall) -> SentShard:
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
    return SentShard(
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
    gathered = {"gathered": gathered_buffer(call), **host.scale_buffer(call, call.problem.m)}
    return {**gathered, **output_buffer(call), "counts": counts}


def launch(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel."""
    sizes = sizes_of(call)
    a, b = host.prepare(call, a, b)
    shard = chunks_of_shards(call)._replace(counts_ptr=call.memory["counts"])
    # Where this rank has no rows, nothing is sent, but a descriptor needs some.
    own = host.own_rows(call) if shard.rows else slice(0, 1)
    everywhere = call.peer_view(host.gathered(call))[:, own]
    hopper.run(
        call,
        all_gather_gemm_workgroup_specialized_sm90,
        a if a.shape[0] else host.gathered(call),
        b,
        own_then_row_chunks,
        gathered=gathered_descriptor(call),
        out=hopper.subtiles_of(call, call.memory["output"]),
        everywhere=hopper.descriptor(everywhere, (1, call.config.block_m, call.config.block_k)),
        shard=shard,
        sizes=sizes,
        row_chunk=sizes._replace(m=shard.chunk_rows),
        scales=hopper.scales_of(call, host.gathered(call), b, host.gathered_scale(call)),
        own_scales=hopper.scales_of(call, a, b),
        sent_scales=host.push_arguments(call, a)["shard"] if call.problem.scales else None,
    )


def fewest_empty(row_tiles: int, most: int) -> int:
    """Return into how many chunks, `most` at most, rows of tiles are cut: many, yet one in ten at most is empty."""
    counts = range(1, min(row_tiles, most) + 1)
    return max(count for count in counts if -(-row_tiles // count) * count <= 1.1 * row_tiles)


VARIANT = host.implementation(
    "workgroup_specialized",
    plan,
    workspace,
    launch,
    outputs,
    supports=partial(hopper.supports, can_split=False),
    can_describe=hopper.can_describe,
    mainloop=Mainloop.SM90,
    predict=partial(prediction.workgroup_specialized_sm90, num_comm_programs=num_comm_programs),
    place=(Arrangement.FUSED_KERNEL, Agent.COMM_PROGRAMS, Sync.SHARD_COUNTER),
    summary="one kernel; some programs send the shard by TMA; of the others a warp loads what has come (Hopper)",
    former_name="warp_specialized",
)
