"""A picture of ``iris-bench ccl``: the speedup over NCCL by size, a line a collective."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ..records.looks import save, use_files
from .record import CclRecord


def speedups(records: Sequence[CclRecord]) -> pd.DataFrame:
    """Return a row a collective, mode and size: both libraries' times in µs, and the speedup over torch's backend."""
    frame = pd.DataFrame(records)
    frame["side"] = frame.library.where(frame.library == "iris", "other")
    table = frame.pivot(index=["kind", "mode", "bytes"], columns="side", values="time_us")
    table = table.reindex(columns=["iris", "other"]).reset_index()
    table["speedup"] = table.other / table.iris
    return table


def plot_ccl(records: Sequence[CclRecord], path: Path) -> None:
    """Draw the speedups, a panel a mode."""
    use_files()
    from matplotlib import pyplot as plt

    table = speedups(records)
    modes = list(table["mode"].unique())
    figure, axes = plt.subplots(1, len(modes), figsize=(1 + 5 * len(modes), 4), layout="constrained", squeeze=False)
    other = next((record.library for record in records if record.library != "iris"), "")
    for ax, mode in zip(axes[0], modes, strict=True):
        for kind, rows in table[table["mode"] == mode].groupby("kind", sort=False):
            ax.plot(rows.bytes, rows.speedup, marker="o", label=kind)
        ax.axhline(1.0, color="black", linewidth=0.5)
        ax.set_xscale("log", base=2)
        ax.set_xlabel("bytes of the larger tensor")
        ax.set_title(mode)
    axes[0][0].set_ylabel(f"speedup over {other}")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"{records[0].world_size} × {records[0].device_name}, {records[0].timestamp[:10]}")
    save(figure, path)
