"""What the multiply warps of a warp-specialised kernel do, wave by wave: in each, a program has one tile.

Every program is 8 warps that multiply and one that loads and communicates. The 8 multiply a tile together; or, with
PINGPONG, each of the two warp groups has a tile of its own, and they multiply in turns: while one rounds its tile and
stages it for the epilogue store, the other multiplies. An ordered sequence barrier says which. Program p has tile
``p + w * num_programs`` in wave w. All programs are resident, one an SM. None waits for another of its rank, but for
those that split its last tiles, if any (fixup.py).

A kernel that is all a call queues is launched early: its programs take SMs that the kernel before has left, make their
barriers, and touch no global memory before that one is done. The kernel after may start when all programs have asked
for their last operands. Beside copy engines it is not, as its side streams need a free SM.

A traced tile is written down when it is staged: before, a thread's registers are full of it. With PINGPONG there is no
trace.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

from ..device.trace import MULTIPLY, SUM, WAIT, trace_span, trace_time, trace_until
from .epilogue_store import acquire_store, apply_epilogue, stage_tile
from .fixup import exchange_partials, stage_reduced
from .pipeline import consumer_wait, multiply_tile, pipeline_state, trace_first_step
from .tile_scheduler import trace_number, work_tile

# Of a thread that loads and communicates; those that multiply have the rest. With 56 the handshake of 8 ranks spills.
LOADER_REGISTERS = gl.constexpr(72)
# Of a thread of the first warp group with PINGPONG; those of the second have what is left, more or as many.
MULTIPLY_REGISTERS = gl.constexpr(208)
GROUP_WARPS = gl.constexpr(4)


@constexpr_function
def first_role(pingpong):
    """Return the index of a kernel's first role: the second warp group's, which is listed first, may be left out."""
    return 0 if pingpong else 1


@constexpr_function
def worker_warps(comm_warps, pingpong):
    """Return the warps of each role but the first that is listed; `comm_warps` of them load and communicate."""
    return [GROUP_WARPS.value] * pingpong + [1] * comm_warps


@constexpr_function
def worker_registers(comm_warps, pingpong):
    """Return the registers of a thread of the same roles."""
    return [MULTIPLY_REGISTERS.value] * pingpong + [LOADER_REGISTERS.value] * comm_warps


@gluon.jit
def wait_in_sequence(pipeline, wave):
    """Wait until the last multiplication of the wave before is under way; by the group whose wave it is."""
    if wave > 0:
        consumer_wait(pipeline.sequence, pipeline_state(pipeline.sequence, wave - 1))


@gluon.jit
def multiply_second(pipeline, store, placed, waves, num_steps, TILE: gl.constexpr):
    """Multiply the second of `waves` tiles, the fourth, …, and stage each for the epilogue store."""
    _multiply_every_other(1, pipeline, store, placed, waves, num_steps, TILE)


@gluon.jit
def _multiply_every_other(first, pipeline, store, placed, waves, num_steps, TILE: gl.constexpr):
    """Multiply every other tile from the `first` on.

    A tile's last operands are loaded when the tile before the last one has left shared memory, so a group that waits
    for the last one to leave cannot take the one for the other.
    """
    for wave in range(first, waves, 2):
        wait_in_sequence(pipeline, wave)
        acc, _ = multiply_tile(pipeline, wave * num_steps, num_steps, TILE, wave)
        acquire_store(store, wave)
        stage_tile(apply_epilogue(acc, placed, wave, TILE), store, TILE)


@gluon.jit
def multiply_tiles(
    pipeline, store, placed, workspace, total_tiles, whole, split, num_steps, peers, epoch, TILE: gl.constexpr
):
    """Multiply tiles in `whole` waves, then parts of tiles in `split` ones, and stage what this program keeps of each.

    With PINGPONG the first of the whole ones, the third, …: the others are `multiply_second`'s.
    """
    if TILE.PINGPONG:
        _multiply_every_other(0, pipeline, store, placed, whole, num_steps, TILE)
    else:
        _multiply_together(pipeline, store, placed, workspace, total_tiles, whole, split, num_steps, peers, epoch, TILE)


@gluon.jit
def _multiply_together(
    pipeline, store, placed, workspace, total_tiles, whole, split, num_steps, peers, epoch, TILE: gl.constexpr
):
    step = 0
    for wave in range(whole):
        began = trace_first_step(pipeline, step, peers, trace_number(wave))
        acc, step = multiply_tile(pipeline, step, num_steps, TILE)
        multiplied = trace_time(peers)
        acquire_store(store, wave)
        acquired = trace_time(peers)
        stage_tile(apply_epilogue(acc, placed, wave, TILE), store, TILE)
        trace_until(peers, MULTIPLY, trace_number(wave), began, multiplied)
        trace_until(peers, WAIT, trace_number(wave), multiplied, acquired)
    if TILE.SPLITS > 1:
        for wave in range(whole, whole + split):
            work = work_tile(wave, total_tiles, whole, num_steps, TILE)
            began = trace_first_step(pipeline, step, peers, trace_number(wave))
            acc, step = multiply_tile(pipeline, step, work.stop - work.start, TILE)
            multiplied = trace_time(peers)
            exchange_partials(acc, workspace, work, epoch, peers.watchdog_ptr, TILE)
            exchanged = trace_time(peers)
            acquire_store(store, wave)
            acquired = trace_time(peers)
            stage_reduced(store, workspace, work, placed, wave, TILE)
            trace_until(peers, MULTIPLY, trace_number(wave), began, multiplied)
            trace_until(peers, SUM, trace_number(wave), multiplied, exchanged)
            trace_until(peers, WAIT, trace_number(wave), exchanged, acquired)
            trace_span(peers, SUM, trace_number(wave), acquired)
