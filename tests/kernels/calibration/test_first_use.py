"""The calibration by itself, at the first use: when, once, by all ranks, and kept."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from calibrations import FACTS, NEW, OF_BYTES, TRUE, as_if_on
from ranks import Ranks, close_context, context

from iris_core import Context
from iris_kernels.common.calibration import calibrate, first_use
from iris_kernels.common.calibration.calibrate import facts_of
from iris_kernels.common.calibration.first_use import spread_reason
from iris_kernels.common.calibration.kept import kept_machine, machine_in, to_text, write_calibration
from iris_kernels.common.choice import auto


@contextlib.contextmanager
def on_a_new_gpu(folder: str, reason: str | None = "") -> Iterator[mock.MagicMock]:
    """On GPUs of which nothing is known, with a cache in a folder; `reason` not to measure, None for the real one."""
    facts = {**FACTS, "world_size": context().get_num_ranks()}
    said = mock.MagicMock()
    with contextlib.ExitStack() as changed:
        for patch in (
            mock.patch.dict(os.environ, {"IRIS_CACHE_DIR": folder}),
            mock.patch.object(auto, "device_name", return_value=NEW),
            mock.patch.object(first_use, "facts_of", return_value=facts),
            mock.patch.object(first_use, "busy_reason", return_value=""),
            mock.patch.object(calibrate, "STEPS", OF_BYTES),
            mock.patch.object(first_use, "calibrate", lambda ctx: calibrate.calibrate(ctx, steps=OF_BYTES)),
            mock.patch.object(Context, "info", said),
            as_if_on(TRUE),
        ):
            changed.enter_context(patch)
        if reason is not None:
            changed.enter_context(mock.patch.object(first_use, "_reason_not_to", return_value=reason))
        yield said


def taken(link_gbps: float) -> float:
    """Return what is taken of two GPUs of which that was measured."""
    return machine_in(to_text(FACTS, {"link_gbps": link_gbps})).link_gbps


def know(
    rank: int, world_size: int, folders: Sequence[str], reasons: Sequence[str]
) -> tuple[Any, list[str], list[str]]:
    """Return a constant as it is known, what was said, and the files there are then."""
    with warnings.catch_warnings(record=True) as warned, on_a_new_gpu(folders[rank], reasons[rank]) as said:
        warnings.simplefilter("always")
        known = auto.known_of(context())
        link = known.calibrated.link_gbps if known.calibrated else None
        lines = [call.args[-1] for call in said.call_args_list]
        there = sorted(file.name for file in Path(folders[rank]).glob("calibration*"))
    close_context()
    return link, lines + [str(one.message) for one in warned if "calibration" in str(one.message)], there


@pytest.mark.parametrize("device", ["cpu"])
def test_an_unknown_machine_is_measured_once(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Rank 0 keeps it: the other rank's cache stays empty."""
    asked = [[str(tmp_path / "first"), str(tmp_path / "second")], ["", ""]]
    (link, lines, there), (other, silence, empty) = ranks(2).call(know, *asked)
    assert link == other == pytest.approx(taken(TRUE.link_gbps), rel=0.01)
    assert len(there) == 1
    assert empty == silence == []
    assert "once, for 15 to 60 s; IRIS_CALIBRATE=0 turns that off" in lines[0]
    assert f"kept in {tmp_path / 'first' / there[0]}" in lines[1]
    again = ranks(2).call(know, *asked)
    assert [link for link, *_ in again] == [link, link]
    assert [lines for _, lines, _ in again] == [[], []]


def keep_first(rank: int, world_size: int, folders: Sequence[str]) -> None:
    """Keep another calibration on each rank."""
    with on_a_new_gpu(folders[rank]):
        write_calibration(NEW, world_size, to_text(FACTS, {"link_gbps": [300.0, 400.0][rank]}))
    close_context()


@pytest.mark.parametrize("device", ["cpu"])
def test_of_ranks_with_different_files_that_of_rank_0_counts(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    folders = [str(tmp_path / "first"), str(tmp_path / "second")]
    ranks(2).call(keep_first, folders)
    assert [link for link, *_ in ranks(2).call(know, folders, ["", ""])] == [taken(300.0)] * 2


@pytest.mark.parametrize("device", ["cpu"])
def test_instead_of_a_file_that_cannot_be_used_it_is_measured_again(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    folders = [str(tmp_path / "first"), str(tmp_path / "second")]
    ranks(2).call(keep_first, folders)
    (file,) = (tmp_path / "first").glob("calibration*")
    file.write_text("{")
    (link, lines, _), (other, *_) = ranks(2).call(know, folders, ["", ""])
    assert link == other == pytest.approx(taken(TRUE.link_gbps), rel=0.01)
    assert any("is not used: it is not JSON" in line for line in lines)
    json.loads(file.read_text())


def choose_before(rank: int, world_size: int, folder: str) -> None:
    """Leave a context of which all is known, as tests do that choose."""
    with on_a_new_gpu(folder, "no time"):
        auto.known_of(context())


def know_for_real(rank: int, world_size: int, folder: str) -> tuple[Any, list[str]]:
    """Take the GPUs for others, of which nothing is known."""
    close_context()
    facts = facts_of(context()) | {"gpu": NEW}
    with (
        mock.patch.dict(os.environ, {"IRIS_CACHE_DIR": folder}),
        mock.patch.object(auto, "device_name", return_value=NEW),
        mock.patch.object(first_use, "facts_of", return_value=facts),
        mock.patch.object(Context, "info") as said,
    ):
        known = auto.known_of(context())
    close_context()
    return known.calibrated, [call.args[-1] for call in said.call_args_list]


def test_unknown_gpus_are_measured_by_themselves(ranks: Callable[[int], Ranks], device: str, tmp_path: Path) -> None:
    """Or it is said why not: they may be busy with what other processes do."""
    folder = str(tmp_path / "cache")
    ranks(2).call(choose_before, folder)
    (machine, lines), (other, silence) = ranks(2).call(know_for_real, folder)
    assert silence == []
    if machine is None:
        assert other is None
        why = "the GPU is busy" if device == "cuda" else "kernels are interpreted"
        assert f"it is not measured now: {why}" in lines[-1]
    else:
        assert machine.link_gbps == other.link_gbps
        assert "kept in" in lines[-1]


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("reasons", [["no time", ""], ["", "no time"]])
def test_where_one_rank_cannot_none_measures(ranks: Callable[[int], Ranks], tmp_path: Path, reasons: list[str]) -> None:
    (link, lines, there), (other, *_) = ranks(2).call(know, [str(tmp_path / "a"), str(tmp_path / "b")], reasons)
    assert link is None
    assert other is None
    assert there == []
    assert lines == [f"the cost model does not know {NEW}, and it is not measured now: no time"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"switch": "0"}, "IRIS_CALIBRATE is 0"),
        ({"switch": "off"}, "IRIS_CALIBRATE is off"),
        ({"switch": "1"}, ""),
        ({"is_interpreted": True}, "kernels are interpreted"),
        ({"is_capturing": True}, "a stream is being captured"),
        ({"is_compiling": True}, "a graph is being compiled"),
        ({"busy": "the GPU is busy"}, "the GPU is busy"),
    ],
)
def test_when_nothing_is_measured(changed: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IRIS_CALIBRATE", raising=False)
    if "switch" in changed:
        monkeypatch.setenv("IRIS_CALIBRATE", changed["switch"])
    ctx = mock.MagicMock()
    ctx.is_interpreted.return_value = changed.get("is_interpreted", False)
    ctx.backend.is_capturing.return_value = changed.get("is_capturing", False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: changed.get("is_compiling", False))
    monkeypatch.setattr(first_use, "busy_reason", lambda ctx: changed.get("busy", ""))
    assert first_use._reason_not_to(ctx) == reason


def test_a_switch_that_makes_no_sense_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRIS_CALIBRATE", "maybe")
    with pytest.raises(ValueError, match="IRIS_CALIBRATE is 'maybe'"):
        first_use._reason_not_to(mock.MagicMock())


def test_what_was_measured_of_such_a_machine_and_shipped_comes_first(cache: Path) -> None:
    ctx = mock.MagicMock()
    ctx.get_num_ranks.return_value = 2
    write_calibration("NVIDIA H200", 2, to_text({**FACTS, "gpu": "NVIDIA H200"}, {"link_gbps": 500.0}))
    assert first_use.calibrated_machine(ctx, "NVIDIA H200") is None
    assert not ctx.broadcast.called
    assert kept_machine("NVIDIA H200", 2) is None


def test_what_was_kept_counts_where_nothing_or_only_another_machines_is_shipped(cache: Path) -> None:
    ctx = mock.MagicMock()
    ctx.get_num_ranks.return_value, ctx.get_rank.return_value = 2, 0
    ctx.broadcast = lambda value, src: value
    for gpu in (NEW, "NVIDIA H100 80GB HBM3"):
        write_calibration(gpu, 2, to_text({**FACTS, "gpu": gpu}, {"link_gbps": 500.0}))
        for machine in (first_use.calibrated_machine(ctx, gpu), kept_machine(gpu, 2)):
            assert machine is not None
            assert machine.link_gbps == taken(500.0)


def test_a_known_gpu_in_another_number_is_not_measured_unasked(cache: Path) -> None:
    ctx = mock.MagicMock()
    ctx.get_num_ranks.return_value, ctx.get_rank.return_value = 8, 0
    ctx.broadcast = lambda value, src: value
    with mock.patch.object(first_use, "_measured", side_effect=AssertionError):
        assert first_use.calibrated_machine(ctx, "NVIDIA H100 80GB HBM3") is None


def test_others_on_the_gpu_are_told_by_how_times_spread() -> None:
    alone = [100.0 + index % 7 for index in range(150)]
    assert spread_reason(alone) == ""
    assert spread_reason([*alone[:-2], 2000.0, 3000.0]) == ""  # now and then something is late
    in_turns = [us if index % 8 else 2000.0 for index, us in enumerate(alone)]
    assert "the GPU is busy: a tenth of one GEMM's runs take 19" in spread_reason(in_turns)
