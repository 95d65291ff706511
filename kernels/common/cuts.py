"""How the `one_shot` variants cut an output into tiles, and how many programs share one, by a model of an H200.

Whole tiles come first, one program each; those that are left are shared (shared_tiles.py), so that every SM streams
weights, however few tiles there are.
"""

from __future__ import annotations

from typing import NamedTuple

import triton

from .config import MOST_SPLITS
from .shared_tiles import LARGE, NONE, UNEVEN

LOW_ROWS = 64  # of a low tile, which is loaded in longer steps of k
GROUP_M = 8  # rows of tiles whose columns follow each other
# A model of an H200, in µs and bytes, fitted to 507 cuts of 66 problems on one (mean error 5 %; the cut that it chooses
# is 0.8 % slower than the best in the mean, 8 % at most), but for what leaving a sum takes, which was measured alone.
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
_TURN_US = 2.5  # from a turn's first load to its first multiplication, and its last to its stored tile
_MEETING_US = 1.85  # to meet the other parts of a tile, of which there is a known number
_UNEVEN_MEETING_US = 2.0  # or of which there is not
_LEAVING_US = 0.8  # to leave a partial sum, beside
_LEFT_SUM_BYTES_US = 40e3  # at which it leaves its SM
_LOADED_SUM_BYTES_US = 37e3  # and comes


class Cut(NamedTuple):
    """How an output is cut: into tiles, and those of the last, unfilled wave into `splits` in the mean, or fewer."""

    block_m: int
    block_n: int
    splits: int


class Plan(NamedTuple):
    """How programs take tiles: `whole` of one program each, the others by `sharers`, `height` of them a column.

    `parts` is how many share each of the others, as `compute_tiles` takes it, `head` what `Sharing` does.
    """

    programs: int
    whole: int
    sharers: int
    height: int
    parts: int
    head: int


def plan_of(
    tiles: int, rows: int, steps: int, *, num_sms: int, group_m: int, splits: int, leaving: int = 0, turning: int = 0
) -> Plan:
    """Return how tiles are taken.

    Args:
        tiles, rows, steps: their number, how many of them are below each other, and the steps of k of each.
        num_sms: programs, at most.
        group_m: rows of tiles whose numbers follow each other down a column.
        splits: programs for each tile that is shared, in the mean, at most; each has a step of k.
        leaving: steps that take as long as leaving the sum of a part.
        turning: steps that take as long as turning to another tile.
    """
    splits = min(splits, steps)
    if splits == 1 or 2 * num_sms**2 * steps >= 1 << 31:  # kernels count in 32 bits; k has millions of columns then
        return Plan(min(num_sms, tiles), tiles, 0, 1, NONE.value, 0)
    height = min(rows, group_m)
    if rows % height or height > num_sms:
        height = 1
    programs = num_sms // height * height
    whole = tiles // programs * programs
    shared = tiles - whole
    sharers = min(programs, shared * splits)
    parts, head = NONE.value, 0
    if shared and sharers % shared:
        parts = UNEVEN.value
        head = min(turning, shared * steps // sharers // 2)  # a run is longer than a head: it has steps
    elif shared:
        parts = sharers // shared
        head = -min(leaving, (steps - parts) // 2)  # a part has steps
    return Plan(programs if whole else sharers, whole, sharers, height, parts, head)


def known_parts(plan: Plan, block_m: int, block_n: int) -> int:
    """Return a plan's `parts` for a kernel, UNEVEN where it had better not know: unrolled, large sums would spill."""
    is_large = 2 * block_m * block_n >= LARGE.value
    few = plan.parts == 2 and block_n <= 128
    return UNEVEN.value if plan.sharers and is_large and not few else plan.parts


def best_cut(
    m: int,
    n: int,
    k: int,
    *,
    num_sms: int,
    block_k: int,
    low_block_k: int,
    element_bytes: int,
    largest: int = 256,
    widest_shared: int = 256,
) -> Cut:
    """Return the cut of an (m, n) output over k that is predicted to be done first.

    Args:
        m, n, k: of the GEMM of the rank with the most to do.
        num_sms: programs, of which each takes a tile or a part of one at a time.
        block_k, low_block_k: a step of k, and one of tiles of 64 rows or less.
        element_bytes: of an operand's element.
        largest: rows and columns of a tile, at most.
        widest_shared: columns of a tile that programs share, at most.
    """
    heights = tuple(h for h in (64, 128) if h <= largest) if m > 64 else (max(16, triton.next_power_of_2(m)),)
    tiles = [(block_m, block_n) for block_m in heights for block_n in (128, 64) if block_n <= largest]
    if largest == 256 and heights[-1] == 128:
        tiles.append((128, 256))

    def us(cut: Cut) -> float:
        return cut_us(cut, m, n, k, num_sms, low_block_k if cut.block_m <= LOW_ROWS else block_k, element_bytes)

    steps = max(1, -(-k // block_k))
    cuts = [
        Cut(block_m, block_n, splits)
        for block_m, block_n in tiles
        for splits in range(1, (min(steps, MOST_SPLITS) if block_n <= widest_shared else 1) + 1)
    ]
    return min(cuts, key=us)


def cut_us(
    cut: Cut, m: int, n: int, k: int, num_sms: int, block_k: int, element_bytes: int, group_m: int = GROUP_M
) -> float:
    """Return the predicted time of a cut, in µs: turns of whole tiles, a run of steps of shared ones, and their sums.

    Args:
        cut: what to predict.
        m, n, k, num_sms, block_k, element_bytes: as for `best_cut`; `block_k` is the cut's.
        group_m: rows of tiles whose columns follow each other.
    """
    block_m, block_n, _ = cut
    rows = -(-m // block_m)
    tiles = rows * -(-n // block_n)
    steps = max(1, -(-k // block_k))
    plan = plan_of_cut(cut, m, n, k, num_sms=num_sms, block_k=block_k, element_bytes=element_bytes, group_m=group_m)

    def turns_us(turn_steps: float, programs: int) -> float:
        return turn_steps * step_us(block_m, block_n, block_k, rows, programs, element_bytes) + _TURN_US

    whole_us = -(-plan.whole // plan.programs) * turns_us(steps, min(plan.whole, plan.programs))
    if not plan.sharers:
        return whole_us
    columns, runs = (tiles - plan.whole) // plan.height, plan.sharers // plan.height
    is_aligned = plan.parts != UNEVEN.value
    others = runs / columns - is_aligned  # sums that a tile's first is added to
    longest = steps / plan.parts - plan.head * (1 - 1 / plan.parts) if is_aligned else columns * steps / runs
    return (
        whole_us
        + turns_us(longest, plan.sharers)
        + (0.0 if is_aligned else columns / runs * _TURN_US + leaving_us(block_m, block_n))
        + (_UNEVEN_MEETING_US if known_parts(plan, block_m, block_n) == UNEVEN.value else _MEETING_US)
        + 4.0 * block_m * block_n * others / _LOADED_SUM_BYTES_US
    )


def plan_of_cut(
    cut: Cut, m: int, n: int, k: int, *, num_sms: int, block_k: int, element_bytes: int, group_m: int = GROUP_M
) -> Plan:
    """Return how programs take the tiles of a cut; arguments as for `cut_us`."""
    block_m, block_n, splits = cut
    rows = -(-m // block_m)
    one_us = step_us(block_m, block_n, block_k, rows, num_sms, element_bytes)
    return plan_of(
        rows * -(-n // block_n),
        rows,
        max(1, -(-k // block_k)),
        num_sms=num_sms,
        group_m=group_m,
        splits=splits,
        leaving=round(leaving_us(block_m, block_n) / one_us),
        turning=round(_TURN_US / one_us),
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


def leaving_us(block_m: int, block_n: int) -> float:
    """Return the predicted time until a program has left its sum of a part of a tile."""
    return _LEAVING_US + 4.0 * block_m * block_n / _LEFT_SUM_BYTES_US
