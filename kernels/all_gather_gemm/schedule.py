"""Into which tiles, teams, parts and chunks `warp_specialized_copies` cuts a call: the quickest, by prediction.

Which tiles a program multiplies is known beforehand, and so is, nearly, when the rows of A that each needs have come. A
program that comes to a tile too early waits. The constants were chosen together, for 124 schedules of 13 problems over
2 H200s: times are 1 % off beside a factor a problem, and the chosen schedule is 0.5 % slower than the quickest. They
held on four, where the last shard may come in chunks of columns (results/notebook.md). Chunks are taken as equal. What
teams cost is of 20 later schedules of 5 problems, 3 % off without such a factor: there all programs share a last round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from ..common.hopper.plan import BLOCK_M, TFLOPS, Cut, possible_cuts, rounds_of, share_us, whole_turns

TEAMS = (1, 2)
PARTS = (1, 2, 4, 8)
CHUNKS = (1, 2)  # four are half a percent faster and take the host 10 µs more
GROUP = 8  # rows of tiles that consecutive tiles share, where parts are not smaller
LEAST_PART_BYTES = 8 << 20  # smaller parts gain nothing, and each costs the host a copy and a flag
# Widths of tiles, and how fast each multiplies, relative to the first: no stores to peers hold the narrower ones up.
_WIDTHS = {256: 1.0, 128: 0.98, 64: 0.55}
_LEAST_GAIN = 1.02  # that teams must bring, and chunks of columns: each costs the host a copy and a flag
_STEPS_OF_A_CHUNK = 8  # or a multiple: copies of rows of 9,600 bytes are slower than of 7,168
_EXCHANGE_US = 4.0  # of a team's sums of 128 columns
_LINK_GBPS = 387.0  # a copy engine, H200 and NVLink 4
_START_US = 10.0  # until the first byte is copied, and from the last one until it is seen
_NEXT_US = 7.0  # between copies
_BESIDE_US = 6.0  # a launch, the last tile's way out, and the meeting at the end


def cut_into_parts(row_tiles: int, group: int, most: int) -> tuple[int, int]:
    """Return how many rows of tiles a part of a shard has, and how many parts, `most` at most, the shard.

    Parts are whole groups of the tile order: so tiles come in the order of parts, and some program awaits each.
    """
    groups = -(-row_tiles // group)
    part_rows = -(-groups // most) * group
    return part_rows, -(-row_tiles // part_rows)


def cut_into_chunks(steps: int, most: int) -> tuple[int, int]:
    """Return how many steps of a tile a chunk of columns is for, and how many chunks, `most` at most, there are."""
    chunk_steps = -(-steps // most)
    if most > 1:
        chunk_steps = -(-chunk_steps // _STEPS_OF_A_CHUNK) * _STEPS_OF_A_CHUNK
    return chunk_steps, -(-steps // chunk_steps)


@dataclass(frozen=True)
class Schedule:
    """How a call is cut.

    Args:
        cut: the tiles, and the teams that share the last ones.
        parts: of a shard, by rows, that are copied apart.
        group: rows of tiles in a group.
        chunks: of each part, by columns; with two or more, only the shard that is used last is cut at all.
    """

    cut: Cut
    parts: int
    group: int
    chunks: int = 1


@dataclass(frozen=True)
class Gathering:
    """What a rank does in a call.

    Args:
        rows, columns, k: of a shard's product with the rank's columns; the most that any rank has.
        world_size: shards.
        itemsize: bytes of an element.
        num_programs: that multiply.
    """

    rows: int
    columns: int
    k: int
    world_size: int
    itemsize: int
    num_programs: int

    def quickest(self) -> Schedule:
        """Return the schedule that is predicted to end first."""
        cuts = possible_cuts(self.k, num_programs=self.num_programs, teams=TEAMS)
        counts = [parts for parts in PARTS if parts == 1 or self._shard_bytes >= parts * LEAST_PART_BYTES]
        schedules = [
            Schedule(cut, parts, self._group(parts), chunks)
            for cut, parts, chunks in product(cuts, counts, CHUNKS)
            if chunks == 1 or self._shard_bytes >= parts * chunks * LEAST_PART_BYTES
        ]

        us = {schedule: self.predicted_us(schedule) for schedule in schedules}

        def is_worth_its_chunks(one: Schedule) -> bool:
            return one.chunks == 1 or us[one] * _LEAST_GAIN <= us[replace(one, chunks=1)]

        def cost(one: Schedule) -> float:
            return us[one] * (1.0 if one.chunks == one.cut.team == 1 else _LEAST_GAIN)

        return min(filter(is_worth_its_chunks, schedules), key=cost)

    def predicted_us(self, schedule: Schedule) -> float:
        """Return how long the call is predicted to take, in µs."""
        cut = schedule.cut
        tile_us = 2e-6 * BLOCK_M * cut.block_n * self.k / (TFLOPS * _WIDTHS[cut.block_n])
        arrivals = self.arrivals_us(schedule)
        count = self.num_programs
        ends = np.zeros(count)
        turns = whole_turns(len(arrivals), count) + (cut.team == 1)
        for turn in range(turns):
            coming = arrivals[turn * count : (turn + 1) * count]
            for chunk in coming.T:
                ends[: len(coming)] = np.maximum(ends[: len(coming)], chunk) + tile_us / schedule.chunks
        if cut.team > 1:
            left = arrivals[turns * count :, -1]  # whose members multiply all chunks at once
            for tiles, members in rounds_of(cut, len(left), self.k, num_programs=count):
                coming, left = left[:tiles], left[tiles:]
                number = np.arange(tiles)
                first = number * cut.team if tiles == count // cut.team else -(-number * count // tiles)
                sharers = first[:, None] + np.arange(members)
                begun = np.maximum(ends[sharers].max(axis=1), coming)
                ends[sharers] = (begun + share_us(cut, tile_us, members, _EXCHANGE_US))[:, None]
        return float(ends.max()) + _BESIDE_US

    def arrivals_us(self, schedule: Schedule) -> np.ndarray:
        """Return when the chunks of the rows of A that each tile needs are there: (tiles, chunks).

        Tiles are in their order, from the own shard's on.
        """
        rows, columns = self._row_tiles, -(-self.columns // schedule.cut.block_n)
        first = np.arange(0, rows, schedule.group)
        heights = np.minimum(rows - first, schedule.group)
        row = np.concatenate(
            [start + np.tile(np.arange(high), columns) for start, high in zip(first, heights, strict=True)]
        )
        part_rows, parts = cut_into_parts(rows, schedule.group, schedule.parts)
        chunks = schedule.chunks
        shard_us = 1e-3 * self._shard_bytes / _LINK_GBPS
        shards = [np.zeros((len(row), chunks))]
        copies = 0  # of shards before
        for distance in range(1, self.world_size):
            is_cut = chunks == 1 or distance == self.world_size - 1
            pieces = parts * chunks if is_cut else 1
            piece = (row // part_rows * chunks)[:, None] + np.arange(chunks) if is_cut else np.zeros((len(row), chunks))
            arrived_us = (distance - 1 + (piece + 1) / pieces) * shard_us
            shards.append(_START_US + arrived_us + (copies + piece) * _NEXT_US)
            copies += pieces
        return np.concatenate(shards)

    @property
    def _shard_bytes(self) -> int:
        return self.rows * self.k * self.itemsize

    @property
    def _row_tiles(self) -> int:
        return -(-self.rows // BLOCK_M)

    def _group(self, parts: int) -> int:
        """Return the rows of tiles in a group, so that a shard can have so many parts."""
        return max(1, min(GROUP, self._row_tiles // parts))
