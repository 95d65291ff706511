"""Docstrings of public names say what arguments are, and their examples are run."""

from __future__ import annotations

import doctest
import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import iris_core
import iris_tensor_parallel
import overlap_taxonomy
from iris_core import bench, checker, tracing, x
from iris_core.collectives import ccl
from iris_tensor_parallel import styles
from overlap_taxonomy import list_families

ROOT = Path(__file__).parents[3]
FOLDERS = {"iris_core": "iris_core", "overlap_taxonomy": "overlap_taxonomy", "iris_tensor_parallel": "tensor_parallel"}
PACKAGES = (iris_core, x, checker, tracing, bench, iris_tensor_parallel, overlap_taxonomy)
MODULES = sorted(
    ".".join([name, *file.relative_to(ROOT / folder).with_suffix("").parts]).removesuffix(".__init__")
    for name, folder in (FOLDERS | {"iris_kernels": "kernels"}).items()
    for file in (ROOT / folder).rglob("*.py")
    if re.search(r"^\s*>>> ", file.read_text(), re.MULTILINE)
)


def public() -> Iterator[tuple[str, Any]]:
    """Every public function and class, and the public methods of these, by name."""
    named = [(f"{package.__name__}.{name}", getattr(package, name)) for package in PACKAGES for name in package.__all__]
    named += [(f"iris_tensor_parallel.styles.{name}", getattr(styles, name)) for name in ("mesh_of", "ColwiseParallel")]
    named += [("iris_core.collectives.ccl.CCL", ccl.CCL)]
    for family in list_families():
        module = importlib.import_module(f"iris_kernels.{family}")
        named += [(f"{family}.{name}", getattr(module, name)) for name in (family, "Problem") if hasattr(module, name)]
    for name, one in named:
        one = getattr(one, "fn", one)
        if inspect.isclass(one) or inspect.isfunction(one):
            yield name, one
        if inspect.isclass(one) and one.__module__.split(".")[0] in sys.modules:
            for method, member in vars(one).items():
                if not method.startswith("_") and inspect.isfunction(getattr(member, "fn", member)):
                    yield f"{name}.{method}", getattr(member, "fn", member)


def undocumented(one: Any) -> list[str]:
    """The arguments that neither a docstring names, nor that of the class or module about what all of them take.

    A single argument needs no name: a sentence says what the function does with it.
    """
    made_otherwise = inspect.isclass(one) and (issubclass(one, (enum.Enum, Exception)) or one is iris_core.Context)
    if made_otherwise or (inspect.getdoc(one) or "").startswith("See `"):
        return []
    module = sys.modules[one.__module__]
    owner = vars(module).get(one.__qualname__.partition(".")[0])
    bases = one.__mro__ if inspect.isclass(one) else ()
    text = " ".join(inspect.getdoc(about) or "" for about in (one, *bases, owner, module))
    unnamed = ("self", "args", "kwargs")
    names = [name for name in inspect.signature(one).parameters if not name.startswith("_") and name not in unnamed]
    return [name for name in names if not re.search(rf"\b{name}\b", text)] if len(names) > 1 else []


NAMED = dict(public())


@pytest.mark.parametrize("name", NAMED)
def test_docstring_names_the_arguments(name: str) -> None:
    one = NAMED[name]
    assert inspect.getdoc(one), "has no docstring"
    assert not undocumented(one)


@pytest.mark.parametrize("module", MODULES)
def test_examples_give_what_they_say(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted
    assert not found.failed
