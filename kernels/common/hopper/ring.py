"""The main loop of the warp-specialised kernels: a ring of operand tiles between a loader warp and the multiply warps.

A step of the main loop uses one stage of the ring. Both sides count steps over all tiles of the program: step i uses
stage ``i % STAGES`` for the ``i // STAGES``-th time, which gives a barrier's phase. So a program may have any number
of tiles, none included, and any number of steps a tile. From step to step the stage and the phase are counted on: the
warp that loads has no time to divide for them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from iris_core import fence_before_descriptor_loads, wait

from ..gemm import DESCRIPTORS_B_NK
from ..trace import WAIT, trace_span, trace_time
from .arguments import GatedRing, Place, Ring
from .barrier import thread_barrier


@gluon.jit
def open_ring(a, b, TILE: gl.constexpr):
    """Return an empty ring for tiles of the descriptors `a` and `b`."""
    STAGES: gl.constexpr = TILE.STAGES
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES, a.block_type.shape[0], a.block_type.shape[1]], a.layout)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, b.block_type.shape[0], b.block_type.shape[1]], b.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(loaded.index(stage), count=1)
        mbarrier.init(used.index(stage), count=1)
    batons = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(2 if TILE.PINGPONG else 0):  # else nobody uses them, and the compiler leaves them out
        mbarrier.init(batons.index(group), count=1)
    return Ring(a_tiles, b_tiles, loaded, used, batons)


@gluon.jit
def gated(ring, gate):
    """Return the ring for operands that must be waited for."""
    return GatedRing(ring.a, ring.b, ring.loaded, ring.used, gate)


@gluon.jit
def place_of(step, TILE: gl.constexpr):
    """Return where a program's `step`-th step is in the ring."""
    return Place(step % TILE.STAGES, (step // TILE.STAGES) & 1)


@gluon.jit
def next_place(place, TILE: gl.constexpr):
    """Return where the step after is."""
    stage = place.stage + 1
    is_past = stage == TILE.STAGES
    return Place(gl.where(is_past, 0, stage), gl.where(is_past, place.phase ^ 1, place.phase))


@gluon.jit
def stage_before(place, TILE: gl.constexpr):
    """Return the stage of the step before.

    A loop must not keep it as ``before = place.stage``: where Triton 3.6 looks for what a loop changes, it takes the
    two for one value, and `before` for a constant.
    """
    return gl.where(place.stage == 0, TILE.STAGES, place.stage) - 1


@gluon.jit
def load_step(a, b, ring, place, a_row, col, k, TILE: gl.constexpr):
    """Load the operands of one step, of A from row `a_row` and of B from column `col`; run by one warp.

    What reaches past the end of an operand is zero.
    """
    if TILE.GATED:
        _pass(ring.gate, k // TILE.BLOCK_K)
    loaded = ring.loaded.index(place.stage)
    mbarrier.wait(ring.used.index(place.stage), place.phase ^ 1)
    mbarrier.expect(loaded, a.block_type.nbytes + b.block_type.nbytes)
    tma.async_copy_global_to_shared(a, [a_row, k], loaded, ring.a.index(place.stage))
    if TILE.LOADS == DESCRIPTORS_B_NK:
        tma.async_copy_global_to_shared(b, [col, k], loaded, ring.b.index(place.stage))
    else:
        tma.async_copy_global_to_shared(b, [k, col], loaded, ring.b.index(place.stage))


@gluon.jit
def _pass(gate, step):
    """Wait for the operands of a tile's `step`-th step, where it is the first of its chunk that is loaded here."""
    if ((step % gate.chunk_steps == 0) | (step == gate.first)) & (gate.is_open == 0):
        wait(gate.counts_ptr + step // gate.chunk_steps, gate.expected, gate.watchdog_ptr)
        fence_before_descriptor_loads()


@gluon.jit
def load_steps(a, b, ring, step, a_row, col, start, stop, TILE: gl.constexpr):
    """Load the operands of a tile's steps from `start` and without `stop`, none or more; return the next step."""
    place = place_of(step, TILE)
    for i in range(start, stop):
        load_step(a, b, ring, place, a_row, col, i * TILE.BLOCK_K, TILE)
        place = next_place(place, TILE)
    return step + (stop - start)


@gluon.jit
def trace_first_step(ring, step, peers, tile, TILE: gl.constexpr):
    """Write down how long the multiply warps wait for a tile's first operands; return when they are there."""
    began = trace_time(peers)
    if peers.trace_ptr is not None:
        place = place_of(step, TILE)
        mbarrier.wait(ring.loaded.index(place.stage), place.phase)
    return trace_span(peers, WAIT, tile, began)


@gluon.jit
def multiply_tile(ring, step, num_steps, TILE: gl.constexpr, baton=None):
    """Return a tile's sum over `num_steps` steps, one or more, in fp32, and the number of the next step.

    One multiplication is in flight while the one before frees its stage. A stage is freed by one thread, so a barrier
    before it brings the warps together: others may still be reading. `baton`, a barrier, is passed with the last
    multiplication in flight.
    """
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, BLOCK_N, 16]
    )
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
    place = place_of(step, TILE)
    for k in range(num_steps):
        mbarrier.wait(ring.loaded.index(place.stage), place.phase)
        b = ring.b.index(place.stage)
        if TILE.LOADS == DESCRIPTORS_B_NK:
            b = b.permute((1, 0))
        acc = warpgroup_mma(ring.a.index(place.stage), b, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        thread_barrier()
        mbarrier.arrive(ring.used.index(stage_before(place, TILE)), count=1, pred=k > 0)
        place = next_place(place, TILE)
    if baton is not None:
        mbarrier.arrive(baton, count=1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    thread_barrier()
    mbarrier.arrive(ring.used.index(stage_before(place, TILE)), count=1)
    return acc, step + num_steps
