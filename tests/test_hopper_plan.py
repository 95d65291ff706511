"""How the warp-specialised kernels' tiles are cut: what is predicted, and what is chosen."""

from __future__ import annotations

import csv
import re
import statistics
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from iris_kernels.common.hopper import plan
from iris_kernels.common.hopper.plan import LEAST_KEPT, STEP_K, Cut, is_possible, predicted_us, quickest_cut
from iris_kernels.gemm_reduce_scatter import rounds

RESULTS = Path(__file__).parents[1] / "results"

on_four = partial(predicted_us, num_programs=132, peers=3)
alone = partial(predicted_us, num_programs=132, peers=0)
TEAMS = (1, 2, 4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("tiles", "num_programs"), [(512, 132), (128, 132), (5, 132), (1, 3), (77, 7), (131, 1)])
def test_rounds_have_every_tile_once_and_own_ones_behind_the_peers(
    tiles: int, num_programs: int, world_size: int
) -> None:
    shards = rounds.cut_into_rounds(None, m=0, n=0, k=0, tiles=tiles, num_programs=num_programs, world_size=world_size)
    position = {}
    gl = SimpleNamespace(
        num_programs=lambda axis: num_programs, where=lambda yes, a, b: a if yes else b, minimum=min, program_id=None
    )
    with mock.patch.object(rounds, "gl", gl):
        for number in range(tiles * world_size):
            gl.program_id = lambda axis, program=number % num_programs: program
            work = rounds.work_in.fn(number // num_programs, shards, world_size)
            position[tuple(work)] = number
    assert position.keys() == {(distance, tile) for distance in range(world_size) for tile in range(tiles)}
    for (distance, tile), number in position.items():
        assert distance == 0 or number < position[0, tile]


def test_without_peers_turns_are_what_counts() -> None:
    one_turn = alone(Cut(256, 1), 128 * 132, 256, 8192)
    assert alone(Cut(256, 1), 128, 256, 8192) == pytest.approx(one_turn)
    assert alone(Cut(256, 1), 128 * 133, 256, 8192) == pytest.approx(2 * one_turn)
    beside_us = 2 * alone(Cut(256, 1), 128 * 132, 256, 4096) - one_turn
    assert 0 < beside_us < one_turn / 10
    assert alone(Cut(256, 1), 128 * 132, 256, 64) == pytest.approx(beside_us + (one_turn - beside_us) / 128)
    assert alone(Cut(256, 1), 0, 256, 8192) == 0


def test_a_team_shortens_a_last_turn_that_few_programs_have() -> None:
    """33 tiles behind a whole turn: a program each, or all at once, four programs each."""
    rows = 128 * (132 + 33)
    whole, shared = alone(Cut(256, 1), rows, 256, 8192), alone(Cut(256, 4), rows, 256, 8192)
    assert shared < 0.7 * whole


def test_a_team_halves_what_is_sent_last() -> None:
    """Four full turns over slow links: the multiplication takes as long, but for the exchange of sums and its rate."""
    sizes = (128 * 132, 1024, 65536)
    wait = on_four(Cut(256, 1), *sizes) - alone(Cut(256, 1), *sizes)
    with mock.patch.object(plan, "_TEAM_RATE", 1.0):
        shared = on_four(Cut(256, 2), *sizes) - alone(Cut(256, 2), *sizes)
    assert shared == pytest.approx(wait / 2)


def test_only_a_kernel_that_sends_is_slower_for_its_teams() -> None:
    sizes = (128 * 132, 1024, 65536)
    for team, slower in ((1, False), (2, True)):
        with mock.patch.object(plan, "_TEAM_RATE", 0.5):
            assert (on_four(Cut(256, team), *sizes) > 1.5 * alone(Cut(256, team), *sizes)) == slower


def test_the_link_bounds_from_below() -> None:
    sent_us = 8192 * 2048 * 2 * 3 / 350e3
    for cut in (Cut(256, 1), Cut(256, 4), Cut(64, 1)):
        assert on_four(cut, 8192, 2048, 64) > sent_us


def test_what_is_chosen_is_possible() -> None:
    for k in (64, 128, 200, 8192):
        for programs in (1, 2, 4, 5, 132):
            cut = quickest_cut(8192, 2048, k, num_programs=programs, peers=3, teams=TEAMS)
            assert cut.team == 1 or (cut.block_n >= cut.team * LEAST_KEPT and k >= cut.team * STEP_K)
            assert cut.team == 1 or cut.team < programs
    assert quickest_cut(8192, 2048, 8192, num_programs=132, peers=3, teams=(1,)).team == 1
    assert not is_possible(Cut(128, 4), 8192)


def measured_cuts(machine: str) -> dict[tuple[str, int, int, int], dict[Cut, float]]:
    """Return the times in µs of all-scatters of many rows by run, m, n and k, and by cut: the first of each."""
    runs: dict[tuple[str, int, int, int], dict[Cut, float]] = defaultdict(dict)
    with (RESULTS / f"configurations-{machine}-bf16.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            found = re.match(r"128x(\d+)x64 group=8 .* sms=132 .* team=(\d) ", row["config"])
            if found and row["family"] == "gemm_all_scatter" and row["status"] == "ok" and int(row["m"]) > 512:
                key = (row["run"], int(row["m"]), int(row["n"]), int(row["k"]))
                cut = Cut(int(found[1]), int(found[2]), row["config"].endswith("pingpong"))
                runs[key].setdefault(cut, float(row["time_us"]))
    return runs


def test_what_is_predicted_to_be_quickest_was_nearly_the_quickest() -> None:
    runs = {key: times for key, times in measured_cuts("h200x4").items() if len(times) > 1}
    assert len(runs) == 37
    behind = []
    for (_, m, n, k), times in runs.items():
        predicted = {cut: on_four(cut, m, n // 4, k) for cut in times}
        behind.append(times[min(predicted, key=predicted.__getitem__)] / min(times.values()))
    assert statistics.mean(behind) < 1.005
    assert max(behind) < 1.03


def test_where_warp_groups_take_turns_it_was_nearly_the_quickest() -> None:
    runs = {key: times for key, times in measured_cuts("h200x2").items() if key[0].startswith("pingpong")}
    assert len(runs) == 20
    in_turns = 0
    for (_, m, n, k), times in runs.items():
        cut = quickest_cut(m, n // 2, k, num_programs=132, peers=1, teams=(1, 2), pingpong=True)
        assert times[cut] <= 1.04 * min(times.values()), (m, n, k)
        if cut.pingpong:
            in_turns += 1
            assert times[cut] == min(times.values()), (m, n, k)
    assert in_turns == 10


@pytest.mark.parametrize("peers", [0, 2, 3, 7])
def test_warp_groups_take_turns_only_where_that_was_measured(peers: int) -> None:
    for size in (2048, 4096, 8192):
        cut = quickest_cut(8192, 2048, size, num_programs=132, peers=peers, teams=(1, 2), pingpong=True)
        assert not cut.pingpong


def test_narrow_outputs_get_narrow_tiles() -> None:
    assert quickest_cut(128 * 132, 64, 512, num_programs=132, peers=0, teams=TEAMS) == Cut(64, 1)
    assert quickest_cut(8192, 8192, 8192, num_programs=132, peers=0, teams=TEAMS).block_n == 256
