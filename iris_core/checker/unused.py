"""Whether a kernel uses what an atomic returns, read off its source: what it does not use is no acquire.

An atomic's acquire is one thread's, and reaches the others with its result, through shared memory and a barrier. One
whose result is not used is compiled to a reduction, which acquires nothing (Triton 3.6, NVIDIA: ``red``).
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Sequence

_ATOMICS = "atomic_"  # what the language's names begin with

Frame = tuple[str, int, str]  # file, line, function


def result_is_unused(frames: Sequence[Frame]) -> bool:
    """Return whether the result of an atomic is dropped, or given a name that is never read.

    Args:
        frames: where the atomic is called, innermost first. One that returns the result leaves it to the next.
    """
    called = _ATOMICS
    for file, line, function in frames:
        used = _use_of(file, line, function, called)
        if used != "returned":
            return used == "unused"
        called = function
    return False


@functools.cache
def _use_of(file: str, line: int, function: str, called: str) -> str:
    """Return what becomes of a call's result: "unused", "returned" or, as far as can be told, "used"."""
    nodes = [
        (scope, node)
        for scope in ast.walk(_parsed(file))
        if isinstance(scope, ast.FunctionDef) and scope.name == function
        for node in ast.walk(scope)
    ]
    calls = [node for _, node in nodes if isinstance(node, ast.Call) and _is_call_of(node, called, line)]
    if len(calls) != 1:
        return "used"
    for scope, node in nodes:
        if isinstance(node, ast.Return) and node.value is calls[0]:
            return "returned"
        if isinstance(node, ast.Expr) and node.value is calls[0]:
            return "unused"
        if isinstance(node, ast.Assign) and node.value is calls[0] and isinstance(node.targets[0], ast.Name):
            return "used" if _is_read(node.targets[0].id, scope) else "unused"
    return "used"


def _is_call_of(call: ast.Call, called: str, line: int) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    is_named = name.startswith(_ATOMICS) if called == _ATOMICS else name == called
    return is_named and call.lineno <= line <= (call.end_lineno or line)


def _is_read(name: str, scope: ast.FunctionDef) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load) for node in ast.walk(scope)
    )


@functools.cache
def _parsed(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])
