"""How each variant is drawn, the same in every picture."""

from __future__ import annotations

import importlib.util
import io
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from overlap_taxonomy import Agent, Mainloop, Schedule, list_variants

from ..command.outputs import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


class Look(NamedTuple):
    """The colour and, of points, the marker of a variant."""

    colour: str
    marker: str = "o"


NO_BAR = "#b00020"  # of what is written where nothing is drawn
OURS = "iris-overlap"  # the fastest variant of this project, where a picture shows no single one

# Okabe and Ito's palette, which any colour vision tells apart: our variants, by their places in the taxonomy.
_PLACES = {
    (Agent.ALL_SMS, Mainloop.PORTABLE, Schedule.DATA_PARALLEL): Look("#56b4e9"),
    (Agent.ALL_SMS, Mainloop.LIBRARY, Schedule.OWN): Look("#332288"),
    (Agent.COMM_KERNEL, Mainloop.PORTABLE, Schedule.DATA_PARALLEL): Look("#e69f00"),
    (Agent.COMPUTING_PROGRAM, Mainloop.PORTABLE, Schedule.DATA_PARALLEL): Look("#cc79a7"),
    (Agent.COMM_PROGRAMS, Mainloop.PORTABLE, Schedule.DATA_PARALLEL): Look("#f0e442"),
    (Agent.COPY_ENGINES, Mainloop.PORTABLE, Schedule.DATA_PARALLEL): Look("#009e73"),
    (Agent.COMM_WARPS, Mainloop.SM90, Schedule.DATA_PARALLEL): Look("#0072b2"),
    (Agent.COMM_PROGRAMS, Mainloop.SM90, Schedule.DATA_PARALLEL): Look("#999933"),
    (Agent.COPY_ENGINES, Mainloop.SM90, Schedule.DATA_PARALLEL): Look("#5d3a9b"),
    (Agent.COMPUTING_PROGRAM, Mainloop.PORTABLE, Schedule.STREAM_K): Look("#d55e00"),
}
# Greys for NCCL + cuBLAS and what torch does with them; browns for other projects' fused operators. Layers have the
# colour of what they are made of.
LOOKS = {
    "library": Look("#4d4d4d", "|"),
    "library_layout": Look("#808080", "|"),
    "library_list": Look("#b3b3b3", "|"),
    "async_tp": Look("#8c6d31", "s"),
    "kraken": Look("#c9a66b", "s"),
    "quack": Look("#5c4a1f", "s"),
    "auto": Look("#1a1a1a", "x"),
    OURS: Look("#0072b2", "D"),
    "torch": Look("#4d4d4d"),
    "torch_compiled": Look("#808080"),
    "torch_replayed": Look("#b3b3b3"),
    "torch_sequence": Look("#808080"),
    "iris": Look("#0072b2"),
    "iris_sequence": Look("#56b4e9"),
    "iris_compiled": Look("#56b4e9"),
    "iris_replayed": Look("#009e73"),
}
_OTHER_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#f0e442", "#5d3a9b")
_OTHER_MARKERS = ("^", "v", "P", "*")  # variants of other distributions; none above has these


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """Return a look for each name: of LOOKS in its order, then of ours; others come last, up to 32 of them."""
    given = dict.fromkeys(names)
    known = {name: look for name, look in (LOOKS | _looks_of_ours()).items() if name in given}
    others = (name for name in given if name not in known)
    fills = itertools.product(_OTHER_MARKERS, _OTHER_COLOURS)
    return known | {name: Look(colour, marker) for name, (marker, colour) in zip(others, fills, strict=False)}


def _looks_of_ours() -> dict[str, Look]:
    """Return the looks of the variants with kernels, by name, in the order of their places."""
    ours = {one.name: (one.agent, one.mainloop, one.schedule) for one in list_variants() if one.has_kernels}
    return {name: look for place, look in _PLACES.items() for name in ours if ours[name] == place}


def check_path(path: Path) -> None:
    """Raise ValueError unless a picture can be drawn, and written under this name."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path} is no picture this command can write; end its name in {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib, which is not installed: pip install 'iris-overlap[bench]'")


def use_files() -> None:
    """Make matplotlib draw without a display, and the same SVG from the same rows."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "iris-overlap"


def save(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a picture, without its date, and close it."""
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    is_svg = path.suffix.lower() == ".svg"
    if is_svg:
        _settle(figure)
    with writing(path):
        figure.savefig(path, dpi=dpi, metadata={"Date": None} if is_svg else None)
    plt.close(figure)


def _settle(figure: Figure) -> None:
    """Lay the axes out, at rounded places: the solver's last digits differ, and an SVG's names are made of all."""
    figure.savefig(io.BytesIO(), format="svg")
    figure.set_layout_engine("none")
    for axes in figure.axes:
        left, bottom, width, height = (round(place, 5) for place in axes.get_position().bounds)
        axes.set_position((left, bottom, width, height))
