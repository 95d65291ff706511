"""The examples' kernels, as the examples launch them: no race on any number of ranks, and they compile for GPUs."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compiling import compile_kernel
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from iris_core.checker import check

EXAMPLES = Path(__file__).parents[2] / "examples"
WITH_KERNELS = [*sorted(EXAMPLES.glob("kernels/[!_]*.py")), EXAMPLES / "first_steps/all_gather_rms_norm.py"]
PATTERNS = sorted(EXAMPLES.glob("patterns/[!_]*.py"))
PLAIN = EXAMPLES / "patterns/persistent_gemm.py"
by_example = pytest.mark.parametrize("example", [*WITH_KERNELS, *PATTERNS], ids=lambda path: path.stem)


class Recorder:
    """Stands in for a kernel, and keeps the arguments of its last launch."""

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel = kernel
        self.arguments: dict[str, Any] = {}

    def __getitem__(self, grid: Any) -> Any:
        def launch(*given: Any, **named: Any) -> None:
            self.arguments = dict(zip(self.kernel.arg_names, given, strict=False)) | named
            self.kernel[grid](*given, **named)

        return launch


def load(example: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(example.parent)
    spec = importlib.util.spec_from_file_location(example.stem, example)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, example.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("buffers", [1, 2])
def test_the_tutorials_race_is_found(monkeypatch: pytest.MonkeyPatch, buffers: int) -> None:
    module = load(EXAMPLES / "first_steps/all_gather_rms_norm.py", monkeypatch)
    report = check(module.body, world_size=3, args=(buffers,), schedules=4)
    if buffers == 2:
        assert report.ok, report
    else:
        page = (EXAMPLES.parent / "docs/tutorials/first_fused_kernel.md").read_text()
        (shown,) = re.findall(r"```\n(race at .*?)```", page, re.DOTALL)
        assert re.sub(r"(\.py):\d+", r"\1", shown) in re.sub(r"(\.py):\d+", r"\1", f"{report}\n")


def test_the_gluon_relay_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(EXAMPLES / "first_steps/gluon_message_passing.py", monkeypatch)
    words = torch.zeros(8, dtype=torch.int64)
    given = {"message": words, "flags": words, "round_number": 1, "context_tensor": words}
    given |= {"CHUNKS": module.CHUNKS, "CHUNK_SIZE": module.CHUNK_SIZE, "num_warps": module.NUM_WARPS}
    for target, threads in (("sm_90", 32), ("gfx942", 64)):
        layout = gl.BlockedLayout([2], [threads], [module.NUM_WARPS], [0])
        assert compile_kernel(module.relay_kernel, given | {"LAYOUT": layout}, target).code


@by_example
def test_no_race_and_compiles(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(example, monkeypatch)
    recorders = {}
    for name, one in list(vars(module).items()):
        if isinstance(one, JITFunction) and name.endswith("_kernel"):
            recorders[name] = Recorder(one)
            monkeypatch.setattr(module, name, recorders[name])
    if example in PATTERNS:
        report = check(sys.modules["_harness"].body, 3, args=(module.launch, example != PLAIN), schedules=2)
    else:
        report = check(module.body, world_size=3, schedules=2)
    assert report.ok, report
    assert recorders
    for recorder in recorders.values():
        for target in ("sm_90", "gfx942"):
            assert compile_kernel(recorder.kernel, recorder.arguments, target).code


def functions_of(example: Path) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(example.read_text()).body if isinstance(node, ast.FunctionDef)}


def code_lines(example: Path) -> Counter[str]:
    """The lines of code of a pattern's kernels and launch, and of what these take from the plain GEMM."""
    own, plain = functions_of(example), functions_of(PLAIN)
    imported = {name for name in plain if name not in own and name in example.read_text()} | {"multiply_tile"}
    lines: Counter[str] = Counter()
    for node in (*own.values(), *(plain[name] for name in imported - own.keys())):
        if ast.get_docstring(node):
            del node.body[0]
        lines.update(line.strip() for line in ast.unparse(node).splitlines())  # without comments and wrapping
    return lines


def test_patterns_add_as_few_lines_as_their_page_says() -> None:
    plain = code_lines(PLAIN)
    rows = re.findall(r"\(patterns/(\w+\.py)\) \|.*\| (\d+) \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    found = {one.name: str((code_lines(one) - plain).total()) for one in PATTERNS}
    assert dict(rows) == found
