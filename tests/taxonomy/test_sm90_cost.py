"""The cost model of kernels for Hopper: rows beyond the matrix, and what an all-scatter of one wave waits for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from overlap_taxonomy import MACHINES, Work, predict_us
from overlap_taxonomy.gemm_cost import gemm

H200X2 = MACHINES["h200x2"]
SCATTERED = "warp_specialized:sm90"


def test_rows_beyond_the_matrix_take_as_long_as_if_they_were_read_from_memory() -> None:
    """Over two H200s one row took 118 us in tiles of 128, 32 rows 85, and 128 rows 74."""
    us = [predict_us(H200X2, SCATTERED, Work("gemm_all_scatter", m, 28672, 8192, 2)) for m in (1, 32, 128)]
    assert us[:2] == pytest.approx([118, 85], rel=0.15)
    assert us[2] == pytest.approx(74, rel=0.2)


@pytest.mark.parametrize(
    ("ranks", "size", "us"),
    [
        (4, (64, 14336, 12288), 40.1),  # all tiles in one wave, each multiplied by two programs
        (4, (33, 28672, 12288), 62.1),
        (4, (192, 8192, 3072), 23.6),  # most of the handshake while the first tile is multiplied
        (2, (192, 8192, 3072), 22.3),
        (2, (300, 7168, 5120), 38.2),
    ],
)
def test_what_an_all_scatter_of_one_wave_waits_for(ranks: int, size: tuple[int, int, int], us: float) -> None:
    """As measured over H200s."""
    machine = MACHINES[f"h200x{ranks}"]
    assert predict_us(machine, SCATTERED, Work("gemm_all_scatter", *size, ranks)) == pytest.approx(us, rel=0.11)


def test_pieces_of_tiles_wholly_beyond_the_matrix_are_not_read() -> None:
    tile: Any = {"tile": (128, 128), "kind": "specialized"}
    work = Work("gemm_all_scatter", 777, 28672, 8192, 2)
    us = {m: gemm(H200X2, work, m, 14336, 8192, **tile).us for m in (1, 32, 128, 769, 800, 801, 896)}
    assert us[800] == us[896]
    assert us[769] == us[801] > us[800]  # 31 rows of one piece
    assert us[1] > us[128] > us[32]  # of four, as no piece is whole
    portable = {m: gemm(H200X2, work, m, 14336, 8192, tile=(128, 128)).us for m in (32, 128)}
    assert portable[32] > portable[128]


@pytest.mark.parametrize(("name", "m", "us"), [("h100x4", 32, 60.5), ("h100x4", 128, 70.9), ("h200x4", 32, 46.4)])
def test_tiles_that_are_split_wait_for_their_weights(name: str, m: int, us: float) -> None:
    """As measured over H100s and H200s, whose memory is faster; and with a slower one."""
    machine, work = MACHINES[name], Work("gemm_all_scatter", m, 28672, 8192, 4)
    assert predict_us(machine, SCATTERED, work) == pytest.approx(us, rel=0.07)
    slower = replace(machine, stream_k=replace(machine.stream_k, memory_gbps=1000.0))
    assert predict_us(slower, SCATTERED, work) > 2 * 7168 * 8192 / 1e6
