"""A picture of ``iris-bench ccl``: the speedup over NCCL by size, a line a collective and variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from iris_core.collectives.config import AUTO

from ...records.looks import save, use_files
from .record import CclRecord


def speedups(records: Sequence[CclRecord]) -> pd.DataFrame:
    """Return a row per way of iris's, mode and size: both libraries' times in µs, and the speedup over torch's backend.

    The column `way` names the collective, and the variant and the number of programs where they were chosen.
    """
    problem = ["kind", "mode", "bytes"]
    frame = pd.DataFrame(records).drop_duplicates([*problem, "library", "variant", "comm_sms"], keep="last")
    is_of_iris = frame.library == "iris"
    others = frame[~is_of_iris].set_index(problem).time_us.rename("other")
    table = frame[is_of_iris].join(others, on=problem).rename(columns={"time_us": "iris"})
    table["way"] = [_way(*row) for row in zip(table.kind, table.variant, table.comm_sms, strict=True)]
    table[["iris", "other"]] = table[["iris", "other"]].astype(float)
    table["speedup"] = table.other / table.iris
    return table[["kind", "way", "mode", "bytes", "iris", "other", "speedup"]].reset_index(drop=True)


def _way(kind: str, variant: str, comm_sms: float | None) -> str:
    chosen = [variant] if variant not in ("", AUTO) else []
    chosen += [] if pd.isna(comm_sms) else [f"{comm_sms:g} programs"]
    return f"{kind} ({', '.join(chosen)})" if chosen else kind


def plot_ccl(records: Sequence[CclRecord], path: Path) -> None:
    """Draw the speedups, a panel a mode."""
    use_files()
    from matplotlib import pyplot as plt

    table = speedups(records)
    modes = list(table["mode"].unique())
    figure, axes = plt.subplots(1, len(modes), figsize=(1 + 5 * len(modes), 4), layout="constrained", squeeze=False)
    other = next((record.library for record in records if record.library != "iris"), "")
    for ax, mode in zip(axes[0], modes, strict=True):
        for way, rows in table[table["mode"] == mode].groupby("way", sort=False):
            ax.plot(rows.bytes, rows.speedup, marker="o", label=way)
        ax.axhline(1.0, color="black", linewidth=0.5)
        ax.set_xscale("log", base=2)
        ax.set_xlabel("bytes of the larger tensor")
        ax.set_title(mode)
    axes[0][0].set_ylabel(f"speedup over {other}")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"{records[0].world_size} × {records[0].device_name}, {records[0].timestamp[:10]}")
    save(figure, path)
