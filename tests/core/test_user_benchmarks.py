"""`iris_core.bench`: functions are called for all combinations of their axes, timed, and put in a table."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from iris_core import Context, bench
from iris_core.bench import benchmark as registry
from iris_core.bench.benchmark import registered


def own(*args: Any) -> Any:
    """Register, and forget at once: what is timed here is chosen by each test."""
    fn = bench.register(*args)
    MADE[fn.__name__] = registered().pop()
    return fn


MADE: dict[str, bench.Benchmark] = {}


@own
@bench.axis("num_ranks", [2, 1])
@bench.axis("M", bench.linear_range(8, 24, 8))
@bench.axis("dtype", [torch.float16, torch.int8])
def sums(state: bench.State, ctx: Context) -> None:
    if state["M"] == 24 and state["dtype"] == torch.int8:
        state.skip("too large")
    x = torch.ones(state["M"], dtype=state["dtype"], device=ctx.get_device())
    calls: list[int] = []
    state.set_bytes(x.nbytes)
    state.set_flops(1e9)
    state.add_counter("heap", ctx.zeros(1 << 20, dtype=torch.int8).numel() / 2**20)  # most of it, in each combination
    state.set_warmup(2)
    state.set_repeat(3)

    def call() -> None:
        assert x[0] == 1, "zeroed before each call"
        calls.append(0)
        assert len(calls) <= 5
        ctx.ccl.all_reduce(x)

    state.exec(call, preamble_fn=lambda: x.fill_(1))


@own
def idle(state: bench.State, ctx: Context) -> None:
    assert state.get("M", 5) == 5


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(registry, "_registered", [MADE[name]])
    bench.main(["--device=cpu", "--heap_size=2097152", *arguments])


@pytest.mark.slow
def test_all_combinations_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "rows.csv"
    run(monkeypatch, "sums", "--benchmark_format=csv", f"--benchmark_out={out}")
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert rows == list(csv.DictReader(out.open()))
    sizes = [(str(m), dtype) for m in (8, 16, 24) for dtype in ("float16", "int8")]
    assert [(row["ranks"], row["M"], row["dtype"]) for row in rows] == [(n, *size) for n in "12" for size in sizes]
    for row in rows:
        if (row["M"], row["dtype"]) == ("24", "int8"):
            assert (row["skipped"], row["ms"]) == ("too large", "")
            continue
        assert float(row["heap"]) == 1
        moved = int(row["M"]) * (2 if row["dtype"] == "float16" else 1)
        assert float(row["GB/s"]) == pytest.approx(moved / float(row["ms"]) / 1e6)
        assert float(row["TFLOP/s"]) == pytest.approx(1 / float(row["ms"]))


@pytest.mark.slow
def test_the_command_line_changes_axes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--axis_M=pow2:3:4", "--skip_M=16", "--axis_dtype=fp32,bf16,int8", "--skip_dtype=int8")
    run(monkeypatch, "sums", *arguments, "--axis_num_ranks=1", "--benchmark_format=json")
    rows = json.loads(capsys.readouterr().out)
    assert [row["params"] for row in rows] == [
        {"num_ranks": 1, "M": 8, "dtype": f"torch.{dtype}"} for dtype in ("float32", "bfloat16")
    ]


def test_more_ranks_than_gpus_are_skipped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    run(monkeypatch, "sums", "--device=cuda", "--axis_num_ranks=64", "--axis_M=8", "--axis_dtype=fp16")
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["benchmark", "ranks", "M", "dtype", "skipped"]
    assert "larger than the 1 GPU(s) present" in row


@pytest.mark.slow
def test_a_benchmark_hands_over_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"idle with \{\} has handed over nothing"):
        run(monkeypatch, "idle", "--ranks=1")


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--axis_M=pow2:3", "pow2:3 is no range"),
        ("--axis_M", "unknown argument --axis_M"),
        ("--skip_M=8,16,24", "there is no benchmark, or no combination"),
        ("--benchmark_filter=nothing", "there is no benchmark"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argument: str, said: str
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "sums", argument)
    assert said in capsys.readouterr().err
