"""GEMM + reduce-scatter with the copy engines: they send chunks of partial tiles to their owners as they are complete.

| queue | work |
|---|---|
| current stream | compute the peers' shards, counting tiles · compute the own shard and add the peers' partials |
| copy stream¹ | for each chunk of the peers' shards: wait for its tiles · copy it · count it at its owner |

¹ one per peer where each is behind a link of its own

A chunk is GROUP_M rows of tiles, computed one chunk after the other; with FULLY_CONNECTED one of each peer's side by
side. Its owner's tiles of the same rows wait for it alone, so the sum starts before the last chunk has come.

The GEMM counts a program's first tile only when all peers are ready, so no copy starts early. Tile counts are this
rank's alone and cleared after the copy: the stream's waits compare with constants, as a captured graph must. The sum
leaves one SM to the kernels on the copy stream, which its peers wait for: its own programs can fill a whole SM's
registers (seen: every rank's sum waiting for signals whose kernels had no SM to run on).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from iris_core.backends.base import Stream
from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.call import Device
from ...common.config import LEAST_CHUNK_BYTES, GemmConfig, programs_beside_another
from ...common.device.handshake import begin_call, count_of_chunk, current_call, finish_after_arrivals, signal_chunk
from ...common.device.tile_scheduler import num_tiles, own_last, peers_first
from ...common.portable.partials import COMPUTES_FOR_PEERS, SUMS, Sums, own_partials, shards_of, sum_tile
from ...common.portable.tile_loop import compute_tiles, keep_and_count
from ...common.variants.implementation import Implementation, default_plan
from ...common.workspace import Buffer, local_flags
from .. import host, prediction
from ..host import FAMILY, KEPT, ReduceCall
from ..problem import GemmReduceScatterProblem


@triton.jit(launch_metadata=COMPUTES_FOR_PEERS)
def gemm_reduce_scatter_copy_engine(a, b, gemm, staging, peers, counts_ptr, TILE: tl.constexpr):
    """Compute the partial tiles of the peers' shards and count them."""
    epoch = begin_call(peers, TILE.WORLD_SIZE)
    pid = tl.program_id(0)
    shards = shards_of(staging)
    sent = (pid, tl.num_programs(0), num_tiles(shards, TILE) * (TILE.WORLD_SIZE - 1))
    chunks = tl.cdiv(staging.shard_rows, TILE.BLOCK_M * TILE.GROUP_M)
    target = (own_partials(staging), counts_ptr, chunks, pid)
    compute_tiles(sent, a, b, gemm, shards, target, peers, epoch, peers_first, keep_and_count, TILE)


@triton.jit
def gemm_reduce_scatter_copy_engine_signal(peers, owner, count_ptr, num_chunks, is_last, WORLD_SIZE: tl.constexpr):
    """After a copy: count the chunk at its owner and clear its tile count."""
    tl.store(count_ptr, 0)
    signal_chunk(peers, owner, count_of_chunk(is_last == 1, num_chunks), WORLD_SIZE)


@triton.jit(launch_metadata=SUMS)
def gemm_reduce_scatter_copy_engine_sum(a, b, gemm, out, staging, peers, CHUNKS: tl.constexpr, TILE: tl.constexpr):
    """Compute the own shard and add the peers' partials."""
    epoch = current_call(peers, TILE.WORLD_SIZE)
    shards = shards_of(staging)
    own = (tl.program_id(0), tl.num_programs(0), num_tiles(shards, TILE))
    compute_tiles(own, a, b, gemm, shards, Sums(out, staging, CHUNKS, 1), peers, epoch, own_last, sum_tile, TILE)
    finish_after_arrivals(peers, epoch, tl.num_programs(0), TILE.WORLD_SIZE)


class PartialChunk(NamedTuple):
    """A chunk of rows of a peer's shard: whose it is, its number of tiles, this rank's partial, and where it goes."""

    owner: int
    tiles: int
    source: torch.Tensor
    destination: torch.Tensor


def plan(problem: GemmReduceScatterProblem, device: Device) -> GemmConfig:
    """Return the family's plan with as many chunks as are worth a copy each."""
    config = default_plan(problem, device)
    if device.arch == "cpu":
        return config
    shard_rows, n = problem.shard_shape(0)
    chunks = max(1, min(2, shard_rows * n * problem.dtype_of_partials.itemsize // LEAST_CHUNK_BYTES))
    # 0.502 ms for 8192x8192x8192 over 4 H200s; with four chunks 0.529, with three stages 0.512.
    tuned = replace(config, num_stages=4, epilogue_subtiles=2) if config.block_n == 256 else config
    return replace(tuned, row_chunks=chunks)


def fit(problem: GemmReduceScatterProblem, config: GemmConfig) -> GemmConfig:
    """Return the configuration with a chunk's rows of tiles as the groups of the tile order."""
    return replace(config, group_m=-(-problem.shard_shape(0)[0] // (config.block_m * config.row_chunks)))


def _rows_of_chunks(call: ReduceCall) -> list[slice]:
    """Return the rows of a shard's chunks, those past the end of a smaller shard too."""
    shard_rows, height = call.problem.shard_shape(0)[0], call.config.group_m * call.config.block_m
    count = -(-shard_rows // height)
    return [slice(number * height, min((number + 1) * height, shard_rows)) for number in range(count)]


def _chunks(call: ReduceCall) -> list[PartialChunk]:
    """Return the chunks of the peers' shards, shard after shard, each in the order in which it is computed."""
    problem, everywhere = call.problem, call.peer_view(call.memory["staging"])
    chunks = []
    for distance in range(1, call.world_size):
        owner = (call.rank + distance) % call.world_size
        owner_rows = problem.shard_shape(owner)[0]
        for of_shard in _rows_of_chunks(call):
            rows = slice(min(of_shard.start, owner_rows), min(of_shard.stop, owner_rows))
            tiles = call.num_tiles(of_shard.stop - of_shard.start, problem.n)
            own = call.memory["partials"][owner, rows]
            chunks.append(PartialChunk(owner, tiles, own, everywhere[owner, call.rank, rows]))
    return chunks


def workspace(call: ReduceCall) -> dict[str, Buffer]:
    """Return the family's buffers, and that of the chunks' counts."""
    num_chunks = len(_rows_of_chunks(call)) * (call.world_size - 1)
    counts = local_flags(num_chunks, "chunk", dtype=torch.int32)
    return {**KEPT.workspace(call), **host.workspace(call), "counts": counts}


def launch(call: ReduceCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel of the peers' shards, beside it the copies, each behind a wait for its chunk, then the sum."""
    multiply, counts = host.multiply_arguments(call, a, b), call.memory["counts"]
    streams, num_chunks = call.copy_streams(), len(_rows_of_chunks(call))
    chunks = call.kept("chunks", lambda: _chunks(call))
    for copies in streams:
        copies.wait_for_current()
    call.run(gemm_reduce_scatter_copy_engine, call.config.num_sms, **multiply, counts_ptr=counts)
    for place, copies in enumerate(streams):
        with call.in_one(copies), copies.as_current():
            for number, chunk in enumerate(chunks):
                if number // num_chunks % len(streams) == place:
                    _send(call, copies, chunk, counts[number], num_chunks, is_last=(number + 1) % num_chunks == 0)
    programs = programs_beside_another(call.config.num_sms)
    call.run(gemm_reduce_scatter_copy_engine_sum, programs, **multiply, out=KEPT.block(call), CHUNKS=num_chunks)
    for copies in streams:
        copies.current_waits()


def _send(
    call: ReduceCall, copies: Stream, chunk: PartialChunk, count: torch.Tensor, num_chunks: int, *, is_last: bool
) -> None:
    """Queue the wait for a chunk's tiles, its copy, and its signal; the stream is the current one."""
    copies.wait_value(count, chunk.tiles)
    if chunk.source.shape[0]:
        copies.copy_2d(chunk.destination, chunk.source)
    call.run(
        gemm_reduce_scatter_copy_engine_signal,
        1,
        num_warps=1,
        peers=call.peers(),
        owner=chunk.owner,
        count_ptr=count,
        num_chunks=num_chunks,
        is_last=int(is_last),
        WORLD_SIZE=call.world_size,
    )


VARIANT = Implementation(
    FAMILY,
    "copy_engine",
    plan,
    workspace,
    launch,
    KEPT.outputs,
    fit,
    counts_chunks=True,
    predict=prediction.copy_engine,
    place=(Arrangement.KERNEL_AND_COPIES, Agent.COPY_ENGINES, Sync.CHUNK_COUNTER),
    summary="GEMM kernels; the copy engines send chunks of partials; own tiles last add the peers'",
)
