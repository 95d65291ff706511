"""The predicted time of the library's GEMM, whose kernels and their choice are its own: cuBLAS's, or hipBLASLt's."""

from __future__ import annotations

import functools

from .gemm_cost import ROWS_OF_MMA, Gemm, clock, fp8_rate, peak_tflops, stream_k_us, tiles_of
from .machine import Machine
from .work import Work, WorkKind

# A side of a tile is 128, and the other any multiple of 8. A step of k takes as long as the tile's area, and as what is
# loaded along its sides, each as many elements of area. By these constants, and `library_tile_us`, 443 times of cuBLAS
# alone on an H200 were predicted best: they are off by 5.8 % in the mean, and 160 held-out ones, which fitted none, by
# 5.2 %.
_SIDE, _WIDTHS = 128, (32, 256)
_RATE, _SIDE_COST = 1.1, 24.6


@functools.lru_cache(maxsize=1024)
def library_gemm(machine: Machine, work: Work) -> Gemm:
    """Return a rank's GEMM by the library, with the tile whose waves end first, or with tiles that are split."""
    (m, n, k), sms = work.product, machine.num_sms
    slows_down = _slows_down(work, m)
    unit_us = k * _unit_us(machine, work.kind, slows_down)
    (waves, wave_us, width), other = _waves(machine, unit_us, m, n), _waves(machine, unit_us, n, m)
    tile_m, tile_n = _SIDE, width
    if other[0] * other[1] < waves * wave_us:
        (waves, wave_us, tile_m), tile_n = other, _SIDE
    tiles = tiles_of(m, n, (tile_m, tile_n))
    if work.element_bytes == 2:
        wave_us /= clock(machine, wave_us * waves)
    moved = work.element_bytes * (m * k + k * n) + work.out_bytes * m * n
    wave_us, last_tiles = max(wave_us, moved / machine.memory_gbps / 1e3 / waves), tiles - (waves - 1) * sms
    if not slows_down and work.element_bytes > 1:  # torch's fp8 kernels split no tiles
        whole_us = waves * wave_us
        split_us = stream_k_us(machine, m, n, k, work.element_bytes, work.sums, fits_rows=True, most_us=whole_us)
        if split_us < whole_us:
            waves, wave_us, last_tiles = 1, split_us, tiles
    return Gemm(tiles, waves, wave_us, wave_us, tile_m, tile_n, last_tiles, moved)


def _waves(machine: Machine, unit_us: float, size: int, other: int) -> tuple[int, float, int]:
    """Return the fewest waves of tiles of one width, or one more: how many, what one takes, and the width.

    Args:
        machine: whose SMs take a tile each in a wave.
        unit_us: what an element of a tile's area takes.
        size, other: of the output; tiles have `_SIDE` along the first, and the width along the second.
    """
    (least, most), rows, sms = _WIDTHS, -(-size // _SIDE), machine.num_sms
    fewest, best_us = -(-rows * -(-other // most) // sms), float("inf")
    for waves in (fewest, fewest + 1):
        columns = min(waves * sms // rows, -(-other // least))
        width = max(least, ROWS_OF_MMA * -(-other // (columns * ROWS_OF_MMA)))  # the least with so few columns of tiles
        wave_us = unit_us * (_SIDE * width + _SIDE_COST * (_SIDE + width)) + machine.library_tile_us
        if waves * wave_us < best_us:
            best_us, best = waves * wave_us, (waves, wave_us, width)
    return best


@functools.lru_cache(maxsize=64)
def _unit_us(machine: Machine, of: WorkKind, slows_down: bool) -> float:
    """Return what the library takes for each element along k of an element of a tile's area."""
    tflops = peak_tflops(machine, of.element_bytes)
    if of.element_bytes == 2:
        tflops *= _RATE
    else:  # that rate is of the widest tiles
        most = _WIDTHS[1]
        tflops *= 1.0 + _SIDE_COST * (1.0 / _SIDE + 1.0 / most)
    if of.sums:
        tflops *= fp8_rate(machine, of.sums, "library")
    if slows_down:
        tflops /= machine.library_narrow_slowdown
    return 2e-6 * machine.num_sms / tflops


def _slows_down(work: Work, m: int) -> bool:
    """Whether rows off 16 bytes slow the library's GEMM; a single row has a kernel of its own, fp32 is not known."""
    return work.reads_narrow_rows and m > 1 and work.element_bytes <= 2
