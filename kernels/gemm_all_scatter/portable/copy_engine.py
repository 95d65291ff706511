"""GEMM + all-scatter with the copy engines: a GEMM kernel on all SMs, and DMA copies of finished chunks of rows.

A chunk is GROUP_M rows of tiles; chunks are computed one after the other. Programs count a chunk's finished tiles. The
copy stream waits for the full count, then copies the chunk to every peer; where each peer is behind a link of its own,
each has a copy stream. A program counts its first tile only once all peers are ready, so no copy starts too early.
After the copies, a kernel of one program ends the call and zeroes the counts, which only this rank uses: the stream's
waits compare with constants, because a captured graph repeats them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync

from ...common.call import Call, Device
from ...common.config import LEAST_CHUNK_BYTES, GemmConfig
from ...common.device.handshake import begin_call, current_call, finish_call
from ...common.device.tile_scheduler import num_tiles, row_grouped
from ...common.portable.tile_loop import compute_tiles, keep_and_count
from ...common.variants.implementation import Implementation, default_plan
from ...common.workspace import Buffer, local_flags
from .. import host, prediction
from ..host import FAMILY, MULTIPLIES
from ..problem import GemmAllScatterProblem


@triton.jit(launch_metadata=MULTIPLIES)
def gemm_all_scatter_copy_engine(a, b, gemm, block, peers, counts_ptr, TILE: tl.constexpr):
    """Compute this rank's block of C and count the finished tiles of each chunk."""
    epoch = begin_call(peers, TILE.WORLD_SIZE)
    pid = tl.program_id(0)
    indices = (pid, tl.num_programs(0), num_tiles(block, TILE))
    target = (block, counts_ptr, 0, pid)
    compute_tiles(indices, a, b, gemm, block, target, peers, epoch, row_grouped, keep_and_count, TILE)


@triton.jit
def gemm_all_scatter_copy_engine_finish(peers, counts_ptr, num_chunks, WORLD_SIZE: tl.constexpr):
    """After the copies: end the call."""
    for chunk in range(num_chunks):
        tl.store(counts_ptr + chunk, 0)
    finish_call(peers, current_call(peers, WORLD_SIZE), 1, WORLD_SIZE)


class RowChunk(NamedTuple):
    """A chunk of rows: its number of tiles, this rank's rows, and where they go at each peer."""

    tiles: int
    source: torch.Tensor
    destinations: list[torch.Tensor]


def plan(problem: GemmAllScatterProblem, device: Device) -> GemmConfig:
    """Return the default plan, with as many chunks as each are large enough for a copy."""
    config = default_plan(problem, device)
    if device.arch == "cpu":
        return config
    m, n = problem.m, problem.b_shape(0)[1]
    return replace(config, row_chunks=max(1, min(4, m * n * problem.out_dtype.itemsize // LEAST_CHUNK_BYTES)))


def fit(problem: GemmAllScatterProblem, config: GemmConfig) -> GemmConfig:
    """Return the configuration whose groups of rows, in the order of tiles, are the chunks."""
    return replace(config, group_m=-(-problem.m // (config.block_m * config.row_chunks)))


def workspace(call: Call[GemmAllScatterProblem]) -> dict[str, Buffer]:
    """Return the buffers of C and of the chunks' counts."""
    num_chunks = len(_rows_of_chunks(call))
    return {**host.workspace(call), "counts": local_flags(num_chunks, "chunk", dtype=torch.int32)}


def _rows_of_chunks(call: Call[GemmAllScatterProblem]) -> list[slice]:
    m, height = call.problem.m, call.config.group_m * call.config.block_m
    count = -(-m // height) if call.problem.b_shape(call.rank)[1] else 0
    return [slice(number * height, min((number + 1) * height, m)) for number in range(count)]


def _chunks(call: Call[GemmAllScatterProblem]) -> list[RowChunk]:
    """Return the chunks in the order in which they are computed."""
    (output,), rank = host.outputs(call), call.rank
    own = slice(*call.problem.columns(rank))
    everywhere = call.peer_view(output)[:, :, own]
    peers = [(rank + distance) % call.world_size for distance in range(1, call.world_size)]
    return [
        RowChunk(
            call.num_tiles(rows.stop - rows.start, own.stop - own.start),
            everywhere[rank, rows],
            [everywhere[peer, rows] for peer in peers],
        )
        for rows in _rows_of_chunks(call)
    ]


def launch(call: Call[GemmAllScatterProblem], a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the GEMM kernel, and on another stream the copies, each after a wait for its chunk."""
    counts, streams, chunks = call.memory["counts"], call.copy_streams(), call.kept("chunks", lambda: _chunks(call))
    for copies in streams:
        copies.wait_for_current()
    arguments = host.compute_arguments(call, a, b)
    call.run(gemm_all_scatter_copy_engine, call.config.num_sms, **arguments, counts_ptr=counts)
    for place, copies in enumerate(streams):
        with call.in_one(copies):
            for number, chunk in enumerate(chunks):
                copies.wait_value(counts[number], chunk.tiles)
                for destination in chunk.destinations[place :: len(streams)]:
                    copies.copy_2d(destination, chunk.source)
        copies.current_waits()
    call.run(
        gemm_all_scatter_copy_engine_finish,
        1,
        num_warps=1,
        peers=call.peers(),
        counts_ptr=counts,
        num_chunks=len(chunks),
        WORLD_SIZE=call.world_size,
    )


VARIANT = Implementation(
    FAMILY,
    "copy_engine",
    plan,
    workspace,
    launch,
    host.outputs,
    fit,
    predict=prediction.copy_engine,
    place=(Arrangement.KERNEL_AND_COPIES, Agent.COPY_ENGINES, Sync.CHUNK_COUNTER),
    summary="a GEMM kernel on all SMs; the copy engines send each chunk of rows when it is complete",
)
