"""What commands refuse in one line before a rank starts: files that could not be written, variables, empty CSVs."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from records import make_records
from typer.testing import CliRunner

from iris_bench import cli
from iris_bench.command import ranks
from iris_bench.command.outputs import UnwritableError, check_different, check_outputs
from iris_bench.measure import job as measure
from iris_bench.records.csv_rows import append_records
from iris_bench.records.record import COLUMNS
from iris_bench.trace import traced as trace
from iris_core.rendezvous import rank_info

RUN = ["run", "--device", "cpu", "--world-size", "2", "--family", "gemm_all_scatter", "--shapes", "8x8x8"]
TRACE = ["trace", "--world-size", "2", "--family", "gemm_all_scatter", "--shape", "64x64x64"]
TRACE_ONE = [*TRACE, "--variant", "fused_sequential:portable"]
LINKS = ["links", "--device", "cpu", "--world-size", "2"]


@pytest.fixture(autouse=True)
def in_a_folder_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run beside a folder `folder.png`, a `file` and the CSV `rows.csv`; to start ranks is a failure."""
    for name in (*rank_info.TORCHRUN_VARIABLES, *ranks._MPI_VARIABLES, "IRIS_DEVICE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranks, "StartedRanks", None)
    monkeypatch.chdir(tmp_path)
    for folder in ("folder.png", "trace-fused_sequential_portable.json"):
        Path(folder).mkdir()
    Path("file").touch()
    append_records(Path("rows.csv"), make_records())
    return tmp_path


def refused(*arguments: Any) -> str:
    result = CliRunner().invoke(cli.app, list(map(str, arguments)))
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plot", "rows.csv", "--out", "folder.png"], "--out folder.png is a folder"),
        (["plot", "rows.csv", "--out", "/dev/null/x.png"], "/dev/null is no folder to write x.png to"),
        (["plot", "rows.png", "--out", "rows.png"], "FILE and --out are both rows.png"),
        (["plot", "rows.csv", "--over", "one", "--out", "x.png"], "no row of 'one' has a time to compare with"),
        (["table", "rows.csv", "--over", "one"], "no row of 'one' has a time to compare with"),
        ([*RUN, "--out", "folder.png"], "--out folder.png is a folder"),
        ([*RUN, "--plot", "folder.png"], "--plot folder.png is a folder"),
        ([*RUN, "--out", "file/x/rows.csv"], "cannot write --out file/x/rows.csv"),
        ([*RUN, "--out", "x.png", "--plot", "folder.png/../x.png"], "--out and --plot are both"),
        ([*TRACE_ONE, "--out", "folder.png"], "--out folder.png is a folder"),
        ([*TRACE_ONE, "--out", "x.json", "--plot", "folder.png"], "--plot folder.png is a folder"),
        ([*TRACE_ONE, "--out", "file/x.json"], "file is no folder to write x.json to"),
        ([*LINKS, "--plot", "file/x.png"], "file is no folder to write x.png to"),
        ([*TRACE_ONE, "--out", "x.png", "--plot", "x.png"], "--out and --plot are both x.png"),
        (
            [*TRACE, "--variant", "fused_sequential:portable,bulk_synchronous:portable", "--out", "trace.json"],
            "trace-fused_sequential_portable.json is a folder",
        ),
        ([*LINKS, "--plot", "folder.png"], "--plot folder.png is a folder"),
        ([*LINKS, "--out", "folder.png"], "--out folder.png is a folder"),
        ([*LINKS, "--out", "x.png", "--plot", "x.png"], "--out and --plot are both x.png"),
        (["defaults", "rows.csv", "--out", "file"], "file is no folder to write some-gpu.json to"),
        (["stress", "--device", "cpu", "--out", "file/x.csv"], "file is no folder to write x.csv to"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_written(arguments: list[str], said: str) -> None:
    assert said in refused(*arguments)


@pytest.mark.parametrize(
    ("arguments", "there"),
    [
        ([*TRACE_ONE, "--out", "file"], "--out file exists"),
        ([*LINKS, "--out", "file"], "--out file exists"),
        (["layers", "--device", "cpu", "--out", "file"], "--out file exists"),
        ([*TRACE_ONE, "--out", "x.json", "--plot", "old.png"], "--plot old.png exists"),
        (
            [*TRACE, "--variant", "fused_sequential:portable,bulk_synchronous:portable", "--out", "old.json"],
            "--out old-bulk_synchronous_portable.json exists",
        ),
        (["defaults", "rows.csv", "--out", "."], "--out some-gpu.json exists"),
    ],
)
def test_what_is_there_is_replaced_only_if_asked(arguments: list[str], there: str) -> None:
    for name in ("old.png", "old-bulk_synchronous_portable.json", "some-gpu.json"):
        Path(name).write_text("kept")
    said = refused(*arguments)
    assert there in said
    assert "--overwrite" in said
    assert {Path(name).read_text() for name in ("old.png", "old-bulk_synchronous_portable.json", "some-gpu.json")} == {
        "kept"
    }


@pytest.mark.parametrize(
    "command", [RUN, TRACE_ONE, LINKS, ["stress", "--device", "cpu"]], ids=lambda command: command[0]
)
def test_folders_that_are_missing_are_made(command: list[str]) -> None:
    CliRunner().invoke(cli.app, [*command, "--out", "new/folder/x"])  # ends where ranks would be started
    assert Path("new/folder").is_dir()


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(ValueError, match=r"cannot write --out .*rows\.csv: permission denied"):
        check_outputs(("--out", tmp_path / "rows.csv"), ("--plot", None))


class FullFile(io.BytesIO):
    """A file on a disk without room."""

    def write(self, text: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("error", [errno.EACCES, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    "command",
    [
        [*RUN, "--out"],
        [*RUN, "--plot"],
        [*TRACE_ONE, "--out"],
        [*TRACE_ONE, "--out", "file", "--overwrite", "--plot"],
        [*LINKS, "--out"],
        [*LINKS, "--plot"],
        ["layers", "--device", "cpu", "--out"],
        ["layers", "--device", "cpu", "--plot"],
        ["stress", "--device", "cpu", "--out"],
        ["plot", "rows.csv", "--out"],
    ],
    ids=lambda command: f"{command[0]}{command[-1]}",
)
def test_a_folder_that_takes_no_file(monkeypatch: pytest.MonkeyPatch, command: list[str], error: int) -> None:
    """Whether a new file can be written is tried out, on the disk that it would be on, before any rank starts."""
    no_file = mock.Mock(side_effect=OSError(error, os.strerror(error)))
    monkeypatch.setattr(tempfile, "TemporaryFile", (lambda **_: FullFile()) if error == errno.ENOSPC else no_file)
    said = refused(*command, "new.png")
    assert f"cannot write {command[-1]} new.png: [Errno {error}] {os.strerror(error)}" in said


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """Return what the whole program says, or the status, as it ends."""
    monkeypatch.setattr("sys.argv", ["iris-bench", *arguments])
    monkeypatch.setattr(cli, "heed_termination", lambda: None)
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


FULL = "No space left on device"


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["plot", "rows.csv", "--out", "full.png"], "full.png"),
        (["defaults", "rows.csv", "--out", ".", "--overwrite"], "some-gpu.json"),
    ],
)
def test_a_disk_that_is_full_is_named_with_the_file(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], file: str
) -> None:
    Path(file).symlink_to("/dev/full")
    assert ended(monkeypatch, *arguments) == f"iris-bench: cannot write {file}: {FULL}"


@pytest.mark.parametrize(
    ("write", "file"),
    [
        (lambda path: append_records(path, make_records()), "full.csv"),
        (
            lambda path: trace.write_trace(trace.Traced("family", "variant", "problem", "", [[]], 0.0, 0), path),
            "full.json",
        ),
    ],
)
def test_whatever_is_measured_names_the_file_that_has_no_room(
    monkeypatch: pytest.MonkeyPatch, write: Any, file: str
) -> None:
    monkeypatch.setattr(Path, "open", lambda *_, **__: FullFile())
    with pytest.raises(UnwritableError, match=f"cannot write {file}: {FULL}"):
        write(Path(file))


def test_a_sweep_whose_disk_fills_up_ends_and_shows_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(self: Any, fn: Any, *_: Any) -> Any:
        monkeypatch.setattr(Path, "open", lambda *_, **__: FullFile())  # from now on
        return {"device_name": "a GPU", "driver": ""} if fn is measure.open_rank else [measure.Outcome("library")]

    class MeasuredRanks(ranks.Ranks):
        is_first = True
        call = measured

        def __init__(self, *_: Any) -> None:
            pass

        def close(self, *, kill: bool = False) -> None:
            assert kill

    monkeypatch.setattr(ranks, "StartedRanks", MeasuredRanks)
    assert ended(monkeypatch, *RUN, "--variant", "library", "--out", "new.csv") == 1
    said = capsys.readouterr()
    assert f"the sweep ended early: UnwritableError: cannot write new.csv: {FULL}" in said.err
    assert "library" in said.out


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="File name too long"):
        check_outputs(("--out", tmp_path / ("x" * 999)))


def test_a_link_to_another_output_is_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(ValueError, match="--out and --plot are both"):
        check_different(("--out", tmp_path / "file"), ("--plot", tmp_path / "link"))


@pytest.mark.parametrize("command", [["run"], ["stress"], ["links"], ["tune"], [*TRACE_ONE, "--out", "x.json"]])
@pytest.mark.parametrize(
    ("variable", "value", "works"),
    [
        ("IRIS_DEVICE", "foo", "known devices: auto, cpu, cuda"),
        ("IRIS_TIMEOUT_S", "abc", "a number of seconds"),
        ("IRIS_RANKS_PER_GPU", "none", "a whole number from 1 on"),
    ],
)
def test_a_variable_that_makes_no_sense(
    monkeypatch: pytest.MonkeyPatch, command: list[str], variable: str, value: str, works: str
) -> None:
    monkeypatch.setenv(variable, value)
    said = refused(*command)
    assert variable in said
    assert repr(value) in said
    assert works in said


@pytest.mark.parametrize("command", [["table"], ["plot", "--out", "x.png"]])
def test_a_csv_without_rows(command: list[str]) -> None:
    Path("empty.csv").write_text(",".join(COLUMNS) + "\n")
    assert "there are no r" in refused(*command, "empty.csv")


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_link_without_a_bandwidth(value: str) -> None:
    assert "--link-gbps" in refused(*RUN, "--link-gbps", value)
    assert "--mib" in refused(*LINKS, "--mib", value)
    assert "--seconds" in refused("stress", "--device", "cpu", "--seconds", value)
