"""GEMM + reduce-scatter with the copy engines: they send chunks of partial tiles to their owners as they are complete.

| queue | work |
|---|---|
| current stream | compute the peers' shards, counting tiles · compute the own shard and add the peers' partials |
| copy stream | for each chunk of the peers' shards: wait for its tiles · copy it · count it at its owner |

A chunk is GROUP_M rows of tiles, computed one chunk after the other. Its owner's tiles of the same rows wait for it
alone, so the sum starts before the last chunk has come.

The GEMM counts a program's first tile only when all peers are ready, so no copy starts early. Tile counts are this
rank's alone and cleared after the copy: the stream's waits compare with constants, as a captured graph must. The sum
leaves one SM to the kernels on the copy stream, which its peers wait for: its own programs can fill a whole SM's
registers (seen: every rank's sum waiting for signals whose kernels had no SM to run on).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync

from ..common.config import LEAST_CHUNK_BYTES, GemmConfig, programs_beside_another
from ..common.handshake import begin_call, current_call, finish_after_arrivals, signal_chunk
from ..common.partials import COMPUTES_FOR_PEERS, SIGNAL_CHUNK, SUMS, compute_partial_tiles, sum_own_tiles
from .operator import GemmReduceScatter


@triton.jit(launch_metadata=COMPUTES_FOR_PEERS)
def gemm_reduce_scatter_copy_engine(
    a, b, gemm, staging, peers, counts_ptr, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Compute the partial tiles of the peers' shards and count them."""
    epoch = begin_call(peers, WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    compute_partial_tiles(pid, step, epoch, a, b, gemm, staging, peers, counts_ptr, SIGNAL_CHUNK, WORLD_SIZE, TILE)


@triton.jit
def gemm_reduce_scatter_copy_engine_signal(peers, owner, count_ptr, WORLD_SIZE: tl.constexpr):
    """After a copy: count the chunk at its owner and clear its tile count."""
    tl.store(count_ptr, 0)
    signal_chunk(peers, owner, WORLD_SIZE)


@triton.jit(launch_metadata=SUMS)
def gemm_reduce_scatter_copy_engine_sum(
    a, b, gemm, out, staging, peers, CHUNKS: tl.constexpr, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Compute the own shard and add the peers' partials."""
    epoch = current_call(peers, WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    sum_own_tiles(pid, step, epoch, a, b, gemm, out, staging, peers, CHUNKS, 1, WORLD_SIZE, TILE)
    finish_after_arrivals(peers, epoch, tl.num_programs(0), WORLD_SIZE)


class CopyEngine(GemmReduceScatter):
    """See the module."""

    variant = "copy_engine"

    def default_config(self) -> GemmConfig:
        config = super().default_config()
        if self.ctx.get_arch() == "cpu":
            return config
        shard_rows, n = self.problem.shard_shape(0)
        chunks = max(1, min(2, shard_rows * n * self.problem.dtype.itemsize // LEAST_CHUNK_BYTES))
        # 0.502 ms for 8192x8192x8192 over 4 H200s; with four chunks 0.529, with three stages 0.512.
        tuned = replace(config, num_stages=4, epilogue_subtiles=2) if config.block_n == 256 else config
        return replace(tuned, row_chunks=chunks)

    def _open_buffers(self) -> None:
        shard_rows = self.problem.shard_shape(0)[0]
        config = self.config
        chunk_row_tiles = -(-shard_rows // (config.block_m * config.row_chunks))
        self.config = config = replace(config, group_m=chunk_row_tiles)  # a chunk is a group of the tile order
        super()._open_buffers()
        world_size, chunk_rows = self.problem.world_size, chunk_row_tiles * config.block_m
        everywhere = self.ctx.peer_view(self._workspace)
        self._num_chunks = -(-shard_rows // chunk_rows)
        self._chunks = []  # (owner, tiles, this rank's partial, its place at the owner), in the order they are computed
        for distance in range(1, world_size):
            owner = (self.rank + distance) % world_size
            owner_rows = self.problem.shard_shape(owner)[0]
            for row in range(0, shard_rows, chunk_rows):
                tiles = self._tiles((min(row + chunk_rows, shard_rows) - row, self.problem.n))
                rows = slice(min(row, owner_rows), min(row + chunk_rows, owner_rows))
                self._chunks.append((owner, tiles, self._partials[owner, rows], everywhere[owner, self.rank, rows]))
        self._counts = self._local_flags(len(self._chunks), "chunk", dtype=torch.int32)
        self._copy_stream = self._side_stream()

    def _chunks_a_call(self) -> int:
        return self._num_chunks

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        multiply = self._multiply_arguments(a, b)
        self._copy_stream.wait_for_current()
        self._run(gemm_reduce_scatter_copy_engine, self.config.num_sms, **multiply, counts_ptr=self._counts)
        with self._copy_stream.in_one(), self._copy_stream.as_current():
            for chunk, (owner, tiles, source, destination) in enumerate(self._chunks):
                self._copy_stream.wait_value(self._counts[chunk], tiles)
                if len(source):
                    self._copy_stream.copy_2d(destination, source)
                self._run(
                    gemm_reduce_scatter_copy_engine_signal,
                    1,
                    num_warps=1,
                    peers=self._peers(),
                    owner=owner,
                    count_ptr=self._counts[chunk],
                    WORLD_SIZE=self.problem.world_size,
                )
        programs = programs_beside_another(self.config.num_sms)
        self._run(gemm_reduce_scatter_copy_engine_sum, programs, **multiply, out=self._out, CHUNKS=self._num_chunks)
        self._copy_stream.current_waits()
        return self.output


VARIANT = CopyEngine.as_variant(
    arrangement=Arrangement.KERNEL_AND_COPIES,
    agent=Agent.COPY_ENGINES,
    sync=Sync.CHUNK_COUNTER,
    summary="GEMM kernels; the copy engines send chunks of partials; own tiles last add the peers'",
)
