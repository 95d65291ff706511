"""The measurements that the documentation shows: which CSVs they are in, and the fastest variant of each problem."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from overlap_taxonomy import list_variants

from ..layers.record import LayersRecord
from ..records import frames
from ..records.record import YARDSTICKS, read_as

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"


@dataclass(frozen=True)
class Machine:
    """GPUs that were measured, and the CSVs of ``iris-bench run`` that say how fast they are today.

    Args:
        title: for people.
        large: square sizes, the paper's and the layers of language models, M from 1024.
        small: M from 1 to 512, and sizes that divide nothing.
    """

    title: str
    large: tuple[str, ...]
    small: tuple[str, ...]

    @functools.cached_property
    def rows(self) -> pd.DataFrame:
        """All rows, the latest of each thing."""
        return frames.read_frame(*(RESULTS / f"{name}.csv" for name in (*self.large, *self.small)))

    @functools.cached_property
    def best(self) -> pd.DataFrame:
        """The fastest variant of each problem, a row each, beside what other projects took."""
        return best_of(self.rows)


MACHINES = {
    "h200x4": Machine("4 × H200", ("h200x4-large-bf16",), ("h200x4-decode-bf16",)),
    "h200x2": Machine(
        "2 × H200", ("h200x2-large-bf16", "h200x2-all-reduce-bf16"), ("h200x2-decode-bf16", "h200x2-ragged-bf16")
    ),
    "h200": Machine("1 × H200", ("h200-bf16",), ("h200-decode-bf16", "h200-ragged-bf16")),
    "h100": Machine("1 × H100", ("h100-bf16",), ()),
}
FAMILIES = ("gemm_all_scatter", "all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce")
FRONT_PAGE = ("Llama-3-8B", "Llama-3-70B", "Qwen2.5-72B")
HELD_UP = 1.25
OTHERS = ("async_tp", "kraken")  # other projects' fused operators that were measured


def best_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row a problem: the variant of this project with the highest speedup over NCCL + cuBLAS of its own run.

    Beside it `library`, and what other projects' operators took (`async_tp`, `kraken`; NaN where not measured), in the
    measure of its run: times `library_us` of its run over that of theirs. `held_up` is True where `library` took more
    than `HELD_UP` times its GEMM and its collective, each alone in that run: the host was late with its calls, and the
    speedup is not the GPUs'.
    """
    ours = {(one.family, one.name) for one in list_variants() if one.has_kernels}
    timed = rows[(rows.status == "ok") & rows.speedup_vs_library.notna()]
    is_ours = pd.Series([key in ours for key in zip(timed.family, timed.variant, strict=True)], index=timed.index)
    fastest = timed[is_ours].groupby(frames.PROBLEM).speedup_vs_library.idxmax()
    best = timed.loc[fastest].set_index(frames.PROBLEM).sort_index()
    best["library"] = best.library_us
    for name in OTHERS:
        speedup = timed[timed.variant == name].set_index(frames.PROBLEM).speedup_vs_library
        best[name] = best.library_us / speedup.reindex(best.index)
    alone = rows[rows.variant.isin(YARDSTICKS)].groupby(frames.PROBLEM).time_us.sum()
    best["held_up"] = (best.index.get_level_values("m") <= 512) & (best.library > HELD_UP * alone.reindex(best.index))
    order = rows.drop_duplicates(frames.PROBLEM).set_index(frames.PROBLEM).index
    return best.reindex(order.intersection(best.index, sort=False)).reset_index()


def large(best: pd.DataFrame) -> pd.DataFrame:
    """Return the problems of many rows that divide well."""
    return best[(best.m >= 1024) & (best.m % 64 == 0) & (best.n % 64 == 0) & (best.k % 64 == 0)]


def small(best: pd.DataFrame) -> pd.DataFrame:
    """Return the layers at M ≤ 512 in which the host was in time."""
    return best[(best.shape_set == "small_m") & ~best.held_up]


@functools.cache
def layers(name: str) -> pd.DataFrame:
    """Return the rows of a CSV of ``iris-bench layers``."""
    return pd.DataFrame(read_as(RESULTS / f"{name}.csv", LayersRecord, speak=False))


@functools.cache
def links(name: str) -> pd.DataFrame:
    """Return the rows of a CSV of ``iris-bench links``."""
    return pd.read_csv(RESULTS / f"{name}.csv")
