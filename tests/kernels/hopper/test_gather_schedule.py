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

from iris_kernels.all_gather_gemm import schedule as module
from iris_kernels.all_gather_gemm.schedule import LEAST_PART_BYTES, Gathering, Schedule
from iris_kernels.common import gemm
from iris_kernels.common.hopper import operator as operator_module
from iris_kernels.common.hopper.plan import Cut
from overlap_taxonomy import get_variant

MEASURED = Path(__file__).parents[3] / "results" / "configurations-h200x2-bf16.csv"
IN_ONE_QUEUE = ("all-gather by copies, flags set by the copy queue", "flags in one queue")

ONE_OF_TWO = Gathering(rows=4096, columns=1152, k=36864, world_size=2, itemsize=2, num_programs=132)


def rows_of_tiles(rows: int, columns: int, group: int) -> Iterator[int]:
    """Give the row of tiles of each tile of a shard, by the kernels' own order."""
    block, tile = (
        SimpleNamespace(m=128 * rows, n=256 * columns),
        SimpleNamespace(BLOCK_M=128, BLOCK_N=256, GROUP_M=group),
    )
    with mock.patch.object(gemm, "tl", SimpleNamespace(cdiv=lambda a, b: -(-a // b))):
        for number in range(rows * columns):
            yield gemm.tile_origin.fn(number, block, tile)[0] // 128


@pytest.mark.parametrize(
    ("rows", "columns", "group", "parts"), [(16, 4, 8, 2), (7, 3, 2, 4), (1, 1, 8, 1), (13, 5, 4, 8)]
)
def test_rows_arrive_in_the_order_of_their_parts(rows: int, columns: int, group: int, parts: int) -> None:
    gathering = Gathering(128 * rows, 256 * columns, 4096, world_size=3, itemsize=2, num_programs=5)
    arrivals = gathering.arrivals_us(Schedule(Cut(256, 1), parts, group)).reshape(3, -1)
    assert (arrivals[0] == 0).all()
    assert (arrivals[1] < arrivals[2]).all()
    groups = math.ceil(rows / group)
    part_rows = math.ceil(groups / parts) * group
    part = [row // part_rows for row in rows_of_tiles(rows, columns, group)]
    for shard in arrivals[1:]:
        assert sorted(set(shard)) == [shard[part.index(number)] for number in range(max(part) + 1)]
        assert all(shard[tile] == shard[part.index(number)] for tile, number in enumerate(part))


def test_the_operator_cuts_as_was_reckoned() -> None:
    case = Case("warp_specialized_copies", "sm_90", family="all_gather_gemm", world_size=2)
    problem = make_problem(case.family, 8192, 2304, 36864, case.world_size, case.dtype)
    heap_bytes = problem.m * problem.k * 2 + (1 << 20)
    with mock.patch.object(operator_module, "machine_reason", return_value=None):
        operator = get_variant(case.family, case.variant).build(StubContext(case, heap_bytes), problem)
    config, chosen = operator.config, ONE_OF_TWO.quickest()
    assert (config.block_n, config.team) == (chosen.cut.block_n, chosen.cut.team)
    assert (config.panels, config.group_m) == (chosen.parts, chosen.group)
    assert config.chunks == chosen.chunks
    arrivals = ONE_OF_TWO.arrivals_us(chosen)
    assert operator._num_parts * operator._num_chunks == len(np.unique(arrivals)) - 1 > 1


FOUR_OF_LONG_ROWS = Gathering(2048, 1024, 14336, world_size=4, itemsize=2, num_programs=132)


def test_chunks_of_the_last_shard_arrive_one_after_the_other() -> None:
    whole, cut = (FOUR_OF_LONG_ROWS.arrivals_us(Schedule(Cut(128, 1), 1, 8, chunks)) for chunks in (1, 3))
    tiles = len(whole) // 4
    assert cut.shape == (4 * tiles, 3)
    assert (cut[: 3 * tiles] == whole[: 3 * tiles]).all()  # the others come whole
    last = cut[3 * tiles :]
    assert (last == last[0]).all()
    assert whole[2 * tiles] < last[0, 0] < last[0, 1] < last[0, 2]
    assert last[0, 2] == pytest.approx(whole[-1, 0] + 2 * module._NEXT_US)


def test_the_last_shard_is_cut_where_the_link_is_slower_than_the_multiplication() -> None:
    assert FOUR_OF_LONG_ROWS.quickest().chunks > 1
    assert replace(FOUR_OF_LONG_ROWS, columns=4096).quickest().chunks == 1
    assert replace(FOUR_OF_LONG_ROWS, world_size=1).quickest().chunks == 1


def test_small_shards_are_not_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(FOUR_OF_LONG_ROWS, k=4032)
    assert small.rows * small.k * 2 < 2 * LEAST_PART_BYTES
    assert small.quickest().chunks == 1
    monkeypatch.setattr(module, "LEAST_PART_BYTES", 0)
    assert small.quickest().chunks > 1


def test_a_team_multiplies_all_chunks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles, both shared by the two programs: the peer's is begun when its last chunk has come."""
    monkeypatch.setattr(module, "_LINK_GBPS", 1.0)
    two = Gathering(128, 256, 65536, world_size=2, itemsize=2, num_programs=2)
    whole, cut = (Schedule(Cut(256, 2), 1, 1, chunks) for chunks in (1, 2))
    later_us = two.arrivals_us(cut)[-1, -1] - two.arrivals_us(whole)[-1, -1]
    assert two.predicted_us(cut) == pytest.approx(two.predicted_us(whole) + later_us)


def test_chunks_are_whole_steps_of_rows_that_copy_engines_are_quick_with() -> None:
    assert module.cut_into_chunks(224, 1) == (224, 1)
    assert module.cut_into_chunks(224, 2) == (112, 2)
    assert module.cut_into_chunks(224, 3) == (80, 3)
    assert module.cut_into_chunks(5, 2) == (8, 1)


def test_with_all_rows_there_turns_are_what_counts() -> None:
    alone = Gathering(128 * 132, 256, 8192, world_size=1, itemsize=2, num_programs=132)
    whole = Schedule(Cut(256, 1), 1, 8)
    turn_us = alone.predicted_us(whole) - module._BESIDE_US
    twice = replace(alone, rows=128 * 133).predicted_us(whole) - module._BESIDE_US
    assert twice == pytest.approx(2 * turn_us)


def test_a_tile_is_multiplied_when_its_rows_have_come() -> None:
    """Two tiles and two programs: one begins at once, the other when the peer's shard is there."""
    two = Gathering(128, 256, 65536, world_size=2, itemsize=2, num_programs=2)
    whole = Schedule(Cut(256, 1), 1, 1)
    both_at_once = replace(two, rows=256, world_size=1).predicted_us(whole)
    assert two.predicted_us(whole) == pytest.approx(both_at_once + two.arrivals_us(whole)[-1, -1])


def test_small_shards_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Gathering(rows=2048, columns=1152, k=4032, world_size=2, itemsize=2, num_programs=132)
    assert small.rows * small.k * 2 < 2 * LEAST_PART_BYTES
    assert small.quickest().parts == 1
    monkeypatch.setattr(module, "LEAST_PART_BYTES", 0)
    assert small.quickest().parts * small.quickest().chunks > 1
    assert ONE_OF_TWO.quickest().parts > 1


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
    case = Case("copy_engine", target, family="all_gather_gemm", world_size=changed.get("world_size", 2))
    context = StubContext(case)
    context.ranks_on_device = changed.get("ranks_on_device", 1)
    problem = make_problem(case.family, 256, 256, 256, case.world_size, case.dtype)
    keep = bool(changed.get("keep_gathered"))
    operator = get_variant(case.family, case.variant).build(context, problem, keep_gathered=keep)
    with recorded_launches() as launches:
        operator(*(torch.zeros(shape, dtype=case.dtype) for shape in (problem.a_shape(0), problem.b_shape(0))))
    names = [kernel.fn.__name__ for kernel, _ in launches]
    assert ("meet_kernel" in names) == (keep and case.world_size > 1)
    assert operator._num_programs(operator.config.num_sms) == operator.config.num_sms - left


@pytest.mark.parametrize("gathering", [ONE_OF_TWO, Gathering(1, 1, 64, 8, 2, 132), Gathering(300, 70, 128, 1, 2, 1)])
def test_what_is_chosen_is_possible(gathering: Gathering) -> None:
    chosen = gathering.quickest()
    assert np.isfinite(gathering.predicted_us(chosen))
    assert chosen.group >= 1
    assert chosen.cut.team == 1 or chosen.cut.team < gathering.num_programs


def measured() -> Iterator[tuple[tuple[str, ...], Schedule, float]]:
    """Give the schedules that were measured with flags in the copies' order: run and sizes, schedule, µs."""
    with MEASURED.open(newline="") as file:
        for row in csv.DictReader(file):
            found = re.match(r"128x(\d+)x64 group=(\d+) .* panels=(\d+) team=(\d+) ", row["config"])
            in_order = IN_ONE_QUEUE[0] == row["run"] or IN_ONE_QUEUE[1] in row["label"]
            if not found or not row["run"].startswith("all-gather by copies, ") or "meets" in row["run"]:
                continue
            width, group, parts, team = map(int, found.groups())
            least = parts == 1 or int(row["m"]) // 2 * int(row["k"]) * 2 >= parts * LEAST_PART_BYTES
            if re.match(r"t1p\d", row["label"]) and least and (in_order or parts == 1):
                key = (row["run"], row["m"], row["n"], row["k"])
                yield key, Schedule(Cut(width, team), parts, group), float(row["time_us"])


def test_teams_are_chosen_where_they_were_quicker_or_nearly() -> None:
    """Today's teams, whose last round all programs share, beside tiles of the same widths without."""
    runs: dict[tuple[int, ...], dict[Cut, float]] = defaultdict(dict)
    parts = {}
    with MEASURED.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["run"] == "all-gather by copies, teams in rounds":
                width, parted, team = re.match(r"128x(\d+)x64 .* panels=(\d+) team=(\d) ", row["config"]).groups()
                sizes = int(row["m"]) // 2, int(row["n"]) // 2, int(row["k"])
                runs[sizes][Cut(int(width), int(team))], parts[sizes] = float(row["time_us"]), int(parted)
    assert len(runs) == 5
    off = []
    for sizes, times in runs.items():
        gathering = Gathering(*sizes, world_size=2, itemsize=2, num_programs=132)
        group = 4 if parts[sizes] == 8 or sizes[0] == 512 else 8
        predicted = {cut: gathering.predicted_us(Schedule(cut, parts[sizes], group)) for cut in times}
        assert times[min(predicted, key=predicted.__getitem__)] <= 1.03 * min(times.values()), sizes
        off += [abs(predicted[cut] / us - 1) for cut, us in times.items()]
    assert statistics.mean(off) < 0.03
    assert max(off) < 0.07


def test_a_team_begins_when_its_last_member_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tiles a shard, two programs: one of them waits for the peer's first tile, and then both share two."""
    monkeypatch.setattr(module, "_LINK_GBPS", 1.0)
    two = Gathering(128, 768, 65536, world_size=2, itemsize=2, num_programs=2)
    schedule = Schedule(Cut(256, 2), 1, 1)
    tile_us = replace(two, rows=128, columns=256, world_size=1).predicted_us(Schedule(Cut(256, 1), 1, 1))
    tile_us -= module._BESIDE_US
    arrived_us = two.arrivals_us(schedule)[-1, -1]
    assert arrived_us > 2 * tile_us
    both_us = 2 * (tile_us / 2 + module._EXCHANGE_US * 2)
    assert two.predicted_us(schedule) == pytest.approx(arrived_us + tile_us + both_us + module._BESIDE_US)


def test_teams_and_chunks_must_gain_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows of weights on two: chunks alone gain under 2 %, as do teams; of others each gains more."""
    wide = Gathering(4096, 14336, 8192, world_size=2, itemsize=2, num_programs=132)
    chosen = wide.quickest()
    chunked = replace(chosen, chunks=2)
    assert chosen.chunks == 1
    assert wide.predicted_us(chosen) / module._LEAST_GAIN < wide.predicted_us(chunked) < wide.predicted_us(chosen)
    wider = replace(wide, columns=24576, k=12288)
    chosen = wider.quickest()
    shared = replace(chosen, cut=replace(chosen.cut, team=2))
    assert chosen.cut.team == 1
    assert wider.predicted_us(chosen) / module._LEAST_GAIN < wider.predicted_us(shared) < wider.predicted_us(chosen)
    assert ONE_OF_TWO.quickest().cut.team == ONE_OF_TWO.quickest().chunks == 2
    monkeypatch.setattr(module, "_LEAST_GAIN", 10.0)
    assert ONE_OF_TWO.quickest().cut.team == ONE_OF_TWO.quickest().chunks == 1


def test_what_is_predicted_to_be_quickest_was_nearly_the_quickest() -> None:
    runs: dict[tuple[str, ...], dict[Schedule, float]] = defaultdict(dict)
    for key, schedule, us in measured():
        runs[key][schedule] = us
    assert len(runs) > 20
    behind = []
    for (_, m, n, k), times in runs.items():
        gathering = Gathering(int(m) // 2, int(n) // 2, int(k), world_size=2, itemsize=2, num_programs=132)
        behind.append(times[min(times, key=gathering.predicted_us)] / min(times.values()))
    assert statistics.mean(behind) < 1.01
    assert max(behind) < 1.06


@pytest.mark.parametrize("variant", ["copy_engine", "warp_specialized_copies"])
def test_copies_take_turns_on_their_streams(variant: str) -> None:
    """Each flag is set on the stream of its copy, and all streams are forked from the current one, and joined to it."""
    case = Case(variant, "sm_90", family="all_gather_gemm", world_size=4)
    problem = make_problem(case.family, 4096, 1024, 1024, 4, torch.bfloat16)
    a, b = (torch.empty(shape, dtype=torch.bfloat16) for shape in (problem.a_shape(0), problem.b_shape(0)))
    build = get_variant(case.family, variant).build
    with recorded_launches(), mock.patch.object(operator_module, "machine_reason", return_value=None):
        made = build(StubContext(case), problem)
        made = build(StubContext(case), problem, replace(made.config, queues=2, panels=1))
        made(a, b)
    streams = [stream._stream for stream in made._copy_streams]
    assert len(streams) == 2
    for number, stream in enumerate(streams):
        done = [(name, arguments) for name, arguments, _ in stream.method_calls]
        own = made._copies[number::2]
        assert [name for name, _ in done] == [
            "wait_for_current",
            *["copy_2d", "write_value"] * len(own),
            "current_waits",
        ]
        for copy, (_, copied), (_, written) in zip(own, done[1:-1:2], done[2:-1:2], strict=True):
            assert copied[0].data_ptr() == copy.destination.data_ptr()
            assert written[0].data_ptr() == copy.flag.data_ptr()
