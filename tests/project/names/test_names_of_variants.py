"""No variant's name is written outside its family's folder: what needs to tell variants apart asks for their axes.

The taxonomy names no family either.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlap_taxonomy import list_families, list_variants

ROOT = Path(__file__).parents[3]
FOLDERS = ("overlap_taxonomy", "bench", "kernels/common", "tensor_parallel")
ALLOWED = {
    "bench/correctness/check/planted.py": "each bug is planted in the code of one variant, which is run with it",
}
FORMER = {one.former_name for one in list_variants()} - {""}
NAMED = re.compile(rf"\b({'|'.join(sorted({one.pattern for one in list_variants() if one.has_kernels} | FORMER))})\b")


def strings(source: str) -> Iterator[str]:
    """Give the strings of a source, but for docstrings."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and _is_said(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def _is_said(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> bool:
    return bool(node.body) and isinstance(node.body[0], ast.Expr)


def names_in(path: Path) -> list[str]:
    """Return the patterns, and former names, that are in a file's strings."""
    return [name for text in strings(path.read_text()) for name in NAMED.findall(text)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_variant_is_named(folder: str) -> None:
    found = {str(path.relative_to(ROOT)): names_in(path) for path in (ROOT / folder).rglob("*.py")}
    assert not {path: names for path, names in found.items() if names and path not in ALLOWED}


def test_the_taxonomy_names_no_family() -> None:
    texts = [text for path in (ROOT / "overlap_taxonomy").rglob("*.py") for text in strings(path.read_text())]
    assert texts
    assert not {family for family in list_families() for text in texts if family in text}


def test_what_is_allowed_is_needed() -> None:
    for path in ALLOWED:
        assert names_in(ROOT / path), path


@pytest.mark.parametrize("family", list_families())
def test_a_family_names_a_variant_in_its_own_file(family: str) -> None:
    """And nothing else does but what it was called before, or what is no more because of it."""
    files = (ROOT / "kernels" / family).rglob("*.py")
    others = [(path, name) for path in files for name in names_in(path) if not path.stem.startswith(name)]
    known = {one.name: one for one in list_variants(family)}
    replaced = {
        word for one in known.values() for pair in one.retired.items() for word in (pair[0].split(":")[0], pair[1])
    }
    assert not [
        path for path, name in others if f'former_name="{name}"' not in path.read_text() and name not in replaced
    ]


def test_the_search_finds_names() -> None:
    assert NAMED.search('variant="copy_engine:sm90"')
    assert NAMED.search("one_shot")
    assert not NAMED.search("gemm_one_shot_all_reduce")
    assert list(strings('"""Of x."""\ndef f():\n    """Of y."""\n    return "copy_engine"\n')) == ["copy_engine"]
