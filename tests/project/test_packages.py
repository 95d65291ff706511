"""The distribution has every package that there is: pyproject.toml lists them by hand."""

from __future__ import annotations

from pathlib import Path

from checkouts import TREE, package_folders


def test_every_package_is_listed() -> None:
    section = (TREE / "pyproject.toml").read_text().split("[tool.setuptools]\npackages = [")[1].split("]")[0]
    listed = {line.strip(' ",') for line in section.split("\n") if line.strip()}
    found = set()
    for name, folder in package_folders(TREE).items():
        for package in (TREE / folder).rglob("__init__.py"):
            found.add(".".join([name, *package.parent.relative_to(TREE / folder).parts]))
    assert listed == found


def test_every_folder_of_sources_is_a_package() -> None:
    """So that none is left out, which an import from the tree would not notice."""
    folders = {one.parent for place in package_folders(TREE).values() for one in (TREE / place).rglob("*.py")}
    assert not [one for one in folders if not Path(one, "__init__.py").exists()]
