"""Names in iris_core are the field's: none that they have replaced is left, or comes back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import iris_core

FOLDER = Path(iris_core.__file__).parent
# Words of identifiers, of modules too, and what is said instead.
REPLACED = {
    "announce": "signal",
    "bootstrap": "rank_info",
    "conversation": "exchange",
    "creation": "tensor_factories",
    "explained": "raising_root_cause",
    "hear": "receive, join",
    "heard": "receive, join",
    "link": "socket",
    "links": "sockets",
    "meet": "exchange, gather, barrier",
    "meeting": "recovery",
    "messages": "pickling",
    "origin": "rank_info",
    "patience": "backoff",
    "reach": "memory bounds",
    "reports": "faults",
    "say": "send, describe",
    "serving": "worker",
    "tell": "send, snapshot",
    "together": "collective_section",
    "turns": "grid",
}
REPLACED_WHOLE = {
    "Board": "FaultBoard",
    "HeapTensors": "TensorFactories",
    "HostGroup": "ControlPlane",
    "Node": "SimulatedHost",
    "_node": "_simulation",
    "all_or_nothing": "collective_allocation",
    "let_next_kernel_start": "gdc_launch_dependents",
    "wait_for_earlier_kernels": "gdc_wait",
}


def identifiers() -> Iterator[tuple[str, str]]:
    """Yield each module's name and the names that it defines, with where that is."""
    for file in FOLDER.rglob("*.py"):
        place = str(file.relative_to(FOLDER))
        yield from ((part, place) for part in file.relative_to(FOLDER).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name, f"{place}:{node.lineno}"
            elif isinstance(node, ast.arg):
                yield node.arg, f"{place}:{node.lineno}"
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                yield node.id if isinstance(node, ast.Name) else node.attr, f"{place}:{node.lineno}"


def words_of(identifier: str) -> set[str]:
    """Return the words of a name in snake_case or CamelCase, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)}


def test_no_name_is_one_that_another_has_replaced() -> None:
    left = {
        (identifier, place)
        for identifier, place in identifiers()
        if identifier in REPLACED_WHOLE or not words_of(identifier).isdisjoint(REPLACED)
    }
    assert not left
