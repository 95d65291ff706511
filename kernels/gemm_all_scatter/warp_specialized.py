"""GEMM + all-scatter in one kernel whose warps have different roles (Gluon, for Hopper).

| warps of a program | do | wait for |
|---|---|---|
| 8, two warp groups | multiply tiles, and leave each in shared memory | operands; the tile before to be out |
| 1 | loads operands, and meanwhile sends the tile before to every rank, in pieces | room; the finished tile |

The pieces are paced by the main loop (../common/hopper/outbox.py). What is finished at the end is sent after the last
multiplication, so the last tiles can be shared by teams of programs, who end them earlier (team.py). Before its first
piece a program waits once for the peers to be ready, and it takes part in ending the call when all its pieces have
arrived. The kernel is launched early (../common/hopper/roles.py). Pattern: arXiv 2511.12500, section 4, which names
"wave specialization" and leaves it unbuilt.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core import gdc_launch_dependents, gdc_wait
from overlap_taxonomy import Agent, Arrangement, Sync

from ..common.gemm import num_tiles, tile_origin
from ..common.handshake import begin_call, finish_call, wait_ready
from ..common.hopper.arguments import Parcel, Sizes
from ..common.hopper.operator import WarpSpecializedOperator
from ..common.hopper.outbox import await_arrival, load_ahead, load_and_send, open_outbox, send_last
from ..common.hopper.positions import share_of, shared_turns, trace_number, whole_turns
from ..common.hopper.ring import open_ring
from ..common.hopper.roles import first_role, multiply_second, multiply_tiles, worker_registers, worker_warps
from ..common.operands import ROW_BYTES, padded
from ..common.trace import SEND_WAIT, trace_span, trace_time
from .operator import GemmAllScatter
from .problem import GemmAllScatterProblem


@gluon.jit
def warp_specialized_kernel(a, b, out, team, sizes, peers, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    """Compute this rank's block of C into every rank's C."""
    ring = open_ring(a, b, TILE)
    outbox = open_outbox(out, TILE)
    gdc_wait()
    epoch = begin_call(peers, WORLD_SIZE)
    tiles = num_tiles(sizes, TILE)
    whole = whole_turns(tiles, TILE)
    num_steps = gl.cdiv(sizes.k, TILE.BLOCK_K)
    shared = shared_turns(tiles, whole, num_steps, TILE)
    gl.warp_specialize(
        [
            (multiply_second, (ring, outbox, whole, num_steps, TILE)),
            (multiply_tiles, (ring, outbox, team, tiles, whole, shared, num_steps, peers, epoch, TILE)),
            (_load_and_scatter, (a, b, out, ring, outbox, whole, shared, sizes, peers, epoch, WORLD_SIZE, TILE)),
        ][first_role(TILE.PINGPONG) :],
        worker_warps(1, TILE.PINGPONG),
        worker_registers(1, TILE.PINGPONG),
    )


@gluon.jit
def _load_and_scatter(
    a, b, out, ring, outbox, whole, shared, sizes, peers, epoch, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr
):
    tiles = num_tiles(sizes, TILE)
    num_steps = gl.cdiv(sizes.k, TILE.BLOCK_K)
    turns = whole + shared
    step = 0
    row = 0
    col = 0
    piece = 0
    pieces = 0
    for turn in range(turns):
        parcel = Parcel(peers.rank + 1, row, col, piece, pieces, peers.trace_ptr)
        share = share_of(turn, tiles, whole, num_steps, TILE)
        row, col = tile_origin(share.position, sizes, TILE)
        piece = share.piece
        pieces = share.pieces
        step, start = load_ahead(a, b, ring, step, row, col, share.start, share.stop, outbox, turn > 1, TILE)
        step = load_and_send(
            a, b, ring, step, row, col, start, share.stop, out, outbox, parcel, turn, WORLD_SIZE, WORLD_SIZE, TILE
        )
        if turn == 0:
            began = trace_time(peers)
            wait_ready(peers, epoch, WORLD_SIZE)
            trace_span(peers, SEND_WAIT, trace_number(turn), began)
    gdc_launch_dependents()  # the last operands have been asked for
    parcel = Parcel(peers.rank + 1, row, col, piece, pieces, peers.trace_ptr)
    send_last(out, outbox, parcel, turns, turns > 1, WORLD_SIZE, WORLD_SIZE, TILE)
    began = trace_time(peers)
    await_arrival()
    began = trace_span(peers, SEND_WAIT, trace_number(turns - 1), began)
    finish_call(peers, epoch, gl.num_programs(0), WORLD_SIZE)
    trace_span(peers, SEND_WAIT, trace_number(turns - 1), began)


class WarpSpecialized(WarpSpecializedOperator[GemmAllScatterProblem], GemmAllScatter):
    """See the module."""

    teams = (1, 2)
    pingpong = True
    cuts_shards = False

    @classmethod
    def _sizes_reason(cls, problem: GemmAllScatterProblem) -> str | None:
        for rank in range(problem.world_size):
            start, stop = problem.columns(rank)
            if stop > start and start * problem.dtype.itemsize % ROW_BYTES:
                return f"rank {rank}'s columns of C start at {start}; TMA stores on a multiple of {ROW_BYTES} bytes"
        return super()._sizes_reason(problem)

    def _peers_of_a_tile(self) -> int:
        return self.problem.world_size - 1

    def _open_buffers(self) -> None:
        problem = self.problem
        rows = self._on_heap((problem.m, padded(problem.n, problem.dtype)), problem.dtype)
        self.output = rows[:, : problem.n]
        start, stop = problem.columns(self.rank)
        self._sizes = Sizes(problem.m, stop - start, problem.k)
        # This rank's columns of every rank's C. Where it has none, nothing is stored, but a descriptor needs some.
        columns = slice(start, stop) if stop > start else slice(0, 1)
        self._out = self._pieces_of(self.ctx.peer_view(rows)[:, :, columns])
        self._team = self._open_team(self.config.num_sms, self._sizes)

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self._run(
            warp_specialized_kernel,
            self.config.num_sms,
            early=True,
            **self._operands(a, b),
            out=self._out,
            team=self._team,
            sizes=self._sizes,
            peers=self._peers(),
            WORLD_SIZE=self.problem.world_size,
        )
        return self.output


VARIANT = WarpSpecialized.as_variant(
    arrangement=Arrangement.FUSED_KERNEL,
    agent=Agent.COMM_WARPS,
    sync=Sync.SHARED_MEMORY_BARRIER,
    summary="one kernel; a warp of each program loads operands and sends the tile before, paced (Hopper)",
)
