"""RMSNorm of whole rows of C: a part of the kernels that have them. A program does a row at a time.

| kernel | a row of C is | waits for |
|---|---|---|
| `norm_rows`, behind a variant's own | there, complete | stream order |
| a variant's own, which sends partial tiles first | what `sum_and_norm_rows` adds | a flag per tile and rank |

Both do `norm_row`: the epilogue, such as a residual, is applied to the row in fp32, C is rounded and stored, and normed
as it was rounded. The norm is computed in fp32 and rounded once: to C's dtype, or to fp8 by a scale of the row, by
which the row's largest element becomes fp8's largest number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from iris_core import wait_each

from ..device.arguments import Block, Epilogue, Tile
from ..device.epilogue import finish_tile
from ..device.tile_scheduler import num_tiles, tile_at
from ..device.trace import SUM, WAIT, trace_span, trace_time
from .gemm import POINTERS, rounded
from .quantise import columns_at_once, row_scale

NORM_WARPS = 8  # of a kernel that only norms rows
NOTHING = Epilogue((), ())
_FLAGS_AT_ONCE = tl.constexpr(256)  # of a row of tiles, of all ranks: few products have more
_ARCHS = {  # of GPUs that round to a dtype
    torch.float8_e4m3fn: ("cpu", "sm_89", "sm_90", "sm_10", "sm_12", "gfx95"),
    torch.float8_e4m3fnuz: ("cpu", "gfx942"),
}


@dataclass(frozen=True)
class RmsNorm:
    """What a problem asks for of its rows of C: each is divided by the root of its mean square, and weighted.

    Args:
        eps: added to the mean square.
        dtype: of normed rows, torch.float8_e4m3fn, or torch.float8_e4m3fnuz for gfx942, with a scale per row; None for
            C's dtype, and no scales.

    Raises:
        ValueError: eps is negative or no number, or the dtype is another.
    """

    eps: float
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if isinstance(self.eps, bool) or not isinstance(self.eps, (int, float)) or not self.eps >= 0.0:
            raise ValueError(f"eps is {self.eps!r}; it takes a number of at least 0, such as 1e-6")
        if not (self.dtype is None or self.dtype in _ARCHS):
            raise ValueError(f"normed_dtype is {self.dtype}; it takes {', '.join(map(str, _ARCHS))}, or None for C's")

    def unsupported_reason(self, arch: str) -> str | None:
        """Return why GPUs of an architecture cannot round to that dtype, or None."""
        if self.dtype is None or arch.startswith(_ARCHS[self.dtype]):
            return None
        there = [str(dtype) for dtype, archs in _ARCHS.items() if arch.startswith(archs)]
        return f"{arch} does not round to {self.dtype}; as normed_dtype it takes {', '.join([*there, 'None'])}"


class NormedRows(NamedTuple):
    """What a norm of n columns reads and where it stores: the weight (n,), normed rows (rows, n), scales (rows,).

    Without scales, `scales_ptr` is None.
    """

    weight_ptr: Any
    weight_stride: int
    n: int
    normed_ptr: Any
    scales_ptr: Any


class NormShape(NamedTuple):
    """Compile-time: the columns that are in registers at once, eps, and of the fp8 dtype the largest number, or 0."""

    COLS: int
    EPS: float
    LARGEST: float


def normed_rows(
    c: torch.Tensor,
    weight: torch.Tensor,
    norm: RmsNorm,
    epilogue: Epilogue = NOTHING,
    ops: tuple[Any, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """Queue `norm_rows` on a matrix, and return normed rows in new memory, and their scales if they are fp8.

    Args:
        c: (rows, n), rows contiguous; where there are `ops`, these are applied first, in place.
        weight: (n,).
        norm: what is made of each row.
        epilogue: what the ops read.
        ops: jit functions, as a `Tile` has them.
    """
    rows, n = c.shape
    normed = torch.empty((rows, n), dtype=norm.dtype or c.dtype, device=c.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=c.device) if norm.dtype else None
    if rows:
        out = Block(c, rows, n, c.stride(0), epilogue)
        stored = NormedRows(weight, weight.stride(0), n, normed, scales)
        tile = Tile(1, 1, 1, 1, POINTERS.value, 1, ops)
        norm_rows[(rows,)](out, stored, shape_of_norm(norm, n, NORM_WARPS), tile, num_warps=NORM_WARPS)
    return (normed,) if scales is None else (normed, scales)


def shape_of_norm(norm: RmsNorm, n: int, num_warps: int) -> NormShape:
    """Return what to compile for rows of n columns."""
    largest = torch.finfo(norm.dtype).max if norm.dtype else 0.0
    return NormShape(columns_at_once(n, num_warps), float(norm.eps), largest)


@triton.jit
def norm_row(
    row,
    weight,
    partials_ptr,
    partial_size,
    out,
    norm,
    PARTIALS: tl.constexpr,
    NORM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum the partials of a row of `out`, finish and store it, and store what the norm makes of it.

    `weight` is that of the first COLS columns. Partials have rows as far apart as `out`'s, and lie `partial_size`
    elements apart; one alone may be `out` itself.
    """
    kept = _finished(row, 0, partials_ptr, partial_size, out, norm, PARTIALS, NORM, TILE)
    weighted = kept * weight
    squares, largest = kept * kept, tl.abs(weighted)
    for start in range(NORM.COLS, norm.n, NORM.COLS):
        value = _finished(row, start, partials_ptr, partial_size, out, norm, PARTIALS, NORM, TILE)
        squares += value * value
        if NORM.LARGEST > 0.0:
            largest = tl.maximum(largest, tl.abs(value * _weight(norm, start, NORM)))
    factor = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / norm.n + NORM.EPS)
    if NORM.LARGEST > 0.0:
        scale = row_scale(tl.max(largest, axis=1) * factor, NORM.LARGEST)
        tl.store(norm.scales_ptr + row + tl.arange(0, 1), scale)
        factor = factor / scale
    _store_normed(weighted * factor[:, None], row, 0, norm, NORM)
    if norm.n > NORM.COLS:
        tl.debug_barrier()  # C's columns past the first, as they were stored, whichever thread did it
        for start in range(NORM.COLS, norm.n, NORM.COLS):
            offsets, mask = _columns_of(row, start, out.stride_cm, norm, NORM)
            value = tl.load(out.c_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
            _store_normed(value * _weight(norm, start, NORM) * factor[:, None], row, start, norm, NORM)


@triton.jit
def _columns_of(row, start, stride, norm, NORM: tl.constexpr):
    """Return the offsets of a row's columns from `start` on, (1, COLS), and the mask of those that there are."""
    cols = start + tl.arange(0, NORM.COLS)
    return tl.cast(row, tl.int64) * stride + cols[None, :], (cols < norm.n)[None, :]


@triton.jit
def _finished(
    row, start, partials_ptr, partial_size, out, norm, PARTIALS: tl.constexpr, NORM: tl.constexpr, TILE: tl.constexpr
):
    """Return columns of a row of C as it is rounded and stored, fp32; zeros past its end."""
    offsets, mask = _columns_of(row, start, out.stride_cm, norm, NORM)
    # .cg: another SM or a peer wrote it, this SM's L1 may hold an older call's.
    total = tl.load(partials_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    for index in tl.static_range(1, PARTIALS):
        other_ptr = partials_ptr + index * partial_size
        total += tl.load(other_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    if (PARTIALS > 1) | (len(out.epilogue.operands) > 0):
        finished = finish_tile(total, out.epilogue, row, start, 1, NORM.COLS, TILE)
        value = rounded(tl.where(mask, finished, 0.0), out.c_ptr.dtype.element_ty)
        tl.store(out.c_ptr + offsets, value, mask=mask)
        total = value.to(tl.float32)
    return total


@triton.jit
def _weight(norm, start, NORM: tl.constexpr):
    """Return the weights of columns, fp32 (1, COLS)."""
    cols = start + tl.arange(0, NORM.COLS)
    offsets = cols.to(tl.int64) * norm.weight_stride
    return tl.load(norm.weight_ptr + offsets, mask=cols < norm.n, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store_normed(value, row, start, norm, NORM: tl.constexpr):
    offsets, mask = _columns_of(row, start, norm.n, norm, NORM)
    tl.store(norm.normed_ptr + offsets, rounded(value, norm.normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_rows(out, norm, NORM: tl.constexpr, TILE: tl.constexpr):
    """Finish and norm C in place, a row per program: a kernel behind that which made it."""
    norm_row(tl.program_id(0), _weight(norm, 0, NORM), out.c_ptr, 0, out, norm, 1, NORM, TILE)


@triton.jit
def sum_and_norm_rows(
    tiled,
    first_row,
    partials_ptr,
    partial_size,
    flags_ptr,
    out,
    norm,
    peers,
    epoch,
    NORM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Do this program's share of the rows of `out`, when all ranks' partials of them are here, in the order of ranks.

    Row 0 of `out` is row `first_row` of `tiled`, whose tiles partials come in; a flag per rank and tile says that one
    is here. Precondition: the program waits for no tile that it has still to send.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    start = program * out.m // programs
    weight = _weight(norm, 0, NORM)  # on its way while partials are
    began = trace_time(peers)
    for row in tl.range(start, (program + 1) * out.m // programs, num_stages=1):
        if (row == start) | ((first_row + row) % TILE.BLOCK_M == 0):
            wait_for_row_of_tiles((first_row + row) // TILE.BLOCK_M, tiled, flags_ptr, peers, epoch, TILE)
            began = trace_span(peers, WAIT, row, began)
        norm_row(row, weight, partials_ptr, partial_size, out, norm, TILE.WORLD_SIZE, NORM, TILE)
        began = trace_span(peers, SUM, row, began)


@triton.jit
def wait_for_row_of_tiles(row, tiled, flags_ptr, peers, epoch, TILE: tl.constexpr):
    """Wait until all ranks' partials of a row of tiles are here."""
    columns, tiles = tl.cdiv(tiled.n, TILE.BLOCK_N), num_tiles(tiled, TILE)
    for first in range(0, TILE.WORLD_SIZE * columns, _FLAGS_AT_ONCE):
        flags = first + tl.arange(0, _FLAGS_AT_ONCE)
        rank = flags // columns
        tile = tile_at(row, flags % columns, tiled, TILE)
        wait_each(flags_ptr + rank * tiles + tile, epoch, rank < TILE.WORLD_SIZE, peers.watchdog_ptr)
