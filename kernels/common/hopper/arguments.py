"""What the warp-specialised kernels take, in bundles (see ../arguments.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

from iris_core.device.cache_key import in_cache_key


class Sizes(NamedTuple):
    """The (m, n) matrix whose tiles are counted, and the inner size."""

    m: int
    n: int
    k: int


class WarpTile(NamedTuple):
    """Compile-time shape of the work on a tile; LOADS says how B lies in memory (../gemm.py).

    STAGES operand tiles are in flight; a finished tile is sent in PIECES of PIECE_ROWS rows and `PIECE_COLS` columns.
    TEAM programs, or more, compute each of the last tiles together (positions.py).
    GATED: operands are still on their way to this rank, rings are gated.
    PINGPONG: two warp groups multiply a tile each, in turns.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    LOADS: int
    STAGES: int
    PIECE_ROWS: int
    PIECES: int
    TEAM: int
    GATED: bool
    PINGPONG: bool


@in_cache_key
class Ring(NamedTuple):
    """Stages of operand tiles in shared memory, and two barriers a stage: they have come, they have been used.

    `batons` are barriers, too, one a warp group, with PINGPONG: it may multiply.
    """

    a: Any
    b: Any
    loaded: Any
    used: Any
    batons: Any


@in_cache_key
class Share(NamedTuple):
    """A program's part of the tile at `position`: steps from `start` and without `stop`, `pieces` from `piece` on.

    It is one of `members` programs, the first of which is `first`; `round` counts the tiles that it shares.
    """

    position: Any
    start: Any
    stop: Any
    piece: Any
    pieces: Any
    first: Any
    members: Any
    round: Any


@in_cache_key
class Place(NamedTuple):
    """A step's stage of the ring, and the phase of the stage's barriers."""

    stage: Any
    phase: Any


@in_cache_key
class Gate(NamedTuple):
    """What a tile's steps must wait for: one count for every `chunk_steps` of them to be `expected`, or nothing.

    `first` is the first of the steps that this program loads.
    """

    counts_ptr: Any
    expected: Any
    chunk_steps: Any
    first: Any
    is_open: Any
    watchdog_ptr: Any


@in_cache_key
class GatedRing(NamedTuple):
    """A ring for steps that must be waited for."""

    a: Any
    b: Any
    loaded: Any
    used: Any
    gate: Any


@in_cache_key
class Outbox(NamedTuple):
    """One finished tile in shared memory, in pieces, and two barriers: it is there, it may be overwritten."""

    pieces: Any
    filled: Any
    emptied: Any


@in_cache_key
class Inbox(NamedTuple):
    """Slabs of a tile in the outbox's memory, a barrier: there is room for an own tile's partials, and two a slab: a
    peer's partial has come, it has been added.
    """

    slabs: Any
    vacated: Any
    arrived: Any
    taken: Any


@in_cache_key
class Herald(NamedTuple):
    """Two barriers between a warp that sends and one that announces: something has been told, it has been said."""

    told: Any
    said: Any


@in_cache_key
class Parcel(NamedTuple):
    """Where the tile in the outbox goes: a first rank, a row and a column of the matrix there.

    Of its pieces those from `piece` on are sent, `pieces` of them. `trace_ptr` is where the warp that sends it writes
    down when (../trace.py); None for nowhere.
    """

    rank: Any
    row: Any
    col: Any
    piece: Any
    pieces: Any
    trace_ptr: Any


class Team(NamedTuple):
    """Where programs that share a tile exchange sums, in this rank's memory: a slot and a flag a round and program."""

    sums_ptr: Any
    flags_ptr: Any
