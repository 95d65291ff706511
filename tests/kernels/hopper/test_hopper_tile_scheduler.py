"""Which tiles programs of the warp-specialised kernels compute, and which parts of those that they split."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from gluon_emulator import Machine, emulated

from iris_kernels.all_gather_gemm.hopper import workgroup_specialized
from iris_kernels.common.device import tile_scheduler as device_schedulers
from iris_kernels.common.hopper import waves as program_waves
from iris_kernels.common.hopper.arguments import Sizes
from iris_kernels.common.hopper.plan import STEP_K, Tiling, split_waves
from iris_kernels.gemm_reduce_scatter.hopper import tile_scheduler as reduce_scatter

SUBTILES = 8


def works(tiles: int, programs: int, splits: int, steps: int) -> dict[int, list[Any]]:
    """Return what each program does, in its order."""
    machine = Machine(0)
    tile = SimpleNamespace(SPLITS=splits, SUBTILES=SUBTILES)
    found: dict[int, list[Any]] = {}
    with emulated(machine, [program_waves]):
        for program in range(programs):
            machine.task = SimpleNamespace(program=program, num_programs=programs)  # type: ignore[assignment]
            waves = program_waves.make_waves(tiles, steps, tile)
            found[program] = [part_of_tile(wave, waves, tile) for wave in range(waves.whole + waves.split)]
    return found


def part_of_tile(wave: int, waves: Any, tile: Any) -> Any:
    """Return what a program does in a wave, and of a split tile where the workspace has its group's partials."""
    split = program_waves.tile_split(wave, waves, tile)
    subtile, num_subtiles = program_waves.kept_subtiles(split, tile)
    is_split = wave >= waves.whole and tile.SPLITS > 1
    partials = program_waves.first_partial(wave, waves, split, tile) if is_split else None
    return SimpleNamespace(**split._asdict(), subtile=subtile, num_subtiles=num_subtiles, first_partial=partials)


SIZES = [(100, 132), (1024, 132), (132, 132), (5, 132), (1, 132), (0, 132), (77, 7), (131, 1), (9, 4), (10, 5), (11, 5)]
CASES = [
    (*sizes, splits, steps)
    for sizes, splits, steps in product(SIZES, (1, 2, 3, 4, 8), (1, 3, 128))
    if splits <= min(sizes[1], steps, SUBTILES)
]


@pytest.mark.parametrize(("tiles", "programs", "splits", "steps"), CASES)
def test_every_step_and_every_subtile_of_a_tile_is_someones(tiles: int, programs: int, splits: int, steps: int) -> None:
    by_tile = defaultdict(list)
    for mine in works(tiles, programs, splits, steps).values():
        for work in mine:
            by_tile[work.index].append(work)
    assert by_tile.keys() == set(range(tiles))
    for members in by_tile.values():
        stop = subtile = 0
        for number, work in enumerate(members):
            assert (work.start, work.subtile) == (stop, subtile)
            assert work.stop > work.start
            assert work.num_subtiles > 0
            assert (work.split, work.splits) == (number, len(members))
            stop, subtile = work.stop, work.subtile + work.num_subtiles
        assert (stop, subtile) == (steps, SUBTILES)
        assert len({work.first_partial for work in members}) == 1


@pytest.mark.parametrize(("tiles", "programs", "splits", "steps"), CASES)
def test_every_partial_has_a_place_of_its_own(tiles: int, programs: int, splits: int, steps: int) -> None:
    """One a wave of split tiles and program."""
    places = [
        (work.first_partial + work.split, program)
        for program, mine in works(tiles, programs, splits, steps).items()
        for work in mine
        if work.first_partial is not None
    ]
    assert all(place >= 0 and place % programs == program for place, program in places)
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(("tiles", "programs"), SIZES)
def test_no_program_has_two_tiles_in_a_wave_and_waves_come_in_order(tiles: int, programs: int) -> None:
    for splits in (2, 3):
        if splits > programs:
            continue
        for mine in works(tiles, programs, splits, 128).values():
            split_numbers = [work.first_partial // programs for work in mine if work.first_partial is not None]
            assert split_numbers == sorted(set(split_numbers))


def test_tiles_behind_whole_waves_are_shared_by_all() -> None:
    """Of 100 tiles 66 by pairs, then 34 by three or four programs: no program idles."""
    found = works(7 * 132 + 100, 132, 2, 128)
    assert {len(mine) for mine in found.values()} == {9}
    assert {mine[7].splits for mine in found.values()} == {2}
    assert {mine[8].splits for mine in found.values()} == {3, 4}


@pytest.mark.parametrize(("tiles", "programs", "splits", "steps"), CASES)
def test_the_plan_predicts_the_same_waves(tiles: int, programs: int, splits: int, steps: int) -> None:
    whole = max(-(-tiles // programs) - 1, 0)
    groups: dict[int, dict[int, int]] = defaultdict(dict)  # of each wave: the programs of each tile
    for mine in works(tiles, programs, splits, steps).values():
        for work in mine[whole:]:
            groups[work.first_partial // programs if splits > 1 else 0][work.index] = work.splits
    found = [(len(counts), min(counts.values())) for _, counts in sorted(groups.items())]
    tiling = Tiling(128, splits)  # of eight subtiles
    assert found == split_waves(tiling, tiles - whole * programs, steps * STEP_K, num_programs=programs)


def test_without_splits_the_last_wave_is_some_programs_alone() -> None:
    found = works(7 * 132 + 100, 132, 1, 128)
    assert [len(mine) for mine in found.values()] == [8] * 100 + [7] * 32
    assert {work.splits for mine in found.values() for work in mine} == {1}


def test_a_tile_has_no_more_programs_than_subtiles() -> None:
    """One tile is left for 132 programs: eight compute it, the others nothing."""
    found = works(133, 132, 2, 128)
    assert sorted(len(mine) for mine in found.values()) == [1] * 124 + [2] * 8


BLOCK = 16
TILE = SimpleNamespace(BLOCK_M=BLOCK, BLOCK_N=BLOCK, GROUP_M=2, SPLITS=1)
SHARDS = [(1, 2, 16, 16), (2, 2, 40, 70), (3, 2, 64, 33), (4, 3, 100, 20), (8, 1, 5, 130)]


@pytest.mark.parametrize(("world_size", "row_chunks", "rows", "columns"), SHARDS)
def test_own_tiles_come_first_then_a_row_chunk_of_each_peer_in_turn(
    world_size: int, row_chunks: int, rows: int, columns: int
) -> None:
    chunk_rows = -(-rows // (row_chunks * BLOCK)) * BLOCK
    shards = workgroup_specialized.ChunkedShards(Sizes(rows, columns, 64), Sizes(chunk_rows, columns, 64))
    across = -(-columns // BLOCK)
    own_tiles, chunk_tiles = -(-rows // BLOCK) * across, chunk_rows // BLOCK * across
    rank = world_size - 1
    tile = SimpleNamespace(**vars(TILE), WORLD_SIZE=world_size)
    with emulated(Machine(0), [device_schedulers, workgroup_specialized]):
        found = [
            workgroup_specialized.own_then_row_chunks(index, shards, rank, tile)
            for index in range(own_tiles + (world_size - 1) * row_chunks * chunk_tiles)
        ]
    assert len({(work.owner, work.row, work.col) for work in found}) == len(found)
    assert {work.owner for work in found[:own_tiles]} == {rank}
    for index, work in enumerate(found[own_tiles:]):
        chunk, distance = divmod(index // chunk_tiles, max(world_size - 1, 1))
        assert work.turn == index // chunk_tiles
        assert work.owner == (rank + 1 + distance) % world_size
        assert chunk * chunk_rows <= work.row < (chunk + 1) * chunk_rows
    for work in found:
        assert (work.a_row, work.b_col) == (work.owner * rows + work.row, work.col)
        assert 0 <= work.col < columns


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(("world_size", "programs"), [(1, 4), (2, 5), (3, 12), (4, 9)])
def test_a_mixed_tile_is_where_its_owners_shard_lies(world_size: int, programs: int, by_columns: bool) -> None:
    m, n = 70, 100
    tiles = -(-m // BLOCK) * -(-n // BLOCK)
    shards = reduce_scatter.mixed_shards(
        None,
        m=m,
        n=n,
        k=64,
        by_columns=by_columns,
        tiles=tiles,
        tile_us=20.0,
        wave_sent_us=20.0,
        sends_sums=False,
        num_programs=programs,
        world_size=world_size,
    )
    machine, rank, tile = Machine(0), world_size - 1, SimpleNamespace(**vars(TILE), WORLD_SIZE=world_size)
    machine.task = SimpleNamespace(program=0, num_programs=programs)  # type: ignore[assignment]
    with emulated(machine, [device_schedulers, reduce_scatter]):
        found = [reduce_scatter.mixed(i, shards, rank, tile) for i in range(tiles * world_size)]
    origins = set(product(range(0, m, BLOCK), range(0, n, BLOCK)))
    for owner in range(world_size):
        mine = [work for work in found if work.owner == owner]
        assert {(work.row, work.col) for work in mine} == origins
        assert {work.tile for work in mine} == set(range(tiles))
        assert {work.turn for work in mine} == {(owner - rank - 1) % world_size}
        apart = {(work.a_row - work.row, work.b_col - work.col) for work in mine}
        assert apart == {(0, owner * n) if by_columns else (owner * m, 0)}
