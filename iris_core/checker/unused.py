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
    within = _innermost(_parsed(file), line, function)
    if within is None:
        return "used"
    scope, statement = within
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.Call) or not _is_call_of(value, called):
        return "used"
    if isinstance(statement, ast.Return):
        return "returned"
    if isinstance(statement, ast.Expr):
        return "unused"
    if isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets):
        read = {node.id for node in ast.walk(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        return "used" if any(target.id in read for target in statement.targets) else "unused"  # type: ignore[attr-defined]
    return "used"


def _is_call_of(call: ast.Call, called: str) -> bool:
    """Whether it is that function's call and none of its arguments is another."""
    names = [_name(node) for node in ast.walk(call) if isinstance(node, ast.Call)]
    matching = [name for name in names if (name.startswith(_ATOMICS) if called == _ATOMICS else name == called)]
    return len(matching) == 1 and matching[0] == _name(call)


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _innermost(tree: ast.Module, line: int, function: str) -> tuple[ast.FunctionDef, ast.stmt] | None:
    """Return the smallest statement at a line of a function, with the function."""
    for scope in ast.walk(tree):
        if isinstance(scope, ast.FunctionDef) and scope.name == function and _holds(scope, line):
            statements = [node for node in ast.walk(scope) if isinstance(node, ast.stmt) and _holds(node, line)]
            return scope, min(statements, key=lambda node: (node.end_lineno or 0) - node.lineno)
    return None


def _holds(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


@functools.cache
def _parsed(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])
