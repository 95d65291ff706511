"""How long a rank's tiles take, as far as that can be said beforehand, and the quickest way to cut them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

BLOCK_M = 128
STEP_K = 64
# Widths of tiles, and how fast each multiplies, relative to the first. These constants were chosen together, so that of
# 104 cuts of 37 all-scatters over 4 H200s, in six runs, the quickest are predicted to be (docs/performance.md).
WIDTHS = {256: 1.0, 128: 1.0, 64: 0.55}
LEAST_KEPT = 64  # columns that a member of a team keeps
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
_EXCHANGE_US = 5.0  # of a team's sums of 128 columns
_TEAM_RATE = 0.96  # how fast a kernel with teams that sends tiles multiplies, in all its turns


@dataclass(frozen=True)
class Cut:
    """The width of tiles, how many programs compute each of the last ones together, whether warp groups take turns."""

    block_n: int
    team: int
    pingpong: bool = False


def predicted_us(cut: Cut, m: int, n: int, k: int, *, num_programs: int, peers: int) -> float:
    """Return how long a rank takes for an (m, n) of inner size k, in µs, with what it sends at last.

    All programs end a turn at once. What they then have is sent during the next turn, or after the last one. So it ends
    with the multiplication and the last turn's bytes, or with the first turn and all bytes, whichever is later.

    Args:
        cut: into which tiles, and teams.
        m, n, k: of the rank's multiplication.
        num_programs: that compute.
        peers: how many ranks each tile is sent to.
    """
    tiles = -(-m // BLOCK_M) * -(-n // cut.block_n)
    if not tiles:
        return 0.0
    tile_us = 2e-6 * BLOCK_M * cut.block_n * k / (TFLOPS * WIDTHS[cut.block_n])
    tile_us += _PINGPONG_TILE_US if cut.pingpong else _TILE_US
    if cut.team > 1 and peers:
        tile_us /= _TEAM_RATE
    tile_sent_us = _tile_sent_us(cut, peers)
    teams = num_programs // cut.team
    whole = -(-tiles // num_programs) - 1
    left = tiles - whole * num_programs
    rounds = -(-left // teams)
    round_us = tile_us / cut.team + (_EXCHANGE_US * cut.block_n / 128 if cut.team > 1 else 0.0)
    first_us = tile_us if whole else round_us
    multiplied_us = whole * tile_us + rounds * round_us
    return max(multiplied_us + (left - (rounds - 1) * teams) * tile_sent_us, first_us + tiles * tile_sent_us)


def _tile_sent_us(cut: Cut, peers: int) -> float:
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

    best = min(possible_cuts(k, num_programs=num_programs, teams=teams), key=us)
    in_turns = Cut(PINGPONG_COLUMNS, 1, pingpong=True)
    tiles = -(-m // BLOCK_M) * -(-n // PINGPONG_COLUMNS)
    sent_us = tiles * _tile_sent_us(in_turns, peers)
    is_measured = peers == 1 and k <= _PINGPONG_MOST_K and sent_us < _PINGPONG_MOST_SENT * us(in_turns)
    can_gain = pingpong and is_measured and tiles > num_programs
    return in_turns if can_gain and us(in_turns) < min(us(best), _PINGPONG_MOST_US) else best


def possible_cuts(k: int, *, num_programs: int, teams: Iterable[int]) -> list[Cut]:
    """Return the cuts with teams of these sizes, of so many programs, for an inner size."""
    cuts = [Cut(block_n, team) for block_n, team in product(WIDTHS, teams)]
    return [cut for cut in cuts if is_possible(cut, k) and (cut.team == 1 or cut.team < num_programs)]


def is_possible(cut: Cut, k: int) -> bool:
    """Whether each member of a team has columns to keep and a step of k to multiply."""
    return cut.team == 1 or (cut.block_n // cut.team >= LEAST_KEPT and k >= cut.team * STEP_K)
