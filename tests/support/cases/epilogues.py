"""An epilogue op as somebody else might define one, and what C is with an epilogue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from checking import FP32_ROUNDOFF, Data
from families import FAMILIES

from iris_kernels.common.device.epilogue import EpilogueOp, epilogue_ops, register_epilogue_op
from iris_kernels.common.problem import shard_bounds

STEEPEST = 8.0  # of the ops used here, one after the other: how much larger they make an error
OPS_ROUNDOFF = 64 * FP32_ROUNDOFF  # of what they compute, in fp32


@triton.jit
def add_marks(acc, rows, cols, marks):
    """Add to each element what tells its row and its column from others."""
    mark = tl.load(marks.ptr + cols.to(tl.int64) * marks.stride, mask=cols < marks.size, other=0.0).to(tl.float32)
    return acc + mark[None, :] * (rows % 7 + 1).to(tl.float32)[:, None]


def _add_marks(c: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(c.shape[0], device=c.device) % 7 + 1
    return c + marks.to(c.dtype)[None, :] * rows.to(c.dtype)[:, None]


MARKS = EpilogueOp("marks", add_marks, _add_marks, operand="marks")


def register_marks() -> None:
    """Let problems name the op."""
    register_epilogue_op(MARKS)


def _whole(name: str, problem: Any, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(problem.n, generator=generator).to(device, problem.dtype)


def own_columns(family: str, problem: Any, rank: int) -> slice:
    """Return which columns of the whole product a rank's B gives."""
    is_cut = FAMILIES[family].own_b.__name__ == "_columns"
    return slice(*shard_bounds(problem.n, problem.world_size, rank)) if is_cut else slice(None)


def own_vector(name: str, family: str, problem: Any, rank: int, device: torch.device | None = None) -> torch.Tensor:
    """Return a rank's part of an operand that the epilogue reads."""
    return _whole(name, problem, device or torch.device("cpu"))[own_columns(family, problem, rank)]


def finished_data(data: Data, family: str, problem: Any, rank: int) -> Data:
    """Return a call's data with what C is after the problem's epilogue."""
    expected, peers = data.expected, [rank]
    if family == "gemm_all_scatter":  # every rank's columns, as that rank finishes them
        peers = list(range(problem.world_size))
    parts = []
    for peer in peers:
        columns = own_columns(family, problem, peer)
        part = expected[:, columns] if len(peers) > 1 else expected
        for op in epilogue_ops(problem.epilogue):
            operands = [own_vector(op.operand, family, problem, peer, part.device)] if op.operand else []
            part = op.reference(part, *operands)
        parts.append(part)
    finished = torch.cat(parts, dim=1)
    roundoff = torch.finfo(problem.dtype).eps / 2
    bound = STEEPEST * data.bound + roundoff * finished.abs() + OPS_ROUNDOFF * (1 + finished.abs())
    return replace(data, expected=finished, bound=bound, library_error=STEEPEST * data.library_error)
