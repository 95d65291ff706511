"""What kernels take, in bundles: a kernel's signature says what it is about, and device functions pass bundles on.

Integers in a bundle are specialised like any other argument (1 becomes a constant). `Tile` holds compile-time values
and is passed as a ``tl.constexpr``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from iris_core.device.cache_key import in_cache_key


class Gemm(NamedTuple):
    """The inner size and the operands' strides in elements; the operands themselves are arguments of their own.

    Scales of fp8 operands (../fp8/scales.py) are read through pointers: that of A at (row, block of k), that of B at
    (block of k, column or block of columns), with strides of 0 where there is one for all; of `rows` rows and `columns`
    columns. Without scales all this is None.
    """

    k: int
    stride_am: int
    stride_ak: int
    stride_bk: int
    stride_bn: int
    a_scale_ptr: Any = None
    stride_asm: int | None = None
    stride_ask: int | None = None
    b_scale_ptr: Any = None
    stride_bsk: int | None = None
    stride_bsn: int | None = None
    rows: int | None = None
    columns: int | None = None


@in_cache_key
class Epilogue(NamedTuple):
    """What the ops of an epilogue (epilogue.py) read, a bundle for each op; of partial sums, which have none, ().

    Row 0 of what is computed is row `first_row` of this rank's C.
    """

    operands: Any
    first_row: Any


@in_cache_key
class Block(NamedTuple):
    """An (m, n) matrix on the heap that this rank computes: rows `stride_cm` elements apart, columns contiguous."""

    c_ptr: Any
    m: int
    n: int
    stride_cm: int
    epilogue: Any


class Peers(NamedTuple):
    """What it takes to reach the other ranks: the operator's state (handshake.py) and the context's own pointers.

    `trace_ptr` is where programs write down what they do (trace.py); None for nowhere.
    """

    state_ptr: Any
    rank: int
    heap_bases: Any
    watchdog_ptr: Any
    trace_ptr: Any = None


class Tile(NamedTuple):
    """Compile-time shape of the work on a tile.

    LOADS says how operands are read (../portable/gemm.py); with two SUBTILES an epilogue stores a tile in halves.
    EPILOGUE has the jit functions that are applied to a finished tile (epilogue.py), of which NARROWING columns become
    one. SCALES says what fp8 operands' scales multiply (scaling.py). MOST_IMPRECISE: of how many k products of fp8 are
    summed in the tensor cores before the sum is promoted to fp32; None for all. WORLD_SIZE is the number of ranks. With
    FULLY_CONNECTED each peer is behind a link of its own: tiles for different peers follow one another.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    LOADS: int
    SUBTILES: int
    EPILOGUE: tuple[Any, ...] = ()
    NARROWING: int = 1
    SCALES: int = 0
    MOST_IMPRECISE: int | None = None
    WORLD_SIZE: int = 1
    FULLY_CONNECTED: bool = False

    @property
    def cache_key(self) -> str:
        """What Triton puts into a kernel's cache key for this."""
        return cache_key_of(self)


def cache_key_of(tile: Any) -> str:
    """Return what tells a compile-time bundle, and the source of the jit functions in it, from others."""
    return f"{tile!r} {[op.cache_key for op in tile.EPILOGUE]}"
