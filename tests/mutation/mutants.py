"""Makes the mutants: what is left out or weakened, and where."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCES = ("iris_core/device/sync.py", "iris_core/device/intrinsics.py", "iris_core/device/rma.py", "kernels/**/*.py")
_TIMED_ALONE = "kernels/common/calibration"  # nothing reads what its kernels move

# Calls that are left out where a kernel makes them for their effect alone.
_ORDERING = re.compile(
    r"(?:^|[._])(?:signal|wait|fence|barrier|arrive|expect|acquire|commit|release|finish|end_own_call|end_with_peers|"
    r"count_tiles|gather_done|clear|atomic)(?:_|$)"
)
# The same on the host.
_OF_STREAMS = re.compile(r"\.(?:wait_value|write_value|current_waits|wait_for_current)$")

# Arguments, and words of PTX, that are weakened.
_WEAKER = {"release": "relaxed", "acquire": "relaxed", "acq_rel": "relaxed", "sys": "gpu"}
_WEAKER_OPTIONS = {"cache_modifier": '""', "volatile": "False"}
_WEAKER_CODE = [
    (re.compile(pattern), weaker)
    for pattern, weaker in {
        r"\bld\.acquire\.": "ld.relaxed.",
        r"\bst\.relaxed\.sys\.": "st.relaxed.gpu.",
        r"\bfence\.proxy\.async(?:\.global)?; ?": "",
        r"\bfence\.acq_rel\.sys; ?": "",
        r"\bgriddepcontrol\.\w+; ?": "",
        r"\bcp\.async\.bulk\.wait_group \{\w+\}; ?": "",
    }.items()
]
_BUFFERS = "buffer_of_call"  # which of two buffers a call uses


@dataclass(frozen=True)
class Mutant:
    """One thing wrong.

    Args:
        path: of the file, from the root.
        function: where it is wrong.
        change: what is wrong.
        line: the first changed one, from 1.
        start, stop: the bytes of the file that are replaced.
        text: by what.
    """

    path: str
    function: str
    change: str
    line: int
    start: int
    stop: int
    text: str

    @property
    def name(self) -> str:
        """What it is called in tables and in explained.py; other lines of the file may move."""
        return f"{self.path}::{self.function}: {self.change}"

    @property
    def is_of_streams(self) -> bool:
        """Whether something is left out on the host, between streams."""
        return bool(_OF_STREAMS.search(self.change.partition("(")[0]))

    def apply(self, source: bytes) -> bytes:
        """Return the file with the fault, as many lines long as before: their numbers are part of cache keys."""
        lost = source[self.start : self.stop].count(b"\n")
        return source[: self.start] + self.text.encode() + b"\n" * lost + source[self.stop :]


def make_mutants(root: Path) -> list[Mutant]:
    """Return all mutants of a tree, file by file, each under a name of its own."""
    paths = sorted({path for pattern in SOURCES for path in root.glob(pattern)} - {*root.glob(f"{_TIMED_ALONE}/*")})
    found = [mutant for path in paths for mutant in _of_file(str(path.relative_to(root)), path.read_bytes())]
    count: Counter[str] = Counter()
    named = []
    for mutant in found:
        count[mutant.name] += 1
        again = f" #{count[mutant.name]}" if count[mutant.name] > 1 else ""
        named.append(Mutant(**{**vars(mutant), "change": mutant.change + again}))
    return named


def _of_file(path: str, source: bytes) -> list[Mutant]:
    place = _Places(source)
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            is_kernel = any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
            for node, change, text in [*_in_kernel(function)] if is_kernel else [*_on_host(function)]:
                start, stop = place.of(node)
                found.append(Mutant(path, function.name, change, node.lineno, start, stop, text))
            for line in range(function.lineno, (function.end_lineno or 0) + 1):
                for start, stop, text in place.codes(line):
                    change = f"{source[start:stop].decode().strip()} -> {text or 'nothing'}"
                    found.append(Mutant(path, function.name, change, line, start, stop, text))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.stop))


_Change = tuple[ast.expr | ast.stmt, str, str]


def _in_kernel(function: ast.FunctionDef) -> Iterator[_Change]:
    for node in ast.walk(function):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if _ORDERING.search(ast.unparse(node.value.func)):
                yield node, f"no {ast.unparse(node)}", "pass"
        elif isinstance(node, ast.Constant) and node.value in _WEAKER:
            yield node, f"{node.value} -> {_WEAKER[node.value]}", f'"{_WEAKER[node.value]}"'
        elif isinstance(node, ast.keyword) and node.arg in _WEAKER_OPTIONS:
            yield node.value, f"no {ast.unparse(node)}", _WEAKER_OPTIONS[node.arg]
        elif isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant) and node.right.value == 1:
            loads = isinstance(node.op, ast.Add) and ast.unparse(node.left).startswith("tl.load")
            if loads or isinstance(node.op, ast.BitXor):
                yield node, f"{ast.unparse(node)} -> {ast.unparse(node.left)}", ast.unparse(node.left)
        elif isinstance(node, ast.Return) and node.value and function.name == _BUFFERS:
            yield node.value, "always the first", f"{function.args.args[0].arg} * 0"


def _on_host(function: ast.FunctionDef) -> Iterator[_Change]:
    for node in ast.walk(function):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if _OF_STREAMS.search(ast.unparse(node.value.func)):
                yield node, f"no {ast.unparse(node)}", "pass"


class _Places:
    """Where in a file's bytes nodes and lines are."""

    def __init__(self, source: bytes) -> None:
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def of(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def codes(self, line: int) -> Iterator[tuple[int, int, str]]:
        """Give the words of a line of PTX that can be weaker, and what they become."""
        text = self._lines[line - 1]
        for pattern, weaker in _WEAKER_CODE:
            for match in re.finditer(pattern.pattern.encode(), text):
                yield self._starts[line - 1] + match.start(), self._starts[line - 1] + match.end(), weaker
