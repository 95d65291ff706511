"""The layers: imports point down and in no cycle, importing does nothing else, and everything public is documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import subprocess
import sys
import tokenize
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


def test_test_files_have_names_of_their_own() -> None:
    """Ranks import a test's functions by its file's name alone."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert names
    assert not {name for name in names if names.count(name) > 1}


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
# Imported where they are needed: they extend torch's compiler, which sets an environment variable when imported.
OF_THE_COMPILER = {
    "iris_bench.benchmarks.decoder.gathers",
    "iris_tensor_parallel.graph.fuse_pass",
    "iris_tensor_parallel.graph.patterns",
}
FILES = {
    module: place
    for folder, (package, _) in LAYERS.items()
    for module in modules(folder)
    for path in [ROOT / folder / Path(*module.split(".")[1:])]
    for place in (path / "__init__.py", path.with_suffix(".py"))
    if place.exists()
}


def test_every_folder_is_in_the_wheel() -> None:
    """An editable install finds folders that ``[tool.setuptools]`` does not list; an installed wheel lacks them."""
    section = (ROOT / "pyproject.toml").read_text().split("[tool.setuptools]")[1].split("\n[")[0]
    folders = [module for module, file in FILES.items() if file.name == "__init__.py"]
    folders.append("iris_kernels.common.choice.measured_times")  # of data alone
    assert sorted(re.findall(r'"([\w.]+)"', section)) == sorted(folders)


def test_every_folder_of_sources_is_a_package() -> None:
    """So that none is left out, which an import from the tree would not notice."""
    folders = {file.parent for folder in LAYERS for file in (ROOT / folder).rglob("*.py")}
    assert folders
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def imports_of(module: str, *, lazy: bool = False) -> set[str]:
    """Return the modules that a file imports: as it is imported itself, for types too, or with `lazy` in functions."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in _imports_in(ast.parse(FILES[module].read_text()), is_lazy=False, lazy=lazy):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*parents, *([node.module] if node.module else [])])
        found |= {name if (name := f"{source}.{alias.name}") in FILES else source for alias in node.names}
    return found


def _imports_in(node: ast.AST, *, is_lazy: bool, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            if is_lazy == lazy:
                yield child
        else:
            in_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from _imports_in(child, is_lazy=is_lazy or in_function, lazy=lazy)


def test_no_files_import_each_other() -> None:
    """Not by way of others either, and not for types: what cannot be read in one order is not in layers."""
    unread = {module: imports_of(module) & FILES.keys() - {module} for module in FILES}
    while ready := [module for module, imported in unread.items() if not imported & unread.keys()]:
        for module in ready:
            del unread[module]
    in_cycles = dict(unread)
    while ends := [one for one in in_cycles if not any(one in imported for imported in in_cycles.values())]:
        for module in ends:  # they import what is in a cycle, and are in none
            del in_cycles[module]
    assert not in_cycles


# What iris_core is made of, in order: each imports what stands before it, and not what stands beside it. A part is a
# folder or a file, without those in it that are parts of their own.
CORE = (("errors", "utils"), ("device", "rendezvous"), ("backends",), ("heap",), ("watchdog",))
CORE += (("context.host",), ("context",), ("context.opening",), ("gluon",))
# On top of that, what the core does without until a context is opened, kernels are interpreted, or ask for it.
BEYOND = (("context.process_group", "rendezvous.tcp_socket", "rendezvous.topology", "utils.user_lines"), ("launcher",))
BEYOND += (("bench", "context.hierarchical", "context.sleep", "heap.providers", "interpreter", "tracing", "x"),)
BEYOND += (("collectives",), ("checker",))
LAYER_OF_PART = {part: layer for layer, parts in enumerate((*CORE, *BEYOND)) for part in parts}
# Where the core reaches for these: in functions.
HOOKS = {
    ("iris_core", "bench"),
    ("iris_core", "launcher"),
    ("iris_core", "x"),
    ("iris_core.context.context", "collectives"),
    ("iris_core.context.context", "context.sleep"),
    ("iris_core.context.context", "tracing"),
    ("iris_core.context.host", "context.process_group"),
    ("iris_core.context.opening", "context.hierarchical"),
    ("iris_core.context.options", "heap.providers"),
    ("iris_core.device.interpretation", "interpreter"),
    ("iris_core.rendezvous.exchange", "rendezvous.tcp_socket"),
    ("iris_core.rendezvous.rank_info", "rendezvous.tcp_socket"),
}


def part_of(module: str) -> str:
    """Return the part of iris_core that a module is in; nothing for others, and for its `__init__`."""
    _, _, place = module.partition("iris_core.")
    while place and place not in LAYER_OF_PART:
        place = place.rpartition(".")[0]
    return place if module.startswith("iris_core.") else ""


def test_the_parts_of_the_core_are_in_layers() -> None:
    ours = [module for module in FILES if module.startswith("iris_core.")]
    assert {part_of(module) for module in ours} == LAYER_OF_PART.keys()  # none is in no part
    upward = {
        (module, imported)
        for module in ours
        for imported in imports_of(module)
        if imported.startswith("iris_core")
        and part_of(imported) != part_of(module)
        and LAYER_OF_PART.get(part_of(imported), len(LAYER_OF_PART)) >= LAYER_OF_PART[part_of(module)]
    }
    assert not upward


PARTS_BEYOND = {part for parts in BEYOND for part in parts}
FILES_OF_CORE = [module for module in FILES if module.startswith("iris_core") and part_of(module) not in PARTS_BEYOND]


def test_the_core_reaches_beyond_itself_by_its_hooks_alone() -> None:
    reached = {(module, part_of(one)) for module in FILES_OF_CORE for one in imports_of(module, lazy=True)}
    assert {(module, part) for module, part in reached if part in PARTS_BEYOND} == HOOKS


MOST_LINES = 3500  # of code: without docstrings, comments and empty lines


def lines_of_code(file: Path) -> int:
    """Return how many lines of a file hold code."""
    source = file.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            if isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str):
                lines.difference_update(range(body[0].lineno, (body[0].end_lineno or body[0].lineno) + 1))
    return len(lines)


def test_the_core_stays_thin() -> None:
    assert 1000 < sum(lines_of_code(FILES[module]) for module in FILES_OF_CORE) <= MOST_LINES


IMPORT_CORE = """
import sys
import numpy, torch, triton, typing_extensions
before = set(sys.modules)
import iris_core
print(*sorted(set(sys.modules) - before))
"""
# Of torch and Triton, of which more is imported than by themselves; `cuda` is optional.
OF_THE_CORE = {"cuda", "iris_core", "numpy", "torch", "triton", "typing_extensions"}


@pytest.mark.slow
def test_importing_the_core_imports_the_core_alone() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_CORE], capture_output=True, text=True, timeout=200, check=True)
    imported = done.stdout.split()
    assert "iris_core.context.context" in imported
    assert not [module for module in imported if part_of(module) in PARTS_BEYOND]
    packages = {module.split(".")[0] for module in imported} - set(sys.stdlib_module_names)
    assert not packages & {"greenlet", "matplotlib", "mpi4py", "pandas", "rich", "typer"}
    third_party = {imported.split(".")[0] for module in FILES_OF_CORE for imported in imports_of(module)}
    assert third_party - set(sys.stdlib_module_names) - {"__future__"} <= OF_THE_CORE


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


@pytest.mark.slow
def test_importing_everything_has_no_side_effects() -> None:
    # Not all of this process's: it has imported everything already.
    environment = {
        name: os.environ[name] for name in ("HOME", "PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ
    }
    free = [module for module in MODULES if module not in OF_THE_COMPILER]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_LOOK, *free], env=environment, capture_output=True, text=True, timeout=200
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
                is_own = inspect.isfunction(inner) and inner.__module__ == module.__name__  # not of a decorator
                if is_own and not method_name.startswith("_"):
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


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "kernels"])
def test_docstrings_say_more_than_where_to_look(folder: str) -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, documented):
                assert not (ast.get_docstring(node) or "").startswith("See "), f"{file.relative_to(ROOT)}: {node}"
