"""The tiling of the variants with stream-K, and how many programs split a tile, by a model of an H200.

Whole tiles come first, one program each; those that are left are split along k (stream_k.py), so that every SM streams
weights, however few tiles there are.
"""

from __future__ import annotations

from typing import NamedTuple

import triton

from ..config import MOST_SPLITS
from .stream_k import LARGE, NONE, UNEVEN

LOW_ROWS = 64  # of a low tile, which is loaded in longer steps of k
GROUP_M = 8  # rows of tiles whose columns follow each other
# A model of an H200, in µs and bytes, fitted to 507 tilings of 66 problems on one (mean error 5 %; the tiling that
# it chooses is 0.8 % slower than the best in the mean, 8 % at most), but for what storing a partial takes, which was
# measured alone.
_SM_BYTES_US = 117e3  # operands into an SM from the L2 cache
_SM_STREAM_US = 96e3  # and where the weights come from memory for it alone
_SM_LOW_STREAM_US = 78e3  # and the tile has 16 or 32 rows
_MEMORY_BYTES_US = 4.27e6  # weights into all of them
_SM_FLOPS_US = 7.0e6
_TILE_RATES = {
    (128, 256): 0.96,
    (128, 128): 0.85,
    (64, 128): 0.73,
    (128, 64): 0.42,
    (64, 64): 0.48,
    (32, 128): 0.30,
    (32, 64): 0.177,
    (16, 128): 0.178,
    (16, 64): 0.105,
}
_LEAST_RATE = 0.09
_TILE_US = 2.5  # from a tile's first load to its first multiplication, and its last to its stored tile
_FIXUP_US = 1.85  # to wait for the other splits of a tile, of which there is a known number
_UNEVEN_FIXUP_US = 2.0  # or of which there is not
_STORE_US = 0.8  # to store a partial sum, beside
_STORED_BYTES_US = 40e3  # at which it is stored
_LOADED_BYTES_US = 37e3  # and loaded


class Tiling(NamedTuple):
    """The tiles of an output, and the `splits` of those of the last, unfilled wave, in the mean, or fewer."""

    block_m: int
    block_n: int
    splits: int


class StreamKPlan(NamedTuple):
    """How programs take tiles: `whole` of one program each, the others by `split_programs`, `height` of them a column.

    `splits` is how many split each of the others, as `compute_tiles` takes it, `head` what `StreamK` does.
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
    height = min(rows, group_m)
    if rows % height or height > num_sms:
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
    m: int,
    n: int,
    k: int,
    *,
    num_sms: int,
    block_k: int,
    low_block_k: int,
    element_bytes: int,
    largest: int = 256,
    widest_split: int = 256,
) -> Tiling:
    """Return the tiling of an (m, n) output over k that is predicted to be done first.

    Args:
        m, n, k: of the GEMM of the rank with the most to do.
        num_sms: programs, of which each takes a tile or a split of one at a time.
        block_k, low_block_k: a step of k, and one of tiles of 64 rows or less.
        element_bytes: of an operand's element.
        largest: rows and columns of a tile, at most.
        widest_split: columns of a tile that programs split, at most.
    """
    heights = tuple(h for h in (64, 128) if h <= largest) if m > 64 else (max(16, triton.next_power_of_2(m)),)
    tiles = [(block_m, block_n) for block_m in heights for block_n in (128, 64) if block_n <= largest]
    if largest == 256 and heights[-1] == 128:
        tiles.append((128, 256))

    def us(tiling: Tiling) -> float:
        return tiling_us(
            tiling, m, n, k, num_sms, low_block_k if tiling.block_m <= LOW_ROWS else block_k, element_bytes
        )

    steps = max(1, -(-k // block_k))
    tilings = [
        Tiling(block_m, block_n, splits)
        for block_m, block_n in tiles
        for splits in range(1, (min(steps, MOST_SPLITS) if block_n <= widest_split else 1) + 1)
    ]
    return min(tilings, key=us)


def tiling_us(
    tiling: Tiling, m: int, n: int, k: int, num_sms: int, block_k: int, element_bytes: int, group_m: int = GROUP_M
) -> float:
    """Return the predicted time of a tiling, in µs: waves of whole tiles, k steps of split ones, and the fix-up.

    Args:
        tiling: what to predict.
        m, n, k, num_sms, block_k, element_bytes: as for `fastest_tiling`; `block_k` is the tiling's.
        group_m: rows of tiles whose columns follow each other.
    """
    block_m, block_n, _ = tiling
    rows = -(-m // block_m)
    tiles = rows * -(-n // block_n)
    steps = max(1, -(-k // block_k))
    plan = plan_of_tiling(
        tiling, m, n, k, num_sms=num_sms, block_k=block_k, element_bytes=element_bytes, group_m=group_m
    )

    def waves_us(wave_steps: float, programs: int) -> float:
        return wave_steps * step_us(block_m, block_n, block_k, rows, programs, element_bytes) + _TILE_US

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
        + (0.0 if is_aligned else columns / runs * _TILE_US + store_partial_us(block_m, block_n))
        + (_UNEVEN_FIXUP_US if known_splits(plan, block_m, block_n) == UNEVEN.value else _FIXUP_US)
        + 4.0 * block_m * block_n * others / _LOADED_BYTES_US
    )


def plan_of_tiling(
    tiling: Tiling, m: int, n: int, k: int, *, num_sms: int, block_k: int, element_bytes: int, group_m: int = GROUP_M
) -> StreamKPlan:
    """Return how programs take the tiles of a tiling; arguments as for `tiling_us`."""
    block_m, block_n, splits = tiling
    rows = -(-m // block_m)
    one_us = step_us(block_m, block_n, block_k, rows, num_sms, element_bytes)
    return plan_stream_k(
        rows * -(-n // block_n),
        rows,
        max(1, -(-k // block_k)),
        num_sms=num_sms,
        group_m=group_m,
        splits=splits,
        store_steps=round(store_partial_us(block_m, block_n) / one_us),
        switch_steps=round(_TILE_US / one_us),
    )


def step_us(block_m: int, block_n: int, block_k: int, rows: int, programs: int, element_bytes: int) -> float:
    """Return the predicted time of a step of a tile, while so many `programs` compute; `rows` of tiles share B."""
    rate = max(_LEAST_RATE, _TILE_RATES.get((block_m, block_n), 0.0)) / (1 if element_bytes == 2 else 16)
    weight_bytes = block_n * block_k * element_bytes / rows  # read from memory once, then from the L2 cache
    stream_us = _SM_LOW_STREAM_US if block_m < LOW_ROWS else _SM_STREAM_US
    return max(
        (block_m + block_n) * block_k * element_bytes / (stream_us if rows == 1 else _SM_BYTES_US),
        weight_bytes * programs / _MEMORY_BYTES_US,
        2.0 * block_m * block_n * block_k / (_SM_FLOPS_US * rate),
    )


def store_partial_us(block_m: int, block_n: int) -> float:
    """Return the predicted time until a program has stored its partial of a tile."""
    return _STORE_US + 4.0 * block_m * block_n / _STORED_BYTES_US
