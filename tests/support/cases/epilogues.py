"""An epilogue op as somebody else might define one, and what C is with an epilogue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from checking import FP32_ROUNDOFF, Data
from families import FAMILIES

from iris_kernels.common.device.epilogue import (
    EpilogueOp,
    column_values,
    epilogue_ops,
    finish_with_torch,
    register_epilogue_op,
    row_values,
)
from iris_kernels.common.problem import shard_bounds

STEEPEST = 16.0  # of the ops used here, one after the other: how much larger they make an error
OPS_ROUNDOFF = 64 * FP32_ROUNDOFF  # of what they compute, in fp32


@triton.jit
def add_marks(acc, rows, cols, marks):
    """Add to each element what tells its row and its column from others."""
    return acc + column_values(marks, cols) * (rows % 7 + 1).to(tl.float32)[:, None]


def _add_marks(c: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(c.shape[0], device=c.device) % 7 + 1
    return c + marks.to(c.dtype)[None, :] * rows.to(c.dtype)[:, None]


@triton.jit
def multiply_rows(acc, rows, cols, factors):
    """Multiply each row by its element of a vector."""
    return acc * row_values(factors, rows)


MARKS = EpilogueOp("marks", add_marks, _add_marks, operand="marks")
ROW_FACTORS = EpilogueOp(
    "row_factors", multiply_rows, lambda c, factors: c * factors.to(c.dtype)[:, None], "row_factors", per="row"
)


def register_ops() -> None:
    """Let problems name the ops."""
    for op in (MARKS, ROW_FACTORS):
        register_epilogue_op(op)


def own_rows(family: str, problem: Any, rank: int) -> slice:
    """Return which rows of the whole product a rank finishes."""
    is_cut = FAMILIES[family].own_output.__name__ == "_rows"
    return slice(*shard_bounds(problem.m, problem.world_size, rank)) if is_cut else slice(None)


def own_columns(family: str, problem: Any, rank: int) -> slice:
    """Return which columns of the whole product a rank's B gives."""
    is_cut = FAMILIES[family].own_b.__name__ == "_columns"
    return slice(*shard_bounds(problem.n, problem.world_size, rank)) if is_cut else slice(None)


def own_operands(family: str, problem: Any, rank: int, device: torch.device | None = None) -> dict[str, torch.Tensor]:
    """Return a rank's parts of what the epilogue reads, by name; matrices with their columns one behind the other."""
    found = {}
    for op in epilogue_ops(problem.epilogue):
        draw = torch.Generator().manual_seed(len(op.operand))
        whole = torch.randn(op.operand_shape(problem.m, problem.n)[::-1], generator=draw).to(device, problem.dtype).t()
        rows, columns = own_rows(family, problem, rank), own_columns(family, problem, rank)
        if op.operand:
            found[op.operand] = whole[{"row": rows, "column": columns, "element": (rows, columns)}[op.per]]
    return found


def finished_data(data: Data, family: str, problem: Any, rank: int) -> Data:
    """Return a call's data with what C is after the problem's epilogue."""
    expected, peers = data.expected, [rank]
    if family == "gemm_all_scatter":  # every rank's columns, as that rank finishes them
        peers = list(range(problem.world_size))
    parts = []
    for peer in peers:
        columns = own_columns(family, problem, peer)
        part = expected[:, columns] if len(peers) > 1 else expected
        parts.append(finish_with_torch(part, problem.epilogue, own_operands(family, problem, peer, part.device)))
    finished = torch.cat(parts, dim=1)
    roundoff = torch.finfo(problem.dtype).eps / 2
    before = data.bound
    if problem.narrowing > 1:  # a gate's error counts as often as its up, and the other way round
        gate, up = (1 + expected.abs()).unflatten(1, (-1, 2)).unbind(-1)
        before = data.bound[:, ::2] * up + data.bound[:, 1::2] * gate
    bound = STEEPEST * before + roundoff * finished.abs() + OPS_ROUNDOFF * (1 + finished.abs())
    return replace(data, expected=finished, bound=bound, library_error=STEEPEST * data.library_error)
