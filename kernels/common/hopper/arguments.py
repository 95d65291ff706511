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
    SUBTILES: a finished tile is sent in so many subtiles of SUBTILE_ROWS rows and SUBTILE_COLS columns.
    SPLITS: so many programs, or more, split each tile of the last wave along k (waves.py).
    PINGPONG: two warp groups multiply a tile each, in turns.
    EPILOGUE: the jit functions that are applied to a finished tile (../device/epilogue.py).
    FETCHES: whether those read vectors of columns alone, which are fetched while the tile is multiplied.
    NARROWING: how many columns they make one of: a finished tile has so many times fewer.
    SCHEDULER: the jit function that returns an index's work tile (../device/tile_scheduler.py).
    SCALES: what the scales of fp8 operands multiply (../device/scaling.py).
    IS_PROMOTED: whether sums of fp8 products are promoted (promotion.py).
    SUM_RANKS: how many ranks a sum of partials is sent to: one, its owner, or all.
    WORLD_SIZE: the number of ranks.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    LOADS: int
    STAGES: int
    SUBTILE_ROWS: int
    SUBTILE_COLS: int
    SUBTILES: int
    SPLITS: int
    PINGPONG: bool
    EPILOGUE: tuple[Any, ...]
    FETCHES: bool
    NARROWING: int
    SCHEDULER: Any
    SCALES: int = 0
    IS_PROMOTED: bool = False
    SUM_RANKS: int = 1
    WORLD_SIZE: int = 1

    @property
    def cache_key(self) -> str:
        """What Triton puts into a kernel's cache key for this."""
        return f"{cache_key_of(self)} {self.SCHEDULER.cache_key}"


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
class TileOperands(NamedTuple):
    """Where the operands of a tile are: A from row `a_row` of a descriptor, B from column `b_col` of another.

    The loads of a step pass the `gate`, unless that is None.
    """

    a: Any
    b: Any
    a_row: Any
    b_col: Any
    gate: Any


@in_cache_key
class Waves(NamedTuple):
    """A program's waves, one tile in each: `whole` ones of tiles that it computes alone, then `split` of split tiles.

    The programs from `first_program` on compute `total_tiles` of `num_steps` k steps.
    """

    total_tiles: Any
    num_steps: Any
    first_program: Any
    whole: Any
    split: Any


@in_cache_key
class TileStaging(NamedTuple):
    """What the multiply warps do with a tile: add the partials of an epilogue `load`, if any, and stage it in `store`.

    `epilogue` has what its ops read. `tiled` is what `WarpTile.SCHEDULER` takes. `scales`, a `Gemm`, has those of the
    operands, or nothing; where A is gathered, `own` has those of this rank's shard.
    """

    store: Any
    load: Any
    epilogue: Any
    tiled: Any
    scales: Any
    own: Any


@in_cache_key
class RowScales(NamedTuple):
    """Where the scales of a tile's rows of A are: its first is row `row` of `rows`."""

    ptr: Any
    stride_m: Any
    stride_k: Any
    row: Any
    rows: Any


@in_cache_key
class LoadWarp(NamedTuple):
    """What the load warp works with: it loads into the operand `pipeline`, and sends from the epilogue `store`.

    Finished tiles go to `out`, a descriptor (rank, row, column).
    """

    pipeline: Any
    store: Any
    out: Any


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
    """The tile in the epilogue store: its first row and column, in the matrix of rank `owner`.

    Its subtiles from `subtile` on are stored, `num_subtiles` of them.
    """

    owner: Any
    row: Any
    col: Any
    subtile: Any
    num_subtiles: Any


class SplitWorkspace(NamedTuple):
    """Where programs that split a tile exchange partial sums, in this rank's memory.

    `tiles_ptr` points at fp32 tiles, `flags_ptr` at flags: one of each a wave of split tiles and program.
    """

    tiles_ptr: Any
    flags_ptr: Any
