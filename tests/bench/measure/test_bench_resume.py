"""Going on with a file of rows: what is measured again, what is not, and what is refused or said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from records import ENVIRONMENT, make_plan, make_records

from iris_bench.measure import environment, sweep
from iris_bench.records.csv_rows import append_records
from iris_bench.records.frames import latest_records
from iris_bench.records.record import YARDSTICKS, Record, read_records
from iris_bench.records.resume import differences
from overlap_taxonomy import get_variant, registry


def test_resuming_measures_what_is_not_ok_again() -> None:
    done = make_records()
    (job,) = make_plan(done=done, variants="copy_engine:portable,fused_sequential:portable").jobs
    assert job.variants == ("library", "fused_sequential:portable")
    assert make_plan(done=done, variants="copy_engine:portable").jobs == ()
    assert len(make_plan(done=done, variants="copy_engine:portable", dtype="fp16").jobs) == 1
    assert len(make_plan(done=done, variants="copy_engine:portable", shapes="8192x8192x8192,8x8x8").jobs) == 1


def test_resuming_looks_at_the_names_of_devices_of_its_own_kind() -> None:
    done = make_records("cuda") + make_records("cpu")
    done[-1] = replace(done[-1], device_name="a processor")
    assert make_plan(done=done, device="cuda").device_names == {"Some GPU"}
    assert make_plan(done=done, device="cpu").device_names == {"Some GPU", "a processor"}


def test_times_of_other_bursts_are_not_gone_on_from() -> None:
    done = make_records()
    with pytest.raises(ValueError, match=r"--burst 1, .* bursts of 10, .* give --burst 10 or another --out"):
        make_plan(done=done, burst=1)
    assert make_plan(done=done, burst=1, variants="copy_engine:portable").jobs == ()  # nothing is measured
    assert make_plan(done=done, burst=1, variants="fused_sequential:portable", timed=False).jobs
    assert make_plan(done=[replace(row, device="cpu") for row in done], burst=1).jobs


def test_how_rows_to_come_are_made_otherwise_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    done, now = make_records(), {"device": "cuda", "timed": True, "rounds": 20, "seed": 0, "link_gbps": 387.0}
    monkeypatch.setattr(environment, "versions", lambda: ENVIRONMENT)
    assert differences(done, **now) == ""
    changes = {"rounds": 6, "seed": 1, "link_gbps": 40.0, "commit": "def", "torch": "1", "triton": "2"}
    for name, value in changes.items():
        others = [*done, replace(done[1], **{name: value})]
        assert differences(others, **now) == f"{name} {value} (now {now.get(name) or getattr(done[0], name)})"
        assert differences(others, **now | {"device": "cpu"}) == ""


def test_resuming_times_what_was_only_checked() -> None:
    checked = [replace(record, time_us=None) for record in make_records()]
    assert len(make_plan(done=checked, variants="copy_engine:portable").jobs) == 1
    assert make_plan(done=checked, variants="copy_engine:portable", timed=False).jobs == ()


def test_resuming_does_not_repeat_the_library_row(tmp_path: Path) -> None:
    done = make_records()
    output = sweep.Output(tmp_path / "rows.csv", done)
    output.add(make_records())
    assert [record.variant for record in read_records(tmp_path / "rows.csv")] == [
        "copy_engine:portable",
        "fused_sequential:portable",
    ]


def test_a_library_that_was_only_checked_is_timed_once(tmp_path: Path) -> None:
    """The row with a time is added to the one without, and counts from then on."""
    path, timed = tmp_path / "rows.csv", make_records()
    append_records(path, [replace(timed[0], time_us=None, latency_us=None)])
    plan = make_plan(done=read_records(path), variants="library,copy_engine:portable")
    assert plan.jobs[0].variants == ("library", "copy_engine:portable")
    sweep.Output(path, read_records(path)).add(timed)
    done = read_records(path)
    assert [record.variant for record in done[:3]] == ["library", "library", "copy_engine:portable"]
    assert [record.time_us for record in latest_records(done)[:2]] == [700.0, 500.0]
    assert make_plan(done=done, variants="library,copy_engine:portable").jobs == ()
    sweep.Output(path, done, timed=False).add([replace(timed[0], time_us=None)])
    assert read_records(path) == done


@pytest.mark.parametrize("implied", ["library", "gemm_alone", "communication_alone"])
def test_resuming_measures_what_comes_with_every_run_again(tmp_path: Path, implied: str) -> None:
    """Its row may be the one that was cut, the variants' being there."""
    path, whole = tmp_path / "rows.csv", make_records()
    append_records(path, [record for record in whole if record.variant != implied])
    done = read_records(path)
    (job,) = make_plan(done=done, variants="copy_engine:portable").jobs
    assert job.variants == ("library",)
    sweep.Output(path, done).add([record for record in whole if record.variant in ("library", *YARDSTICKS)])
    assert [record.variant for record in read_records(path)[len(done) :]] == [implied]
    assert make_plan(done=read_records(path), variants="copy_engine:portable").jobs == ()
    assert bool(make_plan(done=done, variants="copy_engine:portable", timed=False).jobs) == (implied == "library")


def without_library(records: list[Record]) -> list[Record]:
    """The rows of a run in which the library's result was wrong."""
    rows = [replace(record, library_us=None, speedup_vs_library=None) for record in records]
    return [replace(row, status="wrong", time_us=None) if row.variant == "library" else row for row in rows]


def test_a_library_that_is_wrong_when_resumed_is_kept(tmp_path: Path) -> None:
    done = make_records()
    output = sweep.Output(tmp_path / "rows.csv", done)
    output.add(without_library(make_records()))
    assert [record.status for record in output.records[len(done) :] if record.variant == "library"] == ["wrong"]
    (job,) = make_plan(done=output.records, variants="copy_engine:portable").jobs
    assert job.variants == ("library", "copy_engine:portable")


def test_what_was_timed_without_a_library_is_timed_with_one() -> None:
    done = [record for record in without_library(make_records()) if record.variant != "fused_sequential:portable"]
    (job,) = make_plan(done=done, variants="copy_engine:portable").jobs
    assert job.variants == ("library", "copy_engine:portable")
    assert make_plan(done=done, variants="copy_engine:portable", timed=False).jobs[0].variants == ("library",)


def test_the_last_row_says_whether_a_thing_is_finished() -> None:
    done = make_records()
    done += [replace(done[1], status="wrong", time_us=None)]
    assert make_plan(done=done, variants="copy_engine:portable").jobs[0].variants == ("library", "copy_engine:portable")


class TestWhatIsUnsupported:
    """Of `kraken`, whether it is installed decides; a ValueError is of a rank that tried to make the operator."""

    @staticmethod
    def row(reason: str = "kraken is not installed", **changes) -> Record:
        return replace(
            make_records()[2], **({"variant": "kraken", "status": "unsupported", "reason": reason} | changes)
        )

    @staticmethod
    def planned(done: list[Record]) -> list[tuple[str, ...]]:
        done = [replace(record, family="all_gather_gemm") for record in done]
        return [job.variants for job in make_plan(done=done, families="all_gather_gemm", variants="kraken").jobs]

    @pytest.fixture(params=[None])
    def reason_here(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        kraken = get_variant("all_gather_gemm", "kraken")
        variant = replace(kraken, unsupported_reason=lambda problem, config: request.param)
        monkeypatch.setitem(registry._variants, ("all_gather_gemm", "kraken"), variant)

    @pytest.mark.parametrize("reason_here", ["kraken is not installed"], indirect=True)
    @pytest.mark.usefixtures("reason_here")
    def test_is_not_planned_again(self) -> None:
        assert self.planned([*make_records(), self.row()]) == []
        assert self.planned(make_records()) == [("library", "kraken")]
        assert self.planned([*make_records(), self.row(), self.row(status="error")]) == [("library", "kraken")]

    @pytest.mark.usefixtures("reason_here")
    def test_is_planned_once_it_is_supported(self) -> None:
        assert self.planned([*make_records(), self.row()]) == [("library", "kraken")]

    @pytest.mark.usefixtures("reason_here")
    @pytest.mark.parametrize(
        ("changes", "again"), [({}, False), ({"commit": "def"}, True), ({"triton": "4"}, True), ({"torch": "3"}, True)]
    )
    def test_to_ranks_alone_is_planned_with_other_versions(
        self, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], again: bool
    ) -> None:
        monkeypatch.setattr(environment, "versions", lambda: ENVIRONMENT | changes)
        assert bool(self.planned([*make_records(), self.row("ValueError: too few flags")])) == again

    def test_is_not_repeated(self, tmp_path: Path) -> None:
        output = sweep.Output(tmp_path / "rows.csv", [self.row()])
        output.add([self.row()])
        assert output.records == [self.row()]
        output.add([self.row("kraken is too old")])
        assert [record.reason for record in read_records(tmp_path / "rows.csv")] == ["kraken is too old"]
