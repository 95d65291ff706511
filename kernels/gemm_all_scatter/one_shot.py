"""GEMM + all-scatter in one kernel for small M: every SM reads a part of the weights, whatever the number of tiles.

Programs share tiles (../common/shared_tiles.py); the one that leads a tile stores it to every rank, when the peers are
ready. All ranks' programs of a number have the same tiles. So a program that is through tells those of its number, all
at once, with a flag a rank and program, and waits for theirs. Flags hold call numbers and are never reset.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from iris_core import signal_each, wait_each, wait_for_earlier_kernels
from overlap_taxonomy import Agent, Arrangement, Sync, Variant

from ..common.gemm import store_tile
from ..common.handshake import begin_and_tell, finish_after_arrivals, on_every_rank, wait_all_ready
from ..common.shared_tiles import compute_tiles, with_columns
from ..common.split_k import Splitting
from ..common.trace import STORE, WAIT, trace_span, trace_time
from .operator import FAMILY, GemmAllScatter


@triton.jit
def send_tile(acc, block, peers, row, col, tile, tiles, epoch, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Store a tile to every rank when the peers are ready."""
    began = trace_time(peers)
    wait_all_ready(peers, epoch, WORLD_SIZE)
    began = trace_span(peers, WAIT, tile, began)
    store_tile(acc, block, row, col, peers, WORLD_SIZE, WORLD_SIZE, TILE)
    trace_span(peers, STORE, tile, began)


@triton.jit
def meet_program_of_peers(flags_ptr, peers, epoch, WORLD_SIZE: tl.constexpr):
    """Tell the program of this number on every peer that this one is through, and wait until they are.

    Edge: this program's stores happen before what follows a peer's program's call of this.
    """
    began = trace_time(peers)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    flag_ptrs, ranks = on_every_rank(flags_ptr + peers.rank * num_programs + program, peers, WORLD_SIZE)
    is_peer = (ranks >= 0) & (ranks != peers.rank)
    signal_each(flag_ptrs, epoch, is_peer)
    wait_each(flags_ptr + ranks * num_programs + program, epoch, is_peer, peers.watchdog_ptr)
    trace_span(peers, WAIT, program, began)


@triton.jit
def one_shot_kernel(
    a,
    b,
    gemm,
    block,
    columns,
    sharing,
    flags_ptr,
    peers,
    HAS_WHOLE: tl.constexpr,
    PARTS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute this rank's block of C into every rank's C."""
    wait_for_earlier_kernels()
    epoch = begin_and_tell(peers, WORLD_SIZE)
    widest = with_columns(block, columns)
    compute_tiles(
        a, b, gemm, block, widest, 0, sharing, block, peers, epoch, send_tile, HAS_WHOLE, PARTS, WORLD_SIZE, TILE
    )
    meet_program_of_peers(flags_ptr, peers, epoch, WORLD_SIZE)
    finish_after_arrivals(peers, epoch, tl.num_programs(0), WORLD_SIZE)


class OneShot(Splitting, GemmAllScatter):
    """See the module."""

    variant = "one_shot"

    def _open_buffers(self) -> None:
        super()._open_buffers()
        self._open_sharing()
        self._flags = self._flags_by_sender(self._num_programs, "program", "part of C")

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        arguments = {**self._main_loop(a, b), **self._tiles_arguments()}
        self._run(
            one_shot_kernel,
            self._num_programs,
            early=True,
            **arguments,
            block=self._block,
            columns=self._columns,
            flags_ptr=self._flags,
        )
        return self.output


VARIANT = Variant(
    family=FAMILY,
    name=OneShot.variant,
    arrangement=Arrangement.FUSED_KERNEL,
    agent=Agent.COMPUTING_PROGRAM,
    sync=Sync.SPLIT_COUNT,
    summary="one kernel for small M; programs share a tile, the last of them stores it to every rank",
    build=OneShot,
    unsupported_reason=OneShot.unsupported_reason,
)
