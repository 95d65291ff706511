"""A name stands for one thing: no two files of the kernels define a class, or a jit function, of the same name.

These are the families' files, and of `common` those of the main loops; its further folders are the host's.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("*_*", "common/device", "common/portable", "common/hopper")


def shared_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the public classes and jit functions that several files define, with these files."""
    files = defaultdict(list)
    for file, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and _is_jit(node)):
                files[node.name].append(file)
    return {name: found for name, found in files.items() if len(found) > 1 and not name.startswith("_")}


def _is_jit(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_no_two_files_define_the_same_name() -> None:
    paths = [path for folder in FOLDERS for path in sorted(ROOT.glob(f"kernels/{folder}/**/*.py"))]
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    assert len(sources) > 70
    assert not shared_names(sources)


def test_a_name_that_two_files_define_is_found() -> None:
    one, other = "class Tile: ...", "@triton.jit(launch_metadata=None)\ndef load(): ..."
    private, plan = "class _Known: ...", "def plan(): ..."
    sources = {"a.py": "\n".join((one, other, private, plan)), "b.py": "\n".join((one, other, private, plan))}
    assert shared_names(sources) == {"Tile": ["a.py", "b.py"], "load": ["a.py", "b.py"]}
