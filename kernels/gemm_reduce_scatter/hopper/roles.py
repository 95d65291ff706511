"""What the multiply warps do that add partials: they multiply tiles, and add the peers' partials to own ones.

Both warp groups together, or, with PINGPONG, each a tile of its own, in turns (../common/hopper/roles.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...common.device.trace import MULTIPLY, SUM, WAIT, trace_time, trace_until
from ...common.hopper.epilogue_load import add_partials, num_loads
from ...common.hopper.epilogue_store import acquire_store, apply_epilogue, stage_tile, wait_store
from ...common.hopper.pipeline import multiply_tile, trace_first_step
from ...common.hopper.roles import wait_in_sequence
from ...common.hopper.tile_scheduler import trace_number
from .tile_scheduler import work_tile


@gluon.jit
def sum_tiles(
    pipeline, store, load, placed, waves, shards, num_steps, peers, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr
):
    """Multiply `waves` tiles, add the peers' partials to this rank's own, and stage each for the epilogue store.

    With PINGPONG the first, the third, …: the others are `sum_second`'s.
    """
    if TILE.PINGPONG:
        _sum_every_other(0, pipeline, store, load, placed, waves, shards, num_steps, WORLD_SIZE, TILE)
    else:
        _sum_together(pipeline, store, load, placed, waves, shards, num_steps, peers, WORLD_SIZE, TILE)


@gluon.jit
def sum_second(pipeline, store, load, placed, waves, shards, num_steps, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr):
    """As `sum_tiles`, the second tile, the fourth, …."""
    _sum_every_other(1, pipeline, store, load, placed, waves, shards, num_steps, WORLD_SIZE, TILE)


@gluon.jit
def _sum_together(
    pipeline, store, load, placed, waves, shards, num_steps, peers, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr
):
    number = 0
    for wave in range(waves):
        is_own = work_tile(wave, shards, WORLD_SIZE).distance == 0
        step = wave * num_steps  # not kept from wave to wave: every register counts
        began = trace_first_step(pipeline, step, peers, trace_number(wave))
        acc, step = multiply_tile(pipeline, step, num_steps, TILE)
        multiplied = trace_time(peers)
        if is_own:
            acc, number = add_partials(acc, load, number, WORLD_SIZE, TILE)
            acc = apply_epilogue(acc, placed, wave, TILE)
        summed = trace_time(peers)
        acquire_store(store, wave)
        acquired = trace_time(peers)
        stage_tile(acc, store, TILE)
        trace_until(peers, MULTIPLY, trace_number(wave), began, multiplied)
        if is_own:
            trace_until(peers, SUM, trace_number(wave), multiplied, summed)
        trace_until(peers, WAIT, trace_number(wave), summed, acquired)


@gluon.jit
def _sum_every_other(
    first, pipeline, store, load, placed, waves, shards, num_steps, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr
):
    """Every other wave's tile, from the `first` on; they are staged in order."""
    number = 0
    for wave in range(waves):
        is_own = work_tile(wave, shards, WORLD_SIZE).distance == 0
        if wave % 2 == first:
            wait_in_sequence(pipeline, wave)
            acc, _ = multiply_tile(pipeline, wave * num_steps, num_steps, TILE, wave)
            if wave > 0:
                wait_store(store, wave)  # the other group's partials have been added, too
            if is_own:
                acc, number = add_partials(acc, load, number, WORLD_SIZE, TILE)
                acc = apply_epilogue(acc, placed, wave, TILE)
            acquire_store(store, wave)
            stage_tile(acc, store, TILE)
        elif is_own:
            number += num_loads(WORLD_SIZE, TILE)
