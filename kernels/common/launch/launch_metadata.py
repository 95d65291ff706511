"""What a profiler shows of a launch: its FLOPs and bytes, by Triton's `launch_metadata`, as Proton reads it.

Triton calls these functions while a launch hook is set, and at no other time: a prepared launch does not know of them.
Bytes are those of operands that are read and of results that are written, each once, and of what is read or written
beside at peers or for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Arguments = Mapping[str, Any]  # of a launch, by the kernel's names
_OPERANDS = ("b", "gathered", "own_ptr")  # whose elements a kernel multiplies


def launch_metadata(
    *,
    product: Callable[[Arguments], tuple[int, int, int]] = lambda args: (0, 0, 0),
    moved: Callable[[Arguments], int] = lambda args: 0,
) -> Callable[[Any, Any, Arguments], dict[str, Any]]:
    """Return a kernel's `launch_metadata`.

    Args:
        product: gives m, n and k of what a launch multiplies, from its arguments.
        moved: gives the elements that it moves beside, to or from peers.
    """

    def describe(grid: Any, kernel: Any, args: Arguments) -> dict[str, Any]:
        m, n, k = product(args)
        itemsize = _itemsize(args)
        sizes = f" [M={m}, N={n}, K={k}]" if m * n * k else ""
        return {
            "name": kernel.name + sizes,
            f"flops{8 * itemsize}": 2 * m * n * k,
            "bytes": (m * k + k * n + m * n + moved(args)) * itemsize,
        }

    return describe


def _itemsize(args: Arguments) -> int:
    """Return the bytes of an element of the operands; of the matrix that is moved, where none is multiplied."""
    found = next((args[name] for name in _OPERANDS if name in args), None)
    if found is None:
        bundle = next(args[name] for name in ("block", "shard", "staging") if name in args)
        found = next(value for value in bundle if hasattr(value, "dtype"))
    return int(getattr(found, "base", found).dtype.itemsize)


def block_product(args: Arguments) -> tuple[int, int, int]:
    """Return the product whose tiles are those of `block`."""
    return args["block"].m, args["block"].n, args["gemm"].k


def peers_of(args: Arguments) -> int:
    """Return how many peers the rank has."""
    return int(args["TILE"].WORLD_SIZE if "TILE" in args else args["WORLD_SIZE"]) - 1


def size_of_shard(size: int, shard: int, rank: int) -> int:
    """Return how much of a size is in a rank's shard, where full shards have `shard`."""
    return max(0, min(shard, size - rank * shard))
