"""The command ``iris-bench report``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..command.exits import refuse
from .evidence import ROOT


def make_report(
    show: Annotated[str, typer.Option(help="Print this table instead; 'all' for the names of all.")] = "",
) -> None:
    """Make all tables and pictures of the documentation again, and the report, from the CSVs in results/; no GPU.

    Exit status: 0, or 2 if a CSV or a page is not as it should be.
    """
    from .pages import REPORT_HTML, as_html, blocks, pages, report_pages, rewritten
    from .pictures import pictures

    try:
        tables = blocks()
        if show:
            if show != "all" and show not in tables:
                raise ValueError(f"no table is called {show!r}; known tables: {', '.join(tables)}")
            print("\n".join(tables) if show == "all" else tables[show]())
            return
        texts = {page: page.read_text() for page in pages(ROOT)}
        for page, text in texts.items():
            try:
                texts[page] = rewritten(text, tables)
            except ValueError as error:
                raise ValueError(f"{page.relative_to(ROOT)}: {error}") from None
    except ValueError as error:
        refuse(error)
    for path, picture in pictures().items():
        picture.draw(ROOT / path)
        print(path)
    texts[ROOT / REPORT_HTML] = as_html({page.relative_to(ROOT): texts[page] for page in report_pages(ROOT)})
    for page, text in texts.items():
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
            print(page.relative_to(ROOT))
