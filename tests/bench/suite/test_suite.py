"""`iris-bench measure`: the plan, what of it is done, and how its commands end; most with commands that pretend."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from iris_bench import cli
from iris_bench.benchmarks.links.measured import this_machines
from iris_bench.measure import environment
from iris_bench.measure.families import FAMILIES
from iris_bench.measure.shapes import parse_shapes
from iris_bench.suite import cli as suite
from iris_bench.suite import run
from iris_bench.suite.ledger import FILE, Ledger, choose_folder
from iris_bench.suite.plan import CPU_PLAN, GPU_PLAN, Entry, select

ROOT = Path(__file__).parents[3]
COMMIT = "abc1234"
LIMIT_S = 60.0
PRETENDED = """
import argparse, os, time
parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--sleep", type=float, default=0)
parser.add_argument("--until")
parser.add_argument("--status", type=int, default=0)
asked, _ = parser.parse_known_args()
header = "" if os.path.exists(asked.out) else "commit,gpus,resumed\\n"
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(",", " ")
with open(asked.out, "a") as file:
    file.write(f"{header}{os.environ['IRIS_COMMIT']},{gpus},{asked.resume}\\n")
deadline = time.monotonic() + asked.sleep
while time.monotonic() < deadline and not (asked.until and os.path.exists(asked.until)):
    time.sleep(0.01)
if asked.status:
    print("iris-bench: this was wrong")
raise SystemExit(asked.status)
"""
FOREVER = f"ok --sleep {2 * LIMIT_S:g}"


def entry(name: str, *commands: str, seconds: int = 1) -> Entry:
    return Entry(name, commands or ("ok",), seconds, seconds)


@pytest.fixture(autouse=True)
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that add a row, wait, and end as they are told."""
    script = tmp_path / "pretended.py"
    script.write_text(PRETENDED)
    monkeypatch.setattr(run, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(run, "_POLL_S", 0.01)
    monkeypatch.setattr(environment, "commit", lambda: COMMIT)


def plan_of(monkeypatch: pytest.MonkeyPatch, *entries: Entry) -> None:
    monkeypatch.setattr(suite, "CPU_PLAN", entries)


def measure(folder: Path, *arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["measure", "--device", "cpu", "--out", str(folder), *map(str, arguments)])


def states(folder: Path) -> dict[str, str]:
    return {name: ended["state"] for name, ended in json.loads((folder / FILE).read_text())["entries"].items()}


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / f"{name}.csv").open()))


@pytest.mark.parametrize("one", [*GPU_PLAN, *CPU_PLAN], ids=lambda one: one.name)
def test_every_command_of_the_plan_is_one(one: Entry) -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    for text in one.commands:
        name, *words = shlex.split(text)
        words += ["--world-size", "2", "--device", "cpu", "--out", "x.csv", *(["--resume"] if one.resumes else [])]
        given = commands[name].make_context(name, words).params
        if name in ("run", "norm"):
            for family in FAMILIES.values():
                assert parse_shapes(given["shapes"], collective=family.collective, world_size=2)


def test_names_of_measurements_are_their_own() -> None:
    for plan in (GPU_PLAN, CPU_PLAN):
        assert len({one.name for one in plan}) == len(plan)
    assert GPU_PLAN[0].name == "links"  # what ideal_us needs
    assert GPU_PLAN[-1].name == "memcheck"  # what takes longest


def test_measurements_are_selected_by_name_word_and_ranks() -> None:
    plan = [entry("llama-bf16"), entry("fp8-row"), entry("decoder-fp8"), Entry("two-hosts", ("run",), 1, 1, 2)]
    assert select(plan, "all", 2) == plan
    assert select(plan, "all", 3) == plan[:3]
    assert [one.name for one in select(plan, "fp8,llama", 2)] == ["llama-bf16", "fp8-row", "decoder-fp8"]
    assert [one.name for one in select(plan, "fp8-row", 2)] == ["fp8-row"]
    with pytest.raises(
        ValueError, match=r"--only hosts names no measurement on 3 ranks; there are llama-bf16, fp8-row"
    ):
        select(plan, "hosts", 3)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("8m", 480), ("1h30m", 5400)])
def test_times_are_understood(text: str, seconds: float) -> None:
    assert suite.parse_time(text) == seconds


@pytest.mark.parametrize("text", ["8", "m", "8m5", "5s", "-8m", "8 m"])
def test_a_time_that_makes_no_sense_is_refused(text: str, tmp_path: Path) -> None:
    result = measure(tmp_path, "--for", text)
    assert result.exit_code == 2
    assert f"--for {text}" in result.stderr


def test_a_failure_does_not_end_the_rest_and_is_tried_again_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new"
    plan_of(monkeypatch, entry("one", "ok --status 1", "ok"), entry("two"), entry("three", "ok --status 2", "ok"))
    result = measure(folder)
    assert result.exit_code == 1, result.output
    assert "failed, and tried again by the next call: one, three" in result.stderr
    assert "this was wrong" in result.stderr
    assert states(folder) == {"one": "failed", "two": "done", "three": "failed"}
    assert [len(rows(folder, name)) for name in ("one", "two", "three")] == [2, 1, 1]  # of nonsense no second command
    plan_of(monkeypatch, entry("one"), entry("two"), entry("three"), entry("four"))
    result = measure(folder)
    assert result.exit_code == 0, result.output
    begun = [line.split()[1] for line in result.stderr.splitlines() if line.endswith("begun")]
    assert begun == ["four:", "one:", "three:"]
    assert "4 of 4 measurements are done" in result.stderr
    assert {row["resumed"] for row in rows(folder, "one")} == {"True"}
    assert measure(folder).exit_code == 0
    assert len(rows(folder, "one")) == 3


@pytest.mark.parametrize("state", ["begun", "failed"])
@pytest.mark.parametrize(("command", "kept_s"), [("links", 30.0), ("stress", 0.0)])
def test_what_goes_on_from_its_rows_has_spent_their_time(
    command: str, kept_s: float, state: str, tmp_path: Path
) -> None:
    one, ledger = Entry("one", (command,), 100, 100), Ledger(tmp_path, "h200x2", "abc")
    ledger.end(one, state, 30.0)
    assert ledger.left_s(one, 2) == 100 - kept_s
    ledger.end(one, "done", 5.0)
    assert ledger.entries["one"].seconds == kept_s + 5.0


def test_when_the_time_is_over_the_next_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_of(monkeypatch, entry("one"), entry("two", FOREVER, seconds=1000), entry("three"))
    begun, two = time.monotonic(), tmp_path / "two.csv"
    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "_time_s", lambda _: 0.0 if two.exists() and two.read_text() else LIMIT_S)
        result = measure(tmp_path)
    assert time.monotonic() - begun < LIMIT_S
    assert result.exit_code == 0, result.output
    assert "1 of 3 measurements are done" in result.stderr
    assert "the same command goes on" in result.stderr
    assert states(tmp_path) == {"one": "done", "two": "begun"}
    plan_of(monkeypatch, entry("one"), entry("two"), entry("three"))
    assert measure(tmp_path).exit_code == 0
    assert states(tmp_path) == dict.fromkeys(("one", "two", "three"), "done")
    assert [row["resumed"] for row in rows(tmp_path, "two")] == ["True", "True"]


def test_what_starts_over_is_begun_only_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_of(monkeypatch, entry("long", "stress", seconds=1000), entry("short", "stress"))
    (tmp_path / "short.csv").write_text(f"commit,gpus,resumed\n{COMMIT},,False\n")
    result = measure(tmp_path, "--for", "5m")
    assert result.exit_code == 0, result.output
    assert "too long for --for 5m" in result.stderr
    assert "left out: long (1000 s)" in result.stderr
    assert states(tmp_path) == {"short": "done"}
    assert [row["resumed"] for row in rows(tmp_path, "short")] == ["False"]


def test_memcheck_is_left_out_where_there_is_no_sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_of(monkeypatch, entry("memcheck"), entry("one"))
    monkeypatch.setattr(suite, "find_sanitizer", lambda: None)
    result = measure(tmp_path)
    assert result.exit_code == 0, result.output
    assert "memcheck is left out: no compute-sanitizer" in result.stderr
    assert states(tmp_path) == {"one": "done"}


def test_what_hangs_is_ended_and_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_of(monkeypatch, entry("one", FOREVER), entry("two", seconds=1000))
    monkeypatch.setattr(run, "MOST", 0.1)
    monkeypatch.setattr(run, "MOST_S", 2.0)
    result = measure(tmp_path)
    assert result.exit_code == 1, result.output
    assert "one: failed" in result.stderr
    assert "it took more than 2 s" in result.stderr
    assert states(tmp_path) == {"one": "failed", "two": "done"}


def test_a_command_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "deaf.py"
    script.write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + PRETENDED)
    monkeypatch.setattr(run, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(run, "GRACE_S", 0.1)
    monkeypatch.setattr(run, "MOST", 0.1)
    monkeypatch.setattr(run, "MOST_S", 2.0)
    plan_of(monkeypatch, entry("one", FOREVER))
    begun = time.monotonic()
    assert measure(tmp_path).exit_code == 1
    assert time.monotonic() - begun < LIMIT_S


def test_an_interrupt_keeps_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_of(monkeypatch, entry("one", FOREVER))

    def interrupt_once_there_is_a_row() -> None:
        while not (tmp_path / "one.csv").exists():
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts behind itself
    thread = threading.Thread(target=interrupt_once_there_is_a_row)
    thread.start()
    try:
        result = measure(tmp_path)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    assert "interrupted: 0 of 1 measurements are done" in result.stderr
    assert states(tmp_path) == {"one": "begun"}


def test_rows_of_two_commits_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_of(monkeypatch, entry("one"), entry("two"))
    (tmp_path / "one.csv").write_text("commit,gpus,resumed\nfff,,False\n")
    result = measure(tmp_path)
    assert result.exit_code == 2
    assert f"this is commit {COMMIT}" in result.stderr
    assert "one.csv of fff" in result.stderr
    assert f"--out {tmp_path}-{COMMIT}" in result.stderr
    assert measure(tmp_path, "--only", "two").exit_code == 0


def test_a_folder_is_of_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_of(monkeypatch, entry("one"))
    assert measure(tmp_path, "--world-size", 2).exit_code == 0
    result = measure(tmp_path, "--world-size", 3)
    assert result.exit_code == 2
    assert f"{tmp_path} is of cpux2, and this is cpux3" in result.stderr


def test_the_folder_is_the_one_that_was_begun_at_this_commit(tmp_path: Path) -> None:
    for name, commit in (("2026-01-02-h200x2", "a"), ("2026-01-03-h200x2", "b"), ("2026-01-04-h200x4", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_text(json.dumps({"commit": commit, "entries": {}}))
    assert choose_folder(tmp_path, "h200x2", "a") == tmp_path / "2026-01-02-h200x2"
    new = choose_folder(tmp_path, "h200x2", "c")
    assert new.name == f"{environment.timestamp()[:10]}-h200x2"


def test_side_by_side_each_has_gpus_of_its_own(tmp_path: Path) -> None:
    """Both wait for the file that the other's row is in."""
    entries = [entry(name, f"ok --sleep {LIMIT_S:g} --until {tmp_path / other}.csv") for name, other in ("ab", "ba")]
    ledger = Ledger(tmp_path, "h200x2", COMMIT)
    ended: list[Any] = []
    setting = run.Setting(2, "cpu", run.slots(5, 2))
    assert setting.slots == ("0,1", "2,3")
    for _ in run.Run(
        entries, ledger, setting, until=None, begun=lambda _: None, ended=lambda *one: ended.append(one)
    ).run():
        pass
    assert {state for _, state, _ in ended} == {"done"}
    assert [row["gpus"] for name in "ab" for row in rows(tmp_path, name)] == ["0 1", "2 3"]


def test_side_by_side_is_refused_where_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "leave it out with --device cpu" in measure(tmp_path, "--side-by-side").stderr
    monkeypatch.setattr(suite, "count_gpus", lambda: 3)
    with pytest.raises(ValueError, match="needs 4 GPUs for 2 ranks; there are 3"):
        suite._groups(2, "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ValueError, match="sets CUDA_VISIBLE_DEVICES, which is set here"):
        suite._groups(1, "cuda")


def test_a_folder_that_goes_on_elsewhere_has_its_links_known_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_of(monkeypatch, entry("one"))
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copy(ROOT / "results/2026-11-22-h200x4/links.csv", tmp_path)
    assert measure(tmp_path).exit_code == 0
    assert this_machines("NVIDIA H200", 4).gbps == pytest.approx(386.2, abs=0.1)


def test_links_of_an_earlier_folder_serve_where_none_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(suite, "count_gpus", lambda: 4)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
    ledger = suite.Ledger(tmp_path, "h200x4", COMMIT)
    suite._keep_links(ledger, 4)
    assert this_machines("NVIDIA H200", 4) == (pytest.approx(385.6, abs=0.1), "iris-bench links, 2026-11-26, 19fdd3d")
    shutil.copy(ROOT / "results/2026-11-22-h200x4/links.csv", tmp_path)
    suite._keep_links(ledger, 4)  # measured in the folder: they go first
    (tmp_path / "links.csv").unlink()
    suite._keep_links(ledger, 4)
    assert this_machines("NVIDIA H200", 4).gbps == pytest.approx(386.2, abs=0.1)


def test_rows_say_which_gpus_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["iris-bench", "run"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment.versions()["command"] == "iris-bench run"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert environment.versions()["command"] == "CUDA_VISIBLE_DEVICES=2,3 iris-bench run"


def test_the_list_says_what_is_done_and_how_long_the_rest_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_of(monkeypatch, entry("one"), entry("two", seconds=600))
    assert measure(tmp_path, "--only", "one").exit_code == 0
    result = measure(tmp_path, "--list")
    assert result.exit_code == 0
    (one,) = [line for line in result.stdout.splitlines() if line.startswith(" one")]
    (two,) = [line for line in result.stdout.splitlines() if line.startswith(" two")]
    assert one.split()[1:3] == ["done", "1"]
    assert two.split()[1:] == ["left", "600", "ok"]
    assert "about 10 min left" in result.stdout
    (tmp_path / "one.csv").unlink()
    assert "left" in measure(tmp_path, "--list", "--only", "one").stdout


def test_without_gpus_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iris_bench.command.ranks.count_gpus", lambda: 0)
    monkeypatch.setattr(suite, "count_gpus", lambda: 0)
    result = CliRunner().invoke(cli.app, ["measure"])
    assert result.exit_code == 2
    assert "needs GPUs" in result.stderr
    assert "--device cpu" in result.stderr
    listed = CliRunner().invoke(cli.app, ["measure", "--list", "--only", "fp8"])
    assert listed.exit_code == 0
    assert "fp8-row" in listed.stdout


@pytest.mark.slow
def test_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the commands that there are: those of the plan for a CPU that take the least time."""
    monkeypatch.setattr(run, "COMMAND", (sys.executable, "-m", "iris_bench"))
    result = measure(tmp_path, "--only", "links,ccl")
    assert result.exit_code == 0, result.output
    assert {row["commit"] for name in ("links", "ccl") for row in rows(tmp_path, name)} == {COMMIT}
    assert (tmp_path / "log" / "ccl.log").read_text().startswith("$ iris-bench ccl --kib 1 --kind broadcast")
