"""Another commit of this repository beside this tree, and what it takes to run its packages in place of these."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def checkout(base: str) -> Iterator[Path]:
    """Give the tree of a commit, which is checked out for as long; or a folder that holds one already."""
    if Path(base, "pyproject.toml").exists():
        yield Path(base).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, base], check=True, cwd=TREE)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], check=True, cwd=TREE)


def environment_of(tree: Path, folder: Path) -> dict[str, str]:
    """Return the environment in which Python finds a tree's packages, and no others, by links in a new `folder`."""
    folder.mkdir(parents=True)
    for name, place in package_folders(tree).items():
        (folder / name).symlink_to(tree / place)
    _write_entry_points(tree, folder)
    return os.environ | {"PYTHONPATH": str(folder)}


def _write_entry_points(tree: Path, folder: Path) -> None:
    """Stand in for a tree's installation: what is installed has the entry points of another."""
    group = 'entry-points."iris_overlap.families"'
    listed = (tree / "pyproject.toml").read_text().split(f"[project.{group}]\n")[1].split("\n[")[0]
    metadata = folder / "iris_overlap-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: iris-overlap\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[iris_overlap.families]\n" + listed.replace('"', ""))


def package_folders(tree: Path) -> dict[str, str]:
    """Return where a tree has the packages that it installs, by name."""
    section = (tree / "pyproject.toml").read_text().split("[tool.setuptools.package-dir]")[1].split("\n[")[0]
    return dict(re.findall(r'^(\w+) = "([^"]+)"', section, re.MULTILINE))
