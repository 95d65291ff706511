"""What the warp-specialised kernels take, in bundles (see ../device/arguments.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

from iris_core.device.cache_key import in_cache_key

from ..device.arguments import cache_key_of


class Sizes(NamedTuple):
    """The (m, n) matrix whose tiles are counted, and the inner size."""

    m: int
    n: int
    k: int


class WarpTile(NamedTuple):
    """Compile-time shape of the work on a tile; LOADS says how B lies in memory (../portable/gemm.py).

    STAGES: of the operand pipeline.
    SUBTILES: a finished tile is sent in so many subtiles of SUBTILE_ROWS rows and `SUBTILE_COLS` columns.
    SPLITS: so many programs, or more, split each tile of the last wave along k (tile_scheduler.py).
    GATED: operands are still on their way to this rank, so the loads of a tile pass a load gate.
    PINGPONG: two warp groups multiply a tile each, in turns.
    EPILOGUE: the jit functions that are applied to a finished tile (../device/epilogue.py).
    NARROWING: how many columns they make one of: a finished tile has so many times fewer.
    ORIGIN: a jit function, called as ``ORIGIN(wave, place, TILE)``, that returns the first row and column, in this
        rank's C, of the tile that this program finishes in a `wave`.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    LOADS: int
    STAGES: int
    SUBTILE_ROWS: int
    SUBTILES: int
    SPLITS: int
    GATED: bool
    PINGPONG: bool
    EPILOGUE: tuple[Any, ...]
    NARROWING: int
    ORIGIN: Any

    @property
    def cache_key(self) -> str:
        """What Triton puts into a kernel's cache key for this."""
        return f"{cache_key_of(self)} {self.ORIGIN.cache_key}"


@in_cache_key
class Pipeline(NamedTuple):
    """The full and the empty barriers of a pipeline (pipeline.py), as many of either as it has stages."""

    full: Any
    empty: Any


@in_cache_key
class OneWayPipeline(NamedTuple):
    """The full barriers alone: the stages are neither acquired nor released."""

    full: Any


@in_cache_key
class PipelineState(NamedTuple):
    """The stage that an item in a pipeline uses, and the phase of the stage's barriers."""

    index: Any
    phase: Any


@in_cache_key
class OperandPipeline(NamedTuple):
    """Stages of operand tiles in shared memory, and the pipeline of their barriers.

    `sequence` is the ordered sequence barrier of PINGPONG, a one-way pipeline: in each wave but the first, a warp group
    waits until the other one passes the tensor cores on.
    """

    a: Any
    b: Any
    barriers: Any
    sequence: Any


@in_cache_key
class LoadGate(NamedTuple):
    """What a tile's loads wait for: one count for every `chunk_steps` steps to be `expected`, or nothing if `is_open`.

    `first` is the first of the steps that this program loads.
    """

    counts_ptr: Any
    expected: Any
    chunk_steps: Any
    first: Any
    is_open: Any
    watchdog_ptr: Any


@in_cache_key
class GatedPipeline(NamedTuple):
    """An operand pipeline whose loads pass a gate."""

    a: Any
    b: Any
    barriers: Any
    gate: Any


@in_cache_key
class PlacedEpilogue(NamedTuple):
    """What the ops of an epilogue read, and what `WarpTile.ORIGIN` takes to say where in this rank's C a tile is."""

    epilogue: Any
    place: Any


@in_cache_key
class EpilogueStore(NamedTuple):
    """One finished tile in shared memory, by subtiles, and the pipeline of its barriers, of one stage."""

    subtiles: Any
    barriers: Any


@in_cache_key
class EpilogueLoad(NamedTuple):
    """Stages for peers' partials in the memory of the epilogue store, and the pipeline of their barriers.

    `memory` is a one-way pipeline: the warp that empties the epilogue store commits its memory to the partials of each
    own tile. The epilogue store's own barriers would not do: they pass in every wave, and a warp that is not there each
    time cannot tell their phases apart.
    """

    stages: Any
    memory: Any
    barriers: Any


@in_cache_key
class PendingStore(NamedTuple):
    """Where the tile in the epilogue store goes: a first rank, a row and a column of the matrix there.

    Its subtiles from `subtile` on are stored, `num_subtiles` of them. `trace_ptr` is where the warp that stores it
    writes down when (../device/trace.py); None for nowhere.
    """

    rank: Any
    row: Any
    col: Any
    subtile: Any
    num_subtiles: Any
    trace_ptr: Any


@in_cache_key
class WorkTile(NamedTuple):
    """A program's work on the tile of an `index`: its k steps from `start` and without `stop`, and a part of the store.

    It then stores `num_subtiles` subtiles from `subtile` on. It is one of `splits` programs, the first of which is
    `first_program`; `split_wave` counts the waves of split tiles.
    """

    index: Any
    start: Any
    stop: Any
    subtile: Any
    num_subtiles: Any
    first_program: Any
    splits: Any
    split_wave: Any


class SplitWorkspace(NamedTuple):
    """Where programs that split a tile exchange partial sums, in this rank's memory.

    `tiles_ptr` points at fp32 tiles, `flags_ptr` at flags: one of each a wave of split tiles and program.
    """

    tiles_ptr: Any
    flags_ptr: Any
