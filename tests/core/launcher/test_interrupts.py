"""Ctrl-C: it reaches the ranks too, which say nothing of it, and a sweep says what it leaves."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner, Result

from iris_bench import cli
from iris_bench.command import ranks
from iris_bench.command.exits import interrupts_held
from iris_bench.correctness.stress import cli as stress
from iris_bench.measure import job as measure
from iris_bench.records.record import read_records
from iris_core import RankPool
from iris_core.rendezvous import rank_info

SIGINT_BIT = 1 << (signal.SIGINT - 1)


def lets_interrupts_through(pid: int) -> bool:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return not (int(status["SigBlk"], 16) | int(status["SigIgn"], 16)) & SIGINT_BIT


def held_by(rank: int, world_size: int) -> set[int]:
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, []))


@pytest.mark.parametrize("by_main", [True, False])
def test_no_interrupt_reaches_ranks_that_start(by_main: bool) -> None:
    """They import torch at this moment, as the test goes through with the first look at the last of them."""
    found: list[Any] = []

    def start() -> None:
        with RankPool(2, "cpu") as pool:
            found.extend(lets_interrupts_through(process.pid) for process in pool._processes)
            found.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
            found.extend(signal.SIGINT in held for held in pool.call(held_by))

    if by_main:
        start()
    else:
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    assert found == [False] * 5


def test_ranks_that_were_started_end_where_starting_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def interrupt(self: RankPool, origin: Any) -> None:
        if started:
            raise KeyboardInterrupt
        start(self, origin)
        started.extend(self._processes)

    start = RankPool._start
    monkeypatch.setattr(RankPool, "_start", interrupt)
    with pytest.raises(KeyboardInterrupt):
        RankPool(2, "cpu")
    (process,) = started
    with pytest.raises(ValueError, match="closed"):  # by the pool, which has waited for its end
        process.is_alive()


class InterruptedRanks(ranks.Ranks):
    """Ranks whose second problem is interrupted."""

    is_first = True
    problems = 1

    def __init__(self, world_size: int, device: str, hosts: int = 1) -> None:
        self.done = 0

    def call(self, fn: Any, *args: Any) -> Any:
        if fn is measure.open_rank:
            return {"device_name": "a machine", "driver": ""}
        if self.done == self.problems:
            raise KeyboardInterrupt
        self.done += 1
        return [measure.Outcome("library"), measure.Outcome("copy_engine:portable")]

    def close(self, *, kill: bool = False) -> None:
        assert kill


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in (*rank_info.TORCHRUN_VARIABLES, *ranks._MPI_VARIABLES, "IRIS_DEVICE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranks, "StartedRanks", InterruptedRanks)

    def invoke(*arguments: object) -> Result:
        asked = [
            "run",
            "--device",
            "cpu",
            "--no-time",
            "--family",
            "gemm_all_scatter",
            "--variant",
            "copy_engine:portable",
        ]
        return CliRunner().invoke(cli.app, [*asked, "--shapes", "1x1x1,2x2x2", *map(str, arguments)])

    return invoke


def test_an_interrupted_sweep_says_how_to_go_on(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    result = run("--out", out)
    assert result.exit_code == 130
    assert f"interrupted: 2 rows were written to {out}; the same command with --resume goes on" in result.stderr
    assert [record.m for record in read_records(out)] == [1, 1]
    assert "with --resume in place of --overwrite goes on" in run("--out", out, "--overwrite").stderr


@pytest.mark.parametrize(("out", "said"), [("stress.csv", "its row was added to stress.csv"), ("", "with --out")])
def test_an_interrupted_stress_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stress, "start_ranks", lambda *_: mock.Mock(call=mock.Mock(side_effect=KeyboardInterrupt)))
    result = CliRunner().invoke(cli.app, ["stress", "--device", "cpu", *(["--out", out] if out else [])])
    assert result.exit_code == 130
    assert f"interrupted: {said}" in result.stderr
    assert not out or "interrupted" in Path(out).read_text()


def test_one_that_kept_nothing_says_so(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "interrupted: 2 rows are lost; with --out they would be kept" in run().stderr
    monkeypatch.setattr(InterruptedRanks, "problems", 0)
    assert "interrupted: nothing was written" in run("--out", tmp_path / "rows.csv").stderr


@pytest.fixture
def heeded() -> Iterator[None]:
    """Interrupts are heard, also where whoever started the tests ignores them, as a shell does in the background."""
    interrupts = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.default_int_handler) for number in interrupts}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("interrupt", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_garbage_is_collected_is_not_swallowed(interrupt: signal.Signals) -> None:
    """As Python does with what a weak reference's callback raises."""

    class Cycle:
        def __init__(self) -> None:
            self.own = self

    alive = [Cycle()]  # until interrupts are held: Python may collect garbage at any time
    watcher = weakref.ref(alive[0], lambda _: signal.raise_signal(interrupt))
    collected: list[bool] = []

    def collect() -> None:
        with interrupts_held():
            alive.clear()
            gc.collect()
            collected.append(watcher() is None)

    with pytest.raises(KeyboardInterrupt):
        collect()
    assert collected == [True]
    assert signal.getsignal(interrupt) is signal.default_int_handler


@pytest.mark.usefixtures("heeded")
def test_sigterm_ends_every_command_as_an_interrupt_does(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    monkeypatch.setattr(cli, "app", lambda **_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        cli.main()
