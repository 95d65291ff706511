"""`iris-bench litmus`: what is promised holds, what breaks it is counted, and weakened kernels are weaker."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from compiling import Case, StubContext, compile_kernel, recorded_launches
from ranks import Ranks, context
from typer.testing import CliRunner

import iris_core
from iris_bench import cli
from iris_bench.command import ranks as command_ranks
from iris_bench.correctness.litmus import rank as litmus
from iris_bench.correctness.litmus.rank import LITMUS
from iris_bench.correctness.litmus.record import LitmusRecord
from iris_bench.records.record import read_as

CASES = litmus.cases(tuple(LITMUS))
PROMISED = [case for case in CASES if not case.weakened]
ROUNDS = {"cpu": 30, "cuda": 100_000}
# What each litmus test uses, and how it is broken, given the function of iris_core.
BREAKING: dict[str, Callable[[Any], Any]] = {
    "load": lambda load: lambda *args: load(*args) + 1,
    "atomic_xchg": lambda _: lambda pointer, val, *_, **__: val - 1,  # says that it was done
} | dict.fromkeys(("store", "put", "copy", "get"), lambda _: lambda *_: None)
USED = dict.fromkeys(LITMUS, "store") | {"put": "put", "copy": "copy", "get": "get", "read_first": "load"}
USED["store_buffering"] = "atomic_xchg"


def measured(rank: int, world_size: int, case: litmus.Case, rounds: int, broken: str = "") -> litmus.Outcome:
    """Run a litmus test, perhaps with a broken function of iris_core."""
    job = litmus.Job(case, rounds, seed=3)
    with mock.patch.object(litmus, "context", context):
        if not broken:
            return litmus.measure(rank, world_size, job)
        with mock.patch.object(iris_core, broken, BREAKING[broken](getattr(iris_core, broken))):
            return litmus.measure(rank, world_size, job)


@pytest.mark.parametrize("case", PROMISED, ids=str)
def test_what_is_promised_holds(ranks: Any, device: str, case: litmus.Case) -> None:
    found: Ranks = ranks(2)
    outcomes = found.call(measured, case, ROUNDS[device])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].rounds >= ROUNDS[device]
    assert (outcomes[0].status, outcomes[0].forbidden) in (("ok", 0), ("unsupported", None))


@pytest.mark.parametrize("name", [name for name in LITMUS if name != "descriptor_store"])
def test_what_does_not_come_is_counted(pools: Any, name: str) -> None:
    case = next(case for case in PROMISED if case.litmus == name)
    outcome = pools.ranks(2, "cpu").call(measured, case, ROUNDS["cpu"], USED[name])[0]
    assert outcome.status == "wrong"
    assert outcome.forbidden is not None
    assert 0 < outcome.forbidden <= outcome.rounds


@functools.cache
def compiled(case: litmus.Case, target: str) -> str:
    """Return the machine code of a litmus test's kernel."""
    ctx: Any = StubContext(Case("none", target, world_size=2))
    ctx.is_interpreted = lambda: False
    ctx.barrier = ctx.device_barrier = lambda: None
    with recorded_launches() as launches:
        run = litmus._Run(ctx, litmus.Job(case, 1, seed=3))
        run.prepare()
        run.launch(1)
    return compile_kernel(*launches[0], target).code


EDGES = {
    "release": r"\b(?:atom|red)\.global\.{}\.release\.",
    "acquire": r"\b(?:ld|atom)\.(?:global\.{0}\.)?acquire\.|\batom\.global\.{0}\.acquire",
    "fence": r"\bfence\.proxy\.async",
    "arrival": r"\bcp\.async\.bulk\.wait_group 0",
    "rmw": r"\batom\.global\.{}\.acq_rel\.",
}


@pytest.mark.parametrize("case", [case for case in CASES if case.weakened in EDGES], ids=str)
def test_a_weakened_kernel_lacks_an_edge(case: litmus.Case) -> None:
    """And no other one."""
    promised = next(one for one in PROMISED if (one.litmus, one.scope) == (case.litmus, case.scope))
    found = {}
    for edge, pattern in EDGES.items():
        found[edge] = [len(re.findall(pattern.format(case.scope), compiled(one, "sm_90"))) for one in (promised, case)]
    assert found[case.weakened][0] > found[case.weakened][1]
    if case.litmus != "barrier":  # of which all is in another form
        others = EDGES.keys() - {case.weakened} - ({"fence"} if case.weakened == "arrival" else set())
        assert {edge for edge in others if found[edge][0] != found[edge][1]} == set()


@pytest.mark.parametrize("case", PROMISED, ids=str)
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942", "gfx950"])
def test_kernels_compile_for_other_gpus(case: litmus.Case, target: str) -> None:
    ctx: Any = StubContext(Case("none", target, world_size=2))
    ctx.is_interpreted = lambda: False
    if reason := litmus._Run(ctx, litmus.Job(case, 1, seed=3)).unsupported_reason():
        assert "descriptor" in case.litmus
        assert reason == f"{target} has no loads and stores by TMA"
    else:
        assert compiled(case, target)


def test_the_documentation_has_every_litmus_test() -> None:
    page = (Path(__file__).parents[3] / "docs" / "writing_kernels.md").read_text()
    section = page.partition("### Litmus tests")[2].partition("\n## ")[0]
    rows = re.findall(r"\| `(\w+)` \| ([\w, ]+) \| ([\w, ]+)", section)
    assert {name: (scopes, lacking.strip()) for name, scopes, lacking in rows} == {
        name: (", ".join(one.scopes), ", ".join(one.weakenings)) for name, one in LITMUS.items()
    }


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, ["litmus", *map(str, arguments)])


def test_the_command_writes_rows_and_a_table(tmp_path: Path) -> None:
    out = tmp_path / "litmus.csv"
    done = invoke("--device", "cpu", "--world-size", 2, "--litmus", "store,chain", "--rounds", 9, "--out", out)
    assert done.exit_code == 0, done.output
    rows = read_as(out, LitmusRecord)
    assert {(row.litmus, row.scope, row.weakened) for row in rows} == {
        (name, scope, weakened)
        for name in ("store", "chain")
        for scope in ("sys", "gpu")
        for weakened in ("", "release", "acquire")
    }
    assert all(row.rounds >= 9 and row.seconds is not None for row in rows)
    assert re.search(r"chain +gpu +\d+ +0 +release 0, acquire 0", done.output)


def test_a_broken_promise_and_lost_ranks_are_failures(tmp_path: Path) -> None:
    wrong = litmus.Outcome(PROMISED[0], 100, 1, 0.5, "wrong")

    class Broken(command_ranks.Ranks):
        is_first = True
        calls = 0

        def call(self, fn: Any, *args: Any) -> Any:
            if fn is litmus.measure:
                self.calls += 1
                if self.calls == 2:
                    raise TimeoutError("rank 0 waits")
                return wrong
            return {"device_name": "H100", "driver": ""}

        def close(self, *, kill: bool = False) -> None:
            assert kill

    out = tmp_path / "litmus.csv"
    with mock.patch("iris_bench.command.jobs.start_ranks", return_value=Broken()):
        done = invoke("--device", "cpu", "--world-size", 2, "--litmus", "store", "--out", out)
    assert done.exit_code == 1, done.output
    assert [row.status for row in read_as(out, LitmusRecord)] == ["wrong", "error"]
    assert "rank 0 waits" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--world-size", 3], "world size 3 is odd"),
        (["--rounds", 0], "--rounds 0 makes no sense"),
        (["--litmus", "iriw"], "unknown --litmus 'iriw'"),
        (["--out", "/dev/null/a.csv"], "no folder to write a.csv to"),
    ],
)
def test_the_command_refuses_in_one_line(arguments: list[Any], said: str) -> None:
    done = invoke("--device", "cpu", "--world-size", 2, *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
