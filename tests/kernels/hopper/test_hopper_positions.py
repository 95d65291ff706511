"""Which tiles programs of the warp-specialised kernels compute, and which parts of those that they share."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from gluon_emulator import Machine, emulated

from iris_kernels.common.hopper import positions
from iris_kernels.common.hopper.plan import STEP_K, Cut, rounds_of

PIECES = 8


def shares(tiles: int, programs: int, team: int, steps: int) -> dict[int, list[Any]]:
    """Return what each program does, in its order."""
    machine = Machine(0)
    tile = SimpleNamespace(TEAM=team, PIECES=PIECES)
    found: dict[int, list[Any]] = {}
    with emulated(machine, [positions]):
        for program in range(programs):
            machine.task = SimpleNamespace(program=program, num_programs=programs)  # type: ignore[assignment]
            whole = positions.whole_turns(tiles, tile)
            turns = whole + positions.shared_turns(tiles, whole, steps, tile)
            found[program] = [positions.share_of(turn, tiles, whole, steps, tile) for turn in range(turns)]
    return found


SIZES = [(100, 132), (1024, 132), (132, 132), (5, 132), (1, 132), (0, 132), (77, 7), (131, 1), (9, 4), (10, 5), (11, 5)]
CASES = [
    (*sizes, team, steps)
    for sizes, team, steps in product(SIZES, (1, 2, 3, 4, 8), (1, 3, 128))
    if team <= min(sizes[1], steps, PIECES)
]


@pytest.mark.parametrize(("tiles", "programs", "team", "steps"), CASES)
def test_every_step_and_every_piece_of_a_tile_is_someones(tiles: int, programs: int, team: int, steps: int) -> None:
    by_tile = defaultdict(list)
    for program, mine in shares(tiles, programs, team, steps).items():
        for share in mine:
            by_tile[share.position].append((program, share))
    assert by_tile.keys() == set(range(tiles))
    for members in by_tile.values():
        stop = piece = 0
        for number, (program, share) in enumerate(members):
            assert (share.start, share.piece) == (stop, piece)
            assert share.stop > share.start
            assert share.pieces > 0
            assert (share.first + number, share.members) == (program, len(members))
            stop, piece = share.stop, share.piece + share.pieces
        assert (stop, piece) == (steps, PIECES)
        assert len({share.round for _, share in members}) == 1


@pytest.mark.parametrize(("tiles", "programs"), SIZES)
def test_nobody_shares_two_tiles_in_a_round_and_rounds_come_in_order(tiles: int, programs: int) -> None:
    for team in (2, 3):
        if team > programs:
            continue
        for mine in shares(tiles, programs, team, 128).values():
            rounds = [share.round for share in mine if share.position >= tiles - tiles % programs or share.members > 1]
            assert rounds == sorted(set(rounds))


def test_tiles_behind_whole_turns_are_shared_by_all() -> None:
    """Of 100 tiles 66 by pairs, then 34 by three or four programs: no program idles."""
    found = shares(7 * 132 + 100, 132, 2, 128)
    assert {len(mine) for mine in found.values()} == {9}
    assert {mine[7].members for mine in found.values()} == {2}
    assert {mine[8].members for mine in found.values()} == {3, 4}


@pytest.mark.parametrize(("tiles", "programs", "team", "steps"), CASES)
def test_the_plan_reckons_with_the_same_rounds(tiles: int, programs: int, team: int, steps: int) -> None:
    whole = max(-(-tiles // programs) - 1, 0)
    teams: dict[int, dict[int, int]] = defaultdict(dict)  # of each round: the members of each tile
    for mine in shares(tiles, programs, team, steps).values():
        for share in mine[whole:]:
            teams[share.round if team > 1 else 0][share.position] = share.members
    found = [(len(members), min(members.values())) for _, members in sorted(teams.items())]
    cut = Cut(128, team)  # of eight pieces
    assert found == rounds_of(cut, tiles - whole * programs, steps * STEP_K, num_programs=programs)


def test_without_teams_the_last_turn_is_some_programs_alone() -> None:
    found = shares(7 * 132 + 100, 132, 1, 128)
    assert [len(mine) for mine in found.values()] == [8] * 100 + [7] * 32
    assert {share.members for mine in found.values() for share in mine} == {1}


def test_a_tile_has_no_more_programs_than_pieces() -> None:
    """One tile is left for 132 programs: eight compute it, the others nothing."""
    found = shares(133, 132, 2, 128)
    assert sorted(len(mine) for mine in found.values()) == [1] * 124 + [2] * 8
