"""Barriers in shared memory have one file: nothing else in the kernels calls them or computes their phases."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIPELINE = ROOT / "kernels/common/hopper/pipeline.py"
OTHERS = [
    path
    for path in sorted(ROOT.glob("kernels/**/*.py"))
    if path != PIPELINE and "from triton.experimental" in path.read_text()
]


def by_hand(source: str) -> list[str]:
    """Return what a file has of barriers and their phases, each as its line and the code."""
    found = [node for node in ast.walk(ast.parse(source)) if _is_barrier(node) or _is_phase(node)]
    return [f"{node.lineno}: {ast.unparse(node)}" for node in found if isinstance(node, (ast.expr, ast.alias))]


def _is_barrier(node: ast.AST) -> bool:
    names = {ast.Name: "id", ast.alias: "name", ast.Attribute: "attr"}
    name = str(getattr(node, names.get(type(node), ""), ""))
    return "mbarrier" in name.lower().split(".") or name == "MBarrierLayout"


def _is_phase(node: ast.AST) -> bool:
    """Whether a parity is taken or turned over, or a state made or taken apart."""
    if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant):
        of_uses = any(isinstance(inner, ast.FloorDiv) for inner in ast.walk(node.left))
        is_bit = isinstance(node.op, (ast.BitAnd, ast.BitXor)) and node.right.value == 1
        return is_bit or (isinstance(node.op, ast.Mod) and node.right.value == 2 and of_uses)
    is_made = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "PipelineState"
    return is_made or (isinstance(node, ast.Attribute) and node.attr == "phase")


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(ROOT / "kernels")))
def test_barriers_and_phases_are_the_pipelines(path: Path) -> None:
    assert not by_hand(path.read_text())


def test_all_that_use_a_pipeline_are_looked_at() -> None:
    users = {path for path in ROOT.glob("kernels/**/*.py") if "pipeline import" in path.read_text()}
    assert len(users) > 5
    assert users <= set(OTHERS)
    assert by_hand(PIPELINE.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma",
        "hopper.mbarrier.wait(full, phase)",
        "gl.allocate_shared_memory(gl.int64, [1], MBarrierLayout())",
        "wait(full, number & 1)",
        "wait(empty, ((number // STAGES) & 1) ^ 1)",
        "wait(empty, parity ^ 1)",
        "wait(full, (number // STAGES) % 2)",
        "consumer_wait(pipeline, PipelineState(0, 1))",
        "wait(full, state.phase)",
    ],
)
def test_what_is_made_by_hand_is_found(source: str) -> None:
    assert by_hand(source)


@pytest.mark.parametrize("source", ["group = wave % 2", "is_power = not splits & (splits - 1)", "tma.store_wait(0)"])
def test_what_is_no_phase_is_not(source: str) -> None:
    assert not by_hand(source)
