"""All-gather + GEMM in one kernel whose warps have different roles (Gluon, for Hopper).

| warps of a program | do | wait for |
|---|---|---|
| 8, two warp groups | multiply tiles, and leave each in shared memory | operands; the tile before to be out |
| 1 | loads operands, meanwhile stores the tile before | room; chunks of the peers' shards; the finished tile |
| 1, of the first programs | sends pieces of this rank's shard to every peer (courier.py) | the peers' readiness |
| 1, of the first programs | counts what was sent at the peers (../common/hopper/herald.py) | its arrival |

Programs that send have no tiles.

The own shard comes first, read where the caller has it; then a group of rows of each peer's shard, and so on. A tile of
a peer's rows is multiplied as the chunks of its columns come, so where the link is slower than the multiplication, only
the last chunk's part of a tile is left when the last byte has come. The kernel is launched early
(../common/hopper/roles.py). Pattern: arXiv 2511.12500, section 4, which names "wave specialization" and leaves it
unbuilt.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core import gdc_launch_dependents, gdc_wait
from overlap_taxonomy import Agent, Arrangement, Sync

from ..common.config import GemmConfig
from ..common.gemm import num_tiles, tile_origin
from ..common.handshake import begin_call, finish_after_arrivals
from ..common.hopper.arguments import Parcel, Sizes
from ..common.hopper.herald import open_herald
from ..common.hopper.operator import STAGES, WarpSpecializedOperator
from ..common.hopper.outbox import await_arrival, load_ahead, load_and_send, open_outbox, send_last
from ..common.hopper.ring import gated, open_ring
from ..common.hopper.roles import first_role, multiply_second, multiply_tiles, worker_registers, worker_warps
from ..common.operands import padded
from .courier import Consignment, count_parts, gate_of, send_shard, wait_all
from .operator import AllGatherGemm
from .problem import AllGatherGemmProblem

# A part is a chunk of a group of rows, counted and awaited at once: a shard's bytes over so many, within bounds.
_PARTS = 32
_PART_BYTES = (1 << 19, 1 << 22)
_SMALL_SHARD_BYTES = 16 << 20


@gluon.jit
def warp_specialized_kernel(
    a,
    gathered,
    b,
    out,
    everywhere,
    shard,
    sizes,
    group,
    peers,
    WORLD_SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Multiply shards as they come; `sizes` are those of the largest shard's rows of C, `group` those of a group's."""
    ring = open_ring(a, b, TILE)
    outbox = open_outbox(out, TILE)
    herald = open_herald()
    gdc_wait()
    epoch = begin_call(peers, WORLD_SIZE)
    own_tiles = num_tiles(sizes, TILE)
    group_tiles = num_tiles(group, TILE)
    positions = own_tiles + group_tiles * (shard.parts // shard.chunks) * (WORLD_SIZE - 1)
    first = gl.program_id(0) - shard.senders  # of the programs that multiply
    turns = gl.where(first < 0, 0, gl.cdiv(gl.maximum(positions - first, 0), gl.num_programs(0) - shard.senders))
    num_steps = gl.cdiv(sizes.k, TILE.BLOCK_K)
    gl.warp_specialize(
        [
            (multiply_second, (ring, outbox, turns, num_steps, TILE)),
            (multiply_tiles, (ring, outbox, None, positions, turns, 0, num_steps, peers, epoch, TILE)),
            (
                _load_shards_and_store,
                (
                    a,
                    gathered,
                    b,
                    out,
                    ring,
                    outbox,
                    turns,
                    own_tiles,
                    group_tiles,
                    num_steps,
                    shard,
                    sizes,
                    group,
                    peers,
                    epoch,
                    WORLD_SIZE,
                    TILE,
                ),
            ),
            (send_shard, (a, everywhere, ring, herald, shard, peers, epoch, WORLD_SIZE, TILE)),
            (count_parts, (herald, shard, peers, epoch, WORLD_SIZE)),
        ][first_role(TILE.PINGPONG) :],
        worker_warps(3, TILE.PINGPONG),
        worker_registers(3, TILE.PINGPONG),
    )


@gluon.jit
def _load_shards_and_store(
    a,
    gathered,
    b,
    out,
    ring,
    outbox,
    turns,
    own_tiles,
    group_tiles,
    num_steps,
    shard,
    sizes,
    group,
    peers,
    epoch,
    WORLD_SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    PEERS: gl.constexpr = max(WORLD_SIZE - 1, 1)
    step = 0
    owner = 0
    row = 0
    col = 0
    opened = 0  # groups of the peers' shards, in the order of their use, that have come
    for turn in range(turns):
        parcel = Parcel(owner, row, col, 0, TILE.PIECES, peers.trace_ptr)
        position = gl.program_id(0) - shard.senders + turn * (gl.num_programs(0) - shard.senders)
        if position < own_tiles:
            owner = peers.rank
            row, col = tile_origin(position, sizes, TILE)
            here = gated(ring, gate_of(shard, peers, epoch, owner, 0, True, TILE))
            step, start = load_ahead(a, b, here, step, row, col, 0, num_steps, outbox, turn > 1, TILE)
            step = load_and_send(
                a, b, here, step, row, col, start, num_steps, out, outbox, parcel, turn, 1, WORLD_SIZE, TILE
            )
        else:
            index = (position - own_tiles) // group_tiles
            owner = (peers.rank + 1 + index % PEERS) % WORLD_SIZE
            row, col = tile_origin((position - own_tiles) % group_tiles, group, TILE)
            row += index // PEERS * group.m
            coming = gated(ring, gate_of(shard, peers, epoch, owner, index // PEERS, index < opened, TILE))
            a_row = owner * sizes.m + row
            step, start = load_ahead(gathered, b, coming, step, a_row, col, 0, num_steps, outbox, turn > 1, TILE)
            step = load_and_send(
                gathered, b, coming, step, a_row, col, start, num_steps, out, outbox, parcel, turn, 1, WORLD_SIZE, TILE
            )
            opened = index + 1
    gdc_launch_dependents()  # the last operands have been asked for; a program without tiles needs none
    send_last(
        out, outbox, Parcel(owner, row, col, 0, TILE.PIECES, peers.trace_ptr), turns, turns > 1, 1, WORLD_SIZE, TILE
    )
    await_arrival()
    if (own_tiles == 0) & (gl.program_id(0) == 0):  # a rank without columns: its gathered A must be whole all the same
        wait_all(shard, peers, epoch, WORLD_SIZE)
    finish_after_arrivals(peers, epoch, gl.num_programs(0), WORLD_SIZE)


class StoresShards(WarpSpecializedOperator[AllGatherGemmProblem], AllGatherGemm):
    """An operator whose tiles are stored by TMA: one at the end of a shard stops there."""

    def _open_output(self) -> None:
        problem = self.problem
        shard_rows = problem.a_shape(0)[0]
        m, n = problem.c_shape(self.rank)
        # The rows of each shard are a matrix of their own.
        shape = (problem.world_size, shard_rows, padded(n, problem.dtype))
        room = torch.zeros(shape, dtype=problem.dtype, device=self.ctx.get_device())
        self.output = room.flatten(0, 1)[:m, :n]
        self._out = self._pieces_of(room)
        self._sizes = Sizes(shard_rows, n, problem.k)


class WarpSpecialized(StoresShards):
    """See the module. The rows of its output may lie further apart than they are long."""

    @property
    def _operands_arrive(self) -> bool:
        return True

    @classmethod
    def _config_reason(cls, problem: AllGatherGemmProblem, config: GemmConfig) -> str | None:
        if reason := super()._config_reason(problem, config):
            return reason
        return f"team is {config.team}; this variant's programs share no tiles" if config.team > 1 else None

    def default_config(self) -> GemmConfig:
        # Narrow tiles end sooner after the last chunk: 8192x4096x14336 over 4 H200s takes 553 us, with 256 columns 600.
        # Half the senders, and groups twice as large, take 109 us in place of 132 for 4096x4096x4096.
        config = super().default_config()
        if self.problem.world_size == 1:
            return config
        if config.block_n == 256:
            config = replace(config, block_n=128, num_stages=STAGES[128])
        shard_bytes = self.problem.wire_bytes // (self.problem.world_size - 1)
        is_small = shard_bytes < _SMALL_SHARD_BYTES
        return replace(config, panels=2, comm_sms=8) if is_small else replace(config, panels=4, comm_sms=16)

    def _open_buffers(self) -> None:
        super()._open_buffers()
        shard = self._cut()
        counts = self._flags_by_sender(shard.parts, "pieces of part", "shard", a_call=shard.pieces)
        self._shard = shard._replace(counts_ptr=counts)
        # Where this rank has no rows, nothing is sent, but a descriptor needs some.
        own = self._own_rows if shard.rows else slice(0, 1)
        piece = (1, self.config.block_m, self.config.block_k)
        self._everywhere = self._descriptor(self.ctx.peer_view(self.gathered)[:, own], piece)

    def _cut(self) -> Consignment:
        """Return how the shards are cut, into groups of rows of tiles and into chunks; the same on all ranks."""
        problem, config = self.problem, self.config
        itemsize, rows = problem.dtype.itemsize, problem.a_shape(0)[0]
        row_tiles = -(-rows // config.block_m)
        groups = fewest_empty(row_tiles, config.panels)
        group_rows = -(-row_tiles // groups) * config.block_m
        least, most = _PART_BYTES
        part_bytes = max(least, min(rows * problem.k * itemsize // _PARTS, most))
        steps = max(1, part_bytes // (group_rows * itemsize) // config.block_k)
        steps = min(steps, -(-problem.k // config.block_k))
        chunks = -(-problem.k // (steps * config.block_k))
        return Consignment(
            None,
            rows=problem.a_shape(self.rank)[0],
            k=problem.k,
            group_rows=group_rows,
            chunk_columns=steps * config.block_k,
            chunks=chunks,
            parts=groups * chunks,
            pieces=group_rows // config.block_m * steps,
            senders=config.comm_sms if problem.world_size > 1 else 0,
        )

    def _overlap(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self._run(
            warp_specialized_kernel,
            self.config.num_sms,
            early=True,
            **self._operands(a if a.shape[0] else self.gathered, b),
            gathered=self._descriptor(self.gathered, (self.config.block_m, self.config.block_k)),
            out=self._out,
            everywhere=self._everywhere,
            shard=self._shard,
            sizes=self._sizes,
            group=self._sizes._replace(m=self._shard.group_rows),
            peers=self._peers(),
            WORLD_SIZE=self.problem.world_size,
        )


def fewest_empty(row_tiles: int, most: int) -> int:
    """Return into how many groups, `most` at most, rows of tiles are cut: many, yet one in ten at most is empty."""
    counts = range(1, min(row_tiles, most) + 1)
    return max(count for count in counts if -(-row_tiles // count) * count <= 1.1 * row_tiles)


VARIANT = WarpSpecialized.as_variant(
    arrangement=Arrangement.FUSED_KERNEL,
    agent=Agent.COMM_PROGRAMS,
    sync=Sync.SHARD_COUNTER,
    summary="one kernel; some programs send the shard by TMA; of the others a warp loads what has come (Hopper)",
)
