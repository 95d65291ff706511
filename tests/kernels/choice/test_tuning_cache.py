"""The tuning cache: what is written is read again, and nothing else is: every corruption is refused with a warning."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch

from iris_kernels.common.choice import measured, tuning_cache
from iris_kernels.common.choice.measured import Key, Measured, from_json, setup_of, shipped_table, to_json
from iris_kernels.common.choice.tuning_cache import cache_path, read_cache, write_cache
from iris_kernels.common.config import GemmConfig

GPU = "NVIDIA H200"
KEY = Key("gemm_all_scatter", 8192, 4096, 1024, 4, "bfloat16")
CONFIG = GemmConfig(128, 128, 64, num_stages=4)
TABLE = {KEY: Measured({"library_layout": 100.0, "copy_engine:portable": 80.5}, {"copy_engine:portable": CONFIG})}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("IRIS_CACHE_DIR", str(path))
    return path


def files(folder: Path) -> set[str]:
    """All but the locks, which stay."""
    return {name for name in os.listdir(folder) if not name.endswith(".lock")}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_written_is_read_again(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_cache(GPU) == {}  # nothing there is nothing wrong
        path = write_cache(GPU, TABLE)
        assert read_cache(GPU) == TABLE
    assert path == cache_path(GPU)
    assert path.parent == folder
    assert (mode(path), mode(folder)) == (0o600, 0o700)
    assert files(folder) == {path.name}  # no temporary file is left


def test_times_are_added_to_those_there() -> None:
    other = KEY._replace(m=1)
    write_cache(GPU, TABLE)
    write_cache(GPU, {other: Measured({"library": 5.0})})
    assert read_cache(GPU).keys() == {KEY, other}
    write_cache(GPU, {KEY: Measured({"library_layout": 99.0})})
    assert read_cache(GPU)[KEY] == Measured({"library_layout": 99.0})


def test_the_folder_is_in_the_home_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("IRIS_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path(GPU).parent == tmp_path / ".cache" / "iris-overlap"


def test_the_folder_may_be_named_from_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IRIS_CACHE_DIR", "~/tuned")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path(GPU).parent == tmp_path / "tuned"


@pytest.mark.parametrize("what", ["triton", "torch"])
def test_times_of_other_versions_have_a_file_of_their_own(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    path = write_cache(GPU, TABLE)
    monkeypatch.setattr(getattr(measured, what), "__version__", "99.0+cu999")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_cache(GPU) == {}
        assert f"{what}-99.0-cu999" in write_cache(GPU, {KEY: Measured({"library": 1.0})}).name
    monkeypatch.undo()
    monkeypatch.setenv("IRIS_CACHE_DIR", str(path.parent))
    assert read_cache(GPU) == TABLE


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IRIS_CACHE_DIR")
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("no home directory.")))
    assert read_cache(GPU) == {}
    with pytest.raises(ValueError, match=r"no home directory\. IRIS_CACHE_DIR names a folder"):
        write_cache(GPU, TABLE)


def refused(says: str) -> None:
    """The file is not used, and the warning names it, what is wrong, and what to do."""
    with pytest.warns(UserWarning, match="is not used") as caught:
        assert read_cache(GPU) == {}
    (warning,) = caught
    for part in (str(cache_path(GPU)), says, "run `iris-bench tune` again"):
        assert part in str(warning.message)


def changed(**fields: Any) -> str:
    return json.dumps(json.loads(to_json(setup_of(GPU), TABLE)) | fields)


def entry(**fields: Any) -> str:
    said = json.loads(to_json(setup_of(GPU), TABLE))
    said["entries"][0] |= fields
    return json.dumps(said)


CORRUPT = {
    "empty": ("", "not JSON"),
    "truncated": (to_json(setup_of(GPU), TABLE)[:-20], "not JSON"),
    "not JSON": ("import os; os.abort()", "not JSON"),
    "not text": (b"\xff\xfe\x00", "decode"),
    "very deep": ("[" * 100_000, "not JSON"),
    "a list": ("[]", "no list of entries"),
    "no entries": ("{}", "no list of entries"),
    "another format": (changed(format=99), "format 99"),
    "another Triton": (changed(triton="2.0.0"), "triton '2.0.0'"),
    "another torch": (changed(torch="1.0"), "torch '1.0'"),
    "another version": (changed(library="0.0.1"), "library '0.0.1'"),
    "another GPU": (changed(gpu="NVIDIA B300"), "gpu 'NVIDIA B300'"),
    "entries of another kind": (changed(entries=[1]), "entry 0"),
    "a missing size": (changed(entries=[{"family": "x"}]), "entry 0: KeyError: 'm'"),
    "a size as text": (entry(m="8192"), "m is '8192'"),
    "a size beyond all": (entry(m=10**400), "ValueError: m is 1000"),
    "a time beyond all": (entry(times_us={"library": 10**400}), "OverflowError"),
    "a size that is true": (entry(k=True), "k is True"),
    "no times": (entry(times_us={}), "times_us"),
    "a time as text": (entry(times_us={"library": "fast"}), "'fast'"),
    "a negative time": (entry(times_us={"library": -1}), "-1"),
    "not a number": (entry(times_us={"library": float("nan")}), "nan"),
    "endless": (entry(times_us={"library": float("inf")}), "inf"),
    "a foreign field": (entry(configs={"copy_engine:portable": {"__class__": "x"}}), "is no configuration"),
    "half a configuration": (entry(configs={"copy_engine:portable": {"block_m": 128}}), "TypeError"),
    "a bad configuration": (
        entry(configs={"copy_engine:portable": {"block_m": 48, "block_n": 64, "block_k": 64}}),
        "block_m is 48",
    ),
    "a fraction of a warp": (
        entry(configs={"copy_engine:portable": {"block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4.5}}),
        "num_warps is 4.5",
    ),
}


@pytest.mark.parametrize("what", CORRUPT)
def test_a_corrupted_file_is_not_used(what: str) -> None:
    content, says = CORRUPT[what]
    path = write_cache(GPU, TABLE)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(says)
    with pytest.warns(UserWarning, match="is not used"):
        write_cache(GPU, TABLE)  # mends it
    assert read_cache(GPU) == TABLE


def test_a_file_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    write_cache(GPU, TABLE)
    monkeypatch.setattr(tuning_cache, "_MOST_BYTES", 10)
    refused("more than 10")


@pytest.mark.parametrize("bits", [0o620, 0o602])
def test_a_file_that_others_may_write_is_not_used(bits: int) -> None:
    write_cache(GPU, TABLE).chmod(bits)
    refused("others may write")


def test_a_folder_that_others_may_write_is_not_used(folder: Path) -> None:
    write_cache(GPU, TABLE)
    folder.chmod(0o777)
    refused("others may write")
    with pytest.raises(ValueError, match=r"others may write .*IRIS_CACHE_DIR names another folder"):
        write_cache(GPU, TABLE)


def test_another_users_file_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    write_cache(GPU, TABLE)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    refused("not to 12345")


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    path = write_cache(GPU, TABLE)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    refused("symbolic links")


def test_what_cannot_be_read_is_not_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of measurement may be in it."""

    def refuse(path: Path) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    write_cache(GPU, TABLE)
    with monkeypatch.context() as patch:
        patch.setattr(tuning_cache, "read_own", refuse)
        with pytest.raises(ValueError, match="Input/output error"):
            write_cache(GPU, {KEY._replace(m=1): Measured({"library": 1.0})})
    assert read_cache(GPU) == TABLE


def test_a_pipe_holds_nobody_up(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.mkfifo(cache_path(GPU), 0o600)
    refused("not a regular file")


def test_a_write_that_fails_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_cache(GPU, TABLE)
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(ValueError, match="disk full"):
        write_cache(GPU, {KEY._replace(m=1): Measured({"library": 1.0})})
    assert read_cache(GPU) == TABLE
    assert files(folder) == {path.name}


def test_writers_at_once_keep_each_others_times(monkeypatch: pytest.MonkeyPatch) -> None:
    read = tuning_cache._times_in

    def read_slowly(path: Path, gpu: str) -> measured.Table:
        table = read(path, gpu)
        time.sleep(0.02)  # for another to write meanwhile
        return table

    monkeypatch.setattr(tuning_cache, "_times_in", read_slowly)
    keys = {KEY._replace(m=size) for size in range(1, 9)}
    with ThreadPoolExecutor(len(keys)) as writers:
        list(writers.map(lambda key: write_cache(GPU, {key: Measured({"library": 1.0})}), keys))
    assert read_cache(GPU).keys() == keys


def test_a_writer_that_holds_the_lock_for_ever_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_cache, "_LOCK_TIMEOUT_S", 0.05)
    path = write_cache(GPU, {})
    (lock,) = set(os.listdir(folder)) - {path.name}
    with (folder / lock).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.warns(UserWarning, match=r"cannot lock .*nvidia-h200.*\.json: another process has held the lock"):
            write_cache(GPU, TABLE)
    assert read_cache(GPU) == TABLE


def test_a_file_system_without_locks_is_written_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="No locks available; what others write at this moment may be lost"):
        write_cache(GPU, TABLE)
    assert read_cache(GPU) == TABLE


def test_a_folder_that_cannot_be_written_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system")

    write_cache(GPU, TABLE)
    monkeypatch.setattr(tuning_cache.tempfile, "TemporaryFile", refuse)
    with pytest.raises(ValueError, match=r"Read-only file system; IRIS_CACHE_DIR names another folder"):
        write_cache(GPU, {KEY: Measured({"library": 1.0})})
    assert read_cache(GPU) == TABLE


def test_the_times_that_come_with_the_library_are_sound() -> None:
    table = shipped_table(GPU)
    assert table
    assert shipped_table("NVIDIA GeForce 256") == {}
    for key, times in table.items():
        assert "library" in times.times_us
        dtype, *scales = key.dtype.split("-")
        assert getattr(torch, dtype) in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
        assert bool(scales) == (dtype == "float8_e4m3fn")


def test_shipped_times_need_not_be_of_this_triton() -> None:
    text = to_json({"format": measured.FORMAT, "gpu": GPU}, TABLE)
    assert from_json(text, {"format": measured.FORMAT, "gpu": GPU}) == TABLE
    with pytest.raises(ValueError, match="triton None"):
        from_json(text, setup_of(GPU))
