"""How all-gather's copies and tiles are cut: when rows arrive, what is predicted, and what is chosen."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from compiling import Case, StubContext, recorded_launches
from families import make_problem

from iris_kernels.all_gather_gemm import gather_plan as module
from iris_kernels.all_gather_gemm.copies import begins_with_barrier, num_programs, shard_chunks
from iris_kernels.all_gather_gemm.gather_plan import LEAST_CHUNK_BYTES, Gathering, GatherPlan
from iris_kernels.common.config import parse_config
from iris_kernels.common.device import tile_scheduler
from iris_kernels.common.hopper import host as operator_module
from iris_kernels.common.hopper.plan import Tiling
from overlap_taxonomy import get_variant

MEASURED = Path(__file__).parents[3] / "results/tuning" / "configurations-h200x2-bf16.csv"
IN_ONE_QUEUE = ("all-gather by copies, flags set by the copy queue", "flags in one queue")

ONE_OF_TWO = Gathering(rows=4096, columns=1152, k=36864, world_size=2, itemsize=2, num_programs=132)


def rows_of_tiles(rows: int, columns: int, group: int) -> Iterator[int]:
    """Give the row of tiles of each tile of a shard, by the kernels' own order."""
    block, tile = (
        SimpleNamespace(m=128 * rows, n=256 * columns),
        SimpleNamespace(BLOCK_M=128, BLOCK_N=256, GROUP_M=group),
    )
    with mock.patch.object(tile_scheduler, "tl", SimpleNamespace(cdiv=lambda a, b: -(-a // b))):
        for number in range(rows * columns):
            yield tile_scheduler.tile_origin.fn(number, block, tile)[0] // 128


@pytest.mark.parametrize(
    ("rows", "columns", "group", "row_chunks"), [(16, 4, 8, 2), (7, 3, 2, 4), (1, 1, 8, 1), (13, 5, 4, 8)]
)
def test_rows_arrive_in_the_order_of_their_chunks(rows: int, columns: int, group: int, row_chunks: int) -> None:
    gathering = Gathering(128 * rows, 256 * columns, 4096, world_size=3, itemsize=2, num_programs=5)
    arrivals = gathering.arrivals_us(GatherPlan(Tiling(256, 1), row_chunks, group)).reshape(3, -1)
    assert (arrivals[0] == 0).all()
    assert (arrivals[1] < arrivals[2]).all()
    groups = math.ceil(rows / group)
    chunk_rows = math.ceil(groups / row_chunks) * group
    chunk = [row // chunk_rows for row in rows_of_tiles(rows, columns, group)]
    for shard in arrivals[1:]:
        assert sorted(set(shard)) == [shard[chunk.index(number)] for number in range(max(chunk) + 1)]
        assert all(shard[tile] == shard[chunk.index(number)] for tile, number in enumerate(chunk))


def test_the_operator_cuts_as_was_reckoned() -> None:
    case = Case("copy_engine:sm90", "sm_90", family="all_gather_gemm", world_size=2)
    problem = make_problem(case.family, 8192, 2304, 36864, case.world_size, case.dtype)
    heap_bytes = problem.m * problem.k * 2 + (1 << 20)
    with mock.patch.object(operator_module, "machine_reason", return_value=None):
        operator = get_variant(case.family, case.variant).build(StubContext(case, heap_bytes), problem)
    config, chosen = operator.config, ONE_OF_TWO.fastest()
    assert (config.block_n, config.splits) == (chosen.tiling.block_n, chosen.tiling.splits)
    assert (config.row_chunks, config.group_m) == (chosen.row_chunks, chosen.group)
    assert config.k_chunks == chosen.k_chunks
    arrivals = ONE_OF_TWO.arrivals_us(chosen)
    chunks = shard_chunks(operator.last_call, config.row_chunks, config.k_chunks)
    assert chunks.row_chunks * chunks.k_chunks == len(np.unique(arrivals)) - 1 > 1


FOUR_OF_LONG_ROWS = Gathering(2048, 1024, 14336, world_size=4, itemsize=2, num_programs=132)


def test_chunks_of_the_last_shard_arrive_one_after_the_other() -> None:
    whole, cut = (FOUR_OF_LONG_ROWS.arrivals_us(GatherPlan(Tiling(128, 1), 1, 8, chunks)) for chunks in (1, 3))
    tiles = len(whole) // 4
    assert cut.shape == (4 * tiles, 3)
    assert (cut[: 3 * tiles] == whole[: 3 * tiles]).all()  # the others come whole
    last = cut[3 * tiles :]
    assert (last == last[0]).all()
    assert whole[2 * tiles] < last[0, 0] < last[0, 1] < last[0, 2]
    assert last[0, 2] == pytest.approx(whole[-1, 0] + 2 * module.COSTS.next_copy_us)


def test_the_last_shard_is_cut_where_the_link_is_slower_than_the_multiplication() -> None:
    assert FOUR_OF_LONG_ROWS.fastest().k_chunks > 1
    assert replace(FOUR_OF_LONG_ROWS, columns=4096).fastest().k_chunks == 1
    assert replace(FOUR_OF_LONG_ROWS, world_size=1).fastest().k_chunks == 1


def test_small_shards_are_not_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(FOUR_OF_LONG_ROWS, k=4032)
    assert small.rows * small.k * 2 < 2 * LEAST_CHUNK_BYTES
    assert small.fastest().k_chunks == 1
    monkeypatch.setattr(module, "LEAST_CHUNK_BYTES", 0)
    assert small.fastest().k_chunks > 1


def test_a_split_tile_takes_all_k_chunks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles, both split by the two programs: the peer's is begun when its last chunk has come."""
    monkeypatch.setattr(module, "COSTS", replace(module.COSTS, copy_gbps=1.0))
    two = Gathering(128, 256, 65536, world_size=2, itemsize=2, num_programs=2)
    whole, cut = (GatherPlan(Tiling(256, 2), 1, 1, chunks) for chunks in (1, 2))
    later_us = two.arrivals_us(cut)[-1, -1] - two.arrivals_us(whole)[-1, -1]
    assert two.predicted_us(cut) == pytest.approx(two.predicted_us(whole) + later_us)


def test_chunks_are_whole_steps_of_rows_that_copy_engines_are_fast_with() -> None:
    assert module.k_chunks_of(224, 1) == (224, 1)
    assert module.k_chunks_of(224, 2) == (112, 2)
    assert module.k_chunks_of(224, 3) == (80, 3)
    assert module.k_chunks_of(5, 2) == (8, 1)


def test_with_all_rows_there_waves_are_what_counts() -> None:
    alone = Gathering(128 * 132, 256, 8192, world_size=1, itemsize=2, num_programs=132)
    whole = GatherPlan(Tiling(256, 1), 1, 8)
    wave_us = alone.predicted_us(whole) - module.COSTS.beside_copies_us
    twice = replace(alone, rows=128 * 133).predicted_us(whole) - module.COSTS.beside_copies_us
    assert twice == pytest.approx(2 * wave_us)


def test_a_tile_is_multiplied_when_its_rows_have_come() -> None:
    """Two tiles and two programs: one begins at once, the other when the peer's shard is there."""
    two = Gathering(128, 256, 65536, world_size=2, itemsize=2, num_programs=2)
    whole = GatherPlan(Tiling(256, 1), 1, 1)
    both_at_once = replace(two, rows=256, world_size=1).predicted_us(whole)
    assert two.predicted_us(whole) == pytest.approx(both_at_once + two.arrivals_us(whole)[-1, -1])


def test_small_shards_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Gathering(rows=2048, columns=1152, k=4032, world_size=2, itemsize=2, num_programs=132)
    assert small.rows * small.k * 2 < 2 * LEAST_CHUNK_BYTES
    assert small.fastest().row_chunks == 1
    monkeypatch.setattr(module, "LEAST_CHUNK_BYTES", 0)
    assert small.fastest().row_chunks * small.fastest().k_chunks > 1
    assert ONE_OF_TWO.fastest().row_chunks > 1


@pytest.mark.parametrize(
    ("changed", "target", "left"),
    [
        ({}, "sm_90", 0),
        ({"keep_gathered": True}, "sm_90", 1),
        ({"keep_gathered": True, "world_size": 1}, "sm_90", 0),
        ({"ranks_on_device": 2}, "sm_90", 1),
        ({}, "gfx942", 1),
    ],
)
def test_an_sm_is_left_where_kernels_beside_the_gemm_need_one(changed: dict[str, int], target: str, left: int) -> None:
    case = Case("copy_engine:portable", target, family="all_gather_gemm", world_size=changed.get("world_size", 2))
    context = StubContext(case)
    context.ranks_on_device = changed.get("ranks_on_device", 1)
    problem = make_problem(case.family, 256, 256, 256, case.world_size, case.dtype)
    keep = bool(changed.get("keep_gathered"))
    operator = get_variant(case.family, case.variant).build(context, problem, keep_gathered=keep)
    with recorded_launches() as launches:
        operator(*(torch.zeros(shape, dtype=case.dtype) for shape in (problem.a_shape(0), problem.b_shape(0))))
    names = [kernel.fn.__name__ for kernel, _ in launches]
    call = operator.last_call
    programs = num_programs(call.config.num_sms, call.device, has_barrier=begins_with_barrier(call))
    assert ("all_gather_gemm_copy_engine_barrier" in names) == (keep and case.world_size > 1)
    assert programs == operator.config.num_sms - left


@pytest.mark.parametrize("gathering", [ONE_OF_TWO, Gathering(1, 1, 64, 8, 2, 132), Gathering(300, 70, 128, 1, 2, 1)])
def test_what_is_chosen_is_possible(gathering: Gathering) -> None:
    chosen = gathering.fastest()
    assert np.isfinite(gathering.predicted_us(chosen))
    assert chosen.group >= 1
    assert chosen.tiling.splits == 1 or chosen.tiling.splits < gathering.num_programs


def measured() -> Iterator[tuple[tuple[str, ...], GatherPlan, float]]:
    """Give the plans that were measured with flags in the copies' order: run and sizes, plan, µs."""
    with MEASURED.open(newline="") as file:
        for row in csv.DictReader(file):
            config = parse_config(row["config"]) if row["config"] else None
            in_order = IN_ONE_QUEUE[0] == row["run"] or IN_ONE_QUEUE[1] in row["label"]
            if not config or not row["run"].startswith("all-gather by copies, ") or "meets" in row["run"]:
                continue
            row_chunks = config.row_chunks
            least = row_chunks == 1 or int(row["m"]) // 2 * int(row["k"]) * 2 >= row_chunks * LEAST_CHUNK_BYTES
            if re.match(r"t1p\d", row["label"]) and least and (in_order or row_chunks == 1):
                key = (row["run"], row["m"], row["n"], row["k"])
                tiling = Tiling(config.block_n, config.splits)
                yield key, GatherPlan(tiling, row_chunks, config.group_m), float(row["time_us"])


def test_splits_are_chosen_where_they_were_faster_or_nearly() -> None:
    """Today's splits, whose last wave all programs share, beside tiles of the same widths without."""
    runs: dict[tuple[int, ...], dict[Tiling, float]] = defaultdict(dict)
    row_chunks = {}
    with MEASURED.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["run"] == "all-gather by copies, teams in rounds":
                config = parse_config(row["config"])
                sizes = int(row["m"]) // 2, int(row["n"]) // 2, int(row["k"])
                runs[sizes][Tiling(config.block_n, config.splits)] = float(row["time_us"])
                row_chunks[sizes] = config.row_chunks
    assert len(runs) == 5
    off = []
    for sizes, times in runs.items():
        gathering = Gathering(*sizes, world_size=2, itemsize=2, num_programs=132)
        group = 4 if row_chunks[sizes] == 8 or sizes[0] == 512 else 8
        predicted = {tiling: gathering.predicted_us(GatherPlan(tiling, row_chunks[sizes], group)) for tiling in times}
        assert times[min(predicted, key=predicted.__getitem__)] <= 1.03 * min(times.values()), sizes
        off += [abs(predicted[tiling] / us - 1) for tiling, us in times.items()]
    assert statistics.mean(off) < 0.03
    assert max(off) < 0.07


def test_a_split_tile_begins_when_the_last_of_its_programs_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tiles a shard, two programs: one of them waits for the peer's first tile, and then both split two."""
    monkeypatch.setattr(module, "COSTS", replace(module.COSTS, copy_gbps=1.0))
    two = Gathering(128, 768, 65536, world_size=2, itemsize=2, num_programs=2)
    plan = GatherPlan(Tiling(256, 2), 1, 1)
    tile_us = replace(two, rows=128, columns=256, world_size=1).predicted_us(GatherPlan(Tiling(256, 1), 1, 1))
    tile_us -= module.COSTS.beside_copies_us
    arrived_us = two.arrivals_us(plan)[-1, -1]
    assert arrived_us > 2 * tile_us
    both_us = 2 * (tile_us / 2 + module.COSTS.exchange_beside_copies_us * 2)
    assert two.predicted_us(plan) == pytest.approx(arrived_us + tile_us + both_us + module.COSTS.beside_copies_us)


def test_splits_and_k_chunks_must_gain_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows of weights on two: k chunks alone gain under 2 %, as do splits; of others each gains more."""
    wide = Gathering(4096, 14336, 8192, world_size=2, itemsize=2, num_programs=132)
    chosen = wide.fastest()
    chunked = replace(chosen, k_chunks=2)
    assert chosen.k_chunks == 1
    assert wide.predicted_us(chosen) / module._LEAST_GAIN < wide.predicted_us(chunked) < wide.predicted_us(chosen)
    wider = replace(wide, columns=24576, k=12288)
    chosen = wider.fastest()
    shared = replace(chosen, tiling=replace(chosen.tiling, splits=2))
    assert chosen.tiling.splits == 1
    assert wider.predicted_us(chosen) / module._LEAST_GAIN < wider.predicted_us(shared) < wider.predicted_us(chosen)
    assert ONE_OF_TWO.fastest().tiling.splits == ONE_OF_TWO.fastest().k_chunks == 2
    monkeypatch.setattr(module, "_LEAST_GAIN", 10.0)
    assert ONE_OF_TWO.fastest().tiling.splits == ONE_OF_TWO.fastest().k_chunks == 1


def test_what_is_predicted_to_be_fastest_was_nearly_the_fastest() -> None:
    runs: dict[tuple[str, ...], dict[GatherPlan, float]] = defaultdict(dict)
    for key, plan, us in measured():
        runs[key][plan] = us
    assert len(runs) > 20
    slower = []
    for (_, m, n, k), times in runs.items():
        gathering = Gathering(int(m) // 2, int(n) // 2, int(k), world_size=2, itemsize=2, num_programs=132)
        slower.append(times[min(times, key=gathering.predicted_us)] / min(times.values()))
    assert statistics.mean(slower) < 1.01
    assert max(slower) < 1.06


@pytest.mark.parametrize("variant", ["copy_engine:portable", "copy_engine:library", "copy_engine:sm90"])
def test_a_chunks_flag_is_set_after_its_copy(variant: str) -> None:
    """On one stream, which is forked from the current one, and joined to it."""
    case = Case(variant, "sm_90", family="all_gather_gemm", world_size=4)
    problem = make_problem(case.family, 4096, 1024, 1024, 4, torch.bfloat16)
    a, b = (torch.empty(shape, dtype=torch.bfloat16) for shape in (problem.a_shape(0), problem.b_shape(0)))
    with recorded_launches(), mock.patch.object(operator_module, "machine_reason", return_value=None):
        made = get_variant(case.family, variant).build(StubContext(case), problem)
        made(a, b)
    call = made.last_call
    copied_chunks = call.kept("copies", list)
    done = [(name, arguments) for name, arguments, _ in call.stream("copies").method_calls]
    copies = ["copy_2d", "write_value"] * len(copied_chunks)
    assert [name for name, _ in done] == ["wait_for_current", *copies, "current_waits"]
    for copy, (_, copied), (_, written) in zip(copied_chunks, done[1:-1:2], done[2:-1:2], strict=True):
        assert copied[0].data_ptr() == copy.destination.data_ptr()
        assert written[0].data_ptr() == copy.flag.data_ptr()
