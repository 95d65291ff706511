"""docs/reference.md has every public name, with the arguments it takes, and no other."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from triton.runtime.jit import KernelInterface

import iris_core
import iris_tensor_parallel
from iris_bench.cli import app
from iris_core import Context, bench, tracing, x
from iris_core.collectives.ccl import CCL
from iris_core.gluon import IrisDeviceCtx
from iris_tensor_parallel import styles
from overlap_taxonomy import list_families

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reference.md").read_text()
PACKAGES = ("iris_core", "overlap_taxonomy", "kernels", "tensor_parallel", "bench")


def names_of(heading: str) -> dict[str, str]:
    """The names in the first column of a section's tables, with the arguments that are given there, if any."""
    section = re.split(r"^## ", PAGE.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    return {span.partition("(")[0]: span.partition("(")[2].rstrip(")") for span in spans}


def signature_of(function: Any) -> list[str]:
    """The names of a function's arguments; of a jit function's, those of what it was made of."""
    function = getattr(function, "fn", function)
    return [name for name in inspect.signature(function).parameters if not name.startswith("_")]


def arguments_in(text: str) -> list[str]:
    """The names of the arguments that a page gives, without stars and defaults."""
    return [one.strip().lstrip("*").partition("=")[0] for one in text.split(",") if one.strip() not in ("", "*")]


def check_arguments(given: dict[str, str], module: Any) -> None:
    for name, arguments in given.items():
        if arguments:
            assert arguments_in(arguments) == signature_of(getattr(module, name)), name


def test_iris_core() -> None:
    given = names_of("Host functions") | names_of("Device functions")
    assert given.keys() == set(iris_core.__all__)
    check_arguments(given, iris_core)


def test_tile_level_collectives() -> None:
    given = names_of("Tile-level collectives")
    assert given.keys() == set(x.__all__)
    check_arguments(given, x)


def test_tracing() -> None:
    given = names_of("Tracing")
    assert given.keys() == set(tracing.__all__)
    check_arguments(given, tracing)


def test_benchmarks() -> None:
    given = names_of("Benchmarks")
    assert given.keys() == set(bench.__all__)
    check_arguments(given, bench)


def test_collectives_on_whole_tensors() -> None:
    given = names_of("Collectives on whole tensors")
    assert given.keys() == {name for name in dir(CCL) if not name.startswith("_")}
    for name, arguments in given.items():
        assert ["self", *arguments_in(arguments)] == signature_of(getattr(CCL, name)), name


def test_context() -> None:
    given = names_of("Context")
    assert given.keys() == {name for name in dir(Context) if not name.startswith("_")}
    for name, arguments in given.items():
        if arguments:
            assert ["self", *arguments_in(arguments)] == signature_of(getattr(Context, name)), name


@pytest.mark.parametrize("made", [iris_core.DeviceContext, IrisDeviceCtx], ids=lambda made: made.__name__)
def test_context_objects(made: Any) -> None:
    of_tiles = PAGE.split("\n### Tiles\n")[1].split("\n## ")[0]
    given = names_of("Context objects")
    if made is IrisDeviceCtx:
        given = {name: arguments for name, arguments in given.items() if f"| `{name}(" not in of_tiles}
    methods = {name for name in dir(made) if isinstance(getattr(made, name), KernelInterface)}
    assert given.keys() == methods - {"initialize"}
    for name, arguments in given.items():
        assert ["self", *arguments_in(arguments)] == signature_of(getattr(made, name)), name


def test_operators() -> None:
    given = {name: arguments for name, arguments in names_of("Operators").items() if arguments}
    modules = {family: importlib.import_module(f"iris_kernels.{family}") for family in list_families()}
    there = {name: module for family, module in modules.items() for name in module.__all__ if name.startswith(family)}
    assert given.keys() == there.keys()
    for name, arguments in given.items():
        assert arguments_in(arguments) == signature_of(getattr(there[name], name)), name


def test_layers() -> None:
    given = names_of("Layers")
    assert given.keys() == set(iris_tensor_parallel.__all__)
    check_arguments(given, iris_tensor_parallel)
    assert {"ColwiseParallel", "RowwiseParallel", "mesh_of"} <= set(dir(styles))


def test_commands() -> None:
    assert names_of("`iris-bench`").keys() == typer.main.get_command(app).commands.keys()  # type: ignore[attr-defined]


def test_environment_variables() -> None:
    sources = [file.read_text() for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert names_of("Environment variables").keys() == set(re.findall(r"\bIRIS_[A-Z_]+\b", "".join(sources)))


def test_extras() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    section = project.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    assert names_of("Extras of the distribution").keys() == set(re.findall(r"^([\w-]+) = \[", section, re.MULTILINE))
