"""GEMM + all-scatter in one kernel for small M: every SM reads a part of the weights, whatever the number of tiles.

Programs split tiles (../common/stream_k.py); the one that fixes a tile up stores it to every rank. It waits for the
peers to be ready just before, and counts the tile on every rank just after, all at once. The first program ends when
every rank, its own too, has counted all its tiles here. Counts grow over all calls and are never reset.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from iris_core import gdc_wait
from overlap_taxonomy import Agent, Arrangement, Sync

from ..common.gemm import num_tiles, store_tile
from ..common.handshake import (
    begin_own_call,
    end_own_call,
    signal_all_ready,
    signal_chunk_to_all,
    wait_all_chunks,
    wait_all_ready,
)
from ..common.stream_k import compute_tiles, with_columns
from ..common.stream_k_operator import StreamKOperator
from ..common.trace import STORE, WAIT, trace_span, trace_time
from .operator import GemmAllScatter
from .tiles import MULTIPLIES_AND_PUSHES


@triton.jit
def send_tile(acc, block, peers, row, col, tile, tiles, epoch, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Store a tile to every rank when the peers are ready, and count it there."""
    began = trace_time(peers)
    wait_all_ready(peers, epoch, WORLD_SIZE)
    began = trace_span(peers, WAIT, tile, began)
    store_tile(acc, block, row, col, peers, WORLD_SIZE, WORLD_SIZE, TILE)
    signal_chunk_to_all(peers, WORLD_SIZE)
    trace_span(peers, STORE, tile, began)


@triton.jit(launch_metadata=MULTIPLIES_AND_PUSHES)
def gemm_all_scatter_one_shot(
    a,
    b,
    gemm,
    block,
    columns,
    stream_k,
    calls_ptr,
    peers,
    HAS_WHOLE: tl.constexpr,
    SPLITS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute this rank's block of C into every rank's C."""
    gdc_wait()
    epoch = begin_own_call(calls_ptr)
    signal_all_ready(peers, epoch, WORLD_SIZE)
    widest = with_columns(block, columns)
    compute_tiles(
        a, b, gemm, block, widest, 0, stream_k, block, peers, epoch, send_tile, HAS_WHOLE, SPLITS, WORLD_SIZE, TILE
    )
    if tl.program_id(0) == 0:
        began = trace_time(peers)
        wait_all_chunks(peers, epoch * num_tiles(widest, TILE), WORLD_SIZE)
        trace_span(peers, WAIT, 0, began)
    end_own_call(calls_ptr, epoch)


class OneShot(StreamKOperator, GemmAllScatter):
    """See the module."""

    variant = "one_shot"

    def _open_buffers(self) -> None:
        super()._open_buffers()
        self._open_stream_k()

    def _chunks_a_call(self) -> int:
        return self._all_tiles

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        arguments = {**self._main_loop(a, b), **self._tiles_arguments()}
        self._run(
            gemm_all_scatter_one_shot,
            self._num_programs,
            early=self._is_short,
            **arguments,
            block=self._block,
            columns=self._columns,
        )
        return self.output


VARIANT = OneShot.as_variant(
    arrangement=Arrangement.FUSED_KERNEL,
    agent=Agent.COMPUTING_PROGRAM,
    sync=Sync.SPLIT_FLAG,
    summary="one kernel for small M; programs split a tile (stream-K), one of them stores it to every rank",
)
