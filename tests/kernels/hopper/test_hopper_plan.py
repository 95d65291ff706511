"""How the warp-specialised kernels' tiles are tiling: what is predicted, and what is chosen."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import compiling
import pytest
import torch
from families import make_problem

from iris_kernels.all_gather_gemm.hopper.workgroup_specialized import chunks_of_shards
from iris_kernels.common.config import GemmConfig, parse_config
from iris_kernels.common.hopper import host, plan
from iris_kernels.common.hopper.plan import (
    STEP_K,
    Promotion,
    Tiling,
    fastest_tiling,
    is_possible,
    possible_tilings,
    predicted_us,
    split_waves,
)
from iris_kernels.gemm_reduce_scatter.hopper import tile_scheduler
from overlap_taxonomy import get_variant

RESULTS = Path(__file__).parents[3] / "results/tuning"

on_four = partial(predicted_us, num_programs=132, peers=3)
alone = partial(predicted_us, num_programs=132, peers=0)
SPLITS = (1, 2, 4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("tiles", "num_programs"), [(512, 132), (128, 132), (5, 132), (1, 3), (77, 7), (131, 1)])
def test_waves_have_every_tile_once_and_own_ones_behind_the_peers(
    tiles: int, num_programs: int, world_size: int
) -> None:
    places = waves_of(tiles, world_size, num_programs)
    assert places.keys() == {(distance, tile) for distance in range(world_size) for tile in range(tiles)}
    for (distance, tile), place in places.items():
        assert distance == 0 or place < places[0, tile]


@pytest.mark.parametrize(("tiles", "world_size", "ahead"), [(512, 4, 3), (256, 4, 3), (128, 4, 2), (256, 8, 3)])
def test_own_tiles_come_when_partials_have_had_the_time(tiles: int, world_size: int, ahead: int) -> None:
    """So many waves behind the peers' tile of their number, but behind the mixed waves."""
    waves = waves_of(tiles, world_size)
    shards = ordered(tiles, world_size)
    for tile in range(shards.mixed * shards.batch):
        gaps = [waves[0, tile][0] - waves[distance, tile][0] for distance in range(1, world_size)]
        assert min(gaps) >= ahead
        assert waves[0, tile][0] < ahead + shards.mixed


def test_with_two_waves_before_them_own_tiles_come_last_but_where_the_link_is_slow() -> None:
    assert ordered(128, 4, tile_us=23.0, sent_us=25.0).mixed > 0
    assert ordered(128, 4, tile_us=26.0, sent_us=25.0).mixed == 0
    assert ordered(128, 4, tile_us=26.0, sent_us=25.0, sends_sums=True).mixed > 0
    assert ordered(256, 4, tile_us=26.0, sent_us=25.0).mixed > 0


def test_programs_without_a_last_wave_have_more_of_the_own_tiles() -> None:
    """Of 512 a rank 15.5 waves: 68 programs have 16, each an own tile in the last."""
    count = [0] * 132
    for (distance, _), (_, program) in waves_of(512, 4).items():
        count[program] += distance == 0
    assert max(count[:68]) <= 2 < min(count[68:]) <= max(count[68:]) <= 7
    assert ordered(512, 4, tile_us=1.0).first == 0  # where they would take longer than a wave


def ordered(
    tiles: int,
    world_size: int,
    num_programs: int = 132,
    tile_us: float = 23.0,
    sent_us: float = 25.0,
    sends_sums: bool = False,
) -> Any:
    return tile_scheduler.mixed_shards(
        None,
        m=0,
        n=0,
        k=0,
        by_columns=False,
        tiles=tiles,
        tile_us=tile_us,
        wave_sent_us=sent_us,
        sends_sums=sends_sums,
        num_programs=num_programs,
        world_size=world_size,
    )


def waves_of(tiles: int, world_size: int, num_programs: int = 132) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the wave, and the program, of each tile, given by its owner's distance, 0 for own ones, and its number."""
    shards, places = ordered(tiles, world_size, num_programs), {}
    gl = SimpleNamespace(
        num_programs=lambda axis: num_programs,
        where=lambda yes, a, b: a if yes else b,
        minimum=min,
        maximum=max,
    )
    with mock.patch.multiple(tile_scheduler, gl=gl, _between=tile_scheduler._between.fn):
        for number in range(tiles * world_size):
            turn, tile = tile_scheduler._turn_and_tile.fn(number, shards, world_size)
            places[(turn + 1) % world_size, tile] = divmod(number, num_programs)
    return places


def test_without_peers_waves_are_what_counts() -> None:
    one_wave = alone(Tiling(256, 1), 128 * 132, 256, 8192)
    assert alone(Tiling(256, 1), 128, 256, 8192) == pytest.approx(one_wave)
    assert alone(Tiling(256, 1), 128 * 133, 256, 8192) == pytest.approx(2 * one_wave)
    beside_us = 2 * alone(Tiling(256, 1), 128 * 132, 256, 4096) - one_wave
    assert 0 < beside_us < one_wave / 10
    assert alone(Tiling(256, 1), 128 * 132, 256, 64) == pytest.approx(beside_us + (one_wave - beside_us) / 128)
    assert alone(Tiling(256, 1), 0, 256, 8192) == 0


def test_a_split_shortens_a_last_wave_that_few_programs_have() -> None:
    """33 tiles behind a whole wave: a program each, or all at once, four programs each."""
    rows = 128 * (132 + 33)
    whole, split = alone(Tiling(128, 1), rows, 128, 8192), alone(Tiling(128, 4), rows, 128, 8192)
    assert split < 0.8 * whole


def test_a_split_halves_what_is_sent_last() -> None:
    """Four full waves over slow links: the multiplication takes as long, but for two fix-ups."""
    sizes = (128 * 132, 1024, 65536)
    wait = on_four(Tiling(256, 1), *sizes) - alone(Tiling(256, 1), *sizes)
    split = on_four(Tiling(256, 2), *sizes) - alone(Tiling(256, 2), *sizes)
    assert split == pytest.approx(wait / 2)


def test_a_wave_cannot_end_before_what_the_wave_before_sends() -> None:
    """Pairs end their tile in half a wave; the epilogue store has the last whole tile: 132 at 345 GB/s."""
    sent_us = 132 * 128 * 128 * 2 * 3 / 345e3
    first_us = alone(Tiling(128, 2), 128 * 66, 128, 4096)
    wave_us = alone(Tiling(128, 1), 128, 128, 4096)
    assert first_us < sent_us
    assert on_four(Tiling(128, 2), 128 * (132 + 66), 128, 4096) == pytest.approx(wave_us + 1.5 * sent_us)


def test_split_waves_are_those_that_programs_have() -> None:
    assert split_waves(Tiling(128, 1), 100, 8192, num_programs=132) == [(100, 1)]
    assert split_waves(Tiling(128, 2), 100, 8192, num_programs=132) == [(66, 2), (34, 3)]
    assert split_waves(Tiling(128, 4), 1, 8192, num_programs=132) == [(1, 8)]
    assert split_waves(Tiling(128, 2), 1, 192, num_programs=132) == [(1, 3)]
    assert split_waves(Tiling(256, 2), 132, 8192, num_programs=132) == [(66, 2), (66, 2)]
    assert split_waves(Tiling(256, 2), 0, 8192, num_programs=132) == []


def test_the_link_bounds_from_below() -> None:
    sent_us = 8192 * 2048 * 2 * 3 / 350e3
    for tiling in (Tiling(256, 1), Tiling(256, 4), Tiling(64, 1)):
        assert on_four(tiling, 8192, 2048, 64) > sent_us


def test_what_is_chosen_is_possible() -> None:
    for k in (64, 128, 200, 8192):
        for programs in (1, 2, 4, 5, 132):
            tiling = fastest_tiling(8192, 2048, k, num_programs=programs, peers=3, splits=SPLITS)
            assert is_possible(tiling, k)
            assert tiling.splits == 1 or tiling.splits < programs
    assert fastest_tiling(8192, 2048, 8192, num_programs=132, peers=3, splits=(1,)).splits == 1
    assert is_possible(Tiling(128, 8), 8 * STEP_K)
    assert not is_possible(Tiling(128, 8), 8 * STEP_K - 1)
    assert not is_possible(Tiling(128, 9), 8192)


AS_FOUR = ("sends as four do, cool", "sends as four do")  # two GPUs, which send each tile to the peer three times


def measured_tilings(machine: str) -> dict[tuple[str, int, int, int], dict[Tiling, float]]:
    """Return the times in µs of all-scatters of many rows by run, m, n and k, and by tiling: the first of each.

    Splits only of today's kernels, whose last wave is split over all programs.
    """
    runs: dict[tuple[str, int, int, int], dict[Tiling, float]] = defaultdict(dict)
    with (RESULTS / f"configurations-{machine}-bf16.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            config = parse_config(row["config"]) if row["config"] else None
            if not config or row["family"] != "gemm_all_scatter" or row["status"] != "ok" or int(row["m"]) <= 512:
                continue
            tile = (config.block_m, config.block_k, config.group_m, config.num_sms)
            if tile != (128, 64, 8, 132):
                continue
            if config.splits == 1 or row["run"] in (*AS_FOUR, "teams in rounds"):
                key = (row["run"], int(row["m"]), int(row["n"]), int(row["k"]))
                tiling = Tiling(config.block_n, config.splits, config.pingpong)
                runs[key].setdefault(tiling, float(row["time_us"]))
    return runs


def test_what_is_predicted_to_be_fastest_was_nearly_the_fastest() -> None:
    runs = {key: times for key, times in measured_tilings("h200x4").items() if len(times) > 1}
    assert len(runs) == 32
    slower = []
    for (_, m, n, k), times in runs.items():
        predicted = {tiling: on_four(tiling, m, n // 4, k) for tiling in times}
        slower.append(times[min(predicted, key=predicted.__getitem__)] / min(times.values()))
    assert statistics.mean(slower) < 1.005
    assert max(slower) < 1.03


@pytest.mark.parametrize(("run", "mean", "most"), [(AS_FOUR[0], 1.004, 1.03), (AS_FOUR[1], 1.01, 1.04)])
def test_splits_are_chosen_where_they_were_faster_or_nearly(run: str, mean: float, most: float) -> None:
    slower, taken = [], 0
    for key, times in measured_tilings("h200x2").items():
        if key[0] == run:
            tiling = fastest_tiling(key[1], key[2] // 2, key[3], num_programs=132, peers=3, splits=(1, 2))
            slower.append(times[tiling] / min(times.values()))
            taken += tiling.splits > 1
    assert taken >= len(slower) // 2
    assert statistics.mean(slower) < mean
    assert max(slower) < most


def test_on_two_splits_are_chosen_where_they_were_faster_or_nearly() -> None:
    runs = {key: times for key, times in measured_tilings("h200x2").items() if key[0] == "teams in rounds"}
    assert len(runs) == 9
    for (_, m, n, k), times in runs.items():
        tiling = fastest_tiling(m, n // 2, k, num_programs=132, peers=1, splits=(1, 2))
        assert times[tiling] <= 1.08 * min(times.values()), (m, n, k)
        assert tiling.splits == 1 or times[tiling] < 1.01 * min(times.values()), (m, n, k)


def test_where_warp_groups_take_turns_it_was_nearly_the_fastest() -> None:
    runs = {key: times for key, times in measured_tilings("h200x2").items() if key[0].startswith("pingpong")}
    assert len(runs) == 20
    in_turns = 0
    for (_, m, n, k), times in runs.items():
        tiling = fastest_tiling(m, n // 2, k, num_programs=132, peers=1, splits=(1,), pingpong=True)
        assert times[tiling] <= 1.04 * min(times.values()), (m, n, k)
        if tiling.pingpong:
            in_turns += 1
            assert times[tiling] == min(times.values()), (m, n, k)
    assert in_turns == 10


@pytest.mark.parametrize("peers", [0, 2, 3, 7])
def test_warp_groups_take_turns_only_where_that_was_measured(peers: int) -> None:
    for size in (2048, 4096, 8192):
        tiling = fastest_tiling(8192, 2048, size, num_programs=132, peers=peers, splits=(1, 2), pingpong=True)
        assert not tiling.pingpong


def test_no_split_is_taken_for_nothing() -> None:
    """Where the link bounds a call, splits and none are predicted to take as long; narrow and short tiles have none."""
    sizes = (2048, 3584, 8192)
    even = on_four(Tiling(128, 2), *sizes)
    with mock.patch.object(plan, "COSTS", replace(plan.COSTS, store_gbps=10.0)):
        assert on_four(Tiling(128, 2), *sizes) == pytest.approx(on_four(Tiling(128, 1), *sizes))
        assert fastest_tiling(*sizes, num_programs=132, peers=3, splits=(1, 2)).splits == 1
    with mock.patch.object(plan, "predicted_us", lambda tiling, *args, **kwargs: 100.0 - 0.01 * tiling.splits):
        assert fastest_tiling(*sizes, num_programs=132, peers=3, splits=(1, 2)).splits == 1
    assert even < on_four(Tiling(256, 2), *sizes)
    for k in (512, 4096):
        for m, n in product((8, 128, 1024, 2048, 8192), (896, 2752, 3584, 7392)):
            assert fastest_tiling(m, n, k, num_programs=132, peers=3, splits=SPLITS).splits == 1
    assert all(
        tiling.splits == 1 for tiling in possible_tilings(8192, num_programs=132, splits=SPLITS) if tiling.block_n < 128
    )


def test_narrow_outputs_get_narrow_tiles() -> None:
    assert fastest_tiling(128 * 132, 64, 512, num_programs=132, peers=0, splits=SPLITS) == Tiling(64, 1)
    assert fastest_tiling(8192, 8192, 8192, num_programs=132, peers=0, splits=SPLITS).block_n == 256


def made_for(family: str, m: int, n: int, k: int, world_size: int = 4) -> Any:
    """Return rank 0's operator with warps or programs that send on so many H200s, in its default configuration."""
    variant = "workgroup_specialized:sm90" if family == "all_gather_gemm" else "warp_specialized:sm90"
    problem = make_problem(family, m, n, k, world_size, torch.bfloat16)
    case = compiling.Case(variant, "sm_90", family=family, world_size=world_size)
    with mock.patch.object(host, "machine_reason", return_value=None):
        return get_variant(family, variant).build(compiling.StubContext(case), problem)


def shards_of(operator: Any) -> Any:
    """Return the order of tiles that a call hands to its kernel."""
    problem = operator.problem
    with compiling.recorded_launches() as launches:
        operator(*(torch.zeros(shape, dtype=problem.dtype) for shape in (problem.a_shape(0), problem.b_shape(0))))
    return launches[-1][1]["shards"]


@pytest.mark.parametrize(
    ("family", "sizes", "is_mixed"),
    [
        ("gemm_reduce_scatter", (4096, 4096, 4096), True),  # a tile takes 15 µs, a wave's tiles take 25 to be sent
        ("gemm_reduce_scatter", (4096, 4096, 8192), False),  # 26, 25
        ("gemm_all_reduce", (1024, 8192, 8192), True),  # 15, 13; and sums are sent
    ],
)
def test_own_tiles_of_four_turns_come_where_they_gain(family: str, sizes: tuple[int, int, int], is_mixed: bool) -> None:
    shards = shards_of(made_for(family, *sizes))
    assert (shards.tiles, shards.ahead) == (128, 2)
    assert (shards.mixed > 0) == is_mixed


@pytest.mark.parametrize(
    ("family", "block_n"), [("gemm_reduce_scatter", 128), ("all_gather_gemm", 128), ("gemm_all_scatter", 64)]
)
def test_tiles_of_a_default_configuration_are_counted_by_shards(family: str, block_n: int) -> None:
    """Where shards of few rows have tiles of their own, 64 columns are more of them than programs."""
    work = (256, 4096, 14336) if family == "gemm_reduce_scatter" else (256, 14336, 4096)
    assert made_for(family, *work).config.block_n == block_n


@pytest.mark.parametrize(("world_size", "block_n", "comm_programs"), [(1, 256, 0), (2, 128, 16)])
def test_whoever_is_alone_has_the_widest_tiles_and_sends_nothing(
    world_size: int, block_n: int, comm_programs: int
) -> None:
    made = made_for("all_gather_gemm", 8192, 8192 * world_size, 8192, world_size)
    assert made.config.block_n == block_n
    assert chunks_of_shards(made.last_call).comm_programs == comm_programs


def scaled(family: str, sizes: tuple[int, int, int], scales: tuple[str, str], **how: bool) -> Any:
    return replace(make_problem(family, *sizes, 2, torch.float8_e4m3fn), scales=scales, **how)


ROWS, BLOCKS = ("row", "column"), ("block", "block")


@pytest.mark.parametrize(
    ("scales", "use_fast_accum", "block_n"), [(ROWS, False, 128), (ROWS, True, 256), (BLOCKS, False, 256)]
)
def test_long_products_of_fp8_get_the_tiles_that_are_fastest(
    scales: tuple[str, str], use_fast_accum: bool, block_n: int
) -> None:
    of_two = compiling.Case("", "sm_90", world_size=2)
    for family, variant in (("all_gather_gemm", "copy_engine:sm90"), ("gemm_reduce_scatter", "warp_specialized:sm90")):
        problem = scaled(family, (8192, 8192, 8192), scales, use_fast_accum=use_fast_accum)
        with mock.patch.object(host, "machine_reason", return_value=None):
            config = get_variant(family, variant).build(compiling.StubContext(of_two), problem).config
        assert (config.block_n, config.splits) == (block_n, 1)


@pytest.mark.parametrize(
    ("promotion", "block_n"), [(Promotion.NONE, 256), (Promotion.WHOLE_SUMS, 64), (Promotion.BLOCK_SUMS, 128)]
)
def test_widths_are_chosen_by_the_rates_of_the_sums(promotion: Promotion, block_n: int) -> None:
    changed = replace(plan.COSTS, promoted_rates={128: 0.1, 64: 1.0}, block_rates={256: 0.1, 128: 1.0, 64: 0.1})
    with mock.patch.object(plan, "COSTS", changed):
        tiling = fastest_tiling(8192, 8192, 8192, num_programs=132, peers=0, splits=(1,), promotion=promotion)
    assert tiling == Tiling(block_n, 1, promotion=promotion)


def test_promoted_sums_have_the_tiles_that_their_loops_have() -> None:
    def reason(scales: tuple[str, str], **changes: Any) -> str:
        problem = scaled("all_gather_gemm", (8192, 28672, 8192), scales)
        config = GemmConfig(128, 128, 128, num_stages=3, comm_rows=32)
        return host.config_reason(problem, replace(config, **changes)) or ""

    assert reason(ROWS) == reason(BLOCKS) == reason(BLOCKS, block_n=256) == ""
    assert "the tile is 128x256x128; it takes 128x128x128 or 128x64x128" in reason(ROWS, block_n=256)
    for scales in (ROWS, BLOCKS):
        assert "neither multiplied with pingpong nor split: pingpong False, splits 2" in reason(scales, splits=2)
        assert "pingpong True" in reason(scales, pingpong=True)
    for promotion in (Promotion.WHOLE_SUMS, Promotion.BLOCK_SUMS):
        tilings = possible_tilings(4096, num_programs=132, splits=(1, 2), promotion=promotion)
        assert {(tiling.block_n, tiling.splits) for tiling in tilings} == {
            (width, 1) for width in plan.rates_of(promotion)
        }
