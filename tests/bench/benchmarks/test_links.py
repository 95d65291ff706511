"""`iris-bench links`: what is moved arrives, between every two ranks and in every way, and what does not is said."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import Case, StubContext, compile_kernel, recorded_launches
from ranks import Ranks, context
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.benchmarks.links import rank as links
from iris_bench.benchmarks.links.measured import keep, this_machines
from iris_bench.benchmarks.links.paths import (
    HOST_MEMORY,
    NONE,
    NVLINK,
    OTHER_HOST,
    OWN,
    PCIE,
    PEER_ACCESS,
    SAME_GPU,
    path_of,
    paths,
)
from iris_bench.benchmarks.links.rank import KINDS, PAIRWISE, Plan
from iris_bench.benchmarks.links.record import LinkRecord
from iris_bench.records.record import read_as

PLAN = Plan(elements=2 * links.BLOCK, with_flags=True, rounds=1, burst=1, seed=3)
SMALL = replace(PLAN, elements=1024)  # 4 KiB, an eighth of a block
RAGGED = replace(PLAN, elements=links.BLOCK + links.UNIT)


def measured(rank: int, world_size: int, broken: str = "", plan: Plan = PLAN) -> list[links.Outcome]:
    """Measure; of a kind that is broken, the last word is not moved."""
    move = links._Run._move

    def forget(self: Any, kind: str, peers: list[int]) -> None:
        move(self, kind, peers)
        for peer in peers if kind == broken else []:
            end = self.landing[peer] if kind == "load" else self.ctx.peer_view(self.received)[peer, self.rank]
            end[-1] = 7

    with mock.patch.object(links, "context", context), mock.patch.object(links._Run, "_move", forget):
        return links.measure(rank, world_size, plan)


@pytest.mark.parametrize(
    ("world_size", "plan"),
    [(1, PLAN), (3, PLAN), (2, SMALL), (2, RAGGED)],
    ids=["one rank", "blocks", "less than a block", "a block and a bit"],
)
def test_every_way_between_every_two_ranks(ranks: Any, device: str, world_size: int, plan: Plan) -> None:
    found: Ranks = ranks(world_size)
    outcomes = found.call(measured, "", plan)
    assert all(one == outcomes[0] for one in outcomes)
    pairs = [(one.kind, one.from_rank, one.to_rank) for one in outcomes[0]]
    assert len(set(pairs)) == len(pairs)
    assert {kind for kind, *_ in pairs} == (set(KINDS) if world_size > 1 else {"device_barrier", "host_barrier"})
    for kind in PAIRWISE:
        assert sum(kind == one for one, *_ in pairs) == world_size * (world_size - 1)
    for one in outcomes[0]:
        assert one.status == "ok"
        assert one.time_us is not None
        assert one.time_us > 0
        peers = world_size - 1 if one.kind.startswith("all_") else int(one.kind in PAIRWISE)
        assert one.bytes == 4 * plan.elements * peers


@pytest.mark.parametrize("kind", PAIRWISE)
def test_what_does_not_arrive_is_wrong_and_not_timed(ranks: Any, device: str, kind: str) -> None:
    found: Ranks = ranks(2)
    for outcomes in found.call(measured, kind):
        wrong = {one.kind for one in outcomes if one.status == "wrong"}
        assert wrong == {kind} | ({f"all_{kind}"} & set(KINDS))
        assert all((one.time_us is None) == (one.kind in wrong) for one in outcomes)


@pytest.mark.parametrize("plan", [PLAN, RAGGED], ids=["blocks", "a block and a bit"])
@pytest.mark.parametrize("kind", ["store", "load"])
def test_bytes_move_sixteen_at_a_time(kind: str, plan: Plan) -> None:
    case = Case("library", "sm_90", rank=1)
    own = torch.empty(plan.elements, dtype=torch.int32)
    with recorded_launches() as launches:
        links.move_kernel[(132,)](
            own,
            own,
            plan.elements,
            1,
            2,
            StubContext(case).get_heap_bases(),
            KIND=PAIRWISE.index(kind),
            BLOCK=links.BLOCK,
            PEERS=1,
            num_warps=16,
        )
    compiled = compile_kernel(*launches[0], "sm_90")
    assert set().union(*compiled.stores_by_file().values()) == {16}
    assert re.search(r"ld\.global\S*\.v4\.b32", compiled.code)


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, ["links", *map(str, arguments)])


def test_the_command_writes_rows_and_a_picture(tmp_path: Path) -> None:
    out, plot = tmp_path / "links.csv", tmp_path / "links.svg"
    out.write_text("something else")
    result = invoke("--device", "cpu", "--world-size", 2, "--out", out, "--plot", plot, "--overwrite")
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(out.open()))
    assert {row["kind"] for row in rows} == set(KINDS)
    for row in rows:
        moved = float(row["bytes"]) / float(row["time_us"]) / 1e3
        assert (float(row["gbps"]) == pytest.approx(moved, rel=1e-4)) if row["gbps"] else row["bytes"] == "0"
    assert "copy_engine" not in result.output
    assert "store, GB/s" in result.output
    assert "how a rank reaches another's memory" in result.output
    assert {row["path"] for row in rows} == {HOST_MEMORY, ""}
    assert "<svg" in plot.read_text()


def test_a_size_below_a_block_is_measured_as_asked(tmp_path: Path) -> None:
    """And what is no multiple of 64 bytes as the nearest."""
    out = tmp_path / "links.csv"
    result = invoke("--device", "cpu", "--world-size", 2, "--out", out, "--mib", "0.00390625,0.00001")
    assert result.exit_code == 0, result.output
    moved = {(row["kind"], row["bytes"]) for row in csv.DictReader(out.open()) if row["kind"] in PAIRWISE}
    assert moved == {(kind, size) for kind in PAIRWISE for size in ("4096", "64")}


def test_resuming_measures_the_sizes_that_are_missing(tmp_path: Path) -> None:
    """And barriers and signals once."""
    out = tmp_path / "links.csv"
    common = ("--device", "cpu", "--world-size", 2, "--out", out, "--resume", "--mib")
    assert invoke(*common, "0.0625").exit_code == 0
    before = out.read_text()
    result = invoke(*common, "0.0625,0.125")
    assert result.exit_code == 0, result.output
    assert out.read_text().startswith(before)
    new = list(csv.DictReader(out.open()))[before.count("\n") - 1 :]
    assert {(row["kind"], row["bytes"]) for row in new} == {
        (kind, str(1 << 17)) for kind in KINDS if kind.startswith("all_") or kind in PAIRWISE
    }
    before = out.read_text()
    assert invoke(*common, "0.125").exit_code == 0
    assert out.read_text() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mib", 0], "--mib 0 makes no sense"),
        (["--mib", 1e6], "at most 1024"),
        (["--mib", "1,x"], "--mib 1,x makes no sense"),
        (["--resume"], "--resume needs --out"),
        (["--rounds", 0], "--rounds 0 makes no sense"),
        (["--world-size", 1, "--plot", "a.png"], "two ranks or more"),
        (["--plot", "a.doc"], "end its name in"),
        (["--out", "/dev/null/a.csv"], "no folder to write a.csv to"),
    ],
)
def test_the_command_refuses_in_one_line(arguments: list[Any], said: str) -> None:
    result = invoke("--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


class Nvml:
    """NVIDIA's management library on a host of GPUs, each a number of the uuid; what is `connected` is by pair."""

    def __init__(self, connected: dict[tuple[int, int], set[int]]) -> None:
        self.connected = connected

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        prefix, number = uuid.decode().split("-")
        handle._obj.value = int(number)
        return 0 if prefix == "GPU" and int(number) < 4 else 6

    def nvmlDeviceGetP2PStatus(self, first: Any, second: Any, what: int, status: Any) -> int:
        status._obj.value = 0 if what in self.connected.get((first.value, second.value), ()) else 1
        return 0


def test_a_path_is_what_the_driver_says_of_two_gpus() -> None:
    nvml: Any = Nvml({(1, 2): {0, 1, 2}, (1, 3): {0, 1}})
    assert path_of(nvml, "1", "2") == NVLINK
    assert path_of(nvml, "1", "3") == PCIE
    assert path_of(nvml, "3", "1") == NONE
    assert path_of(nvml, "1", "7") == path_of(None, "1", "2") == PEER_ACCESS


def ranks_paths(rank: int, world_size: int, places: list[tuple[str, str]] | None) -> list[list[str]]:
    ctx = context()
    if places is None:
        return paths(ctx)
    host, gpu = places[rank]
    with (
        mock.patch.object(ctx, "is_interpreted", return_value=False),
        mock.patch("iris_bench.benchmarks.links.paths.host_name", return_value=host),
        mock.patch.object(ctx.backend, "identity", return_value=gpu),
    ):
        return paths(ctx)


@pytest.mark.parametrize("device", ["cpu"])
def test_all_ranks_know_all_paths(ranks: Any) -> None:
    found: Ranks = ranks(3)
    assert found.call(ranks_paths, None) == [[[OWN if i == j else HOST_MEMORY for j in range(3)] for i in range(3)]] * 3
    expected = [[OWN, SAME_GPU, OTHER_HOST], [SAME_GPU, OWN, OTHER_HOST], [OTHER_HOST, OTHER_HOST, OWN]]
    assert found.call(ranks_paths, [("a", "0"), ("a", "0"), ("b", "0")]) == [expected] * 3


def test_other_commands_take_the_link_that_was_measured_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest way to send, of as many GPUs of that name; interpreted rows are kept nowhere."""
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path))
    rows = read_as(Path(__file__).parents[3] / "results/2026-11-22-h200x4/links.csv", LinkRecord)
    assert keep([replace(row, device="cpu") for row in rows]) is None
    assert this_machines("NVIDIA H200", 4).gbps is None
    small = [replace(row, bytes=4096, gbps=1.0) for row in rows if row.gbps]
    assert keep([*small, *rows, *small]) is not None
    link = this_machines("NVIDIA H200", 4)
    assert link.gbps == pytest.approx(386.2, abs=0.1)  # the copy engines
    assert link.source == "iris-bench links, 2026-11-22, 77ec08b"
    assert this_machines("NVIDIA H200", 2).source == "not measured on 2 x NVIDIA H200: iris-bench links --world-size 2"
