"""The layers: imports point down only, importing does nothing else, and everything public says what it is."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import iris_core

ROOT = Path(iris_core.__file__).parents[1]
# Folder, name it is imported by, and its layer: it may import what is below, and not what is beside it.
LAYERS = {
    "iris_core": ("iris_core", 0),
    "overlap_taxonomy": ("overlap_taxonomy", 0),
    "kernels": ("iris_kernels", 1),
    "tensor_parallel": ("iris_tensor_parallel", 2),
    "bench": ("iris_bench", 3),
}
LAYER_OF = dict(LAYERS.values())
FOLDERS = [folder for folder in LAYERS if (ROOT / folder / "__init__.py").exists()]


def imported_packages(file: Path, package: str) -> Iterator[tuple[str, int]]:
    """Yield what a file imports, by top-level name, and the line; a relative import is resolved."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (package if node.level else (node.module or "").split(".")[0]), node.lineno


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_down(folder: str) -> None:
    package, layer = LAYERS[folder]
    upward = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in (ROOT / folder).rglob("*.py")
        for name, line in imported_packages(file, package)
        if name in LAYER_OF and name != package and LAYER_OF[name] >= layer
    ]
    assert not upward


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_goes_by_its_folders_name(folder: str) -> None:
    """``import kernels`` would work from the root alone."""
    folders = {name for name, (package, _) in LAYERS.items() if name != package}
    for file in (ROOT / folder).rglob("*.py"):
        for name, line in imported_packages(file, LAYERS[folder][0]):
            assert name not in folders, f"{file.relative_to(ROOT)}:{line}"


def modules(folder: str) -> list[str]:
    package = LAYERS[folder][0]
    found = pkgutil.walk_packages([str(ROOT / folder)], prefix=f"{package}.")
    return [package, *(module.name for module in found if not module.name.endswith("__main__"))]


MODULES = [module for folder in FOLDERS for module in modules(folder)]

IMPORT_AND_LOOK = """
import json, os, sys, threading
import torch, triton
before, threads, files = dict(os.environ), threading.active_count(), os.listdir("/proc/self/fd")
for module in sys.argv[1:]:
    __import__(module)
assert not torch.cuda.is_initialized()
assert "mpi4py.MPI" not in sys.modules  # importing it initialises MPI
assert not torch.distributed.is_initialized()
assert not triton.knobs.runtime.interpret
assert threading.active_count() == threads
print(json.dumps([before, dict(os.environ)]))
"""


def test_importing_everything_has_no_side_effects() -> None:
    # Not all of this process's: it has imported everything already.
    environment = {
        name: os.environ[name] for name in ("HOME", "PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ
    }
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_LOOK, *MODULES], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)  # nothing else was printed
    assert before == after


def public_things(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Yield the module, its public classes and functions, kernels too, and the classes' public methods."""
    yield module.__name__, module
    for name, thing in vars(module).items():
        function = getattr(thing, "fn", thing)  # a kernel's
        if name.startswith("_") or getattr(function, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(function) or inspect.isfunction(function):
            yield f"{module.__name__}.{name}", function
        if inspect.isclass(function):
            for method_name, method in vars(function).items():
                inner = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
                if not method_name.startswith("_") and inspect.isfunction(inner):
                    yield f"{module.__name__}.{name}.{method_name}", method


def is_documented(name: str, thing: object) -> bool:
    """A method that overrides a documented one needs no words of its own."""
    if inspect.getdoc(thing):  # follows a method to the class that it overrides
        return True
    owner, _, method = name.rpartition(".")
    module, _, class_name = owner.rpartition(".")
    cls = getattr(sys.modules.get(module), class_name, None)
    return any((getattr(base, method, None) or thing).__doc__ for base in getattr(cls, "__mro__", ()))


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_is_documented(module: str) -> None:
    silent = [name for name, thing in public_things(importlib.import_module(module)) if not is_documented(name, thing)]
    assert not silent
