"""Measured times of variants, by problem: what `auto` knows of a machine. JSON, every field checked as it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata, resources
from typing import Any, NamedTuple

import torch
import triton

from overlap_taxonomy import Work, current_name, is_retired, machine_for

from ..config import OPERAND_DTYPES, GemmConfig, current_fields, invalid_reason
from ..problem import Problem

FORMAT = 1
_ELEMENT_BYTES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in OPERAND_DTYPES}
_MOST = 1 << 31  # of a size


class Key(NamedTuple):
    """What a time was measured for; the dtype as torch names it, of fp8 with what has a scale ("float8_e4m3fn-row")."""

    family: str
    m: int
    n: int
    k: int
    world_size: int
    dtype: str


@dataclass(frozen=True)
class Measured:
    """The times of one problem.

    Args:
        times_us: by variant, with the fastest of its configurations that were tried.
        configs: that configuration, where it is not the default.
    """

    times_us: Mapping[str, float]
    configs: Mapping[str, GemmConfig] = field(default_factory=dict)


Table = dict[Key, Measured]


def key_of(family: str, problem: Problem) -> Key:
    """Return what a problem's times are found by."""
    dtype = "-".join([str(problem.dtype).removeprefix("torch."), *([problem.scale_kind] if problem.scales else [])])
    if problem.use_fast_accum:
        dtype += "-fast"
    return Key(family, problem.m, problem.n, problem.k, problem.world_size, dtype)


def work_of(key: Key) -> Work:
    """Return what a time was measured for as the model sees it.

    Raises:
        ValueError: operands of that dtype are multiplied by no kernel here.
    """
    name, *scales = key.dtype.split("-")
    element_bytes = _ELEMENT_BYTES.get(name)
    if element_bytes is None:
        raise ValueError(f"unknown dtype {name!r}; known dtypes: {', '.join(_ELEMENT_BYTES)}")
    sums = ""
    if element_bytes == 1:
        sums = next((kind for kind in ("block", "fast") if kind in scales), "promoted")
    sizes = key.m, key.n, key.k, key.world_size
    return Work(key.family, *sizes, element_bytes, max(2, element_bytes), sums=sums)


def setup_of(gpu: str) -> dict[str, Any]:
    """Return what times must have been measured with to hold here."""
    return {"format": FORMAT, "gpu": gpu, **versions()}


def versions() -> dict[str, str]:
    """Return the versions that a time depends on: torch brings the libraries' GEMM and collectives."""
    try:
        library = metadata.version("iris-overlap")
    except metadata.PackageNotFoundError:
        library = "unknown"
    return {"triton": triton.__version__, "torch": torch.__version__, "library": library}


def file_name(gpu: str, of: Mapping[str, str] | None = None) -> str:
    """Return the name of the file of a kind of GPU, and of versions where its times are of these alone."""
    words = [gpu, *(f"{name} {version}" for name, version in (of or {}).items())]
    plain = "".join(letter if letter.isalnum() or letter in "._" else "-" for letter in " ".join(words).lower())
    return f"{plain.strip('-') or 'unknown'}.json"


def to_json(setup: Mapping[str, Any], table: Table) -> str:
    """Return a table as the text of a file."""
    entries = [
        {
            **key._asdict(),
            "times_us": {name: float(f"{us:.6g}") for name, us in measured.times_us.items()},
            "configs": {name: asdict(config) for name, config in measured.configs.items()},
        }
        for key, measured in sorted(table.items())
    ]
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    head = json.dumps({**setup})[1:-1]
    return f'{{{head}, "entries": [\n{lines}\n]}}\n'


def from_json(text: str, setup: Mapping[str, Any]) -> Table:
    """Return the table in a file.

    Args:
        text: the file's.
        setup: what it must have been measured with; what is not named here may be anything.

    Raises:
        ValueError: it was measured with something else, or is not such a file; names what is wrong.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("entries"), list):
        raise ValueError("it has no list of entries")
    for name, expected in setup.items():
        if found.get(name) != expected:
            raise ValueError(f"it was made with {name} {found.get(name)!r}, this is {expected!r}")
    table: Table = {}
    for index, entry in enumerate(found["entries"]):
        try:
            key, measured = _entry(entry)
        except (ValueError, TypeError, KeyError, ArithmeticError) as error:
            raise ValueError(f"entry {index}: {type(error).__name__}: {error}") from None
        table[key] = measured
    return table


def shipped_table(gpu: str) -> Table:
    """Return the times that come with the library, for a kind of GPU; none for most."""
    file = resources.files(__package__).joinpath("measured_times", file_name(gpu))
    return from_json(file.read_text(encoding="utf-8"), {"format": FORMAT, "gpu": gpu}) if file.is_file() else {}


def shipped_tables(gpu: str) -> dict[str, Table]:
    """Return the times that come with the library of a kind of GPU, and of others of its chip, by their names."""
    chip = _chip_of(gpu)
    return {name: table for name, table in all_shipped_tables().items() if chip and _chip_of(name) == chip}


def all_shipped_tables() -> dict[str, Table]:
    """Return all times that come with the library, by the GPUs' names."""
    files = resources.files(__package__).joinpath("measured_times").iterdir()
    texts = {file.name: file.read_text(encoding="utf-8") for file in files if file.name.endswith(".json")}
    gpus = {name: json.loads(text.partition('"entries"')[0].rstrip(" ,") + "}")["gpu"] for name, text in texts.items()}
    return {gpu: from_json(texts[name], {"format": FORMAT, "gpu": gpu}) for name, gpu in sorted(gpus.items())}


def _chip_of(gpu: str) -> str | None:
    machine = machine_for(gpu, 1)
    return machine.chip if machine else None


def _entry(entry: Any) -> tuple[Key, Measured]:
    values = {name: entry[name] for name in Key._fields}
    for name, value in values.items():
        kind = str if name in ("family", "dtype") else int
        if type(value) is not kind or (type(value) is int and not 0 < value < _MOST):
            raise ValueError(f"{name} is {value!r}")
    times, configs = entry["times_us"], entry.get("configs", {})
    if not isinstance(times, dict) or not times or not isinstance(configs, dict):
        raise ValueError("times_us and configs must be objects")
    for name, us in times.items():
        if type(us) not in (int, float) or not math.isfinite(us) or us <= 0:
            raise ValueError(f"the time of {name} is {us!r}")
    key = Key(**values)
    work_of(key)  # of a dtype that is known
    now = {name: current_name(key.family, name) for name in (*times, *configs)}
    there = {name for name, present in now.items() if not is_retired(key.family, present)}
    configured = {now[name]: to_config(config) for name, config in configs.items() if name in there}
    return key, Measured({now[name]: us for name, us in times.items() if name in there}, configured)


def to_config(found: Any) -> GemmConfig:
    """Return the configuration that JSON holds, with names of fields of any version; ValueError where it is none."""
    types = {column.name: bool if column.type == "bool" else int for column in fields(GemmConfig)}
    if not isinstance(found, dict) or current_fields(dict.fromkeys(found, 1)).keys() - types.keys():
        raise ValueError(f"{found!r} is no configuration")
    for name, value in found.items():
        if type(value) is not types.get(name, int):
            raise ValueError(f"{name} is {value!r}")
    config = GemmConfig(**current_fields(found))
    if reason := invalid_reason(config):
        raise ValueError(reason)
    return config


def device_name(device: torch.device) -> str:
    """Return a GPU's name as its driver gives it; empty without one."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
