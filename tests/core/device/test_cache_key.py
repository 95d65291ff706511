"""A kernel's key in Triton's cache changes with everything of ours that the kernel is compiled from."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import triton
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.runtime.jit import DependenciesFinder, JITFunction

import iris_bench
import iris_core
import iris_kernels
from iris_core.device import intrinsics

OF_THE_DEVICE = (
    "aggregate", "cache_key", "context", "interpretation", "intrinsics", "operations", "rma", "spans", "sync", "tiles",
    "tracing",
)  # fmt: skip
BUILTINS = sorted(
    name
    for name, value in vars(intrinsics).items()
    if getattr(value, "__triton_builtin__", False) and value.__module__ == intrinsics.__name__
)

# A bundle as kernels make them, and one of its instances' fields in use.
BUNDLE = """
from typing import NamedTuple
import triton
from iris_core.device.cache_key import in_cache_key

@in_cache_key
class Pair(NamedTuple):
    first: int
    second: int

@triton.jit
def kernel(pointer):
    pair = Pair(1, 2)
    pair.first
"""

Copied = Callable[..., Any]


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copied]:
    """``copied(old, new)`` imports another `iris_core.device.sync`, whose intrinsics.py says `new` for `old`.

    Without either, too: what Triton makes a key of includes which keys it has made before.
    """
    package = "copy_of_iris_core"  # one name for all: keys have it in them
    copies = itertools.count()

    def forget() -> None:
        for module in [module for module in sys.modules if module.partition(".")[0] == package]:
            del sys.modules[module]

    def copy(old: str = "", new: str = "") -> ModuleType:
        forget()
        place = tmp_path / str(next(copies))
        folder = place / package
        folder.mkdir(parents=True)
        for name in OF_THE_DEVICE:
            shutil.copy(Path(intrinsics.__file__).parent / f"{name}.py", folder)
        file = folder / "intrinsics.py"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
        monkeypatch.syspath_prepend(str(place))
        return importlib.import_module(f"{package}.sync")

    yield copy
    forget()


@pytest.mark.parametrize("name", ["wait", "wait_each", "signal", "signal_each", "barrier"])
def test_device_functions_are_compiled_again_when_a_builtin_changes(copied: Copied, name: str) -> None:
    """An upgrade would else run the ordering of the version before."""
    key = getattr(copied(), name).cache_key
    assert getattr(copied(), name).cache_key == key
    assert getattr(copied("ld.acquire", "ld.relaxed"), name).cache_key != key


@pytest.mark.parametrize("name", ["DeviceContext", "IrisDeviceCtx"])
@pytest.mark.parametrize("is_argument", [False, True])
def test_kernels_are_compiled_again_when_a_context_object_changes(copied: Copied, name: str, is_argument: bool) -> None:
    """What its methods call, too; whether a kernel names the class or takes it as a constant."""

    def key_with(sync: ModuleType) -> str:
        made = getattr(importlib.import_module(f"{sync.__package__}.context"), name)

        def kernel(context_tensor):
            made.initialize(context_tensor)

        def taking(made, context_tensor):
            made.initialize(context_tensor)

        if is_argument:
            return ASTSource(triton.jit(taking), {}, {"made": made}).hash()
        return triton.jit(kernel).cache_key

    key = key_with(copied())
    assert key_with(copied()) == key
    assert key_with(copied("ld.acquire", "ld.relaxed")) != key


@pytest.mark.parametrize("jit", [triton.jit, gluon.jit], ids=["triton", "gluon"])
@pytest.mark.parametrize("name", BUILTINS)
def test_kernels_of_users_are_compiled_again_when_a_builtin_changes(copied: Copied, name: str, jit: Any) -> None:
    def key_with(sync: ModuleType) -> str:
        builtin = getattr(sys.modules[f"{sync.__package__}.intrinsics"], name)

        def kernel(pointer):
            builtin(pointer)

        return jit(kernel).cache_key

    key = key_with(copied())
    assert key_with(copied()) == key
    assert key_with(copied("ld.acquire", "ld.relaxed")) != key


def test_kernels_are_compiled_again_when_fields_change_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    exchanged = BUNDLE.replace("first: int\n    second: int", "second: int\n    first: int")
    assert exchanged != BUNDLE
    keys = []
    for name, source in (("bundle", BUNDLE), ("same_bundle", BUNDLE), ("exchanged_bundle", exchanged)):
        (tmp_path / f"{name}.py").write_text(source)
        keys.append(importlib.import_module(name).kernel.cache_key)
        monkeypatch.delitem(sys.modules, name)
    assert keys[0] == keys[1] != keys[2]


def jit_functions() -> list[JITFunction]:
    """Return all jit functions of our packages."""
    found: dict[int, JITFunction] = {}
    for package in (iris_core, iris_kernels, iris_bench):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                members = vars(importlib.import_module(module.name)).values()
                for member in members:  # classes that kernels make have methods
                    functions = (member, *getattr(member, "hash_attrs", ()))
                    found |= {id(one): one for one in functions if isinstance(one, JITFunction)}
    return list(found.values())


def test_no_kernel_refers_to_what_its_key_leaves_out() -> None:
    """Of what Triton's search meets, it hashes jit functions, constants and what is marked as an aggregate."""
    left_out = set()
    look = DependenciesFinder.record_reference

    def record(self: DependenciesFinder, value: Any, *where: Any) -> None:
        module = getattr(value, "__module__", None) or ""
        if inspect.isfunction(value) or inspect.isclass(value):
            if not module.startswith("triton.") and not getattr(value, "__triton_aggregate__", False):
                left_out.add(f"{self.name} refers to {module}.{value.__qualname__}")
        look(self, value, *where)

    functions = jit_functions()
    assert len(functions) > 200
    with mock.patch.object(DependenciesFinder, "record_reference", record):
        for function in functions:
            finder = DependenciesFinder(
                function.__name__, function.__globals__, inspect.getclosurevars(function.fn).nonlocals, function.src
            )
            finder.visit(function.parse())
    assert not left_out
