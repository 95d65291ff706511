"""Docstrings of public names say what arguments are, and their examples are run."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import doctest
import enum
import importlib
import inspect
import operator
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import iris_core
from iris_core.gluon import IrisDeviceCtx

ROOT = Path(__file__).parents[3]
FOLDERS = {"iris_core": "iris_core", "overlap_taxonomy": "overlap_taxonomy", "iris_tensor_parallel": "tensor_parallel"}
OURS = (*FOLDERS, "iris_kernels")
MADE_BY_FUNCTIONS = (iris_core.Context, iris_core.DeviceContext, IrisDeviceCtx)
MODULES = sorted(
    ".".join([name, *file.relative_to(ROOT / folder).with_suffix("").parts]).removesuffix(".__init__")
    for name, folder in (FOLDERS | {"iris_kernels": "kernels"}).items()
    for file in (ROOT / folder).rglob("*.py")
    if re.search(r"^\s*>>> ", file.read_text(), re.MULTILINE)
)


def reference() -> dict[str, tuple[str, ...]]:
    """The pages of the site's reference: a title, and modules, each with names or with all that it exports."""
    for node in ast.parse((ROOT / "docs/site/hooks.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REFERENCE":
            return ast.literal_eval(node.value)
    raise AssertionError


def exported(module: Any) -> list[str]:
    """The names that a module has in ``__all__``, or defines without an underscore."""
    defined = [name for name, one in vars(module).items() if getattr(one, "__module__", None) == module.__name__]
    return getattr(module, "__all__", [name for name in defined if not name.startswith("_")])


def public() -> Iterator[tuple[str, Any]]:
    """Every function and class of the reference, and the public methods of these, also inherited ones, by name."""
    for part in (part for _, *parts in reference().values() for part in parts):
        path, _, names = part.partition(":")
        module = importlib.import_module(path)
        for name in names.split() or exported(module):
            one = getattr(module, name)
            one = getattr(one, "fn", one)
            if inspect.isclass(one) or inspect.isfunction(one):
                yield f"{path}.{name}", one
            if inspect.isclass(one):
                yield from ((f"{path}.{name}.{method}", member) for method, member in methods(one))


def methods(one: type) -> Iterator[tuple[str, Any]]:
    """The public methods of a class, those of its bases among them where these are of this repository."""
    names = {name for base in one.__mro__ if base.__module__.startswith(OURS) for name in vars(base)}
    for name in sorted(names):
        member = getattr(one, name)
        member = getattr(member, "__func__", member)  # of a class method
        member = getattr(member, "fn", member)
        if not name.startswith("_") and inspect.isfunction(member):
            yield name, member


def signature(one: Any) -> Mapping[str, inspect.Parameter]:
    """What a function takes, or a class's constructor: nothing where callers make no instances."""
    if inspect.isclass(one) and (issubclass(one, (enum.Enum, Exception)) or one in MADE_BY_FUNCTIONS):
        return {}
    made_by = getattr(one, "hash_attrs", (one,))[0]  # of one of Triton's aggregates, its `__init__`
    return inspect.signature(getattr(made_by, "fn", made_by)).parameters


def parameters(one: Any) -> list[str]:
    """The names of what a caller gives."""
    unnamed = ("self", "cls", "args", "kwargs")
    return [name for name in signature(one) if not name.startswith("_") and name not in unnamed]


def entries(one: Any) -> list[str]:
    """The names with an entry in a docstring's ``Args:``, or where a class is all fields in its ``Attributes:``."""
    is_of_fields = inspect.isclass(one) and (dataclasses.is_dataclass(one) or issubclass(one, tuple))
    heading = "Args|Attributes" if is_of_fields else "Args"
    sections = re.findall(rf"^(?:{heading}):\n((?:(?: {{4}}.*)?\n)+)", f"{inspect.getdoc(one)}\n", re.MULTILINE)
    listed = [re.findall(r"^ {4}((?:\*{0,2}\w+, )*\*{0,2}\w+): \S", section, re.MULTILINE) for section in sections]
    return [name.lstrip("*") for found in listed for names in found for name in names.split(", ")]


def elsewhere(one: Any) -> set[str]:
    """The entries of the docstrings that one says to see: a base's method, or the function that a method is of."""
    found: set[str] = set()
    for name in re.findall(r"(?:^See|; see) `([\w.]+)`[.:]", inspect.getdoc(one) or ""):
        for where in (sys.modules[one.__module__], iris_core):
            with contextlib.suppress(AttributeError):
                seen = operator.attrgetter(name)(where)
                found |= set(entries(getattr(seen, "fn", seen)))
    return found


def undocumented(one: Any) -> list[str]:
    """The parameters without an entry, in the docstring or where it says to see.

    A single one needs none: a sentence says what the function does with it.
    """
    names = parameters(one)
    return [name for name in names if name not in {*entries(one), *elsewhere(one)}] if len(names) > 1 else []


def gone(one: Any) -> list[str]:
    """The entries for what a function does not take; of one with keywords of any name they may be for these."""
    taken = signature(one)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        return []
    return [name for name in entries(one) if name not in taken]


NAMED = dict(public())


@pytest.mark.parametrize("name", NAMED)
def test_docstring_has_an_entry_for_each_parameter(name: str) -> None:
    one = NAMED[name]
    assert inspect.getdoc(one), "has no docstring"
    assert not undocumented(one)
    assert not gone(one)


@pytest.mark.parametrize("module", MODULES)
def test_examples_give_what_they_say(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted
    assert not found.failed
