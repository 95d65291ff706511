"""The persistent tile loops of the sm90 main loop: what the warps of a program do with its tiles, one a wave.

| loop | by | does with a tile |
|---|---|---|
| `load_tiles` | the load warp | loads its operands, step by step, and meanwhile sends the tile before |
| `multiply_tiles`, `multiply_second` | the multiply warps | multiply it, add the peers' partials if any, and stage it |

As in the portable loop (../portable/tile_loop.py) the other parts of a fused GEMM are jit functions, each with a bundle
of what it reads:

| function | does |
|---|---|
| TILE.SCHEDULER | returns an index's work tile, as in ../device/tile_scheduler.py |
| GATE | waits for the rows of a peer's A that a tile needs, or leaves that to the loads of its steps |
| SEND | produces a tile's loads, and meanwhile sends the tile before, which is `pending` in the epilogue store |

They are called so:

    work = SCHEDULER(index, tiled, rank, TILE)
    load_gate, arrived = GATE(gate, work, split, arrived, peers, TILE)
    number, sent = SEND(operands, warp, number, split, work, wave, pending, sent, peers, epoch, TILE)

`number` is that of the program's next k step; `arrived` and `sent` are what GATE and SEND know of the tiles before.

With PINGPONG each of the two warp groups multiplies every other tile: while one rounds its tile and stages it, the
other multiplies. An ordered sequence barrier says which. The last operands of tile w are loaded only after tile w - 2
has left shared memory: so a group that waits for w - 1 to leave is one phase behind at most, and the parity tells.

A traced tile is written down when it is staged: before, a thread's registers are full of it. With PINGPONG there is no
trace.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.scaling import BLOCK_SUMS, WHOLE_SUMS
from ..device.trace import MULTIPLY, SUM, WAIT, trace_span, trace_time, trace_until
from .arguments import PendingStore, TileOperands
from .epilogue_load import add_partials, num_loads
from .epilogue_store import (
    acquire_store,
    apply_epilogue,
    by_columns,
    fetch_columns,
    load_and_send,
    load_prologue,
    stage_tile,
    wait_store,
)
from .fixup import exchange_partials, stage_reduced
from .pipeline import consumer_wait, multiply_tile, pipeline_state, trace_first_step
from .promotion import multiply_by_halves, multiply_in_turns, row_scales, scale_columns
from .waves import first_partial, kept_subtiles, tile_split, trace_number, whole_tile


@gluon.jit
def load_tiles(
    a,
    b,
    warp,
    waves,
    tiled,
    sent,
    peers,
    epoch,
    SEND: gl.constexpr,
    TILE: gl.constexpr,
    gathered=None,
    gate=None,
    GATE: gl.constexpr = None,
):
    """Load the operands of a program's tiles, and send all but the last of them; by one warp.

    `a` and `b` are descriptors. Where A is `gathered`, that is the descriptor of the peers' rows, whose tiles pass the
    gate, and `a` is this rank's shard. Return the last tile, and what SEND returned of it as `sent`.
    """
    number = 0  # of a step, of all of the program
    arrived = 0
    pending = PendingStore(peers.rank, 0, 0, 0, TILE.SUBTILES)
    for wave in range(waves.whole + waves.split):
        split = tile_split(wave, waves, TILE)
        work = TILE.SCHEDULER(split.index, tiled, peers.rank, TILE)
        if gathered is None:
            whole = TileOperands(a, b, work.a_row, work.b_col, None)
            number, sent = SEND(whole, warp, number, split, work, wave, pending, sent, peers, epoch, TILE)
        elif work.owner == peers.rank:
            own = TileOperands(a, b, work.row, work.b_col, None)
            number, sent = SEND(own, warp, number, split, work, wave, pending, sent, peers, epoch, TILE)
        else:
            load_gate, arrived = GATE(gate, work, split, arrived, peers, TILE)
            coming = TileOperands(gathered, b, work.a_row, work.b_col, load_gate)
            number, sent = SEND(coming, warp, number, split, work, wave, pending, sent, peers, epoch, TILE)
        subtile, num_subtiles = kept_subtiles(split, TILE)
        pending = PendingStore(work.owner, work.row, work.col, subtile, num_subtiles)
    return pending, sent


@gluon.jit
def send_to_owner(operands, warp, number, split, work, wave, pending, sent, peers, epoch, TILE: gl.constexpr):
    """Load a tile's operands while the tile before is stored at its owner's place in `warp.out`: a SEND."""
    return load_and_send_tile(operands, warp, number, split, wave, pending, peers, 1, TILE), sent


@gluon.jit
def load_and_send_tile(
    operands, warp, number, split, wave, pending, peers, DESTINATIONS: gl.constexpr, TILE: gl.constexpr
):
    """Load a tile's operands while the tile before is sent; return the program's next step."""
    # From the third tile on: one was sent in the wave before, and its shared memory is to be released.
    number, start = load_prologue(operands, warp, number, split, wave > 1, TILE)
    return load_and_send(
        operands, warp, warp.out, number, start, split.stop, pending, wave, peers, DESTINATIONS, TILE.WORLD_SIZE, TILE
    )


@gluon.jit
def multiply_tiles(pipeline, staging, waves, workspace, peers, epoch, TILE: gl.constexpr):
    """Multiply a program's tiles and its parts of split ones, and stage what it keeps of each.

    With PINGPONG the first tile, the third, …: the others are `multiply_second`'s.
    """
    _multiply_whole(0, pipeline, staging, waves, peers, TILE)
    if TILE.SPLITS > 1:
        _multiply_split(pipeline, staging, waves, workspace, peers, epoch, TILE)


@gluon.jit
def multiply_second(pipeline, staging, waves, peers, TILE: gl.constexpr):
    """With PINGPONG, multiply the second of a program's tiles, the fourth, …, and stage each."""
    _multiply_whole(1, pipeline, staging, waves, peers, TILE)


@gluon.jit
def _multiply_whole(first, pipeline, staging, waves, peers, TILE: gl.constexpr):
    """Multiply tiles that are not split, with PINGPONG every other one from the `first` on; all are staged in order."""
    loads = 0  # of peers' partials, for all tiles before
    for wave in range(waves.whole):
        index = whole_tile(wave, waves)
        is_summed = False
        if staging.load is not None:
            is_summed = TILE.SCHEDULER(index, staging.tiled, peers.rank, TILE).owner == peers.rank
        if (not TILE.PINGPONG) or (wave % 2 == first):
            if TILE.PINGPONG:
                _wait_in_sequence(pipeline, wave)
            number = wave * waves.num_steps  # not kept from wave to wave: every register counts
            began = trace_first_step(pipeline, number, peers, trace_number(wave))
            acc, fetched = _multiply(pipeline, staging, wave, number, waves.num_steps, index, peers.rank, TILE)
            multiplied = trace_time(peers)
            if staging.load is None:
                acc = apply_epilogue(acc, staging, fetched, index, peers.rank, TILE)
            else:
                if TILE.PINGPONG:
                    if wave > 0:
                        wait_store(staging.store, wave)  # the other group's partials have been added, too
                if is_summed:
                    acc = add_partials(acc, staging.load, loads, TILE)
                    acc = apply_epilogue(acc, staging, fetched, index, peers.rank, TILE)
            finished = trace_time(peers)
            acquire_store(staging.store, wave)
            acquired = trace_time(peers)
            stage_tile(acc, staging.store, TILE)
            trace_until(peers, MULTIPLY, trace_number(wave), began, multiplied)
            if is_summed:
                trace_until(peers, SUM, trace_number(wave), multiplied, finished)
            trace_until(peers, WAIT, trace_number(wave), finished, acquired)
        if is_summed:
            loads += num_loads(TILE)


@gluon.jit
def _multiply_split(pipeline, staging, waves, workspace, peers, epoch, TILE: gl.constexpr):
    number = waves.whole * waves.num_steps
    for wave in range(waves.whole, waves.whole + waves.split):
        split = tile_split(wave, waves, TILE)
        partial = first_partial(wave, waves, split, TILE)
        began = trace_first_step(pipeline, number, peers, trace_number(wave))
        steps = split.stop - split.start
        acc, _ = _multiply(pipeline, staging, wave, number, steps, split.index, peers.rank, TILE)
        number += steps
        multiplied = trace_time(peers)
        exchange_partials(acc, workspace, split, partial, epoch, peers.watchdog_ptr, TILE)
        exchanged = trace_time(peers)
        acquire_store(staging.store, wave)
        acquired = trace_time(peers)
        stage_reduced(staging, workspace, split, partial, peers.rank, TILE)
        trace_until(peers, MULTIPLY, trace_number(wave), began, multiplied)
        trace_until(peers, SUM, trace_number(wave), multiplied, exchanged)
        trace_until(peers, WAIT, trace_number(wave), exchanged, acquired)
        trace_span(peers, SUM, trace_number(wave), acquired)


@gluon.jit
def _multiply(pipeline, staging, wave, number, num_steps, index, rank, TILE: gl.constexpr):
    """Return the tile of an index, as `multiply_tile` does, promoted where that is asked for, and scaled.

    Return also what of its epilogue's operands was fetched meanwhile, or ().
    """
    fetched = ()
    if TILE.SCALES == BLOCK_SUMS:
        acc = multiply_by_halves(pipeline, staging, number, num_steps, index, rank, TILE)
    elif TILE.IS_PROMOTED:
        acc = multiply_in_turns(pipeline, number, num_steps, TILE)
    else:
        FETCH: gl.constexpr = fetch_columns if TILE.FETCHES else None
        reads = (staging, index, rank)
        acc, fetched = multiply_tile(pipeline, wave, number, num_steps, reads, FETCH, TILE)
    if TILE.SCALES == WHOLE_SUMS:
        # Not kept since the tile was scheduled: the multiplication takes the registers.
        work = TILE.SCHEDULER(index, staging.tiled, rank, TILE)
        scales = row_scales(staging, work, rank)
        acc = by_columns(acc, scale_columns, (scales, staging.scales), scales.row, work.b_col, TILE)
    return acc, fetched


@gluon.jit
def _wait_in_sequence(pipeline, wave):
    """Wait until the last multiplication of the wave before is under way; by the group whose wave it is."""
    if wave > 0:
        consumer_wait(pipeline.sequence, pipeline_state(pipeline.sequence, wave - 1))
