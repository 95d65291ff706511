"""The calibration that is kept: a file of the user's own for each kind of GPU, number of them, and versions."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from overlap_taxonomy import Machine, assumed_machine, machine_for

from ..choice.measured import file_name, versions
from ..choice.tuning_cache import cache_folder, check_folder, read_own, write_own

_FORMAT = 2
_LEAST_OF_FITTED = 0.25  # of a fitted time, whatever the difference
_DRIVER_FILES = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))
_FACTS: Mapping[str, type] = {
    "gpu": str,
    "world_size": int,
    "num_sms": int,
    "l2_bytes": int,
    "is_amd": bool,
    "is_hopper": bool,
}  # what `assumed_machine` takes


@functools.cache
def driver() -> str:
    """Return the version of the GPUs' driver; nothing without one."""
    for file in _DRIVER_FILES:
        if file.exists():
            return file.read_text().strip()
    asked = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def calibration_path(gpu: str, world_size: int) -> Path:
    """Return the file of so many GPUs of a kind, for what is installed here; it need not be there."""
    return cache_folder() / file_name(f"calibration {world_size} {gpu}", _versions())


def to_text(facts: Mapping[str, Any], constants: Mapping[str, float]) -> str:
    """Return a calibration as the text of a file.

    Args:
        facts: what `assumed_machine` takes.
        constants: what was measured, by the names that `Machine.constant` takes.
    """
    return json.dumps({"format": _FORMAT, **_versions(), **facts, "constants": dict(constants)}, indent=1) + "\n"


def machine_in(text: str, *, is_of_here: bool = True) -> Machine:
    """Return the machine that a file describes: what was measured, made comparable with constants that were fitted.

    Constants that come with the library are fitted to whole calls, and differ from what a calibration measures by
    itself on the same machine: a launch holds what the next kernel waits for, a copy the engine's wait for the SMs.
    So of a kind of which such a machine was calibrated, too (`reference-*.json`), a rate or share is the fitted one,
    times what was measured here over what was measured there. A time is the fitted one and the difference of what was
    measured, as the rest that the fitted one holds is the same. What could not be measured there is as it is assumed.

    Args:
        text: the file's.
        is_of_here: whether it must have been made with the versions of here.

    Raises:
        ValueError: it is not such a file, was made with other versions, or has what cannot have been measured.
    """
    facts, constants = _parsed(text, _versions() if is_of_here else {})
    assumed = assumed_machine(**facts)
    taken = constants if facts["is_amd"] else _as_fitted(assumed, constants)
    return replace(assumed.with_constants(taken), is_measured=True)


def _as_fitted(assumed: Machine, constants: Mapping[str, float]) -> dict[str, float]:
    """Return the constants to take, of those measured on a machine; ValueError for a name that none has."""
    nearest = min(_references(), key=lambda size: abs(size - assumed.world_size))
    fitted, measured = _references()[nearest]

    def taken(name: str, value: float) -> float:
        if name not in measured:
            return assumed.constant(name)
        known = fitted.constant(name)
        if name.endswith("_us"):
            return max(known + value - measured[name], known * _LEAST_OF_FITTED)
        return known * value / measured[name]

    return {name: taken(name, value) for name, value in constants.items()}


@functools.cache
def _references() -> dict[int, tuple[Machine, dict[str, float]]]:
    """Return the machines whose constants are fitted, and what a calibration measures there, by numbers of GPUs."""
    found = {}
    for file in resources.files(__package__).iterdir():
        if file.name.startswith("reference-"):
            facts, constants = _parsed(file.read_text(encoding="utf-8"), {})
            found[facts["world_size"]] = assumed_machine(**facts), constants
    return found


def _parsed(text: str, versions: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, float]]:
    """Return what `assumed_machine` takes, and the constants, of a file's text; see `machine_in` for errors."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("constants"), dict):
        raise ValueError("it has no constants")
    for name, expected in {"format": _FORMAT, **versions}.items():
        if found.get(name) != expected:
            raise ValueError(f"it was made with {name} {found.get(name)!r}, this is {expected!r}")
    for name, kind in _FACTS.items():
        if type(found.get(name)) is not kind:
            raise ValueError(f"{name} is {found.get(name)!r}")
    for name, value in found["constants"].items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ValueError(f"the constant {name} is {value!r}")
    constants = {name: float(value) for name, value in found["constants"].items()}
    return {name: found[name] for name in _FACTS}, constants


def is_shipped(gpu: str, world_size: int) -> bool:
    """Return whether constants that were measured on such a machine come with the library; they choose better."""
    shipped = machine_for(gpu, world_size)
    return shipped is not None and shipped.is_measured


def read_calibration(gpu: str, world_size: int) -> str | None:
    """Return the text of what was measured of so many GPUs; None where what comes with the library counts instead.

    None, with a warning, of a file that cannot be used.
    """
    if is_shipped(gpu, world_size):
        return None
    path = None
    try:
        path = calibration_path(gpu, world_size)
        text = read_own(path)
        machine = machine_in(text)
        if (machine.world_size, machine.has(gpu)) != (world_size, True):
            raise ValueError(f"it is of {machine.world_size} x {machine.gpu}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RuntimeError) as error:  # no home, for one
        if path:
            said = f"the calibration {path} is not used: {error}; `iris-bench calibrate` replaces it"
            warnings.warn(said, stacklevel=2)
        return None
    return text


def write_calibration(gpu: str, world_size: int, text: str) -> Path:
    """Keep a calibration in place of what there is; return where.

    Raises:
        ValueError: the folder is not the user's own, or cannot be written.
    """
    check_folder()
    path = calibration_path(gpu, world_size)
    try:
        write_own(path, text)
    except OSError as error:
        raise ValueError(f"cannot keep the calibration: {error}; IRIS_CACHE_DIR names another folder") from None
    return path


def kept_machine(gpu: str, world_size: int) -> Machine | None:
    """Return so many GPUs as they were measured here; None where they were not, or it does not count."""
    text = read_calibration(gpu, world_size)
    return machine_in(text) if text else None


def _versions() -> dict[str, str]:
    return versions() | {"driver": driver()}
