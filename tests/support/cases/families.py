"""What the tests must know of each family: which part of the whole is a rank's, and what its output must be.

A new family's variants are found through the registry; their tests ask here and fail until the family is described.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from iris_kernels.common.problem import shard_bounds
from overlap_taxonomy import Variant, list_families, list_variants


@dataclass(frozen=True)
class Family:
    """A family's shards.

    Args:
        own_a, own_b: ``(problem, rank, whole)`` gives a rank's operand, a view.
        own_output: ``(problem, rank, product)`` gives a rank's part of A @ B.
        sums_partials: whether A @ B is the sum of the ranks' own products, each rounded to the dtype to travel.
    """

    own_a: Callable[[Any, int, torch.Tensor], torch.Tensor]
    own_b: Callable[[Any, int, torch.Tensor], torch.Tensor]
    own_output: Callable[[Any, int, torch.Tensor], torch.Tensor]
    sums_partials: bool = False


def _rows(problem: Any, rank: int, whole: torch.Tensor) -> torch.Tensor:
    return whole[slice(*shard_bounds(whole.shape[0], problem.world_size, rank))]


def _columns(problem: Any, rank: int, whole: torch.Tensor) -> torch.Tensor:
    return whole[:, slice(*shard_bounds(whole.shape[1], problem.world_size, rank))]


def _all(problem: Any, rank: int, whole: torch.Tensor) -> torch.Tensor:
    return whole


FAMILIES = {
    "gemm_all_scatter": Family(own_a=_all, own_b=_columns, own_output=_all),
    "all_gather_gemm": Family(own_a=_rows, own_b=_columns, own_output=_columns),
    "gemm_all_reduce": Family(own_a=_columns, own_b=_rows, own_output=_all, sums_partials=True),
    "gemm_reduce_scatter": Family(own_a=_columns, own_b=_rows, own_output=_rows, sums_partials=True),
}


def name(variant: Variant) -> str:
    """Return a variant's name for a test's id."""
    return f"{variant.family}-{variant.name}"


def stem(variant: str) -> str:
    """Return how kernels are named after a variant: by pattern, main loop and schedule, if not the first ones."""
    return variant.replace(":portable", "").replace(":", "_")


def module_of(variant: str) -> str:
    """Return where a variant is, in its family's package."""
    pattern, mainloop, *schedule = variant.split(":")
    return f"{'hopper' if mainloop == 'sm90' else 'portable'}.{'_'.join([pattern, *schedule])}"


def make_problem(family: str, m: int, n: int, k: int, world_size: int, dtype: torch.dtype, **options: Any) -> Any:
    """Return a family's problem."""
    return importlib.import_module(f"iris_kernels.{family}").Problem(m, n, k, world_size, dtype, **options)


def dtype_and_options(name: str) -> tuple[torch.dtype, dict[str, Any]]:
    """Return the dtype of a table of measured times, such as "float8_e4m3fn-row-fast", as options of a problem."""
    dtype, *scales = name.split("-")
    if not scales:
        return getattr(torch, dtype), {}
    kinds = {"tensor": ("tensor", "tensor"), "row": ("row", "column"), "block": ("block", "block")}
    return getattr(torch, dtype), {"scales": kinds[scales[0]], "use_fast_accum": "fast" in scales}


def _running_here() -> list[Variant]:
    """Return the variants that this machine can run: some libraries, and some kernels, need their GPUs."""
    problems = {family: make_problem(family, 64, 64, 64, 1, torch.bfloat16) for family in list_families()}
    return [variant for variant in list_variants() if not variant.unsupported_reason(problems[variant.family], None)]


def _fused(variants: list[Variant]) -> list[Variant]:
    return [variant for variant in variants if variant.has_kernels]


with mock.patch.object(torch.cuda, "is_available", return_value=False):
    VARIANTS = _running_here()  # on every machine
FUSED = _fused(VARIANTS)
GPU_VARIANTS = _running_here()  # on this machine's GPUs
GPU_FUSED = _fused(GPU_VARIANTS)
