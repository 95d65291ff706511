"""A picture of ``iris-bench links``: a heat map a kind, one rank's bandwidth to or from each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...records.looks import save, use_files
from .rank import KINDS, PAIRWISE
from .record import LinkRecord


def plot_links(records: Sequence[LinkRecord], path: Path) -> None:
    """Draw what every rank moves to and from every other, in GB/s, of the largest size that was measured.

    Raises:
        ValueError: there are no two ranks.
    """
    use_files()
    from matplotlib import pyplot as plt

    pairs = [record for record in records if record.kind in PAIRWISE]
    if not pairs:
        raise ValueError("a heat map takes two ranks or more")
    pairs = [record for record in pairs if record.bytes == max(one.bytes for one in pairs)]
    size = pairs[0].world_size
    largest = max(record.gbps or 0.0 for record in pairs)
    figure, axes = plt.subplots(1, len(PAIRWISE), figsize=(1.5 + 3.2 * len(PAIRWISE), 4.2), layout="constrained")
    for ax, kind in zip(axes, PAIRWISE, strict=True):
        cells = [[float("nan")] * size for _ in range(size)]
        for record in pairs:
            if record.kind == kind and record.gbps is not None:
                assert record.from_rank is not None
                assert record.to_rank is not None
                cells[record.from_rank][record.to_rank] = record.gbps
                ax.text(record.to_rank, record.from_rank, f"{record.gbps:.3g}", ha="center", va="center", fontsize=7)
        ax.imshow(cells, vmin=0.0, vmax=largest or 1.0, cmap="viridis", alpha=0.75)
        ax.set_title(f"{kind}: {KINDS[kind]}", fontsize=7, wrap=True)
        ax.set_xlabel("memory of rank")
        ax.set_xticks(range(size))
        ax.set_yticks(range(size))
    axes[0].set_ylabel("done by rank")
    figure.colorbar(axes[0].images[0], ax=axes, label="GB/s", shrink=0.8)
    figure.suptitle(f"{size} × {pairs[0].device_name}, {pairs[0].bytes / 2**20:.3g} MiB, one pair at a time")
    save(figure, path)
