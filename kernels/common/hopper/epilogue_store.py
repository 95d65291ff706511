"""The epilogue store pipeline: the multiply warps stage a finished tile in shared memory, the load warp stores it.

A tile stored at once would fill the queue of the engine that also loads the operands, and the loads behind it would
wait for the link (0.569 ms for 8192x8192x8192 over 4 H200s). Its subtiles, one every few steps of the next tile's main
loop, cost almost nothing (0.412 ms): the multiplication's own progress paces them.

`out` is a tensor descriptor of three dimensions, (rank, row, column), whose bounds are those of what this program may
write at a rank: what reaches past its end is not stored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..device.epilogue import apply_ops, load_elements
from ..device.trace import SEND, trace_span, trace_time, trace_until
from .arguments import EpilogueStore
from .gluon_names import reinterpret, thread_barrier, tma_store
from .pipeline import (
    consumer_release,
    consumer_wait,
    load_step,
    load_steps,
    make_pipeline,
    pipeline_state,
    producer_acquire,
    producer_commit,
)
from .waves import trace_number


@gluon.jit
def make_epilogue_store(out, TILE: gl.constexpr):
    """Return an empty epilogue store for subtiles of the descriptor `out`."""
    subtiles = gl.allocate_shared_memory(
        out.dtype, [TILE.SUBTILES, 1, TILE.SUBTILE_ROWS, TILE.SUBTILE_COLS], out.layout
    )
    return EpilogueStore(subtiles, make_pipeline(1))


@gluon.jit
def fetch_columns(reads, TILE: gl.constexpr):
    """Return of each operand of an epilogue, which are vectors of columns alone, the elements of a tile's columns.

    By the multiply warps, an element a thread. `reads` is (staging, the tile's index, rank).
    """
    staging, index, rank = reads
    work = TILE.SCHEDULER(index, staging.tiled, rank, TILE)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    cols = work.b_col + gl.arange(0, TILE.BLOCK_N, LAYOUT)
    operands = staging.epilogue.operands
    fetched = operands[:0]
    for i in gl.static_range(len(operands)):
        if len(operands[i]) > 0:
            fetched += (load_elements(operands[i], cols),)
        else:
            fetched += ((),)
    return fetched


@gluon.jit
def apply_epilogue(acc, staging, fetched, index, rank, TILE: gl.constexpr):
    """Return the tile of an index as its epilogue leaves it; by the multiply warps.

    `fetched` is what `fetch_columns` returned, or ().
    """
    if len(fetched) > 0:
        LAYOUT: gl.constexpr = acc.type.layout
        operands = staging.epilogue.operands
        of_columns = operands[:0]
        for i in gl.static_range(len(operands)):
            if len(operands[i]) > 0:
                # In fp32 and through shared memory: so a thread neither masks nor widens what it adds.
                of_columns += (gl.convert_layout(fetched[i].to(gl.float32), gl.SliceLayout(0, LAYOUT)),)
            else:
                of_columns += ((),)
        work = TILE.SCHEDULER(index, staging.tiled, rank, TILE)
        rows = work.a_row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
        cols = work.b_col + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
        acc = apply_ops(acc, staging.epilogue, rows, cols, TILE, of_columns)
    elif len(staging.epilogue.operands) > 0:
        # Not kept since the tile was scheduled: the multiplication takes the registers.
        work = TILE.SCHEDULER(index, staging.tiled, rank, TILE)
        acc = by_columns(acc, apply_ops, staging.epilogue, work.a_row, work.b_col, TILE)
    return acc


@gluon.jit
def by_columns(acc, APPLY: gl.constexpr, reads, row, col, TILE: gl.constexpr):
    """Return what APPLY makes of a tile, of so few columns at a time that what it `reads` for them fits the registers.

    It is a jit function ``(acc, reads, rows, cols, TILE)``, as `apply_ops` is.
    """
    COLS: gl.constexpr = acc.shape[1]
    LAYOUT: gl.constexpr = acc.type.layout
    if COLS > TILE.SUBTILE_COLS:
        ROWS: gl.constexpr = acc.shape[0]
        left, right = acc.reshape([ROWS, 2, COLS // 2]).permute([0, 2, 1]).split()
        left = by_columns(left, APPLY, reads, row, col, TILE)
        right = by_columns(right, APPLY, reads, row, col + COLS // 2, TILE)
        COLS_LEFT: gl.constexpr = 2 * left.shape[1]
        acc = gl.join(left, right).permute([0, 2, 1]).reshape([ROWS, COLS_LEFT])
        if COLS_LEFT == COLS:
            acc = gl.convert_layout(acc, LAYOUT)
        return acc
    else:
        rows = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
        cols = col + gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
        return APPLY(acc, reads, rows, cols, TILE)


@gluon.jit
def wait_store(store, wave):
    """Wait until the program's tile before that of a `wave`, which is not its first, is staged."""
    consumer_wait(store.barriers, pipeline_state(store.barriers, wave - 1))


@gluon.jit
def acquire_store(store, wave):
    """Wait until the program's tile before that of a `wave` has left shared memory; by the multiply warps."""
    if wave > 0:
        producer_acquire(store.barriers, pipeline_state(store.barriers, wave))


@gluon.jit
def stage_tile(acc, store, TILE: gl.constexpr):
    """Round a tile into the acquired store, and commit it; by the multiply warps."""
    SHAPE: gl.constexpr = [acc.shape[0], acc.shape[1]]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, store.subtiles.dtype)
    reinterpret(store.subtiles, store.subtiles.dtype, SHAPE, LAYOUT).store(acc.to(store.subtiles.dtype))
    commit_store(store)


@gluon.jit
def origin_of_subtile(row, col, index, TILE: gl.constexpr):
    """Return the first row and column of a tile's subtile."""
    ROWS: gl.constexpr = TILE.BLOCK_M // TILE.SUBTILE_ROWS
    return row + (index % ROWS) * TILE.SUBTILE_ROWS, col + (index // ROWS) * TILE.SUBTILE_COLS


@gluon.jit
def stage_subtile(acc, staging, subtile, index, rank, TILE: gl.constexpr):
    """Finish a subtile of the tile of an index, and round it into the acquired store; by the multiply warps."""
    if len(staging.epilogue.operands) > 0:
        work = TILE.SCHEDULER(index, staging.tiled, rank, TILE)
        row, col = origin_of_subtile(work.a_row, work.b_col, subtile, TILE)
        acc = by_columns(acc, apply_ops, staging.epilogue, row, col, TILE)
    SHAPE: gl.constexpr = [TILE.SUBTILE_ROWS, TILE.SUBTILE_COLS]
    subtiles = staging.store.subtiles
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, subtiles.dtype)
    reinterpret(subtiles.index(subtile), subtiles.dtype, SHAPE, LAYOUT).store(acc.to(subtiles.dtype))


@gluon.jit
def commit_store(store):
    """Hand what is staged to the warp that stores it; by the multiply warps."""
    fence_async_shared()  # every thread's stores, before the copy engine's reads
    thread_barrier()  # the arrival is one thread's
    producer_commit(store.barriers, 0)


@gluon.jit
def load_prologue(operands, warp, number, split, is_held, TILE: gl.constexpr):
    """Load the first steps of a tile while the tile before is multiplied, as many as there are stages.

    With `is_held`, what was stored last still takes the shared memory that the multiply warps need next: release it,
    only now that all but one of the stages have something to do. Return the program's next step and the tile's.
    """
    loaded = gl.minimum(split.start + TILE.STAGES, split.stop)
    number = load_steps(operands, warp.pipeline, number, split.start, loaded - 1, TILE)
    if is_held:
        release_store(warp.store)
    return load_steps(operands, warp.pipeline, number, loaded - 1, loaded, TILE), loaded


@gluon.jit
def load_and_send(
    operands,
    warp,
    out,
    number,
    start,
    stop,
    pending,
    wave,
    peers,
    DESTINATIONS: gl.constexpr,
    WORLD_SIZE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Load steps of a `wave`'s tile while the tile before, `pending`, is sent to `out`; return the program's next step.

    It goes to its owner, or to all ranks, which DESTINATIONS are. The subtiles are spread over these steps and end an
    eighth before the last: they have arrived when someone waits for them. With PINGPONG the tile before is still being
    staged: they begin after a quarter of the steps.
    """
    if TILE.PINGPONG:
        later = start + (stop - start) // 4
        number = load_steps(operands, warp.pipeline, number, start, later, TILE)
        start = later
    stores = 0
    if wave > 0:
        wait_store(warp.store, wave)
        stores = pending.num_subtiles * DESTINATIONS
    span = gl.maximum(stop - start - (stop - start) // 8, 1)
    state = pipeline_state(warp.pipeline.barriers, number)
    sent = 0
    due = 0  # in units of a store over `span`
    began = trace_time(peers)
    ended = began
    for step in range(start, stop):
        state = load_step(operands, warp.pipeline, state, step, TILE)
        due += stores
        while (due >= span) & (sent < stores):
            _send_subtile(out, warp.store, pending, sent, DESTINATIONS, WORLD_SIZE, TILE)
            sent += 1
            due -= span
            ended = trace_time(peers)
    while sent < stores:
        _send_subtile(out, warp.store, pending, sent, DESTINATIONS, WORLD_SIZE, TILE)
        sent += 1
        ended = trace_time(peers)
    if wave > 0:
        trace_until(peers, SEND, trace_number(wave - 1), began, ended)
    return number + (stop - start)


@gluon.jit
def send_last(
    warp, out, pending, waves, is_held, peers, DESTINATIONS: gl.constexpr, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr
):
    """Send the last of a program's `waves` tiles, if it had any; `is_held` as in `load_prologue`."""
    if is_held:
        release_store(warp.store)
    if waves > 0:
        wait_store(warp.store, waves)
        began = trace_time(peers)
        for number in range(pending.num_subtiles * DESTINATIONS):
            _send_subtile(out, warp.store, pending, number, DESTINATIONS, WORLD_SIZE, TILE)
        trace_span(peers, SEND, trace_number(waves - 1), began)


@gluon.jit
def _send_subtile(
    out, store, pending, number, DESTINATIONS: gl.constexpr, WORLD_SIZE: gl.constexpr, TILE: gl.constexpr
):
    """Make a tile's `number`-th store: a subtile to its owner, or to all ranks from the owner on; then the next."""
    rank = (pending.owner + number % DESTINATIONS) % WORLD_SIZE
    subtile = pending.subtile + number // DESTINATIONS
    row, col = origin_of_subtile(pending.row, pending.col // TILE.NARROWING, subtile, TILE)
    tma_store(out, [rank, row, col], store.subtiles.index(subtile))


@gluon.jit
def release_store(store):
    """Wait until all that is being stored has been read from shared memory, and let the next tile be staged there.

    Not that it has arrived: see `wait_stores_arrived`.
    """
    tma.store_wait(0)
    consumer_release(store.barriers, 0)


@gluon.jit
def wait_stores_arrived(STORES: gl.constexpr = 0):
    """Wait until all that this warp has sent, but for the last STORES stores, has arrived, and may be signalled.

    Edge: the stored subtiles happen before this warp's later releases. `store_wait` is not enough, it waits for the
    reads of shared memory; and the stores are the async proxy's, which a release alone does not order (PTX ISA, "Async
    proxy").
    """
    gl.inline_asm_elementwise(_arrival_code(STORES), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@constexpr_function
def _arrival_code(stores):
    return f"cp.async.bulk.wait_group {stores}; fence.proxy.async; mov.u32 $0, 0;"
