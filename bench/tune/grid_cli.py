"""The command ``iris-bench predictions``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..command.exits import refuse
from ..command.outputs import check_outputs, writing
from .grid import grid

PAGE = Path(__file__).resolve().parents[2] / "docs/interactive"


def write_predictions(
    out: Annotated[Path | None, typer.Option(help="The script to write [default: the page's own].")] = None,
) -> None:
    """Write what the cost model predicts and what `auto` takes for a grid of problems, for the page docs/interactive.

    No GPU is needed; it takes two minutes. Exit status: 0, or 2 if the file cannot be written.
    """
    try:
        if out is None:
            if not PAGE.is_dir():
                raise ValueError("the page docs/interactive is not beside this installation; give --out predictions.js")
            out = PAGE / "predictions.js"
        check_outputs(("--out", out))
    except ValueError as error:
        refuse(error)
    text = grid()
    with writing(out):
        out.write_text(text)
    print(f"{out}: {len(text) / 1e6:.1f} MB")
