"""GEMM + reduce-scatter in one kernel whose warps have different roles (Gluon, for Hopper).

| warps of a program | do | wait for |
|---|---|---|
| 8, two groups | multiply, add the peers' partials to own tiles, leave tiles in shared memory | operands; partials |
| 1 | loads operands, and meanwhile sends the tile before to its owner, in pieces, then announces it | room; the tile |
| 1 | loads the peers' partials of own tiles | the peers' flags; room |

Tiles of the peers' shards come first, rank+1's, then rank+2's, …, and the own ones last, as in the other variants: by
then their partials have been arriving for most of the time. Sums start from the fp32 accumulators, add the peers'
partials in a fixed order and are rounded once. The pieces are paced by the main loop (../common/hopper/outbox.py); the
last tile of the peers' is sent during an own one. A rank's own slot, which no peer sends to, is its output: sums are
sent there, like any other tile. Pattern: arXiv 2511.12500, section 4 ("wave specialization"), with the reduction in the
epilogue.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core import fence_before_descriptor_loads, wait
from overlap_taxonomy import Agent, Arrangement, Sync, Variant

from ..common.config import GemmConfig
from ..common.gemm import num_tiles, tile_origin
from ..common.handshake import begin_call, finish_after_arrivals, wait_ready
from ..common.hopper.arguments import Parcel
from ..common.hopper.inbox import add_partials, load_partials, open_inbox, vacate, wait_vacated
from ..common.hopper.operator import WarpSpecializedOperator
from ..common.hopper.outbox import (
    PIECE_COLS,
    await_arrival,
    hand_over,
    let_refill,
    load_ahead,
    load_and_send,
    open_outbox,
    send_last,
    wait_emptied,
)
from ..common.hopper.ring import load_steps, multiply_tile, open_ring
from ..common.hopper.roles import LOADER_REGISTERS
from ..common.hopper.team import num_turns
from ..common.partials import announce_position, owner_of
from .operator import FAMILY, GemmReduceScatter
from .problem import GemmReduceScatterProblem


class Shards(NamedTuple):
    """The (m, n) of the largest shard of C, the inner size, and the flags where partials arrive (partials.Staging)."""

    flags_ptr: Any
    m: int
    n: int
    k: int


@gluon.jit
def warp_specialized_kernel(a, b, out, slots, shards, peers, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    """Send the partial tiles of the peers' shards, then sum this rank's."""
    epoch = begin_call(peers, WORLD_SIZE)
    ring = open_ring(a, b, TILE)
    outbox = open_outbox(out, TILE)
    inbox = open_inbox(outbox, slots, TILE)
    tiles = num_tiles(shards, TILE)
    sent = num_turns(tiles * (WORLD_SIZE - 1))
    turns = num_turns(tiles * WORLD_SIZE)
    gl.warp_specialize(
        [
            (_multiply_and_sum, (ring, outbox, inbox, sent, turns, gl.cdiv(shards.k, TILE.BLOCK_K), WORLD_SIZE, TILE)),
            (
                _load_and_send_partials,
                (a, b, out, ring, outbox, inbox, sent, turns, shards, peers, epoch, WORLD_SIZE, TILE),
            ),
            (_collect, (slots, inbox, sent, turns, shards, peers, epoch, WORLD_SIZE, TILE)),
        ],
        [1, 1],
        [LOADER_REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _multiply_and_sum(ring, outbox, inbox, sent, turns, num_steps, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    step = 0
    message = 0
    for turn in range(sent):
        acc, step = multiply_tile(ring, step, num_steps, TILE)
        wait_emptied(outbox, turn)
        hand_over(acc, outbox, TILE)
    for turn in range(sent, turns):
        acc, step = multiply_tile(ring, step, num_steps, TILE)
        acc, message = add_partials(acc, inbox, message, WORLD_SIZE, TILE)
        wait_emptied(outbox, turn)
        hand_over(acc, outbox, TILE)


@gluon.jit
def _load_and_send_partials(
    a,
    b,
    out,
    ring,
    outbox,
    inbox,
    sent,
    turns,
    shards,
    peers,
    epoch,
    WORLD_SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    tiles = num_tiles(shards, TILE)
    num_steps = gl.cdiv(shards.k, TILE.BLOCK_K)
    step = 0
    position = 0
    owner = 0
    row = 0
    col = 0
    sending = 0  # the position of the tile whose pieces were sent last
    for turn in range(turns):
        before = sending
        sending = position
        parcel = Parcel(owner, row, col, TILE.BLOCK_N)
        position = gl.program_id(0) + turn * gl.num_programs(0)
        owner = owner_of(peers, position, tiles, WORLD_SIZE)
        row, col = tile_origin(position % tiles, shards, TILE)
        a_row = owner * shards.m + row
        is_own = turn >= sent
        overdue = (turn > 1) & (turn <= sent)
        step, start = load_ahead(a, b, ring, step, a_row, col, 0, num_steps, outbox, overdue, TILE)
        if overdue:  # with steps loaded ahead, and long after the last piece, there is nothing to wait for any more
            await_arrival()
            announce_position(shards, peers, before, tiles, epoch, WORLD_SIZE)
        # Partials need the outbox's memory: what is there during an own tile leaves in half of its main loop.
        stop = gl.where(is_own, (start + num_steps) // 2, num_steps)
        step = load_and_send(a, b, ring, step, a_row, col, start, stop, out, outbox, parcel, turn, 1, WORLD_SIZE, TILE)
        if is_own:
            if turn > 0:
                let_refill(outbox)
            vacate(inbox)
            step = load_steps(a, b, ring, step, a_row, col, stop, num_steps, TILE)
            if (turn == sent) & (turn > 0):
                await_arrival()
                announce_position(shards, peers, sending, tiles, epoch, WORLD_SIZE)
        elif turn == 0:
            wait_ready(peers, epoch, WORLD_SIZE)
    parcel = Parcel(owner, row, col, TILE.BLOCK_N)
    if (turns > 1) & (turns == sent):
        let_refill(outbox)
        await_arrival()
        announce_position(shards, peers, sending, tiles, epoch, WORLD_SIZE)
    send_last(out, outbox, parcel, turns, False, 1, WORLD_SIZE, TILE)
    await_arrival()
    if (sent > 0) & (turns == sent):
        announce_position(shards, peers, position, tiles, epoch, WORLD_SIZE)
    finish_after_arrivals(peers, epoch, gl.num_programs(0), WORLD_SIZE)


@gluon.jit
def _collect(slots, inbox, sent, turns, shards, peers, epoch, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    tiles = num_tiles(shards, TILE)
    message = 0
    for turn in range(sent, turns):
        tile = (gl.program_id(0) + turn * gl.num_programs(0)) % tiles
        row, col = tile_origin(tile, shards, TILE)
        for distance in range(1, WORLD_SIZE):
            peer = (peers.rank + distance) % WORLD_SIZE
            wait(shards.flags_ptr + peer * tiles + tile, epoch, peers.watchdog_ptr)
        fence_before_descriptor_loads()
        wait_vacated(inbox, turn - sent)
        message = load_partials(inbox, slots, message, peers.rank, row, col, WORLD_SIZE, TILE)


class WarpSpecialized(WarpSpecializedOperator[GemmReduceScatterProblem], GemmReduceScatter):
    """See the module. The rows of its output may lie further apart than they are long."""

    @classmethod
    def _config_reason(cls, problem: GemmReduceScatterProblem, config: GemmConfig) -> str | None:
        if reason := super()._config_reason(problem, config):
            return reason
        return f"team is {config.team}; nothing is sent after the last tiles" if config.team > 1 else None

    def _open_buffers(self) -> None:
        problem = self.problem
        shard_rows, n = problem.shard_shape(0)
        room = self._on_heap((problem.world_size, shard_rows, self._padded(n)), problem.dtype)
        self._flags = self._open_flags()
        self.output = room[self.rank, : problem.shard_shape(self.rank)[0], :n]
        at_owners = self.ctx.peer_view(room)[:, self.rank, :, :n]
        self._out = self._pieces_of(at_owners)
        self._slots = self._descriptor(room[:, :, :n], (1, self.config.block_m, PIECE_COLS.value))
        self._shards = Shards(self._flags, shard_rows, n, problem.a_shape(self.rank)[1])

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self._run(
            warp_specialized_kernel,
            self.config.num_sms,
            **self._operands(a, b),
            out=self._out,
            slots=self._slots,
            shards=self._shards,
            peers=self._peers(),
            WORLD_SIZE=self.problem.world_size,
        )
        return self.output


VARIANT = Variant(
    family=FAMILY,
    name=WarpSpecialized.variant,
    arrangement=Arrangement.FUSED_KERNEL,
    agent=Agent.COMM_WARPS,
    sync=Sync.SHARED_MEMORY_BARRIER,
    summary="one kernel; a warp of each program sends partial tiles, paced, another loads the peers' (Hopper)",
    build=WarpSpecialized,
    unsupported_reason=WarpSpecialized.unsupported_reason,
)
