"""The stress run: that it finds a wrong element among many calls, and the row it leaves."""

from __future__ import annotations

import csv
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pools, Ranks, close_context
from typer.testing import CliRunner, Result

from iris_bench import cli
from iris_bench.command import exits, progress
from iris_bench.command import ranks as bench_ranks
from iris_bench.command.ranks import Ranks as BenchRanks
from iris_bench.correctness.stress import cli as stress_cli
from iris_bench.correctness.stress import rank as stress_rank
from iris_bench.correctness.stress.record import COLUMNS
from iris_kernels.common.call import Call
from iris_kernels.common.operators.operator import Operator

ONE_VARIANT = [
    "--world-size",
    "2",
    "--family",
    "gemm_all_scatter",
    "--variant",
    "fused_sequential:portable",
    "--dtype",
    "bf16",
]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["stress", "--device", "cpu", *map(str, arguments)])


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class PooledRanks(BenchRanks):
    """The command's ranks are those of the tests."""

    is_first = True
    ranks: Ranks

    def __init__(self, world_size: int, device: str, hosts: int = 1) -> None:
        assert (world_size, device) == (self.ranks.world_size, self.ranks.device)
        self.ranks.call(leave_context)

    def call(self, fn: Any, *args: Any) -> Any:
        return self.ranks.call(fn, *args)[0]

    def close(self, *, kill: bool = False) -> None:
        pass


def leave_context(rank: int, world_size: int) -> None:
    close_context()


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch, pools: Pools) -> Ranks:
    """Let the command run on two ranks that are there already."""
    monkeypatch.setattr(PooledRanks, "ranks", pools.ranks(2, "cpu"), raising=False)
    monkeypatch.setattr(bench_ranks, "StartedRanks", PooledRanks)
    return PooledRanks.ranks


@pytest.mark.usefixtures("pooled")
def test_a_run_leaves_a_row_and_its_seed_repeats_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "stress.csv"
    arguments = ["--world-size", 2, "--variant", "bulk_synchronous:portable", "--dtype", "bf16", "--out", path]
    first = invoke(*arguments, "--calls", 50)
    assert first.exit_code == 0, first.output
    fewest = min(int(count) for count in re.findall(r"bulk_synchronous:portable +\d+ +(\d+)", first.stdout))
    assert f"ok: 50 calls, of each variant {fewest} or more, " in first.stdout
    (row,) = rows(path)
    assert list(row) == COLUMNS
    assert (row["calls"], row["mismatches"], row["status"], row["error"]) == ("50", "0", "ok", "")
    assert (row["world_size"], row["families"], row["variants"], row["device"]) == ("2", "4", "4", "cpu")
    assert float(row["seconds"]) > 0
    assert float(row["warm_up_seconds"]) > 0
    assert int(row["elements"]) > 50
    assert "interpreter" in row["device_name"]
    assert row["timestamp"]
    assert row["commit"]
    again = invoke(*arguments, "--calls", 50, "--seed", row["seed"])
    before, after = rows(path)
    assert before == row
    assert (after["elements"], after["seed"]) == (row["elements"], row["seed"])
    table = re.compile(r"^ ?gemm.*|^ ?all_gather.*", re.MULTILINE)
    assert table.findall(first.stdout)
    assert table.findall(again.stdout) == table.findall(first.stdout)


def test_seconds_end_a_run(tmp_path: Path) -> None:
    path = tmp_path / "stress.csv"
    arguments = ("--world-size", 2, "--family", "gemm_all_scatter", "--variant", "fused_sequential:portable")
    assert invoke(*arguments, "--seconds", 0.5, "--out", path).exit_code == 0
    (row,) = rows(path)
    assert float(row["seconds"]) >= 0.5
    assert int(row["calls"]) > int(row["operators"])


class TerminatedRanks(PooledRanks):
    """As its second round of calls ends, the command gets SIGTERM."""

    def __init__(self, world_size: int, device: str, hosts: int = 1) -> None:
        super().__init__(world_size, device)
        self.rounds = 0

    def call(self, fn: Any, *args: Any) -> Any:
        if fn is stress_rank.call_often:
            self.rounds += 1
            if self.rounds == 3:
                signal.raise_signal(signal.SIGTERM)
        return super().call(fn, *args)

    def close(self, *, kill: bool = False) -> None:
        self.ranks.call(stress_rank.close_rank)


class SpokenProgress(progress.CommandProgress):
    """Every ten seconds have passed as soon as anything happens."""

    def update(self, *args: Any, **changes: Any) -> None:
        super().update(*args, **changes)
        self.print_line()

    def advance(self, *args: Any) -> None:
        super().advance(*args)
        self.print_line()


def test_a_terminated_run_keeps_its_row_and_said_how_far_it_was(
    pooled: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "stress.csv"
    monkeypatch.setattr(bench_ranks, "StartedRanks", TerminatedRanks)
    monkeypatch.setattr(stress_cli, "CommandProgress", SpokenProgress)
    before = signal.getsignal(signal.SIGTERM)
    exits.heed_termination()
    result = invoke(*ONE_VARIANT, "--seconds", 3600, "--out", path)
    signal.signal(signal.SIGTERM, before)
    assert result.exit_code == exits.INTERRUPTED
    (row,) = rows(path)
    assert (row["status"], row["error"], row["calls"]) == ("error", "interrupted", "43")  # 3 first ones, 2 rounds
    assert float(row["seconds"]) > 0
    assert "operators warmed up, 2 of 3, " in result.stderr
    assert re.search(r"^43 calls, 0 mismatches, 3\d\d\d s left, 0 %, \d+ s$", result.stderr, re.MULTILINE)


def plant(rank: int, world_size: int, fault: str) -> None:
    """From its 30th call on, GEMM + all-scatter goes wrong on rank 1, where the output has rows enough."""
    calls = 0
    older: dict[Any, torch.Tensor] = {}

    def broken(self: Operator[Any], call: Call[Any], *given: Any) -> tuple[torch.Tensor, ...]:
        nonlocal calls
        (output,) = outputs = RIGHT(self, call, *given)
        if self.variant != "fused_sequential:portable":
            return outputs
        calls += 1
        if rank == 1 and calls >= 30 and len(output) > 2:
            if fault == "element" and older:
                older.clear()
                output[2, 1] += 1
            elif fault == "stale" and self in older:
                output.copy_(older[self])
            elif fault == "raises":
                raise RuntimeError("no luck")
        elif calls < 30 or fault == "stale":
            older[self] = output.clone()
        return outputs

    Operator._launch = broken  # type: ignore[method-assign]


RIGHT = Operator._launch


def root_out(rank: int, world_size: int) -> None:
    Operator._launch = RIGHT  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", ["element", "stale"])
def test_a_planted_fault_is_found(pooled: Ranks, tmp_path: Path, fault: str) -> None:
    path = tmp_path / "stress.csv"
    arguments = [
        "--world-size",
        2,
        "--family",
        "gemm_all_scatter",
        "--variant",
        "fused_sequential:portable,bulk_synchronous:portable",
    ]
    pooled.call(plant, fault)
    result = invoke(*arguments, "--dtype", "fp16", "--calls", 100, "--seed", 3, "--out", path)
    pooled.call(root_out)
    assert result.exit_code == 1
    (row,) = rows(path)
    assert (row["status"], row["error"], row["calls"]) == ("wrong", "", "100")
    found = re.search(
        r"wrong: gemm_all_scatter/fused_sequential:portable (\d+x\d+x\d+) fp16, call (\d+), rank 1: "
        r"at row (\d+), column (\d+): (\S+) instead of (\S+) within (\S+)",
        result.stderr,
    )
    assert found, result.stderr
    if fault == "element":
        assert row["mismatches"] == "1"
        assert found.group(3, 4) == ("2", "1")
        assert float(found[5]) == pytest.approx(float(found[6]) + 1, abs=0.01)
    else:
        assert int(row["mismatches"]) > 1


def plant_beside_the_output(rank: int, world_size: int) -> None:
    """On rank 1, the gathered A lacks its first element wherever somebody reads it."""

    def broken(self: Operator[Any], call: Call[Any], *given: Any) -> tuple[torch.Tensor, ...]:
        outputs = RIGHT(self, call, *given)
        if rank == 1 and call.options["keep_gathered"]:
            outputs[1][0, 0] += 1
        return outputs

    Operator._launch = broken  # type: ignore[method-assign]


def test_a_fault_in_an_auxiliary_output_is_found(pooled: Ranks) -> None:
    pooled.call(plant_beside_the_output)
    arguments = [
        "--world-size",
        2,
        "--family",
        "all_gather_gemm",
        "--variant",
        "bulk_synchronous:portable",
        "--dtype",
        "bf16",
    ]
    result = invoke(*arguments, "--calls", 10)
    pooled.call(root_out)
    assert result.exit_code == 1
    assert re.search(r"wrong: all_gather_gemm.*rank 1: auxiliary output 1, at row 0, column 0", result.stderr), result


def plant_beside_the_scales(rank: int, world_size: int) -> None:
    """From its 20th call on, rank 1 takes the scale of an A's first row, block or tensor for a quarter larger."""
    calls = 0

    def broken(self: Operator[Any], call: Call[Any], operands: dict[str, torch.Tensor], *given: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == 1 and calls >= 20 and operands["a_scale"].numel():
            operands = {**operands, "a_scale": operands["a_scale"].clone()}
            operands["a_scale"][0, 0] *= 1.25
        return RIGHT(self, call, operands, *given)

    Operator._launch = broken  # type: ignore[method-assign]


def test_a_wrong_scale_of_fp8_is_found_and_what_was_drawn_is_named(pooled: Ranks) -> None:
    pooled.call(plant_beside_the_scales)
    arguments = ["--world-size", 2, "--family", "gemm_all_scatter,gemm_reduce_scatter", "--dtype", "fp8"]
    result = invoke(*arguments, "--variant", "bulk_synchronous:portable", "--calls", 60, "--seed", 1)
    pooled.call(root_out)
    assert result.exit_code == 1
    drawn = r"fp8 (e4m3fn|e5m2)·(e4m3fn|e5m2) (tensor|row|block)/(tensor|column|block), call \d+, rank [01]: at row"
    assert re.search(rf"wrong: gemm_\w+/bulk_synchronous:portable \d+x\d+x\d+ {drawn}", result.stderr), result


def plant_in_quantising(rank: int, world_size: int) -> None:
    """From its 20th time on, rank 1 does not quantise A: what is gathered is of the calls before."""
    times = 0

    def broken(self: Call[Any], a: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        nonlocal times
        times += 1
        if rank == 1 and times >= 20:
            self.operands["a_scale"] = scales
            return rows
        return QUANTISE(self, a, rows, scales)

    Call.quantise = broken  # type: ignore[method-assign]


def quantise_again(rank: int, world_size: int) -> None:
    Call.quantise = QUANTISE  # type: ignore[method-assign]


QUANTISE = Call.quantise


def test_a_shard_that_is_not_quantised_is_found(pooled: Ranks) -> None:
    pooled.call(plant_in_quantising)
    arguments = ["--world-size", 2, "--family", "all_gather_gemm", "--variant", "bulk_synchronous:portable"]
    result = invoke(*arguments, "--dtype", "fp8", "--calls", 150, "--seed", 0)
    pooled.call(quantise_again)
    assert result.exit_code == 1
    drawn = r"fp8 e4m3fn·(e4m3fn|e5m2) row/(tensor|column) from (bfloat16|float16|float32), call \d+, rank [01]: "
    assert re.search(rf"wrong: all_gather_gemm/bulk_synchronous:portable \d+x\d+x\d+ {drawn}", result.stderr), result


@pytest.mark.usefixtures("pooled")
def test_every_variant_is_called_with_fp8(tmp_path: Path) -> None:
    path = tmp_path / "stress.csv"
    result = invoke("--world-size", 2, "--dtype", "fp8", "--calls", 80, "--out", path)
    assert result.exit_code == 0, result.output
    (row,) = rows(path)
    assert (row["dtypes"], row["families"], row["variants"], row["mismatches"]) == ("fp8", "4", "25", "0")


def test_a_run_in_which_a_rank_fails_says_so_in_its_row(pooled: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "stress.csv"
    pooled.call(plant, "raises")
    result = invoke(*ONE_VARIANT, "--calls", 100, "--out", path)
    assert result.exit_code == 1
    (row,) = rows(path)
    assert (row["status"], row["calls"], row["mismatches"]) == (
        "error",
        "23",
        "0",
    )  # one round of 20, after 3 first ones
    assert "no luck" in row["error"]
    assert "ended early, after 23 checked calls" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "given", "works"),
    [
        (["--family", "gemm_all_scater"], "gemm_all_scater", "gemm_all_scatter"),
        (["--family", "gemm_all_scatter", "--variant", "library"], "--variant library", "baselines"),
        (["--variant", "telepathic"], "telepathic", "copy_engine:portable"),
        (["--dtype", "bf16,fp4"], "fp4", "fp8"),
        (["--seconds", "0"], "--seconds 0", "positive"),
        (["--calls", "-3"], "--calls -3", "positive"),
        (["--once", "--calls", "3"], "--once", "--calls"),
        (["--world-size", "0"], "world size 0", "positive"),
        (["--out", "."], "--out .", "give a file"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], given: str, works: str
) -> None:
    monkeypatch.setattr(bench_ranks, "StartedRanks", None)  # no rank is started
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert given in result.stderr
    assert works in result.stderr


def test_a_file_of_something_else_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_ranks, "StartedRanks", None)
    path = tmp_path / "rows.csv"
    path.write_text("family,variant\n")
    result = invoke("--out", path)
    assert result.exit_code == 2
    assert str(path) in result.stderr
    assert path.read_text() == "family,variant\n"
