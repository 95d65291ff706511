"""The command ``iris-bench figures``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..command.exits import refuse
from .pages import pages, rewritten
from .results import ROOT


def figures(
    show: Annotated[str, typer.Option(help="Print this table instead; 'all' for the names of all.")] = "",
) -> None:
    """Make all tables and pictures of the documentation again, from the CSVs in results/; no GPU.

    Exit status: 0, or 2 if a CSV or a page is not as it should be.
    """
    from .pictures import PICTURES
    from .tables import TABLES

    try:
        if show:
            if show != "all" and show not in TABLES:
                raise ValueError(f"no table is called {show!r}; known tables: {', '.join(TABLES)}")
            print("\n".join(TABLES) if show == "all" else TABLES[show]())
            return
        for page in pages(ROOT):
            text = page.read_text()
            try:
                new = rewritten(text, TABLES)
            except ValueError as error:
                raise ValueError(f"{page.relative_to(ROOT)}: {error}") from None
            if new != text:
                page.write_text(new)
                print(page.relative_to(ROOT))
        for name, draw in PICTURES.items():
            draw(ROOT / name)
            print(name)
    except ValueError as error:
        refuse(error)
