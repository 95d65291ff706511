"""Shape sets: which (M, N, K), sizes of the whole problem over all ranks, are measured under which name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_PAPER_NK = ((4096, 12288), (4096, 14336), (3584, 14336), (4608, 36864), (8192, 28672), (8192, 30720))

# The matrices of Llama and Qwen models: what goes with an all-gather, or all-scatter, and what with a reduce-scatter.
_LLAMA_NK = {
    "all_gather": ((11008, 4096), (14336, 4096), (28672, 8192), (53248, 16384), (29568, 8192), (49152, 12288)),
    "reduce_scatter": ((4096, 11008), (4096, 14336), (3584, 14336), (4608, 36864), (8192, 28672), (8192, 29568)),
}

EXPLICIT = "explicit"  # the shape set of a shape that was given as MxNxK


@dataclass(frozen=True)
class Shape:
    """Sizes of a whole problem, and the name of the set they are from."""

    m: int
    n: int
    k: int
    shape_set: str = EXPLICIT

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


def _paper(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    return [(8192, n, k) for n, k in _PAPER_NK]


def _square(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    return [(size, size, size) for size in (2048, 4096, 8192, 16384)]


def _llama(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    return [(8192, n, k) for n, k in _LLAMA_NK[collective]]


def _decode(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    return [(m, n, k) for n, k in _LLAMA_NK[collective] for m in (1, 8, 32, 64, 128, 256, 512)]


def _ragged(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    return [(4091 * world_size, 5120, 1024), (8191, 5119, 1031), (257, 4099, 2055), (127, 1001, 333)]


def _smoke(collective: str, world_size: int) -> Iterable[tuple[int, int, int]]:
    return [(64, 128, 64), (33, 37, 41), (1, 64, 32)]


@dataclass(frozen=True)
class ShapeSet:
    """A named list of (M, N, K); it may depend on the family's collective and on the number of ranks."""

    name: str
    summary: str
    sizes: Callable[[str, int], Iterable[tuple[int, int, int]]]


SHAPE_SETS = {
    shape_set.name: shape_set
    for shape_set in (
        ShapeSet("smoke", "small enough for the interpreter", _smoke),
        ShapeSet("paper", "the paper's, M 8192", _paper),
        ShapeSet("square", "M = N = K", _square),
        ShapeSet("llama", "the (N, K) of language models, M 8192", _llama),
        ShapeSet("decode", "the same (N, K) with few rows: M 1 to 512", _decode),
        ShapeSet("ragged", "sizes that divide nothing", _ragged),
    )
}


def parse_shapes(text: str, *, collective: str, world_size: int) -> list[Shape]:
    """Return the shapes that a comma-separated list of set names and MxNxK names, each once, in order.

    Args:
        text: e.g. ``"smoke,8192x4096x14336"``.
        collective: "all_gather" or "reduce_scatter": which list of the sets that have two.
        world_size: the number of ranks.

    Raises:
        ValueError: a name that is no set, or sizes that are not three positive integers.
    """
    shapes: dict[tuple[int, int, int], Shape] = {}
    for part in (part.strip() for part in text.split(",")):
        if part in SHAPE_SETS:
            sizes = SHAPE_SETS[part].sizes(collective, world_size)
            found = [Shape(m, n, k, part) for m, n, k in sizes]
        else:
            found = [_explicit(part)]
        for shape in found:
            shapes.setdefault((shape.m, shape.n, shape.k), shape)
    return list(shapes.values())


def parse_sizes(text: str) -> tuple[int, int, int] | None:
    """Return three positive integers with an x between them; None for another text."""
    match = re.fullmatch(r"(\d+)[xX](\d+)[xX](\d+)", text)
    first, second, third = map(int, match.groups()) if match else (0, 0, 0)
    return (first, second, third) if first and second and third else None


def _explicit(text: str) -> Shape:
    sizes = parse_sizes(text)
    if sizes is None:
        raise ValueError(
            f"unknown shape {text!r}; give a shape set ({', '.join(SHAPE_SETS)}) "
            "or sizes as MxNxK, three positive integers, e.g. 8192x4096x14336"
        )
    return Shape(*sizes)
