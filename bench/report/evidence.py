"""The measurements that the documentation shows: CSVs of results/, machines, the fastest variant of each problem."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from overlap_taxonomy import list_variants

from ..benchmarks.decoder.record import DecoderRecord
from ..benchmarks.decoder.show import by_step
from ..benchmarks.links.record import LinkRecord
from ..records import frames
from ..records.record import YARDSTICKS, AnyRow, Record, kind_of, read_as

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
LEFT_OUT = ("archive", "local", "tuning")  # folders whose CSVs no table or picture shows
FAMILIES = ("gemm_all_scatter", "all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
HELD_UP = 1.25
OTHERS = ("async_tp", "kraken", "quack")  # other projects' fused operators
EXPLICIT = "explicit"
HELD_OUT = "held_out"
M_GROUPS = (("M ≤ 128", 1, 128), ("M = 129 to 1024", 129, 1024), ("M > 1024", 1025, 1 << 30))
T = TypeVar("T")


def csvs() -> list[Path]:
    """Return the CSVs that tables and pictures are made from, in every folder of results/ but `LEFT_OUT`."""
    found = (path for path in RESULTS.rglob("*.csv") if path.relative_to(RESULTS).parts[0] not in LEFT_OUT)
    return sorted(found, key=lambda path: path.relative_to(RESULTS).parts)


@functools.cache
def kinds() -> Mapping[Path, type[Any] | None]:
    """Return which command each CSV is of, by file."""
    return {path: kind_of(path) for path in csvs()}


@functools.cache
def rows_in(path: Path) -> list[Any]:
    """Return the rows of a CSV of a command."""
    kind = kinds()[path]
    assert kind is not None
    return read_as(path, kind, speak=False)


def read_all(kind: type[AnyRow]) -> dict[Path, list[AnyRow]]:
    """Return the rows of every CSV of one command, by file."""
    return {path: rows_in(path) for path, its in kinds().items() if its is kind}


@functools.cache
def sweeps() -> pd.DataFrame:
    """Return all rows of ``iris-bench run`` on GPUs, and the folder that each is from; of no file with an epilogue.

    Raises:
        ValueError: there are none, as where the package is installed without its repository.
    """
    files = {path: frames.to_frame(rows) for path, rows in read_all(Record).items()}
    parts = [
        rows.assign(folder=path.parent.relative_to(RESULTS).as_posix())
        for path, rows in files.items()
        if not rows.epilogue.any()
    ]
    if not parts:
        raise ValueError(
            f"no CSV of iris-bench run is in {RESULTS}; the report is made in a checkout of the repository"
        )
    rows = pd.concat(parts, ignore_index=True)
    return rows[rows.device == "cuda"].reset_index(drop=True)


def in_one_folder(rows: pd.DataFrame, wanted: pd.Series) -> pd.DataFrame:
    """Return each problem's rows of one folder, the latest of each variant.

    That is the folder with the latest of the rows that are `wanted`; one where the problem is of a named shape set goes
    before one where it was given by its sizes, for an experiment. A problem without a wanted row is left out.
    """
    keys = [*frames.PROBLEM, "folder"]
    candidates = rows[wanted].assign(is_named=rows.shape_set != EXPLICIT).sort_values(["is_named", "timestamp"])
    chosen = candidates.drop_duplicates(frames.PROBLEM, keep="last")[keys]
    return frames.latest(rows.merge(chosen, on=keys))


def of_ours(rows: pd.DataFrame) -> pd.Series:
    """Return which rows are of a variant of this project with kernels."""
    ours = [(one.family, one.name) for one in list_variants() if one.has_kernels]
    return pd.Series(pd.MultiIndex.from_frame(rows[["family", "variant"]]).isin(ours), index=rows.index)


def is_timed(rows: pd.DataFrame) -> pd.Series:
    """Return which rows have a time, and a speedup over `library`."""
    return (rows.status == "ok") & rows.time_us.notna() & rows.speedup_vs_library.notna()


@dataclass(frozen=True)
class Machine:
    """So many GPUs of a kind on one host.

    Args:
        device_name: as the driver gives it.
        world_size: how many.
        dtype: of what was measured on them.
    """

    device_name: str
    world_size: int
    dtype: str = "bf16"

    @property
    def gpu(self) -> str:
        """The GPU's short name, e.g. "H100"."""
        return short_name(self.device_name)

    @property
    def name(self) -> str:
        """What folders of results/ are called after, e.g. "h200x4"."""
        return f"{self.gpu.lower()}x{self.world_size}"

    @property
    def title(self) -> str:
        """The name for people, e.g. "4 × H200"."""
        return f"{self.world_size} × {self.gpu}"

    @functools.cached_property
    def all_rows(self) -> pd.DataFrame:
        """Every row of its sweeps."""
        rows = sweeps()
        here = (rows.device_name == self.device_name) & (rows.world_size == self.world_size)
        return rows[here & (rows.dtype == self.dtype)]

    @functools.cached_property
    def rows(self) -> pd.DataFrame:
        """Its rows today: of each problem those of the folder in which it was last measured with a variant of ours."""
        return in_one_folder(self.all_rows, of_ours(self.all_rows) & is_timed(self.all_rows))

    @functools.cached_property
    def best(self) -> pd.DataFrame:
        """The fastest variant of each problem, a row each, beside what other projects took."""
        rows = self.all_rows
        others = {name: in_one_folder(rows, is_timed(rows) & (rows.variant == name)) for name in OTHERS}
        return best_of(self.rows, others)


def short_name(device_name: str) -> str:
    """Return a GPU's name without its vendor, memory and module."""
    return re.sub(r"^(NVIDIA|AMD Instinct) ", "", device_name).split()[0].rstrip(",")


def dtypes() -> list[str]:
    """Return the dtypes of all sweeps, bf16 first."""
    return sorted(sweeps().dtype.unique(), key=lambda name: (name != "bf16", name))


@functools.cache
def machines(dtype: str = "bf16") -> dict[str, Machine]:
    """Return the machines that sweeps of a dtype were measured on, by name: most GPUs first, then the newest chip."""
    rows = sweeps()
    rows = rows[(rows.dtype == dtype) & of_ours(rows) & is_timed(rows)]
    found = [Machine(*key, dtype) for key in dict.fromkeys(zip(rows.device_name, rows.world_size, strict=True))]
    found.sort(key=lambda one: one.gpu, reverse=True)
    return {one.name: one for one in sorted(found, key=lambda one: -one.world_size)}


def several() -> list[Machine]:
    """Return the machines of several GPUs: on one there is nothing to overlap."""
    return [machine for machine in machines().values() if machine.world_size > 1]


def in_time(machine: Machine) -> pd.DataFrame:
    """Return the fastest variant of each problem in which the host was not late with the calls of `library`."""
    return machine.best[~machine.best.held_up]


def best_of(rows: pd.DataFrame, others: Mapping[str, pd.DataFrame] | None = None) -> pd.DataFrame:
    """Return a row per problem: the variant of this project with the highest speedup over NCCL + cuBLAS of its own run.

    Beside it `library`, and what other projects' operators took (`others`: by name the rows of the last run that has
    each; NaN where not measured), in the measure of its run: times `library_us` of its run over that of theirs.
    `held_up` is True where `library` took more than `HELD_UP` times its GEMM and its collective, each alone in that
    run: the host was late with its calls, and the speedup is not the GPUs'.
    """
    timed = rows[is_timed(rows)]
    fastest = timed[of_ours(timed)].groupby(frames.PROBLEM).speedup_vs_library.idxmax()
    best = timed.loc[fastest].set_index(frames.PROBLEM).sort_index()
    best["library"] = best.library_us
    for name, of_other in (others or {}).items():
        speedup = of_other[of_other.variant == name].set_index(frames.PROBLEM).speedup_vs_library
        best[name] = best.library_us / speedup.reindex(best.index)
    alone = rows[rows.variant.isin(YARDSTICKS)].groupby(frames.PROBLEM).time_us.sum()
    best["held_up"] = (best.index.get_level_values("m") <= 512) & (best.library > HELD_UP * alone.reindex(best.index))
    order = rows.drop_duplicates(frames.PROBLEM).set_index(frames.PROBLEM).index
    return best.reindex(order.intersection(best.index, sort=False)).reset_index()


def times_of(machine: Machine, variant: str) -> pd.Series:
    """Return the time of a variant, or of a yardstick, of each row of `machine.best`, in its order; NaN where none."""
    times = machine.rows[machine.rows.variant == variant].set_index(frames.PROBLEM).time_us
    found = times.reindex(pd.MultiIndex.from_frame(machine.best[frames.PROBLEM]))
    return pd.Series(found.to_numpy(), index=machine.best.index)


def small(best: pd.DataFrame) -> pd.DataFrame:
    """Return the layers at M ≤ 512 in which the host was in time."""
    return best[(best.shape_set == "small_m") & ~best.held_up]


def newest(kind: type[AnyRow], key: Callable[[AnyRow], T]) -> dict[T, list[AnyRow]]:
    """Return the rows of the newest file of a command for each key of its rows."""
    found: dict[T, list[AnyRow]] = {}
    for rows in _by_age(kind):
        of_file: dict[T, list[AnyRow]] = {}
        for row in rows:
            of_file.setdefault(key(row), []).append(row)
        found |= of_file
    return found


def _by_age(kind: type[AnyRow]) -> list[list[AnyRow]]:
    """Return the rows of each file of a command, the newest file's last."""
    return sorted(read_all(kind).values(), key=lambda rows: max(row.timestamp for row in rows))


def machine_of(row: AnyRow) -> Machine:
    """Return the machine that a row was measured on."""
    return Machine(row.device_name, row.world_size)


def by_machine(kind: type[AnyRow], key: Callable[[AnyRow], object]) -> dict[Machine, list[AnyRow]]:
    """Return the rows of a command on each machine, of each key those of the newest file."""
    found: dict[Machine, list[AnyRow]] = {}
    for (machine, _), rows in newest(kind, lambda row: (machine_of(row), key(row))).items():
        found.setdefault(machine, []).extend(rows)
    return dict(sorted(found.items(), key=lambda item: (item[0].world_size, item[0].gpu)))


def decoder_steps() -> list[list[DecoderRecord]]:
    """Return the rows of ``iris-bench decoder`` for each step, of one run: the newest with the most systems.

    Few GPUs come first.
    """
    found: dict[tuple[object, ...], list[DecoderRecord]] = {}
    for rows in _by_age(DecoderRecord):
        for step, of_step in by_step(rows).items():
            if len(_timed_systems(of_step)) >= len(_timed_systems(found.get(step, []))):
                found[step] = of_step
    return sorted(found.values(), key=lambda rows: (rows[0].world_size, rows[0].device_name))


def _timed_systems(rows: list[DecoderRecord]) -> set[str]:
    return {row.system for row in rows if row.time_us}


def links() -> dict[Machine, list[LinkRecord]]:
    """Return the newest rows of ``iris-bench links`` for each machine: of each way and size."""
    found = by_machine(LinkRecord, lambda row: (row.kind, row.bytes))
    return {machine: [row for row in rows if row.status == "ok"] for machine, rows in found.items()}
