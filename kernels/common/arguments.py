"""What kernels take, in bundles: a kernel's signature says what it is about, and device functions pass bundles on.

Integers in a bundle are specialised like any other argument (1 becomes a constant). `Tile` holds compile-time values
and is passed as a ``tl.constexpr``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from iris_core.device.cache_key import in_cache_key


class Gemm(NamedTuple):
    """The inner size and the operands' strides in elements; the operands themselves are arguments of their own."""

    k: int
    stride_am: int
    stride_ak: int
    stride_bk: int
    stride_bn: int


@in_cache_key
class Epilogue(NamedTuple):
    """What is done to a finished tile (epilogue.py): jit functions in order, and for each what it reads, or None.

    Row 0 of what is computed is row `first_row` of this rank's C.
    """

    ops: Any
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

    LOADS says how operands are read (gemm.py); with two SUBTILES an epilogue stores a tile in halves.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    LOADS: int
    SUBTILES: int
