"""GEMM + all-reduce in one kernel for small M: every SM reads a part of the weights, whatever the number of tiles.

Programs split tiles (../common/stream_k.py). The one that fixes a tile up stores its sum, a partial one, to every
rank's workspace, signals all of them at once, waits for theirs, and adds all ranks', its own too, in the order of the
ranks: every rank has the same bits, in every run.

The workspace is doubled, and calls use its halves alternately: every rank has seen all peers' flags in a call that it
has ended, so they are done with the half of the call before, and no rank waits for the peers to be ready. Flags hold
call numbers and are never reset.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from iris_core import gdc_wait, signal_each, wait_each
from overlap_taxonomy import Agent, Arrangement, Sync

from ..common.arguments import Block
from ..common.config import GemmConfig
from ..common.gemm import store_subtile, store_tile, subtile_offsets
from ..common.handshake import begin_own_call, end_own_call, on_every_rank
from ..common.stream_k import buffer_of_call, compute_tiles
from ..common.stream_k_operator import StreamKOperator
from ..common.trace import STORE, SUM, WAIT, trace_span, trace_time
from .operator import FAMILY, ONE_SHOT


@triton.jit
def reduce_tile(acc, target, peers, row, col, tile, tiles, epoch, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Send a partial tile to all ranks, and sum all ranks'."""
    out, workspace_ptr, flags_ptr = target
    partial_size = tl.cast(out.m, tl.int64) * out.n
    mine = Block(workspace_ptr + peers.rank * partial_size, out.m, out.n, out.n)
    ranks = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    began = trace_time(peers)
    store_tile(acc, mine, row, col, peers, WORLD_SIZE, WORLD_SIZE, TILE)
    flag_ptrs, all_ranks = on_every_rank(flags_ptr + peers.rank * tiles + tile, peers, WORLD_SIZE)
    # Edge: this tile's stores happen before what follows any rank's wait for the flag.
    signal_each(flag_ptrs, epoch, all_ranks >= 0)
    began = trace_span(peers, STORE, tile, began)
    wait_each(flags_ptr + ranks * tiles + tile, epoch, ranks < WORLD_SIZE, peers.watchdog_ptr)
    began = trace_span(peers, WAIT, tile, began)
    # Halves of a wide tile, one after the other: both in registers would be too many.
    COLS: tl.constexpr = TILE.BLOCK_N // TILE.SUBTILES
    for index in range(TILE.SUBTILES):
        sum_subtile(out, workspace_ptr, peers, row, col + index * COLS, WORLD_SIZE, TILE.BLOCK_M, COLS)
    trace_span(peers, SUM, tile, began)


@triton.jit
def sum_subtile(out, workspace_ptr, peers, row, col, WORLD_SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Add all ranks' partials of a subtile, in the order of the ranks, and store the sum."""
    partial_size = tl.cast(out.m, tl.int64) * out.n
    offsets, mask = subtile_offsets(out, row, col, ROWS, COLS)
    # .cg: the peers wrote it past this SM's L1, which may hold an older call's.
    total = tl.load(workspace_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    # Not unrolled: one rank's partial in registers at a time.
    for rank in range(1, WORLD_SIZE):
        partial_ptr = workspace_ptr + rank * partial_size
        total += tl.load(partial_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    store_subtile(total, out, row, col, peers, 1, WORLD_SIZE, ROWS, COLS)


@triton.jit(launch_metadata=ONE_SHOT)
def gemm_all_reduce_one_shot(
    a,
    b,
    gemm,
    out,
    workspace_ptr,
    flags_ptr,
    stream_k,
    calls_ptr,
    peers,
    HAS_WHOLE: tl.constexpr,
    SPLITS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Send this rank's partial tiles to all ranks, and sum all ranks'."""
    gdc_wait()
    epoch = begin_own_call(calls_ptr)
    target = (out, workspace_ptr + buffer_of_call(epoch, 2) * WORLD_SIZE * out.m * out.n, flags_ptr)
    compute_tiles(
        a, b, gemm, out, out, 0, stream_k, target, peers, epoch, reduce_tile, HAS_WHOLE, SPLITS, WORLD_SIZE, TILE
    )
    end_own_call(calls_ptr, epoch)


class OneShot(StreamKOperator):
    """See the module."""

    family = FAMILY
    variant = "one_shot"

    def default_config(self) -> GemmConfig:
        return self._config_for(self.problem.m, self.problem.n)

    def _open_buffers(self) -> None:
        problem = self.problem
        m, n = problem.c_shape(self.rank)
        width = self._width(n)
        self._workspace = self._on_heap((2 * problem.world_size, m, width), problem.dtype)
        self._flags = self._flags_by_source(self._all_tiles, "tile", "partial sum")
        room = torch.zeros(m, width, dtype=problem.dtype, device=self.ctx.get_device())
        self.output = room[:, :n]
        self._out = Block(room, m, width, width)
        self._open_stream_k()

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        arguments = {**self._main_loop(a, b), **self._tiles_arguments()}
        self._run(
            gemm_all_reduce_one_shot,
            self._num_programs,
            early=self._is_short,
            **arguments,
            out=self._out,
            workspace_ptr=self._workspace,
            flags_ptr=self._flags,
        )
        return self.output


VARIANT = OneShot.as_variant(
    arrangement=Arrangement.FUSED_KERNEL,
    agent=Agent.COMPUTING_PROGRAM,
    sync=Sync.SPLIT_FLAG,
    summary="one kernel for small M; programs split a tile (stream-K), one sends it to every rank and adds all ranks'",
)
