"""The cost model of stream-K: what it predicts for rows beyond the matrix, and at the highest clock."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from overlap_taxonomy import MACHINES, Work, predict_us
from overlap_taxonomy.gemm_cost import LOW_ROWS, MOST_CLOCK, stream_k_us
from overlap_taxonomy.machine import Machine

H200X2 = MACHINES["h200x2"]
STREAM_K = "fused_sequential:portable:stream_k"


@pytest.mark.parametrize(
    ("family", "m", "n", "k", "us"),
    [
        # 32 rows beyond the matrix
        ("gemm_all_scatter", 96, 22528, 8192, 67.9),
        ("gemm_all_reduce", 96, 8192, 22528, 62.2),
        ("gemm_all_reduce", 96, 3072, 8192, 21.2),
        # whole tiles in one wave
        ("gemm_all_scatter", 256, 28672, 8192, 112.1),
        ("gemm_reduce_scatter", 256, 8192, 28672, 98.2),
        ("all_gather_gemm", 256, 28672, 8192, 100.6),
        # several waves
        ("gemm_reduce_scatter", 1500, 5120, 14336, 184.0),
        ("all_gather_gemm", 1280, 18944, 3584, 139.2),
    ],
)
def test_predictions_of_stream_k_are_what_was_measured(family: str, m: int, n: int, k: int, us: float) -> None:
    """Over two H200s."""
    assert predict_us(H200X2, STREAM_K, Work(family, m, n, k, 2)) == pytest.approx(us, rel=0.08)


def test_rows_beyond_the_matrix_are_read_by_descriptors_alone() -> None:
    by_pointers = replace(H200X2, is_hopper=False)

    def us(machine: Machine, m: int) -> float:
        return stream_k_us(machine, m, 11264, 8192, 2)

    assert us(H200X2, 96) > us(by_pointers, 96)
    assert us(H200X2, 128) == us(by_pointers, 128)


def test_tiles_of_the_library_have_no_rows_beyond_the_matrix() -> None:
    assert stream_k_us(H200X2, 96, 11264, 8192, 2, fits_rows=True) < stream_k_us(H200X2, 96, 11264, 8192, 2)


def test_the_main_loop_is_no_faster_at_the_highest_clock() -> None:
    """A tile of 128 x 256 for each SM, of little k, so that the GPU stays cool."""
    m, n, k = 128 * 12, 256 * 11, 3072
    cool, hot = (replace(H200X2, hot_share=share) for share in (1.0, MOST_CLOCK))
    us = stream_k_us(cool, m, n, k, 2)
    assert us == stream_k_us(hot, m, n, k, 2)
    assert stream_k_us(cool, m, n, k, 2, fits_rows=True) < us


@pytest.mark.parametrize("fits_rows", [False, True])
def test_no_tile_is_left_out_that_would_end_first(fits_rows: bool) -> None:
    """Those that cannot, even split at no cost, are not looked at in full."""
    print("seed", seed := random.randrange(1 << 30))
    draw, rates = random.Random(seed), H200X2.stream_k.tile_rates
    of_one = (replace(H200X2.stream_k, tile_rates={tile: rates[tile]}) for tile in rates if tile[0] >= LOW_ROWS)
    machines = [replace(H200X2, stream_k=one) for one in of_one]
    for _ in range(100):
        m, n, k = (int(2 ** draw.uniform(least, most)) for least, most in ((7, 14), (7, 16), (6, 14)))
        found = stream_k_us(H200X2, m, n, k, 2, fits_rows=fits_rows)
        assert found == min(stream_k_us(one, m, n, k, 2, fits_rows=fits_rows) for one in machines), (m, n, k)
        for most_us in (0.9 * found, 1.1 * found):
            bounded = stream_k_us(H200X2, m, n, k, 2, fits_rows=fits_rows, most_us=most_us)
            assert bounded == min(found, most_us), (m, n, k)


def test_multiplying_and_loading_hold_each_other_up_where_they_take_as_long() -> None:
    def us(memory_gbps: float) -> float:
        stream_k = replace(H200X2.stream_k, memory_gbps=memory_gbps, tile_rates={(128, 256): 1.0})
        return stream_k_us(replace(H200X2, stream_k=stream_k), 256, 132 * 128, 8192, 2)  # one wave

    tile_us, multiplied_us, read_us = H200X2.stream_k.tile_us, us(1e9), us(10.0)
    as_long = 10.0 * (read_us - tile_us) / (multiplied_us - tile_us)
    assert us(as_long) == pytest.approx(tile_us + 2 ** (1 / 8) * (multiplied_us - tile_us), rel=0.02)
    assert us(2 * as_long) < 1.01 * multiplied_us
