"""Pipelines through shared memory from one role of a kernel to another, and the main loop on that of the operands.

| by | function | |
|---|---|---|
| the producer | `producer_acquire` | wait until a stage is empty |
| | `producer_commit` | what was put into the stage is there, or will be with the last byte of TMA copies |
| the consumer | `consumer_wait` | wait until the stage is full |
| | `consumer_release` | what was in the stage has been read |

The terms are CUTLASS's. Both sides count what passes: the i-th item uses stage ``i % stages`` for the
``i // stages``-th time, and the parity of that is the phase of the stage's barriers. The producer waits for the phase
before, which a new barrier takes for complete. A parity tells two phases apart: whoever waits is never more than one
behind. A barrier expects one arrival, by one thread: where several warps have written or read a stage, a barrier of the
threads comes first, and where TMA follows them, a fence (`fence_async_shared`).

In the main loop one warp loads and the multiply warps consume. Their items are k steps over all tiles of the program,
so a program may have any number of tiles, none included, and any number of steps per tile.

A warp that stores to peers and has more to do may have another signal (`commit_signal`), through a pipeline of one
stage: a release to peers waits until all that its thread has seen stored is visible to them, which takes microseconds
while the link is busy. The warp that stores waits only for its stores' arrival, which is long past when it asks,
commits the signal, and goes on. Signals are committed and sent in one order, which both warps know; one is under way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from iris_core import fence_before_descriptor_loads, wait

from ..device.trace import WAIT, trace_span, trace_time
from ..portable.gemm import DESCRIPTORS_B_NK
from .arguments import OneWayPipeline, OperandPipeline, Pipeline, PipelineState
from .gluon_names import thread_barrier, tma_load


@gluon.jit
def make_pipeline(STAGES: gl.constexpr, ONE_WAY: gl.constexpr = False):
    """Return the barriers of a pipeline whose stages are empty.

    ONE_WAY: nobody acquires and releases stages, for something else keeps the producer from committing one again before
    the consumer has waited for it.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if not ONE_WAY:
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        if not ONE_WAY:
            mbarrier.init(empty.index(stage), count=1)
    if ONE_WAY:
        return OneWayPipeline(full)
    else:
        return Pipeline(full, empty)


@gluon.jit
def pipeline_state(pipeline, number):
    """Return the state for the `number`-th item."""
    STAGES: gl.constexpr = pipeline.full.shape[0]
    return PipelineState(number % STAGES, (number // STAGES) & 1)


@gluon.jit
def next_state(pipeline, state):
    """Return the state for the item after, by counting on: a warp that loads has no time to divide."""
    index = state.index + 1
    is_past = index == pipeline.full.shape[0]
    return PipelineState(gl.where(is_past, 0, index), gl.where(is_past, state.phase ^ 1, state.phase))


@gluon.jit
def previous_index(pipeline, state):
    """Return the stage of the item before.

    A loop must not keep it as ``before = state.index``: where Triton 3.6 looks for what a loop changes, it takes the
    two for one value, and `before` for a constant.
    """
    return gl.where(state.index == 0, pipeline.full.shape[0], state.index) - 1


@gluon.jit
def producer_acquire(pipeline, state):
    """Wait until a stage is empty; at once where it was never full."""
    mbarrier.wait(pipeline.empty.index(state.index), state.phase ^ 1)


@gluon.jit
def producer_commit(pipeline, index, NUM_BYTES: gl.constexpr = 0):
    """Make the stage of an index full: now, or when NUM_BYTES have been copied with its full barrier by TMA.

    Edge: this thread's prior writes, or the copies, happen before what follows `consumer_wait`.
    """
    if NUM_BYTES:
        mbarrier.expect(pipeline.full.index(index), NUM_BYTES)
    else:
        mbarrier.arrive(pipeline.full.index(index), count=1)


@gluon.jit
def consumer_wait(pipeline, state, pred=True):
    """Wait until a stage is full, if `pred`."""
    mbarrier.wait(pipeline.full.index(state.index), state.phase, pred=pred)


@gluon.jit
def consumer_release(pipeline, index, pred=True):
    """Make the stage of an index empty, if `pred`.

    Edge: this thread's prior reads happen before what follows `producer_acquire`.
    """
    mbarrier.arrive(pipeline.empty.index(index), count=1, pred=pred)


@gluon.jit
def commit_signal(signals, number):
    """Have the other warp send the `number`-th signal, when the one before is sent; by the warp that stores.

    Edge: what this warp has stored, and awaited, happens before what the other does after `consumer_wait`.
    """
    if number > 0:
        producer_acquire(signals, pipeline_state(signals, number))
    producer_commit(signals, 0)


@gluon.jit
def make_operand_pipeline(a, b, TILE: gl.constexpr):
    """Return an empty pipeline for tiles of the descriptors `a` and `b`."""
    STAGES: gl.constexpr = TILE.STAGES
    B_LINES: gl.constexpr = TILE.BLOCK_N if TILE.LOADS == DESCRIPTORS_B_NK else b.block_type.shape[0]
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, TILE.BLOCK_M, a.block_type.shape[1]], a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, B_LINES, b.block_type.shape[1]], b.layout)
    barriers = make_pipeline(STAGES)
    # Without PINGPONG a placeholder: a jit function cannot return None.
    sequence = make_pipeline(2, ONE_WAY=True) if TILE.PINGPONG else barriers
    return OperandPipeline(a_tiles, b_tiles, barriers, sequence)


@gluon.jit
def load_step(operands, pipeline, state, step, TILE: gl.constexpr):
    """Load the operands of one `step` of a tile; return the state of the next.

    Run by one warp. Past the end of k there are zeros, past that of rows and columns anything.
    """
    if operands.gate is not None:
        _wait_gate(operands.gate, step)
    a, b = operands.a, operands.b
    k = step * TILE.BLOCK_K
    full = pipeline.barriers.full.index(state.index)
    producer_acquire(pipeline.barriers, state)
    NUM_BYTES: gl.constexpr = bytes_of(pipeline.a.shape[1], a.block_type) + bytes_of(pipeline.b.shape[1], b.block_type)
    producer_commit(pipeline.barriers, state.index, NUM_BYTES)
    load_lines(a, operands.a_row, k, full, pipeline.a.index(state.index))
    if TILE.LOADS == DESCRIPTORS_B_NK:
        load_lines(b, operands.b_col, k, full, pipeline.b.index(state.index))
    else:
        tma_load(b, [k, operands.b_col], full, pipeline.b.index(state.index))
    return next_state(pipeline.barriers, state)


@constexpr_function
def bytes_of(lines, block_type):
    """Return the bytes of so many lines, of which a descriptor has blocks of this type."""
    return lines * block_type.nbytes // block_type.shape[0]


@gluon.jit
def load_lines(matrix, first, k, full, memory):
    """Load a tile's lines, rows of A or columns of B, from the `first` on, from column `k` of them.

    As many at once as the descriptor's blocks have. TMA takes longer for a line past the end, which it makes zeros,
    than for another, and the main loop waits: with 127 of them in a tile an all-scatter of 641 rows took 472 us, of 768
    rows 359 (one H200). So in place of a piece that is wholly past the end comes another: nobody stores what is made of
    it.
    """
    LINES: gl.constexpr = memory.shape[0]
    PIECE: gl.constexpr = matrix.block_type.shape[0]
    left = matrix.shape[0] - first
    for begin in gl.static_range(0, LINES, PIECE):
        line = gl.where(begin < left, first + begin, gl.maximum(first - PIECE, 0)) if PIECE < LINES else first
        tma_load(matrix, [line, k], full, memory.slice(begin, PIECE, dim=0))


@gluon.jit
def _wait_gate(gate, step):
    """Wait for the operands of a tile's `step`-th step, where it is the first of its chunk that is loaded here."""
    if ((step % gate.chunk_steps == 0) | (step == gate.first)) & (gate.is_open == 0):
        wait(gate.counts_ptr + step // gate.chunk_steps, gate.expected, gate.watchdog_ptr)
        fence_before_descriptor_loads()


@gluon.jit
def load_steps(operands, pipeline, number, start, stop, TILE: gl.constexpr):
    """Load the operands of a tile's steps from `start` and without `stop`, none or more.

    `number` is the first one's, of all steps of the program; return the next one's.
    """
    state = pipeline_state(pipeline.barriers, number)
    for step in range(start, stop):
        state = load_step(operands, pipeline, state, step, TILE)
    return number + (stop - start)


@gluon.jit
def trace_first_step(pipeline, number, peers, tile):
    """Write down how long the multiply warps wait for a tile's first operands; return when they are there."""
    began = trace_time(peers)
    if peers.trace_ptr is not None:
        consumer_wait(pipeline.barriers, pipeline_state(pipeline.barriers, number))
    return trace_span(peers, WAIT, tile, began)


@constexpr_function
def accumulator_layout(num_warps, dtype, columns):
    """Return the layout of an accumulator of so many columns, of products of this dtype."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, columns, 256 // dtype.primitive_bitwidth]
    )


@gluon.jit
def zero_tile(pipeline, COLS: gl.constexpr, TILE: gl.constexpr):
    """Return an accumulator of so many columns of a tile."""
    LAYOUT: gl.constexpr = accumulator_layout(gl.num_warps(), pipeline.a.dtype, COLS)
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    return gl.zeros((BLOCK_M, COLS), gl.float32, LAYOUT)


@gluon.jit
def multiply_step(pipeline, state, acc, use_acc, COL: gl.constexpr, COLS: gl.constexpr, TILE: gl.constexpr):
    """Begin the multiplication of a stage's operands, which is added to `acc`, or replaces it.

    `acc` has COLS columns of the tile, from column COL on.
    """
    b = pipeline.b.index(state.index)
    if TILE.LOADS == DESCRIPTORS_B_NK:
        b = b.slice(COL, COLS, dim=0).permute((1, 0))
    else:
        b = b.slice(COL, COLS, dim=1)
    return warpgroup_mma(pipeline.a.index(state.index), b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def multiply_tile(pipeline, wave, number, num_steps, reads, FETCH: gl.constexpr, TILE: gl.constexpr):
    """Return the sum of a `wave`'s tile over `num_steps` steps, one or more, in fp32; `number` is the first one's.

    Return also what FETCH, a jit function ``(reads, TILE)``, returns: it is called when the first multiplication is in
    flight, so that neither what it computes nor what it loads is waited for. Without FETCH that is ().

    One multiplication is in flight while the one before releases its stage. A stage is released by one thread, so a
    barrier before it brings the warps together: others may still be reading. With PINGPONG the other warp group may
    begin the next wave's tile when this one's last multiplication is in flight.
    """
    acc = zero_tile(pipeline, TILE.BLOCK_N, TILE)
    state = pipeline_state(pipeline.barriers, number)
    if FETCH is None:
        fetched = ()
        acc, state = _multiply_steps(pipeline, acc, state, 0, num_steps, TILE)
    else:
        acc, state = _multiply_steps(pipeline, acc, state, 0, 1, TILE)
        fetched = FETCH(reads, TILE)
        acc, state = _multiply_steps(pipeline, acc, state, 1, num_steps, TILE)
    if TILE.PINGPONG:
        producer_commit(pipeline.sequence, pipeline_state(pipeline.sequence, wave).index)
    acc = warpgroup_mma_wait(0, deps=[acc])
    thread_barrier()
    consumer_release(pipeline.barriers, previous_index(pipeline.barriers, state))
    return acc, fetched


@gluon.jit
def _multiply_steps(pipeline, acc, state, start, stop, TILE: gl.constexpr):
    """Multiply steps of a tile, all but the last of them to their end; return the sum and the state of the next."""
    for k in range(start, stop):
        consumer_wait(pipeline.barriers, state)
        acc = multiply_step(pipeline, state, acc, k > 0, 0, TILE.BLOCK_N, TILE)
        acc = warpgroup_mma_wait(1, deps=[acc])
        thread_barrier()
        consumer_release(pipeline.barriers, previous_index(pipeline.barriers, state), pred=k > 0)
        state = next_state(pipeline.barriers, state)
    return acc, state
