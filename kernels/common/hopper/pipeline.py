"""The operand pipeline of the warp-specialised kernels, and their main loop.

One warp loads: it acquires a stage by its empty barrier, and the TMA copies commit it by its full barrier. The multiply
warps wait for the full barrier and release the stage by the empty one. Both sides count k steps over all tiles of the
program: step i uses stage ``i % STAGES`` for the ``i // STAGES``-th time, which gives the barriers' phase. So a program
may have any number of tiles, none included, and any number of steps a tile. From step to step the state is counted on:
the warp that loads has no time to divide for it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from iris_core import fence_before_descriptor_loads, wait

from ..gemm import DESCRIPTORS_B_NK
from ..trace import WAIT, trace_span, trace_time
from .arguments import GatedPipeline, OperandPipeline, PipelineState
from .barrier import thread_barrier


@gluon.jit
def make_pipeline(a, b, TILE: gl.constexpr):
    """Return an empty pipeline for tiles of the descriptors `a` and `b`."""
    STAGES: gl.constexpr = TILE.STAGES
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, a.block_type.shape[0], a.block_type.shape[1]], a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, b.block_type.shape[0], b.block_type.shape[1]], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    sequence = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(2 if TILE.PINGPONG else 0):  # else unused, and the compiler leaves them out
        mbarrier.init(sequence.index(group), count=1)
    return OperandPipeline(a_tiles, b_tiles, full, empty, sequence)


@gluon.jit
def with_gate(pipeline, gate):
    """Return the pipeline for operands that must be waited for."""
    return GatedPipeline(pipeline.a, pipeline.b, pipeline.full, pipeline.empty, gate)


@gluon.jit
def pipeline_state(step, TILE: gl.constexpr):
    """Return the state for a program's `step`-th step."""
    return PipelineState(step % TILE.STAGES, (step // TILE.STAGES) & 1)


@gluon.jit
def next_state(state, TILE: gl.constexpr):
    """Return the state for the step after."""
    index = state.index + 1
    is_past = index == TILE.STAGES
    return PipelineState(gl.where(is_past, 0, index), gl.where(is_past, state.phase ^ 1, state.phase))


@gluon.jit
def previous_index(state, TILE: gl.constexpr):
    """Return the stage of the step before.

    A loop must not keep it as ``before = state.index``: where Triton 3.6 looks for what a loop changes, it takes the
    two for one value, and `before` for a constant.
    """
    return gl.where(state.index == 0, TILE.STAGES, state.index) - 1


@gluon.jit
def load_step(a, b, pipeline, state, a_row, col, k, TILE: gl.constexpr):
    """Load the operands of one step, of A from row `a_row` and of B from column `col`; run by one warp.

    What reaches past the end of an operand is zero.
    """
    if TILE.GATED:
        _wait_gate(pipeline.gate, k // TILE.BLOCK_K)
    full = pipeline.full.index(state.index)
    mbarrier.wait(pipeline.empty.index(state.index), state.phase ^ 1)
    mbarrier.expect(full, a.block_type.nbytes + b.block_type.nbytes)
    tma.async_copy_global_to_shared(a, [a_row, k], full, pipeline.a.index(state.index))
    if TILE.LOADS == DESCRIPTORS_B_NK:
        tma.async_copy_global_to_shared(b, [col, k], full, pipeline.b.index(state.index))
    else:
        tma.async_copy_global_to_shared(b, [k, col], full, pipeline.b.index(state.index))


@gluon.jit
def _wait_gate(gate, step):
    """Wait for the operands of a tile's `step`-th step, where it is the first of its chunk that is loaded here."""
    if ((step % gate.chunk_steps == 0) | (step == gate.first)) & (gate.is_open == 0):
        wait(gate.counts_ptr + step // gate.chunk_steps, gate.expected, gate.watchdog_ptr)
        fence_before_descriptor_loads()


@gluon.jit
def load_steps(a, b, pipeline, step, a_row, col, start, stop, TILE: gl.constexpr):
    """Load the operands of a tile's steps from `start` and without `stop`, none or more; return the next step."""
    state = pipeline_state(step, TILE)
    for i in range(start, stop):
        load_step(a, b, pipeline, state, a_row, col, i * TILE.BLOCK_K, TILE)
        state = next_state(state, TILE)
    return step + (stop - start)


@gluon.jit
def trace_first_step(pipeline, step, peers, tile, TILE: gl.constexpr):
    """Write down how long the multiply warps wait for a tile's first operands; return when they are there."""
    began = trace_time(peers)
    if peers.trace_ptr is not None:
        state = pipeline_state(step, TILE)
        mbarrier.wait(pipeline.full.index(state.index), state.phase)
    return trace_span(peers, WAIT, tile, began)


@gluon.jit
def multiply_tile(pipeline, step, num_steps, TILE: gl.constexpr, next_group=None):
    """Return a tile's sum over `num_steps` steps, one or more, in fp32, and the number of the next step.

    One multiplication is in flight while the one before releases its stage. A stage is released by one thread, so a
    barrier before it brings the warps together: others may still be reading. `next_group`, a barrier of the ordered
    sequence, is passed with the last multiplication in flight.
    """
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
    state = pipeline_state(step, TILE)
    for k in range(num_steps):
        mbarrier.wait(pipeline.full.index(state.index), state.phase)
        b = pipeline.b.index(state.index)
        if TILE.LOADS == DESCRIPTORS_B_NK:
            b = b.permute((1, 0))
        acc = warpgroup_mma(pipeline.a.index(state.index), b, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        thread_barrier()
        mbarrier.arrive(pipeline.empty.index(previous_index(state, TILE)), count=1, pred=k > 0)
        state = next_state(state, TILE)
    if next_group is not None:
        mbarrier.arrive(next_group, count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    thread_barrier()
    mbarrier.arrive(pipeline.empty.index(previous_index(state, TILE)), count=1)
    return acc, step + num_steps
