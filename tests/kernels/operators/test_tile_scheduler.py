"""The tile schedulers of the portable kernels: which program computes which tile, in which order, in the tile loop.

Those of stream-K are in test_stream_k.py, those of the Hopper kernels in ../hopper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, product

import pytest
import torch
import triton
import triton.language as tl
from ranks import Ranks, context

from iris_kernels.common.device.arguments import Gemm, Peers, Tile
from iris_kernels.common.device.tile_scheduler import (
    Shards,
    next_index,
    num_tiles,
    own_first,
    own_last,
    peers_first,
    row_grouped,
)
from iris_kernels.common.portable.gemm import POINTERS
from iris_kernels.common.portable.tile_loop import compute_tiles

BLOCK = 16
TILE = Tile(BLOCK, BLOCK, BLOCK, GROUP_M=2, LOADS=POINTERS.value, SUBTILES=1)
FIELDS = ("index", "tile", "turn", "owner", "start", "row", "col", "a_row", "m", "n")
WIDTH = tl.constexpr(len(FIELDS))
ROW_GROUPED, OWN_FIRST, PEERS_FIRST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
WORLD_SIZES = (1, 2, 3, 4)


@dataclass(frozen=True)
class Noted:
    """A tile that a program computed, its `number`-th; the rest as in WorkTile."""

    program: int
    number: int
    index: int
    tile: int
    turn: int
    owner: int
    start: int
    row: int
    col: int
    a_row: int
    m: int
    n: int


@triton.jit
def note_tile(acc, target, work, peers, epoch, began, TILE: tl.constexpr):
    """Write down a tile in place of storing it."""
    notes_ptr, counts_ptr, most = target
    number = tl.atomic_add(counts_ptr + tl.program_id(0), 1)
    note_ptr = notes_ptr + (tl.program_id(0) * most + number) * WIDTH
    tl.store(note_ptr + 0, work.index)
    tl.store(note_ptr + 1, work.tile)
    tl.store(note_ptr + 2, work.turn)
    tl.store(note_ptr + 3, work.owner)
    tl.store(note_ptr + 4, work.start)
    tl.store(note_ptr + 5, work.row)
    tl.store(note_ptr + 6, work.col)
    tl.store(note_ptr + 7, work.a_row)
    tl.store(note_ptr + 8, work.m)
    tl.store(note_ptr + 9, work.n)


@triton.jit
def note_kernel(
    a,
    b,
    gemm,
    shards,
    notes_ptr,
    counts_ptr,
    most,
    peers,
    ORDER: tl.constexpr,
    TILE: tl.constexpr,
):
    """Take the tiles as the families' kernels do."""
    pid, step = tl.program_id(0), tl.num_programs(0)
    tiles = num_tiles(shards, TILE)
    notes = (notes_ptr, counts_ptr, most)
    if ORDER == ROW_GROUPED:
        whole = (pid, step, tiles)
        compute_tiles(whole, a, b, gemm, shards, notes, peers, 1, row_grouped, note_tile, TILE)
    elif ORDER == OWN_FIRST:
        own, others = (pid, step, tiles), (next_index(pid, step, tiles), step, tiles * TILE.WORLD_SIZE)
        compute_tiles(own, a, b, gemm, shards, notes, peers, 1, own_first, note_tile, TILE)
        compute_tiles(others, a, b, gemm, shards, notes, peers, 1, own_first, note_tile, TILE)
    else:
        sent = tiles * (TILE.WORLD_SIZE - 1)
        others, own = (pid, step, sent), (next_index(pid, step, sent) - sent, step, tiles)
        compute_tiles(others, a, b, gemm, shards, notes, peers, 1, peers_first, note_tile, TILE)
        compute_tiles(own, a, b, gemm, shards, notes, peers, 1, own_last, note_tile, TILE)


def note(
    rank: int, _: int, order: int, world_size: int, rows: int, columns: int, num_programs: int, has_links: bool = False
) -> list[list[Noted]]:
    """Return what each rank of a world computes of a matrix of so many rows and columns."""
    context()
    shard_rows = rows if order == ROW_GROUPED.value else -(-rows // world_size)
    shards = Shards(shard_rows, columns, rows, shard_rows)
    most = world_size * -(-shard_rows // BLOCK) * -(-columns // BLOCK)
    nothing = torch.zeros(1, 1)
    found = []
    for one in range(world_size):
        notes = torch.zeros(num_programs, most + 1, len(FIELDS), dtype=torch.int32)
        counts = torch.zeros(num_programs, dtype=torch.int32)
        peers = Peers(counts, one, counts, counts)
        note_kernel[(num_programs,)](
            *(nothing, nothing, Gemm(0, 1, 1, 1, 1), shards, notes, counts, most + 1, peers),
            ORDER=order,
            TILE=TILE._replace(WORLD_SIZE=world_size, FULLY_CONNECTED=has_links),
        )
        found.append(
            [
                Noted(program, number, *notes[program, number].tolist())
                for program, count in enumerate(counts.tolist())
                for number in range(count)
            ]
        )
    return found


SIZES = [(1, 1, 1), (100, 70, 4), (64, 64, 3), (33, 20, 7), (5, 40, 2), (130, 16, 5)]  # rows, columns, programs
CASES = [(ROW_GROUPED.value, 1, *sizes) for sizes in SIZES] + [
    (order.value, world_size, *sizes)
    for order, world_size, sizes in product((OWN_FIRST, PEERS_FIRST), WORLD_SIZES, SIZES)
]


@pytest.mark.parametrize("device", ["cpu"])
def test_every_tile_is_computed_once_in_order_and_by_programs_alike(ranks: Callable[[int], Ranks]) -> None:
    for order, world_size, rows, columns, programs in CASES:
        (found,) = ranks(1).call(note, order, world_size, rows, columns, programs)
        shard_rows = rows if order == ROW_GROUPED.value else -(-rows // world_size)
        origins = set(product(range(0, shard_rows, BLOCK), range(0, columns, BLOCK)))
        for rank, noted in enumerate(found):
            indices = sorted(one.index for one in noted)
            assert indices == list(range(world_size * len(origins)))
            counts = [sum(one.program == program for one in noted) for program in range(programs)]
            assert max(counts) - min(counts) <= 1
            first = rank + 1 if order == PEERS_FIRST.value else rank
            for owner in range(world_size):
                of_shard = [one for one in noted if one.owner == owner]
                assert {one.tile for one in of_shard} == set(range(len(origins)))
                assert {(one.row, one.col) for one in of_shard} == origins
                start = min(owner * shard_rows, rows)
                assert {(one.start, one.m, one.n) for one in of_shard} == {
                    (start, min(shard_rows, rows - start), columns)
                }
                assert all(one.a_row - one.row == owner * shard_rows for one in of_shard)
                assert all(one.index == one.turn * len(origins) + one.tile for one in of_shard)
                assert {one.turn for one in of_shard} == {(owner - first) % world_size}
            for before, after in pairwise(noted):
                assert before.program < after.program or before.index < after.index


@pytest.mark.parametrize("device", ["cpu"])
def test_over_links_of_their_own_tiles_of_all_peers_follow_one_another(ranks: Callable[[int], Ranks]) -> None:
    for world_size, (rows, columns, programs) in product(WORLD_SIZES, SIZES):
        found, by_shard = (
            ranks(1).call(note, PEERS_FIRST.value, world_size, rows, columns, programs, has_links)[0]
            for has_links in (True, False)
        )
        peers = max(1, world_size - 1)
        for rank, (noted, before) in enumerate(zip(found, by_shard, strict=True)):
            places = {replace(one, program=0, number=0, index=0) for one in noted}
            assert places == {replace(one, program=0, number=0, index=0) for one in before}
            in_order = sorted(noted, key=lambda one: one.index)
            assert [one.index for one in in_order] == list(range(len(before)))
            others = [one.owner for one in in_order if one.owner != rank]
            assert [one.owner for one in in_order[: len(others)]] == others, "the own tiles are the last"
            for first in range(0, len(others), peers):
                assert set(others[first : first + peers]) == set(range(world_size)) - {rank}
            assert all((owner - rank - 1) % world_size == index % peers for index, owner in enumerate(others))


@pytest.mark.parametrize("device", ["cpu"])
def test_a_sum_waits_for_what_its_peers_compute_earlier(ranks: Callable[[int], Ranks]) -> None:
    """Programs are resident and take their tiles in ascending order, so they cannot wait for each other in a circle."""
    for world_size, (rows, columns, programs) in product(WORLD_SIZES[1:], SIZES):
        (found,) = ranks(1).call(note, PEERS_FIRST.value, world_size, rows, columns, programs)
        places = [{(one.owner, one.tile): one.index for one in noted} for noted in found]
        for rank, peer in product(range(world_size), repeat=2):
            own = {tile: index for (owner, tile), index in places[rank].items() if owner == rank}
            assert own
            if peer != rank:
                assert all(places[peer][rank, tile] < index for tile, index in own.items())
