"""GEMM + reduce-scatter in one kernel whose warps have different roles (Gluon, for Hopper).

| warps of a program | do | wait for |
|---|---|---|
| 8, two groups | multiply, add the peers' partials to own tiles, leave tiles in shared memory | operands; partials |
| 1 | loads operands, and meanwhile sends the tile before to its owner, in pieces | room; the tile |
| 1 | announces what was sent (../common/hopper/herald.py) | its arrival |
| 1 | loads the peers' partials of own tiles | the peers' flags; room |

Own tiles come among the peers', when their partials have had the time to arrive (order.py). So all the time there is
as much to send as there is to multiply; with all own tiles last, the link would be too slow before and idle then. Sums
start from the fp32 accumulators, add the peers' partials in a fixed order and are rounded once. The pieces are paced
by the main loop (../common/hopper/outbox.py). A rank's own slot, which no peer sends to, is its output: sums are sent
there, like any other tile. In all-reduce they go to every rank's output. The kernel is launched early
(../common/hopper/roles.py). Pattern: arXiv 2511.12500, section 4 ("wave specialization"), with the reduction in the
epilogue.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris_core import fence_before_descriptor_loads, gdc_launch_dependents, gdc_wait, wait
from overlap_taxonomy import Agent, Arrangement, Sync

from ..common.config import GemmConfig
from ..common.gemm import tile_origin
from ..common.handshake import begin_call, finish_after_arrivals, finish_call, wait_ready
from ..common.hopper.arguments import Parcel
from ..common.hopper.herald import hear, open_herald, said, tell
from ..common.hopper.inbox import load_partials, open_inbox, vacate, wait_vacated
from ..common.hopper.operator import WarpSpecializedOperator
from ..common.hopper.outbox import (
    PIECE_COLS,
    await_arrival,
    let_refill,
    load_ahead,
    load_and_send,
    open_outbox,
    send_last,
)
from ..common.hopper.plan import Cut, tile_alone_us, tile_sent_us
from ..common.hopper.positions import num_turns, trace_number
from ..common.hopper.ring import load_steps, open_ring
from ..common.hopper.roles import first_role, worker_registers, worker_warps
from ..common.operands import padded
from ..common.partials import announce_position
from ..common.trace import COLLECT, COLLECT_WAIT, SEND_WAIT, trace_span, trace_time
from .operator import GemmReduceScatter
from .order import Work, order_tiles, work_in
from .problem import GemmReduceScatterProblem
from .turns import sum_second, sum_tiles


@gluon.jit
def warp_specialized_kernel(a, b, out, sums, slots, shards, peers, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    """Send the partial tiles of the peers' shards, and sum this rank's, into `sums` or, without it, its own slot."""
    ring = open_ring(a, b, TILE)
    outbox = open_outbox(out, TILE)
    inbox = open_inbox(outbox, slots, TILE)
    herald = open_herald()
    gdc_wait()
    epoch = begin_call(peers, WORLD_SIZE)
    turns = num_turns(shards.tiles * WORLD_SIZE)
    num_steps = gl.cdiv(shards.k, TILE.BLOCK_K)
    gl.warp_specialize(
        [
            (sum_second, (ring, outbox, inbox, turns, shards, num_steps, WORLD_SIZE, TILE)),
            (sum_tiles, (ring, outbox, inbox, turns, shards, num_steps, peers, WORLD_SIZE, TILE)),
            (
                _load_and_send_partials,
                (a, b, out, sums, ring, outbox, inbox, herald, turns, shards, peers, epoch, WORLD_SIZE, TILE),
            ),
            (_collect, (slots, inbox, turns, shards, peers, epoch, WORLD_SIZE, TILE)),
            (_announce, (herald, turns, shards, peers, epoch, WORLD_SIZE)),
        ][first_role(TILE.PINGPONG) :],
        worker_warps(3, TILE.PINGPONG),
        worker_registers(3, TILE.PINGPONG),
    )


@gluon.jit
def _load_and_send_partials(
    a,
    b,
    out,
    sums,
    ring,
    outbox,
    inbox,
    herald,
    turns,
    shards,
    peers,
    epoch,
    WORLD_SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    num_steps = gl.cdiv(shards.k, TILE.BLOCK_K)
    step = 0
    row = 0
    col = 0
    now = Work(0, 0)  # the tile whose operands are loaded
    is_owed = False  # a peer's tile was sent, and the herald does not know
    is_held = False  # what was sent last is still in the outbox
    announced = 0
    for turn in range(turns):
        sending = now
        parcel = Parcel(peers.rank + sending.distance, row, col, 0, TILE.PIECES, peers.trace_ptr)
        now = work_in(turn, shards, WORLD_SIZE)
        row, col = tile_origin(now.tile, shards, TILE)
        owner = (peers.rank + now.distance) % WORLD_SIZE
        a_row = owner * shards.rows_apart + row
        b_col = owner * shards.cols_apart + col
        step, start = load_ahead(a, b, ring, step, a_row, b_col, 0, num_steps, outbox, is_held, TILE)
        # With steps loaded ahead, and long after the last piece, there is nothing to wait for any more.
        announced = _have_announced(herald, is_owed, announced)
        is_owed = sending.distance > 0
        # Partials need the outbox's memory: what is there during an own tile leaves in half of its main loop.
        is_own = now.distance == 0
        stop = gl.where(is_own, (start + num_steps) // 2, num_steps)
        if (sums is not None) and (sending.distance == 0):
            step = load_and_send(
                a, b, ring, step, a_row, b_col, start, stop, sums, outbox, parcel, turn, WORLD_SIZE, WORLD_SIZE, TILE
            )
        else:
            step = load_and_send(
                a, b, ring, step, a_row, b_col, start, stop, out, outbox, parcel, turn, 1, WORLD_SIZE, TILE
            )
        is_held = turn > 0
        if is_own:
            if turn > 0:
                let_refill(outbox)
            vacate(inbox)
            step = load_steps(a, b, ring, step, a_row, b_col, stop, num_steps, TILE)
            announced = _have_announced(herald, is_owed, announced)
            is_owed = False
            is_held = False
        elif turn == 0:  # a program whose first tile is an own one sends sums of what peers have sent in this call
            began = trace_time(peers)
            wait_ready(peers, epoch, WORLD_SIZE)
            trace_span(peers, SEND_WAIT, trace_number(turn), began)
    gdc_launch_dependents()  # the last operands have been asked for
    if is_held:
        let_refill(outbox)
    announced = _have_announced(herald, is_owed, announced)
    parcel = Parcel(peers.rank + now.distance, row, col, 0, TILE.PIECES, peers.trace_ptr)
    if (sums is not None) and (now.distance == 0):
        send_last(sums, outbox, parcel, turns, False, WORLD_SIZE, WORLD_SIZE, TILE)
    else:
        send_last(out, outbox, parcel, turns, False, 1, WORLD_SIZE, TILE)
    began = trace_time(peers)
    await_arrival()
    trace_span(peers, SEND_WAIT, trace_number(turns - 1), began)
    _have_announced(herald, (turns > 0) & (now.distance > 0), announced)
    if sums is None:
        finish_after_arrivals(peers, epoch, gl.num_programs(0), WORLD_SIZE)
    else:
        finish_call(peers, epoch, gl.num_programs(0), WORLD_SIZE)


@gluon.jit
def _have_announced(herald, is_owed, announced):
    """Have the herald announce a tile that was sent, if it is a peer's; return how many of them there were."""
    if is_owed:
        await_arrival()
        tell(herald, announced)
        announced += 1
    return announced


@gluon.jit
def _announce(herald, turns, shards, peers, epoch, WORLD_SIZE: gl.constexpr):
    """Tell the owners of the tiles that were sent that this rank's partials of them are there."""
    announced = 0
    for turn in range(turns):
        sent = work_in(turn, shards, WORLD_SIZE)
        if sent.distance > 0:
            hear(herald, announced)
            position = (sent.distance - 1) * shards.tiles + sent.tile
            announce_position(shards, peers, position, shards.tiles, epoch, WORLD_SIZE)
            said(herald)
            announced += 1


@gluon.jit
def _collect(slots, inbox, turns, shards, peers, epoch, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    message = 0
    collected = 0
    # Alone there is nothing to collect, and so nothing that would hold the loader back: it could be two phases ahead.
    for turn in range(turns if WORLD_SIZE > 1 else 0):
        work = work_in(turn, shards, WORLD_SIZE)
        if work.distance == 0:
            began = trace_time(peers)
            row, col = tile_origin(work.tile, shards, TILE)
            for distance in range(1, WORLD_SIZE):
                peer = (peers.rank + distance) % WORLD_SIZE
                wait(shards.flags_ptr + peer * shards.tiles + work.tile, epoch, peers.watchdog_ptr)
            fence_before_descriptor_loads()
            trace_span(peers, COLLECT_WAIT, trace_number(turn), began)
            wait_vacated(inbox, collected)
            began = trace_time(peers)
            message = load_partials(inbox, slots, message, peers.rank, row, col, WORLD_SIZE, TILE)
            trace_span(peers, COLLECT, trace_number(turn), began)
            collected += 1


class WarpSpecialized(WarpSpecializedOperator[GemmReduceScatterProblem], GemmReduceScatter):
    """See the module. The rows of its output may lie further apart than they are long."""

    @classmethod
    def _config_reason(cls, problem: GemmReduceScatterProblem, config: GemmConfig) -> str | None:
        if reason := super()._config_reason(problem, config):
            return reason
        return f"team is {config.team}; tiles to which partials are added are not shared" if config.team > 1 else None

    def _open_buffers(self) -> None:
        problem, config = self.problem, self.config
        m, n = self._shard_shape
        cut = Cut(config.block_n, config.team, config.pingpong)
        room = self._on_heap((problem.world_size, m, padded(n, problem.dtype)), problem.dtype)
        self._flags = self._open_flags()
        self.output, self._sums = self._open_sums(room)
        at_owners = self.ctx.peer_view(room)[:, self.rank, :, :n]
        self._out = self._pieces_of(at_owners)
        self._slots = self._descriptor(room[:, :, :n], (1, config.block_m, PIECE_COLS.value))
        self._shards = order_tiles(
            self._flags,
            m=m,
            n=n,
            k=problem.a_shape(self.rank)[1],
            by_columns=self._is_cut_by_columns,
            tiles=self._tiles((m, n)),
            tile_us=tile_alone_us(cut, problem.a_shape(0)[1]),
            turn_sent_us=config.num_sms * tile_sent_us(cut, peers=1),
            sends_sums=self._sums is not None,
            num_programs=config.num_sms,
            world_size=problem.world_size,
        )

    @property
    def _is_cut_by_columns(self) -> bool:
        """Whether ranks sum columns of C; else rows."""
        return False

    def _open_sums(self, room: torch.Tensor) -> tuple[torch.Tensor, TensorDescriptor | None]:
        """Return the output, and where sums are sent; None: into this rank's slot of the `room`, the output."""
        return room[self.rank, : self.problem.shard_shape(self.rank)[0], : self.problem.n], None

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self._run(
            warp_specialized_kernel,
            self.config.num_sms,
            early=True,
            **self._operands(a, b),
            out=self._out,
            sums=self._sums,
            slots=self._slots,
            shards=self._shards,
            peers=self._peers(),
            WORLD_SIZE=self.problem.world_size,
        )
        return self.output


VARIANT = WarpSpecialized.as_variant(
    arrangement=Arrangement.FUSED_KERNEL,
    agent=Agent.COMM_WARPS,
    sync=Sync.SHARED_MEMORY_BARRIER,
    summary="one kernel; a warp of each program sends partial tiles, paced, another loads the peers' (Hopper)",
)
