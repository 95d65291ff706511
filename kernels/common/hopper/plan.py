"""How long a rank's tiles take, as far as that can be said beforehand, and the quickest way to cut them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from .positions import PIECE_COLS

BLOCK_M = 128
STEP_K = 64
# Widths of tiles, and how fast each multiplies, relative to the first. These constants were chosen together, so that of
# 104 cuts of 37 all-scatters over 4 H200s, in six runs, the quickest are predicted to be (results/notebook.md).
WIDTHS = {256: 1.0, 128: 1.0, 64: 0.55}
PIECE_ROWS = 32  # of default configurations; a member of a team keeps a piece or more
TFLOPS = 5.8  # of an SM, with the widest tile
_TILE_US = 3.0  # that a tile takes beside its multiplication
# The same with pingpong. Within these bounds it gained 0 to 7 % of ten all-scatters over 2 H200s, 2 % in the mean.
# Beyond the first it lost 6 %, beyond the second it gained nothing in the mean, beyond the third it was not measured.
_PINGPONG_TILE_US = 1.4
_PINGPONG_MOST_US = 1000.0
_PINGPONG_MOST_K = 8192
_PINGPONG_MOST_SENT = 0.5  # of that time in which the link is busy: a tile's pieces leave later
PINGPONG_COLUMNS = 128  # more would not fit the registers of a warp group
_LINK_GBPS = 345.0  # stores of all SMs to peers, H200 and NVLink 4
# What an exchange of a team's sums of 128 columns costs, all in all, where tiles are sent; chosen by 14 all-scatters
# over two H200s that send as four do. Teams of 256 columns took 2 % more in the mean than was predicted there, teams of
# tiles that take less time lost, and teams of 64 columns were not measured.
_EXCHANGE_US = 14.0
_TEAM_COLUMNS = 128
_TEAM_LEAST_TILE_US = 45.0


@dataclass(frozen=True)
class Cut:
    """The width of tiles, how many programs compute each of the last ones together, whether warp groups take turns."""

    block_n: int
    team: int
    pingpong: bool = False


def predicted_us(cut: Cut, m: int, n: int, k: int, *, num_programs: int, peers: int) -> float:
    """Return how long a rank takes for an (m, n) of inner size k, in µs, with what it sends at last.

    All programs end a turn at once. What they then have is sent during the next turn, which cannot end before, or after
    the last one.

    Args:
        cut: into which tiles, and teams.
        m, n, k: of the rank's multiplication.
        num_programs: that compute.
        peers: how many ranks each tile is sent to.
    """
    tiles = tiles_of(m, n, cut.block_n)
    tile_us = tile_alone_us(cut, k)
    whole = whole_turns(tiles, num_programs)
    turns = [(num_programs, tile_us)] * whole
    for shared, members in rounds_of(cut, tiles - whole * num_programs, k, num_programs=num_programs):
        turns.append((shared, share_us(cut, tile_us, members, _EXCHANGE_US)))
    multiplied = sent = 0.0  # when the turn before is, and when its tiles are
    for finished, turn_us in turns:
        multiplied = max(multiplied + turn_us, sent)
        sent = multiplied + finished * tile_sent_us(cut, peers)
    return sent


def tiles_of(m: int, n: int, block_n: int) -> int:
    """Return how many tiles of so many columns an (m, n) has."""
    return -(-m // BLOCK_M) * -(-n // block_n)


def tile_alone_us(cut: Cut, k: int) -> float:
    """Return how long a program takes for a tile by itself."""
    beside_us = _PINGPONG_TILE_US if cut.pingpong else _TILE_US
    return 2e-6 * BLOCK_M * cut.block_n * k / (TFLOPS * WIDTHS[cut.block_n]) + beside_us


def share_us(cut: Cut, tile_us: float, members: int, exchange_us: float) -> float:
    """Return how long a team takes for a tile, where to exchange the sums of 128 columns takes `exchange_us`."""
    return tile_us / members + (exchange_us * cut.block_n / 128 if members > 1 else 0.0)


def whole_turns(num_tiles: int, num_programs: int) -> int:
    """Return how many turns all programs have before the last one, which some or all of them have."""
    return max(-(-num_tiles // num_programs) - 1, 0)


def rounds_of(cut: Cut, left: int, k: int, *, num_programs: int) -> list[tuple[int, int]]:
    """Return how many tiles there are in each round behind the whole turns, and how few programs share one of them.

    `left` are the tiles of all these rounds, 0 to `num_programs`. See positions.py.
    """
    if cut.team == 1:
        return [(left, 1)] if left else []
    teams = num_programs // cut.team
    rounds = [(teams, cut.team)] * (left // teams)
    if left_over := left % teams:
        most = min(pieces_of(cut.block_n, PIECE_ROWS), -(-k // STEP_K))
        rounds.append((left_over, min(num_programs // left_over, most)))
    return rounds


def tile_sent_us(cut: Cut, peers: int) -> float:
    """Return how long the link takes for a tile of one program."""
    return 2e-3 * BLOCK_M * cut.block_n * peers / _LINK_GBPS


def quickest_cut(
    m: int, n: int, k: int, *, num_programs: int, peers: int, teams: Iterable[int], pingpong: bool = False
) -> Cut:
    """Return the cut that is predicted to end first; see `predicted_us`.

    Args:
        teams: their sizes to choose from.
        pingpong: whether warp groups may take turns, where that was seen to be quicker.
    """

    def us(cut: Cut) -> float:
        return predicted_us(cut, m, n, k, num_programs=num_programs, peers=peers)

    def can_gain_by_team(cut: Cut) -> bool:
        return cut.block_n == _TEAM_COLUMNS and tile_alone_us(cut, k) >= _TEAM_LEAST_TILE_US

    cuts = possible_cuts(k, num_programs=num_programs, teams=teams)
    cuts = [cut for cut in cuts if cut.team == 1 or can_gain_by_team(cut)]
    best = min(cuts, key=lambda cut: (round(us(cut), 1), cut.team))  # not a team for nothing
    in_turns = Cut(PINGPONG_COLUMNS, 1, pingpong=True)
    tiles = tiles_of(m, n, PINGPONG_COLUMNS)
    sent_us = tiles * tile_sent_us(in_turns, peers)
    is_measured = peers == 1 and k <= _PINGPONG_MOST_K and sent_us < _PINGPONG_MOST_SENT * us(in_turns)
    can_take_turns = pingpong and is_measured and tiles > num_programs
    return in_turns if can_take_turns and us(in_turns) < min(us(best), _PINGPONG_MOST_US) else best


def possible_cuts(k: int, *, num_programs: int, teams: Iterable[int]) -> list[Cut]:
    """Return the cuts with teams of these sizes, of so many programs, for an inner size; narrow tiles have no teams."""
    cuts = [Cut(block_n, team) for block_n, team in product(WIDTHS, teams) if team == 1 or block_n >= _TEAM_COLUMNS]
    return [cut for cut in cuts if is_possible(cut, k) and (cut.team == 1 or cut.team < num_programs)]


def is_possible(cut: Cut, k: int) -> bool:
    """Whether each member of a team has a piece to keep and a step of k to multiply."""
    return cut.team == 1 or (cut.team <= pieces_of(cut.block_n, PIECE_ROWS) and k >= cut.team * STEP_K)


def pieces_of(block_n: int, rows: int) -> int:
    """Return how many pieces of so many rows a tile has."""
    return BLOCK_M // rows * (block_n // PIECE_COLS.value)
