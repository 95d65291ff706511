"""The predicted time of the library's GEMM."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from overlap_taxonomy import MACHINES, Machine, Work
from overlap_taxonomy.gemm_cost import Gemm, fp8_rate, peak_tflops
from overlap_taxonomy.library_cost import library_gemm

H200 = MACHINES["h200x2"]


def gemm(m: int, n: int, k: int, machine: Machine = H200, **options: Any) -> Gemm:
    return library_gemm(machine, Work("all_gather_gemm", m, n, k, 1, **options))


@pytest.mark.parametrize(
    ("m", "n", "k", "tile", "waves"),
    [
        (256, 9216, 7168, (128, 144), 1),  # 2 x 64 tiles
        (9216, 256, 7168, (144, 128), 1),
        (512, 8192, 4096, (128, 256), 1),  # 4 x 32
        (300, 5120, 7168, (104, 128), 1),  # 3 x 40; 128 rows are as many tiles
        (777, 5120, 5120, (136, 128), 2),  # 6 x 40; in one wave there would be 18 tiles of 288 columns a row
        (1024, 5120, 4096, (128, 160), 2),  # 8 x 32
        (1, 4096, 4096, (128, 32), 1),
    ],
)
def test_tiles_are_as_wide_as_their_waves_need(m: int, n: int, k: int, tile: tuple[int, int], waves: int) -> None:
    found = gemm(m, n, k)
    assert ((found.tile_m, found.tile_n), found.waves) == (tile, waves)


def test_waves_hold_all_tiles() -> None:
    """Of any size, on any number of SMs."""
    print("seed", seed := random.randrange(1 << 30))
    draw = random.Random(seed)
    for _ in range(300):
        m, n, k = (int(2 ** draw.uniform(0, most)) for most in (14, 16, 14))
        sms = draw.randint(1, 132)
        found = gemm(m, n, k, H200.with_sms(sms))
        assert 0 < found.last_tiles <= found.tiles, (m, n, k, sms)
        assert found.waves == 1 or found.tiles <= found.waves * sms, (m, n, k, sms)


def test_one_wave_more_than_the_fewest_is_taken_where_it_ends_first() -> None:
    found = gemm(158, 23024, 21968, element_bytes=1, sums="promoted")
    assert ((found.tile_m, found.tile_n), found.waves) == ((80, 128), 3)


def test_a_tile_that_is_split_is_in_one_wave_and_fp8s_are_not_split() -> None:
    split, whole = gemm(2048, 4096, 4096), gemm(2048, 4096, 4096, element_bytes=1, sums="promoted")
    assert (split.waves, split.last_tiles) == (1, split.tiles)
    assert whole.waves > 1


def test_other_elements_multiply_at_their_own_rate_in_the_widest_tiles() -> None:
    m, n, k = 8 * 128, 132 * 256, 8192  # 8 waves
    for rate, options in (
        (fp8_rate(H200, "promoted", "library") * peak_tflops(H200, 1), {"element_bytes": 1, "sums": "promoted"}),
        (peak_tflops(H200, 4), {"element_bytes": 4}),
    ):
        assert gemm(m, n, k, **options).us == pytest.approx(2e-6 * m * n * k / rate, rel=0.05)


def test_rows_off_16_bytes_are_slower_by_what_was_measured() -> None:
    slow = replace(H200, library_narrow_slowdown=10.0)
    assert gemm(4096, 4096, 4097, slow).us > 1.9 * gemm(4096, 4096, 4097, replace(slow, library_narrow_slowdown=5.0)).us
    assert gemm(1, 4096, 4097, slow).us == pytest.approx(gemm(1, 4096, 4096, slow).us, rel=0.01)  # a kernel of its own
