"""Which tiles programs of the warp-specialised kernels compute, and which parts of those that they split."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from gluon_emulator import Machine, emulated

from iris_kernels.common.hopper import tile_scheduler
from iris_kernels.common.hopper.plan import STEP_K, Tiling, split_waves

SUBTILES = 8


def works(tiles: int, programs: int, splits: int, steps: int) -> dict[int, list[Any]]:
    """Return what each program does, in its order."""
    machine = Machine(0)
    tile = SimpleNamespace(SPLITS=splits, SUBTILES=SUBTILES)
    found: dict[int, list[Any]] = {}
    with emulated(machine, [tile_scheduler]):
        for program in range(programs):
            machine.task = SimpleNamespace(program=program, num_programs=programs)  # type: ignore[assignment]
            whole = tile_scheduler.whole_waves(tiles, tile)
            waves = whole + tile_scheduler.split_waves(tiles, whole, steps, tile)
            found[program] = [tile_scheduler.work_tile(wave, tiles, whole, steps, tile) for wave in range(waves)]
    return found


SIZES = [(100, 132), (1024, 132), (132, 132), (5, 132), (1, 132), (0, 132), (77, 7), (131, 1), (9, 4), (10, 5), (11, 5)]
CASES = [
    (*sizes, splits, steps)
    for sizes, splits, steps in product(SIZES, (1, 2, 3, 4, 8), (1, 3, 128))
    if splits <= min(sizes[1], steps, SUBTILES)
]


@pytest.mark.parametrize(("tiles", "programs", "splits", "steps"), CASES)
def test_every_step_and_every_subtile_of_a_tile_is_someones(tiles: int, programs: int, splits: int, steps: int) -> None:
    by_tile = defaultdict(list)
    for program, mine in works(tiles, programs, splits, steps).items():
        for work in mine:
            by_tile[work.index].append((program, work))
    assert by_tile.keys() == set(range(tiles))
    for members in by_tile.values():
        stop = subtile = 0
        for number, (program, work) in enumerate(members):
            assert (work.start, work.subtile) == (stop, subtile)
            assert work.stop > work.start
            assert work.num_subtiles > 0
            assert (work.first_program + number, work.splits) == (program, len(members))
            stop, subtile = work.stop, work.subtile + work.num_subtiles
        assert (stop, subtile) == (steps, SUBTILES)
        assert len({work.split_wave for _, work in members}) == 1


@pytest.mark.parametrize(("tiles", "programs"), SIZES)
def test_no_program_has_two_tiles_in_a_wave_and_waves_come_in_order(tiles: int, programs: int) -> None:
    for splits in (2, 3):
        if splits > programs:
            continue
        for mine in works(tiles, programs, splits, 128).values():
            split_numbers = [
                work.split_wave for work in mine if work.index >= tiles - tiles % programs or work.splits > 1
            ]
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
            groups[work.split_wave if splits > 1 else 0][work.index] = work.splits
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
