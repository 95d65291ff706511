"""One word for one thing: no name that another has replaced is left in code or documentation, or comes back."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIST = Path(__file__).with_name("retired_names.txt")
SUFFIXES = (".py", ".md", ".toml", ".yml")
HISTORY = ("CHANGELOG.md", "results/notebook*.md")


def retired() -> list[tuple[str, tuple[str, ...]]]:
    """Return the list's expressions, each with where it may still stand."""
    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    return [(name, tuple(places.split())) for name, _, places in (line.partition("\t") for line in lines)]


def sources() -> dict[str, str]:
    """Return the text of each file of the project that has names, by its path."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=False, capture_output=True, text=True).stdout.split(
        "\n"
    )
    paths = listed if any(listed) else [str(file.relative_to(ROOT)) for file in ROOT.rglob("*") if file.is_file()]
    chosen = [path for path in paths if path.endswith(SUFFIXES) and not any(fnmatch(path, one) for one in HISTORY)]
    return {path: (ROOT / path).read_text() for path in chosen if (ROOT / path).is_file()}


SOURCES = sources()


def found(name: str, allowed: tuple[str, ...]) -> list[str]:
    """Return the lines that have a retired name where it may not stand; paths, too, are names."""
    pattern = re.compile(rf"(?<!\w)(?:{name})(?!\w)")
    return [
        f"{path}:{number}: {line.strip()}"
        for path, text in SOURCES.items()
        if not any(fnmatch(path, one) for one in allowed)
        for number, line in enumerate([path, *text.splitlines()])
        if pattern.search(line)
    ]


@pytest.mark.parametrize(("name", "allowed"), retired(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_retired_name_is_gone(name: str, allowed: tuple[str, ...]) -> None:
    assert not found(name, allowed)


@pytest.mark.parametrize(("name", "allowed"), [entry for entry in retired() if entry[1]], ids=lambda value: str(value))
def test_a_name_is_allowed_only_where_it_stands(name: str, allowed: tuple[str, ...]) -> None:
    """An exception that nothing needs would let the name come back."""
    lines = found(name, ())
    for place in allowed:
        assert any(fnmatch(line.split(":")[0], place) for line in lines), place
