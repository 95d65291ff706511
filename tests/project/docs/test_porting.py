"""docs/porting.md: every name here is one, every public device function stands there, and torch's names are torch's."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
from triton.runtime.jit import KernelInterface

import iris_core
from iris_core import Context, DeviceContext, bench, tracing, x
from iris_core.collectives.ccl import CCL
from iris_core.gluon import IrisDeviceCtx
from overlap_taxonomy import list_families

PAGE = (Path(__file__).parents[3] / "docs/porting.md").read_text()
ROOTS: dict[str, Any] = {
    "iris_core": iris_core,
    "x": x,
    "tracing": tracing,
    "bench": bench,
    "Context": Context,
    "DeviceContext": DeviceContext,
    "CCL": CCL,
    "IrisDeviceCtx": IrisDeviceCtx,
}
ROOTS |= {family: getattr(importlib.import_module(f"iris_kernels.{family}"), family) for family in list_families()}


def rows_of(heading: str) -> list[tuple[str, str, str]]:
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [re.split(r" +\| +", line.strip("| ") + " ") for line in section.splitlines() if line.startswith("| ")]
    return [(row[0], row[1].strip(), row[2] if len(row) > 2 else "") for row in cells[1:]]


TABLES = {name: rows_of(name) for name in ("From Iris", "From NVSHMEM", "From torch's symmetric memory")}


def names_in(text: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", text)


def resolve(name: str) -> Any:
    first, *others = name.split(".")
    found = ROOTS[first]
    for one in others:
        found = getattr(found, one)
    return found


@pytest.mark.parametrize("table", TABLES)
def test_names_here_resolve(table: str) -> None:
    assert len(TABLES[table]) > 10
    for _, here, differs in TABLES[table]:
        assert here == "none" or names_in(here), here
        for name in names_in(here):
            assert resolve(name) is not None
        for name in names_in(differs):
            if name.partition(".")[0] in ROOTS:
                assert resolve(name) is not None


def device_functions() -> set[str]:
    """What kernels call: what iris_core.device defines, all of x, tracing's functions, a context object's methods."""
    exported = {name: getattr(iris_core, name) for name in iris_core.__all__}
    functions = {
        f"iris_core.{name}"
        for name, one in exported.items()
        if str(getattr(one, "__module__", "")).startswith("iris_core.device")
    }
    methods = {name for name in dir(DeviceContext) if isinstance(getattr(DeviceContext, name), KernelInterface)}
    traced = {name for name in tracing.__all__ if isinstance(getattr(tracing, name), KernelInterface)}
    return {
        *functions,
        *(f"x.{name}" for name in x.__all__),
        *(f"tracing.{name}" for name in traced),
        *(f"DeviceContext.{name}" for name in methods - {"initialize"}),
    }


def test_every_device_function_is_in_a_table_or_here_alone() -> None:
    in_tables = {name for table in TABLES.values() for _, here, _ in table for name in names_in(here)}
    alone = set(names_in(PAGE.split("\n## Here alone\n")[1]))
    assert "iris_core.load" in device_functions()
    assert device_functions() <= in_tables | alone
    assert alone <= device_functions()
    assert not in_tables & alone


def test_torchs_names_are_torchs() -> None:
    for there, _, differs in TABLES["From torch's symmetric memory"]:
        if torch.__version__.startswith("2.11.") and "torch 2.11 does not have it" in differs:
            continue
        for name in names_in(there):
            owner, _, attribute = name.rpartition(".")
            if owner in ("symm_mem", "handle"):
                assert hasattr(symm_mem if owner == "symm_mem" else symm_mem._SymmetricMemory, attribute), name
