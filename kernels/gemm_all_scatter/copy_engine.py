"""GEMM + all-scatter with the copy engines: a GEMM kernel on all SMs, and DMA copies of finished chunks of rows.

A chunk is GROUP_M rows of tiles, computed one chunk after the other. Programs count its tiles; the copy stream waits
for the full count and copies the chunk to every peer. The kernel counts a program's first tile only when all peers are
ready, so no copy starts early. A last, tiny kernel, after the copies, ends the call and clears the counts, which only
this rank uses: the stream's waits compare with constants, as a captured graph must.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync

from ..common.config import LEAST_CHUNK_BYTES, GemmConfig
from ..common.handshake import begin_call, current_call, finish_call
from .operator import GemmAllScatter
from .tiles import MULTIPLIES, SIGNAL_CHUNK, compute_tiles


@triton.jit(launch_metadata=MULTIPLIES)
def gemm_all_scatter_copy_engine(a, b, gemm, block, peers, counts_ptr, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Compute this rank's block of C and count each chunk's tiles."""
    epoch = begin_call(peers, WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    compute_tiles(pid, step, epoch, a, b, gemm, block, peers, counts_ptr, SIGNAL_CHUNK, 1, WORLD_SIZE, TILE)


@triton.jit
def gemm_all_scatter_copy_engine_finish(peers, counts_ptr, num_chunks, WORLD_SIZE: tl.constexpr):
    """After the copies: end the call."""
    for chunk in range(num_chunks):
        tl.store(counts_ptr + chunk, 0)
    finish_call(peers, current_call(peers, WORLD_SIZE), 1, WORLD_SIZE)


class CopyEngine(GemmAllScatter):
    """See the module."""

    variant = "copy_engine"

    def default_config(self) -> GemmConfig:
        config = super().default_config()
        if self.ctx.get_arch() != "cpu":
            m, n = self.problem.m, self.problem.b_shape(0)[1]
            config = replace(
                config, row_chunks=max(1, min(4, m * n * self.problem.dtype.itemsize // LEAST_CHUNK_BYTES))
            )
        return replace(config, group_m=self._chunk_row_tiles(config))

    def _chunk_row_tiles(self, config: GemmConfig) -> int:
        """Rows of tiles of a chunk."""
        return max(1, -(-self.problem.m // (config.block_m * config.row_chunks)))

    def _open_buffers(self) -> None:
        super()._open_buffers()
        config = self.config
        self.config = replace(config, group_m=self._chunk_row_tiles(config))  # a chunk is a group of the tile order
        chunk_rows = self.config.group_m * config.block_m
        m, n = self._block.m, self._block.n
        start = self.problem.columns(self.rank)[0]
        everywhere = self.ctx.peer_view(self.output)[:, :, start : start + n]
        self._chunks = []  # (tiles, this rank's rows, each peer's rows), in the order they are computed
        for row in range(0, m if n else 0, chunk_rows):
            rows = slice(row, min(row + chunk_rows, m))
            tiles = -(-(rows.stop - row) // config.block_m) * -(-n // config.block_n)
            order = [(self.rank + distance) % len(everywhere) for distance in range(1, len(everywhere))]
            self._chunks.append((tiles, everywhere[self.rank, rows], [everywhere[peer, rows] for peer in order]))
        self._counts = self._local_flags(len(self._chunks), "chunk", dtype=torch.int32)
        self._copy_stream = self._side_stream()

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self._copy_stream.wait_for_current()
        self._run(
            gemm_all_scatter_copy_engine, self.config.num_sms, **self._compute_arguments(a, b), counts_ptr=self._counts
        )
        with self._copy_stream.in_one():
            for chunk, (tiles, source, destinations) in enumerate(self._chunks):
                self._copy_stream.wait_value(self._counts[chunk], tiles)
                for destination in destinations:
                    self._copy_stream.copy_2d(destination, source)
        self._copy_stream.current_waits()
        self._run(
            gemm_all_scatter_copy_engine_finish,
            1,
            num_warps=1,
            peers=self._peers(),
            counts_ptr=self._counts,
            num_chunks=len(self._chunks),
            WORLD_SIZE=self.problem.world_size,
        )
        return self.output


VARIANT = CopyEngine.as_variant(
    arrangement=Arrangement.KERNEL_AND_COPIES,
    agent=Agent.COPY_ENGINES,
    sync=Sync.CHUNK_COUNTER,
    summary="a GEMM kernel on all SMs; the copy engines send each chunk of rows when it is complete",
)
