"""Tables inside Markdown, between ``<!-- figures: NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

_BLOCK = re.compile(r"^<!-- figures: (?P<name>\S+) -->\n(?P<body>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"^<!-- (?:figures: \S+|end) -->$", re.MULTILINE)


def rewritten(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with each of its tables as they are made from the CSVs today.

    Raises:
        ValueError: a marker without its other half, or that names no table.
    """
    if len(_MARKER.findall(text)) != 2 * len(list(_BLOCK.finditer(text))):
        raise ValueError("a line <!-- figures: NAME --> without its <!-- end -->, or the other way round")

    def table(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in tables:
            raise ValueError(f"no table is called {name!r}; known tables: {', '.join(tables)}")
        return f"<!-- figures: {name} -->\n{tables[name]()}\n<!-- end -->"

    return _BLOCK.sub(table, text)


def pages(root: Path) -> list[Path]:
    """Return the Markdown pages that may have tables."""
    return sorted(page for pattern in ("*.md", "docs/**/*.md", "results/*.md") for page in root.glob(pattern))
