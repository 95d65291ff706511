"""All-gather + GEMM with the copy engines and a kernel whose warps have different roles (Gluon, for Hopper).

| who | does | waits for |
|---|---|---|
| the copy engines | push this rank's shard of A to every peer, in pieces (copies.py) | the call before |
| 8 warps of every program | multiply tiles, and leave each in shared memory | operands; the tile before to be out |
| 1 warp | loads operands, meanwhile stores the tile before | room; pieces of the peers' shards; the finished tile |

The Hopper form of `copy_engine`, whose protocol this is: its multiplication keeps the vendor's rate beside the copies.
The own shard comes first, read where the caller has it. A tile of a peer's rows waits for their part before its first
load. Where the link is slower than the multiplication, what counts is what is left to multiply when the last byte has
come: then the shard that is used last comes in chunks of columns, and its tiles are multiplied chunk by chunk, while
the others come whole, for the copy engine pauses after every piece. Teams may share the last tiles
(../common/hopper/team.py). Pattern: arXiv 2511.12500, section 4, which names "wave specialization" and leaves it
unbuilt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core import fence_before_descriptor_loads, wait
from overlap_taxonomy import Agent, Arrangement, Sync

from ..common.config import GemmConfig
from ..common.gemm import num_tiles, tile_origin
from ..common.handshake import current_call, finish_and_clear
from ..common.hopper.arguments import Gate, Parcel
from ..common.hopper.outbox import await_arrival, load_ahead, load_and_send, open_outbox, send_last
from ..common.hopper.positions import share_of, shared_turns, whole_turns
from ..common.hopper.ring import gated, open_ring
from ..common.hopper.roles import first_role, multiply_second, multiply_tiles, worker_registers, worker_warps
from .copies import PushedByCopyEngines
from .schedule import Gathering
from .warp_specialized import StoresShards


@gluon.jit
def warp_specialized_kernel(
    a,
    gathered,
    b,
    out,
    team,
    sizes,
    part_rows,
    chunk_steps,
    peers,
    came_ptr,
    PARTS: gl.constexpr,
    CHUNKS: gl.constexpr,
    WORLD_SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Multiply shards as they come; `sizes` are those of the largest shard's rows of C, `part_rows` those of a part.

    Each of a part's CHUNKS is for `chunk_steps` steps of a tile.
    """
    epoch = current_call(peers, WORLD_SIZE)
    ring = open_ring(a, b, TILE)
    outbox = open_outbox(out, TILE)
    positions = num_tiles(sizes, TILE) * WORLD_SIZE
    whole = whole_turns(positions, TILE)
    num_steps = gl.cdiv(sizes.k, TILE.BLOCK_K)
    shared = shared_turns(positions, whole, num_steps, TILE)
    gl.warp_specialize(
        [
            (multiply_second, (ring, outbox, whole, num_steps, TILE)),
            (multiply_tiles, (ring, outbox, team, positions, whole, shared, num_steps, peers, epoch, TILE)),
            (
                _load_shards_and_store,
                (
                    a,
                    gathered,
                    b,
                    out,
                    ring,
                    outbox,
                    whole,
                    shared,
                    sizes,
                    part_rows,
                    chunk_steps,
                    peers,
                    came_ptr,
                    epoch,
                    PARTS,
                    CHUNKS,
                    WORLD_SIZE,
                    TILE,
                ),
            ),
        ][first_role(TILE.PINGPONG) :],
        worker_warps(1, TILE.PINGPONG),
        worker_registers(1, TILE.PINGPONG),
    )


@gluon.jit
def _load_shards_and_store(
    a,
    gathered,
    b,
    out,
    ring,
    outbox,
    whole,
    shared,
    sizes,
    part_rows,
    chunk_steps,
    peers,
    came_ptr,
    epoch,
    PARTS: gl.constexpr,
    CHUNKS: gl.constexpr,
    WORLD_SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    tiles = num_tiles(sizes, TILE)
    num_steps = gl.cdiv(sizes.k, TILE.BLOCK_K)
    turns = whole + shared
    step = 0
    owner = 0
    row = 0
    col = 0
    piece = 0
    pieces = 0
    arrived = PARTS  # in the order in which they are used; the own shard's are there
    for turn in range(turns):
        parcel = Parcel(owner, row, col, piece, pieces, peers.trace_ptr)
        share = share_of(turn, tiles * WORLD_SIZE, whole, num_steps, TILE)
        position = share.position
        start = share.start
        stop = share.stop
        piece = share.piece
        pieces = share.pieces
        owner = (peers.rank + position // tiles) % WORLD_SIZE
        row, col = tile_origin(position % tiles, sizes, TILE)
        if owner == peers.rank:
            here = ring
            if CHUNKS > 1:
                here = gated(ring, Gate(came_ptr, 1, num_steps, start, True, peers.watchdog_ptr))
            step, start = load_ahead(a, b, here, step, row, col, start, stop, outbox, turn > 1, TILE)
            step = load_and_send(
                a, b, here, step, row, col, start, stop, out, outbox, parcel, turn, 1, WORLD_SIZE, TILE
            )
        else:
            part = row // part_rows
            steps_a_flag = num_steps
            if CHUNKS > 1:
                is_cut = position // tiles == WORLD_SIZE - 1
                part = gl.where(is_cut, part, 0)
                steps_a_flag = gl.where(is_cut, chunk_steps, num_steps)
            needed = position // tiles * PARTS + part + 1
            flag_ptr = came_ptr + (owner * PARTS + part) * CHUNKS
            coming = ring
            if CHUNKS > 1:
                coming = gated(ring, Gate(flag_ptr, 1, steps_a_flag, start, needed <= arrived, peers.watchdog_ptr))
                arrived = gl.where(share.members == 1, needed, arrived)  # a team's member awaits its own run of k alone
            elif needed > arrived:
                wait(flag_ptr, 1, peers.watchdog_ptr)
                fence_before_descriptor_loads()
                arrived = needed
            a_row = owner * sizes.m + row
            step, start = load_ahead(gathered, b, coming, step, a_row, col, start, stop, outbox, turn > 1, TILE)
            step = load_and_send(
                gathered, b, coming, step, a_row, col, start, stop, out, outbox, parcel, turn, 1, WORLD_SIZE, TILE
            )
    parcel = Parcel(owner, row, col, piece, pieces, peers.trace_ptr)
    send_last(out, outbox, parcel, turns, turns > 1, 1, WORLD_SIZE, TILE)
    await_arrival()
    if (tiles == 0) & (gl.program_id(0) == 0):  # a rank without columns: its gathered A must be whole all the same
        for distance in gl.static_range(1, WORLD_SIZE):
            owner = (peers.rank + distance) % WORLD_SIZE
            for flag in gl.static_range(PARTS * CHUNKS if CHUNKS == 1 or distance == WORLD_SIZE - 1 else 1):
                wait(came_ptr + owner * PARTS * CHUNKS + flag, 1, peers.watchdog_ptr)
    finish_and_clear(peers, epoch, gl.num_programs(0), came_ptr, WORLD_SIZE * PARTS * CHUNKS, WORLD_SIZE)


class WarpSpecializedCopies(StoresShards, PushedByCopyEngines):
    """See the module. The rows of its output may lie further apart than they are long; `panels` are parts of a shard,
    `chunks` those of a part.

    Args, Attributes: see `AllGatherGemm`.
    """

    variant = "warp_specialized_copies"

    def default_config(self) -> GemmConfig:
        problem = self.problem
        rows, k = problem.a_shape(0)
        columns, itemsize = problem.b_shape(0)[1], problem.dtype.itemsize
        num_programs = self._num_programs(self.ctx.get_cu_count())
        schedule = Gathering(rows, columns, k, problem.world_size, itemsize, num_programs).quickest()
        config = self._config_of(schedule.cut)
        return replace(config, panels=schedule.parts, chunks=schedule.chunks, group_m=schedule.group)

    def _most_parts(self) -> int:
        return self.config.panels

    def _most_chunks(self) -> int:
        return self.config.chunks

    @property
    def _operands_arrive(self) -> bool:
        return self._num_chunks > 1

    def _open_output(self) -> None:
        super()._open_output()
        num_programs = self._num_programs(self.config.num_sms)
        self._team = self._open_team(num_programs, self._sizes, self.problem.world_size)

    def _multiplication(self, a: torch.Tensor, b: torch.Tensor) -> tuple[Any, dict[str, Any]]:
        return warp_specialized_kernel, {
            **self._operands(a if a.shape[0] else self.gathered, b),
            "gathered": self._descriptor(self.gathered, (self.config.block_m, self.config.block_k)),
            "out": self._out,
            "team": self._team,
            "sizes": self._sizes,
            "part_rows": self._part_rows,
            "chunk_steps": self._chunk_steps,
            "CHUNKS": self._num_chunks,
        }


VARIANT = WarpSpecializedCopies.as_variant(
    arrangement=Arrangement.KERNEL_AND_COPIES,
    agent=Agent.COPY_ENGINES,
    sync=Sync.SHARD_FLAG,
    summary="the copy engines push the shard; a warp of each program waits for shards, loads and stores (Hopper)",
)
