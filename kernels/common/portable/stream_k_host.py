"""Stream-K on the host: the tiling and how many programs split a tile, by what tiles cost, workspace, and launch.

Whole tiles come first, one program each; those that are left are split along k (stream_k.py), so that every SM streams
weights, however few tiles there are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.jit import JITFunction

from overlap_taxonomy.gemm_cost import LOW_ROWS, step_us, store_partial_us
from overlap_taxonomy.machines import H200X4

from ..call import Call, Device
from ..config import MOST_SPLITS, GemmConfig, is_hopper_or_later, operand_room, warps_of, widest_tile
from ..device.handshake import OwnCalls
from ..problem import Problem
from ..workspace import Buffer, local_flags
from .stream_k import LARGE, NONE, UNEVEN, StreamK

GROUP_M = 8  # rows of tiles whose columns follow each other
_MOST_KEPT = 4096  # of what calls of some tiles ask for again
_COSTS = H200X4.stream_k  # by which tilings are chosen, on every GPU
# Weights on their way to all SMs, at most: 12288 x 12288 takes one row 73 us with 13 MB of them, 79 with 19 MB (H200).
_FLIGHT_BYTES = 15e6
LEAST_STAGES = 4
_SHORT_US = 45.0  # worth an early launch


class StreamKGemm(NamedTuple):
    """A rank's GEMM, and how its programs, `num_sms` at most, take it.

    `block_k` is a step of k, `element_bytes` the size of an operand's element. In groups of `group_m` rows of tiles the
    numbers of tiles follow each other down a column.
    """

    m: int
    n: int
    k: int
    num_sms: int
    block_k: int
    element_bytes: int
    group_m: int = GROUP_M


class StreamKTiling(NamedTuple):
    """The tiles of an output, and the `splits` of those of the last, unfilled wave, in the mean, or fewer."""

    block_m: int
    block_n: int
    splits: int


class StreamKPlan(NamedTuple):
    """How programs take tiles: `whole` of one program each, the others by `split_programs`, `height` of them a column.

    `splits` is how many split each of the others, as `compute_stream_k` takes it, `head` what `StreamK` does.
    """

    programs: int
    whole: int
    split_programs: int
    height: int
    splits: int
    head: int


def plan_stream_k(
    tiles: int,
    rows: int,
    steps: int,
    *,
    num_sms: int,
    group_m: int,
    splits: int,
    store_steps: int = 0,
    switch_steps: int = 0,
) -> StreamKPlan:
    """Return how tiles are taken.

    Args:
        tiles, rows, steps: their number, how many of them are below each other, and the steps of k of each.
        num_sms: programs, at most.
        group_m: rows of tiles whose numbers follow each other down a column.
        splits: programs for each tile that is split, in the mean, at most; each has a step of k.
        store_steps: steps that take as long as to store a partial.
        switch_steps: steps that take as long as to go to another tile.
    """
    splits = min(splits, steps)
    if splits == 1 or 2 * num_sms**2 * steps >= 1 << 31:  # kernels count in 32 bits; k has millions of columns then
        return StreamKPlan(min(num_sms, tiles), tiles, 0, 1, NONE.value, 0)
    height = rows if rows <= group_m else math.gcd(rows, group_m)
    if height > num_sms:
        height = 1
    programs = num_sms // height * height
    whole = tiles // programs * programs
    split_tiles = tiles - whole
    split_programs = min(programs, split_tiles * splits)
    tile_splits, head = NONE.value, 0
    if split_tiles and split_programs % split_tiles:
        tile_splits = UNEVEN.value
        head = min(
            switch_steps, split_tiles * steps // split_programs // 2
        )  # a run is longer than a head: it has steps
    elif split_tiles:
        tile_splits = split_programs // split_tiles
        head = -min(store_steps, (steps - tile_splits) // 2)  # a split has steps
    return StreamKPlan(programs if whole else split_programs, whole, split_programs, height, tile_splits, head)


def known_splits(plan: StreamKPlan, block_m: int, block_n: int) -> int:
    """Return a plan's `splits` for a kernel, UNEVEN where it had better not know: unrolled, large sums would spill."""
    is_large = 2 * block_m * block_n >= LARGE.value
    few = plan.splits == 2 and block_n <= 128
    return UNEVEN.value if plan.split_programs and is_large and not few else plan.splits


def fastest_tiling(
    gemm: StreamKGemm, *, low_block_k: int, largest: int = 256, widest_split: int = 256
) -> StreamKTiling:
    """Return the tiling that is predicted to be done first.

    Args:
        gemm: that of the rank with the most to do.
        low_block_k: a step of k of tiles of 64 rows or less.
        largest: rows and columns of a tile, at most.
        widest_split: columns of a tile that programs split, at most.
    """
    m = gemm.m
    heights = tuple(h for h in (64, 128) if h <= largest) if m > 64 else (max(16, triton.next_power_of_2(m)),)
    tiles = [(block_m, block_n) for block_m in heights for block_n in (128, 64) if block_n <= largest]
    if largest == 256 and heights[-1] == 128:
        tiles.append((128, 256))

    def gemm_in(tiling: StreamKTiling) -> StreamKGemm:
        return gemm._replace(block_k=low_block_k) if tiling.block_m <= LOW_ROWS else gemm

    def tilings() -> Iterator[StreamKTiling]:
        for block_m, block_n in tiles:
            before = None
            for splits in range(1, (min(steps, MOST_SPLITS) if block_n <= widest_split else 1) + 1):
                tiling = StreamKTiling(block_m, block_n, splits)
                plan = plan_of_tiling(tiling, gemm_in(tiling))
                if plan == before:  # all programs have a part: with more splits the plan is the same
                    break
                yield tiling
                before = plan

    steps = max(1, -(-gemm.k // gemm.block_k))
    return min(tilings(), key=lambda tiling: tiling_us(tiling, gemm_in(tiling)))


@functools.lru_cache(_MOST_KEPT)
def tiling_us(tiling: StreamKTiling, gemm: StreamKGemm) -> float:
    """Return the predicted time of a tiling, in µs: waves of whole tiles, k steps of split ones, and the fix-up."""
    (block_m, block_n, _), (m, n, k, _, block_k, element_bytes, _) = tiling, gemm
    rows = -(-m // block_m)
    tiles = rows * -(-n // block_n)
    steps = max(1, -(-k // block_k))
    plan = plan_of_tiling(tiling, gemm)

    def waves_us(wave_steps: float, programs: int) -> float:
        return wave_steps * step_us(_COSTS, block_m, block_n, block_k, rows, programs, element_bytes) + _COSTS.tile_us

    whole_us = -(-plan.whole // plan.programs) * waves_us(steps, min(plan.whole, plan.programs))
    if not plan.split_programs:
        return whole_us
    columns, runs = (tiles - plan.whole) // plan.height, plan.split_programs // plan.height
    is_aligned = plan.splits != UNEVEN.value
    others = runs / columns - is_aligned  # partials that are added to a tile's first
    longest = steps / plan.splits - plan.head * (1 - 1 / plan.splits) if is_aligned else columns * steps / runs
    return (
        whole_us
        + waves_us(longest, plan.split_programs)
        + (0.0 if is_aligned else columns / runs * _COSTS.tile_us + store_partial_us(_COSTS, block_m, block_n))
        + (_COSTS.uneven_fixup_us if known_splits(plan, block_m, block_n) == UNEVEN.value else _COSTS.fixup_us)
        + 4.0 * block_m * block_n * others / _COSTS.load_gbps / 1e3
    )


@functools.lru_cache(_MOST_KEPT)
def plan_of_tiling(tiling: StreamKTiling, gemm: StreamKGemm) -> StreamKPlan:
    """Return how programs take the tiles of a tiling."""
    (block_m, block_n, splits), (m, n, k, num_sms, block_k, element_bytes, group_m) = tiling, gemm
    rows = -(-m // block_m)
    one_us = step_us(_COSTS, block_m, block_n, block_k, rows, num_sms, element_bytes)
    return plan_stream_k(
        rows * -(-n // block_n),
        rows,
        max(1, -(-k // block_k)),
        num_sms=num_sms,
        group_m=group_m,
        splits=splits,
        store_steps=round(store_partial_us(_COSTS, block_m, block_n) / one_us),
        switch_steps=round(_COSTS.tile_us / one_us),
    )


def default_stream_k_config(
    arch: str, num_sms: int, *, m: int, n: int, k: int, dtype: torch.dtype, is_promoted: bool = False
) -> GemmConfig:
    """Return what to start from for an (m, n) output over k of one rank's GEMM; arguments as `default_config`'s."""
    if arch == "cpu":
        return GemmConfig(
            32, 32, 32, group_m=2, num_warps=4, num_sms=num_sms, comm_sms=1, row_chunks=1, splits=2, descriptors=False
        )
    is_amd = arch.startswith("gfx")
    is_exact = dtype == torch.float32
    block_k = 16 if is_exact else 128 // dtype.itemsize
    # Exact products run on the ordinary cores: small tiles, in registers.
    largest = 64 if is_exact else widest_tile(arch, is_promoted=is_promoted)
    # Two sums of 256 columns do not fit the registers on sm_100, nor two accumulators.
    widest_split = 256 if arch == "sm_90" and not is_promoted else 128
    low_block_k = block_k if is_amd or is_exact else 128
    gemm = StreamKGemm(m, n, k, num_sms, block_k, dtype.itemsize)
    tiling = fastest_tiling(gemm, low_block_k=low_block_k, largest=largest, widest_split=widest_split)
    if tiling.block_m <= LOW_ROWS:
        block_k = low_block_k
    if is_amd:
        stages = 2
    elif is_exact:
        stages = 4
    else:  # as much on its way as shared memory takes, and the memory takes well: it is what hides the latency
        stages = stages_within(operand_room(arch), (tiling.block_m + tiling.block_n) * block_k * dtype.itemsize)
        plan = plan_of_tiling(tiling, gemm._replace(block_k=block_k))
        in_flight = int(_FLIGHT_BYTES // (max(1, plan.programs) * tiling.block_n * block_k * dtype.itemsize))
        stages = min(stages, max(LEAST_STAGES, in_flight))
    return GemmConfig(
        tiling.block_m,
        tiling.block_n,
        block_k,
        group_m=GROUP_M,
        num_warps=warps_of(tiling.block_m, tiling.block_n),
        num_stages=stages,
        epilogue_subtiles=2 if tiling.block_n == 256 else 1,
        num_sms=num_sms,
        comm_rows=4 if m > 16 else 1,  # a chunk of A is 8 KB, or what a program loads at once of a row
        row_chunks=1,
        splits=tiling.splits,
        descriptors=not is_exact and is_hopper_or_later(arch),
    )


def stages_within(room: int, stage: int) -> int:
    """Return how many stages of a size to have within some room, in whatever unit: at least two, no more than help."""
    return max(2, min(6, room // stage))


def plan(problem: Problem, device: Device) -> GemmConfig:
    """Return what to start from for the rank that has most to do."""
    k, n = problem.b_shape(0)
    how: dict[str, Any] = {"dtype": problem.dtype, "is_promoted": problem.is_promoted}
    return default_stream_k_config(device.arch, device.num_sms, m=problem.m, n=n, k=k, **how)


def stream_k_plan(call: Call[Any]) -> StreamKPlan:
    """Return how this rank's programs take its tiles; it may have fewer steps of k than others."""
    return call.kept("stream-K plan", lambda: plan_of_tiling(_tiling(call), _gemm(call)))


def is_short(call: Call[Any]) -> bool:
    """Return whether the kernel is worth an early launch: it saves 3 µs, and costs a long kernel up to 10.

    Programs that come early get SMs as they fall free, not evenly. That slows what is bound by memory (measured; the
    reason is a guess).
    """
    return call.kept("is short", lambda: tiling_us(_tiling(call), _gemm(call)) < _SHORT_US)


def columns(call: Call[Any]) -> int:
    """Return the columns of the rank with the most."""
    return int(call.problem.b_shape(0)[1])


def all_tiles(call: Call[Any]) -> int:
    """Return the tiles of that rank."""
    return call.num_tiles(call.problem.m, columns(call))


def workspace(call: Call[Any]) -> dict[str, Buffer]:
    """Return the buffers of the partials of split tiles, and of the numbers of calls."""
    config, split_programs = call.config, stream_k_plan(call).split_programs
    return {
        "partial_tiles": Buffer((split_programs * config.block_m * config.block_n,), torch.float32),
        "partial_flags": local_flags(split_programs, "the partial of a split tile by program"),
        # Of every program that a call may have.
        "calls": local_flags(max(config.num_sms, call.device.num_sms), "the number of calls ended by program"),
    }


def run(
    call: Call[Any],
    kernel: JITFunction[Any],
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None = None,
    **arguments: Any,
) -> None:
    """Queue a kernel of `compute_stream_k`, early if it is short.

    `a_scale` is A's, where that is not the call's; `arguments` are those that not all of these kernels take.
    """
    programs, early = stream_k_plan(call).programs, is_short(call)
    multiply = call.main_loop(a, b, a_scale=a_scale)
    call.run(kernel, programs, early=early, **{**multiply, **_arguments(call), **arguments})


def _arguments(call: Call[Any]) -> dict[str, Any]:
    plan, memory = stream_k_plan(call), call.memory
    return {
        "stream_k": StreamK(
            memory["partial_tiles"], memory["partial_flags"], plan.split_programs, plan.height, plan.head
        ),
        "own": OwnCalls(memory["calls"], memory["calls"].numel()),
        "peers": call.peers(),
        "HAS_WHOLE": plan.whole > 0,
        "SPLITS": known_splits(plan, call.config.block_m, call.config.block_n),
    }


def _tiling(call: Call[Any]) -> StreamKTiling:
    return StreamKTiling(call.config.block_m, call.config.block_n, call.config.splits)


def _gemm(call: Call[Any]) -> StreamKGemm:
    problem, config = call.problem, call.config
    m = int(-(-problem.m // config.block_m)) * config.block_m  # so it is the same for all that take as many tiles
    sizes = m, columns(call), problem.a_shape(call.rank)[1]
    return StreamKGemm(*sizes, config.num_sms, config.block_k, problem.dtype.itemsize, config.group_m)
