"""A model of copy engines beside the sm90 main loop: the tiling, row chunks and k chunks that are fastest by it.

Which tiles a program multiplies is known beforehand, and so is, nearly, when the rows of A that each needs have come. A
program that comes to a tile too early waits. The constants were chosen together, for 124 plans of 13 problems over
2 H200s: times are 1 % off beside a factor a problem, and the chosen plan is 0.5 % slower than the fastest. They
held on four, where the last shard may come in k chunks (results/notebook.md). Chunks are taken as equal. What a split
costs is of 20 later plans of 5 problems, 3 % off without such a factor: there all programs share a last wave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from ..common.hopper.plan import (
    BLOCK_M,
    COSTS,
    Promotion,
    Tiling,
    possible_tilings,
    rates_of,
    split_tile_us,
    split_waves,
    whole_waves,
)

SPLITS = (1, 2)
ROW_CHUNKS = (1, 2, 4, 8)
K_CHUNKS = (1, 2)  # four are half a percent faster and take the host 10 µs more
GROUP = 8  # rows of tiles that consecutive tiles share, where row chunks are not smaller
LEAST_CHUNK_BYTES = 8 << 20  # smaller chunks gain nothing, and each costs the host a copy and a flag
_LEAST_GAIN = 1.02  # that a split must bring, and k chunks: each costs the host a copy and a flag
_STEPS_OF_A_K_CHUNK = 8  # or a multiple: copies of rows of 9,600 bytes are slower than of 7,168


def row_chunks_of(row_tiles: int, group: int, most: int) -> tuple[int, int]:
    """Return how many rows of tiles a row chunk has, and how many of these, `most` at most, a shard.

    Row chunks are whole groups of the tile order: so tiles come in the order of chunks, and some program awaits each.
    """
    groups = -(-row_tiles // group)
    chunk_rows = -(-groups // most) * group
    return chunk_rows, -(-row_tiles // chunk_rows)


def k_chunks_of(steps: int, most: int) -> tuple[int, int]:
    """Return how many steps of a tile a k chunk is for, and how many k chunks, `most` at most, there are."""
    chunk_steps = -(-steps // most)
    if most > 1:
        chunk_steps = -(-chunk_steps // _STEPS_OF_A_K_CHUNK) * _STEPS_OF_A_K_CHUNK
    return chunk_steps, -(-steps // chunk_steps)


@dataclass(frozen=True)
class GatherPlan:
    """How a call is cut.

    Args:
        tiling: the tiles, and how the last ones are split.
        row_chunks: of a shard, that are copied apart.
        group: rows of tiles in a group.
        k_chunks: of each row chunk; with two or more, only the shard that is used last is cut at all.
    """

    tiling: Tiling
    row_chunks: int
    group: int
    k_chunks: int = 1


@dataclass(frozen=True)
class Gathering:
    """What a rank does in a call.

    Args:
        rows, columns, k: of a shard's product with the rank's columns; the most that any rank has.
        world_size: shards.
        itemsize: bytes of an element.
        num_programs: that multiply.
        promotion: which sums are promoted; elements of fp8 are counted as half as many of two bytes.
    """

    rows: int
    columns: int
    k: int
    world_size: int
    itemsize: int
    num_programs: int
    promotion: Promotion = Promotion.NONE

    def fastest(self, widest: int = 256) -> GatherPlan:
        """Return the plan that is predicted to end first, of tiles of so many columns at most."""
        tilings = possible_tilings(
            self.k, num_programs=self.num_programs, splits=SPLITS, widest=widest, promotion=self.promotion
        )
        counts = [count for count in ROW_CHUNKS if count == 1 or self._shard_bytes >= count * LEAST_CHUNK_BYTES]
        plans = [
            GatherPlan(tiling, row_chunks, self._group(row_chunks), k_chunks)
            for tiling, row_chunks, k_chunks in product(tilings, counts, K_CHUNKS)
            if k_chunks == 1 or self._shard_bytes >= row_chunks * k_chunks * LEAST_CHUNK_BYTES
        ]

        us = {plan: self.predicted_us(plan) for plan in plans}

        def is_worth_its_k_chunks(one: GatherPlan) -> bool:
            return one.k_chunks == 1 or us[one] * _LEAST_GAIN <= us[replace(one, k_chunks=1)]

        def cost(one: GatherPlan) -> float:
            return us[one] * (1.0 if one.k_chunks == one.tiling.splits == 1 else _LEAST_GAIN)

        return min(filter(is_worth_its_k_chunks, plans), key=cost)

    def predicted_us(self, plan: GatherPlan) -> float:
        """Return how long the call is predicted to take, in µs."""
        tiling = plan.tiling
        rates = COSTS.rates_beside_copies if tiling.promotion is Promotion.NONE else rates_of(tiling.promotion)
        tflops = COSTS.sm_tflops * rates[tiling.block_n]
        tile_us = 2e-6 * BLOCK_M * tiling.block_n * self.k / tflops
        arrivals = self.arrivals_us(plan)
        count = self.num_programs
        ends = np.zeros(count)
        waves = whole_waves(len(arrivals), count) + (tiling.splits == 1)
        for wave in range(waves):
            coming = arrivals[wave * count : (wave + 1) * count]
            for chunk in coming.T:
                ends[: len(coming)] = np.maximum(ends[: len(coming)], chunk) + tile_us / plan.k_chunks
        if tiling.splits > 1:
            left = arrivals[waves * count :, -1]  # whose programs multiply all k chunks at once
            for tiles, splits in split_waves(tiling, len(left), self.k, num_programs=count):
                coming, left = left[:tiles], left[tiles:]
                number = np.arange(tiles)
                first = number * tiling.splits if tiles == count // tiling.splits else -(-number * count // tiles)
                programs = first[:, None] + np.arange(splits)
                begun = np.maximum(ends[programs].max(axis=1), coming)
                split_us = split_tile_us(tiling, tile_us, splits, COSTS.exchange_beside_copies_us)
                ends[programs] = (begun + split_us)[:, None]
        return float(ends.max()) + COSTS.beside_copies_us

    def arrivals_us(self, plan: GatherPlan) -> np.ndarray:
        """Return when the chunks of the rows of A that each tile needs are there: (tiles, chunks).

        Tiles are in their order, from the own shard's on.
        """
        rows, columns = self._row_tiles, -(-self.columns // plan.tiling.block_n)
        first = np.arange(0, rows, plan.group)
        heights = np.minimum(rows - first, plan.group)
        row = np.concatenate(
            [start + np.tile(np.arange(high), columns) for start, high in zip(first, heights, strict=True)]
        )
        chunk_rows, row_chunks = row_chunks_of(rows, plan.group, plan.row_chunks)
        k_chunks = plan.k_chunks
        shard_us = 1e-3 * self._shard_bytes / COSTS.copy_gbps
        shards = [np.zeros((len(row), k_chunks))]
        copies = 0  # of shards before
        for distance in range(1, self.world_size):
            is_cut = k_chunks == 1 or distance == self.world_size - 1
            chunks = row_chunks * k_chunks if is_cut else 1
            chunk = np.zeros((len(row), k_chunks))
            if is_cut:
                chunk = (row // chunk_rows * k_chunks)[:, None] + np.arange(k_chunks)
            arrived_us = (distance - 1 + (chunk + 1) / chunks) * shard_us
            shards.append(COSTS.copy_start_us + arrived_us + (copies + chunk) * COSTS.next_copy_us)
            copies += chunks
        return np.concatenate(shards)

    @property
    def _shard_bytes(self) -> int:
        return self.rows * self.k * self.itemsize

    @property
    def _row_tiles(self) -> int:
        return -(-self.rows // BLOCK_M)

    def _group(self, row_chunks: int) -> int:
        """Return the rows of tiles in a group, so that a shard can have so many row chunks."""
        return max(1, min(GROUP, self._row_tiles // row_chunks))
