"""The epilogue: what is done to a finished tile of C in fp32, before it is rounded and stored. A list of ops.

An op is a jit function ``op(acc, rows, cols, operand)`` that returns the tile anew: `acc` is fp32 (ROWS, COLS), `rows`
and `cols` say which rows and columns of this rank's C they are, some of which lie before or past it, `operand` is what
the op reads, a `Vector`, a `Matrix`, or (). `column_values`, `row_values` and `elements` load from it what belongs to
the tile. The same function runs in Triton and in Gluon, so it makes no tensors of its own but from its arguments: of
what layout they would be, it cannot know.

Partial sums have no epilogue. Where ranks sum, the one that adds the last partial applies it, to each element once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from iris_core.device.cache_key import in_cache_key

from .arguments import Epilogue


@in_cache_key
class Vector(NamedTuple):
    """An operand with an element a column, or a row, of this rank's C; with a stride of 0 it is one number.

    Where a kernel has loaded the elements of the tile's columns ahead of its ops, `fetched` has them, in fp32.
    """

    ptr: Any
    size: int
    stride: int
    fetched: tuple[Any, ...] = ()


class Matrix(NamedTuple):
    """An operand with an element an element of this rank's C."""

    ptr: Any
    rows: int
    columns: int
    stride_row: int
    stride_column: int


@triton.jit
def finish_tile(acc, epilogue, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr):
    """Return a tile or subtile whose first element is at (row, col), as its epilogue leaves it."""
    if len(epilogue.operands) > 0:
        acc = apply_ops(acc, epilogue, row + tl.arange(0, ROWS), col + tl.arange(0, COLS), TILE)
    return acc


@triton.jit
def apply_ops(acc, epilogue, rows, cols, TILE: tl.constexpr, fetched=None):
    """Return what the ops make of a tile; `rows` and `cols` in the layouts of its dimensions.

    `fetched`, if any, has of each op the elements of its vector that belong to `cols`, fp32, or () if it reads nothing.
    """
    for index in tl.static_range(len(epilogue.operands)):
        operand = epilogue.operands[index]
        if fetched is not None:
            if len(operand) > 0:
                operand = Vector(operand.ptr, operand.size, operand.stride, (fetched[index],))
        acc = TILE.EPILOGUE[index](acc, epilogue.first_row + rows, cols, operand)
    return acc


@triton.jit
def from_row(epilogue, start):
    """Return the epilogue of the rows from `start` on."""
    if len(epilogue.operands) > 0:
        return Epilogue(epilogue.operands, epilogue.first_row + start)
    else:
        return epilogue


@triton.jit
def column_values(vector, cols):
    """Return of a vector the elements of the columns that the op is given, fp32 (1, COLS)."""
    if len(vector.fetched) > 0:
        return vector.fetched[0][None, :]
    else:
        return load_elements(vector, cols).to(tl.float32)[None, :]


@triton.jit
def row_values(vector, rows):
    """Return of a vector the elements of these rows, fp32 (ROWS, 1)."""
    return load_elements(vector, rows).to(tl.float32)[:, None]


@triton.jit
def load_elements(vector, indices):
    """Return the elements of a vector at these indices; 0 where there are none."""
    is_inside = (indices >= 0) & (indices < vector.size)
    return tl.load(vector.ptr + indices.to(tl.int64) * vector.stride, mask=is_inside, other=0.0)


@triton.jit
def elements(matrix, rows, cols):
    """Return of a matrix the elements of these rows and columns, fp32 (ROWS, COLS)."""
    offsets = rows.to(tl.int64)[:, None] * matrix.stride_row + cols.to(tl.int64)[None, :] * matrix.stride_column
    is_inside = ((rows >= 0) & (rows < matrix.rows))[:, None] & (cols < matrix.columns)[None, :]
    return tl.load(matrix.ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)


@triton.jit
def multiply_by_scale(acc, rows, cols, scale):
    """Multiply each column by its element of a vector."""
    return acc * column_values(scale, cols)


@triton.jit
def add_bias(acc, rows, cols, bias):
    """Add to each column its element of a vector."""
    return acc + column_values(bias, cols)


@triton.jit
def add_residual(acc, rows, cols, residual):
    """Add a matrix."""
    return acc + elements(residual, rows, cols)


@triton.jit
def relu(acc, rows, cols, operand):
    """max(x, 0); not a number stays so."""
    return tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gelu(acc, rows, cols, operand):
    """x Φ(x), by the error function."""
    return 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))


@triton.jit
def gelu_tanh(acc, rows, cols, operand):
    """x Φ(x), with tanh in place of the error function, as torch approximates it."""
    return acc * tl.sigmoid(1.5957691216057308 * (acc + 0.044715 * acc * acc * acc))


@triton.jit
def silu(acc, rows, cols, operand):
    """x sigmoid(x)."""
    return acc * tl.sigmoid(acc)


@triton.jit
def swiglu(acc, rows, cols, operand):
    """silu(gate) · up, of a gate in each even column and its up in the next: half as many columns."""
    gate, up = tl.split(acc.reshape([acc.shape[0], acc.shape[1] // 2, 2]))
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _scaled_by_tanh(acc, slope):
    """x (1 + tanh(slope x)) / 2, off by 2^-12 |x|: of PTX's tanh.approx.f32 the relative error is up to 2^-11."""
    half = 0.5 * acc
    inner = acc * slope
    tanh = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [inner], dtype=tl.float32, is_pure=True, pack=1)
    return half * tanh + half


@triton.jit
def gelu_by_tanh(acc, rows, cols, operand):
    """`gelu`, off by 2^-11.8 |x|: erf(x / sqrt(2)) is tanh(x p(x^2)), with this p off by 2^-14.7."""
    square = tl.minimum(acc * acc, 36.0)  # p is positive there, and from x = 6 on both are 1 in fp32
    return _scaled_by_tanh(acc, 0.797717846 + square * (0.0367982354 - 0.000315807829 * square))


@triton.jit
def gelu_tanh_by_tanh(acc, rows, cols, operand):
    """`gelu_tanh`, off by 2^-12 |x|."""
    return _scaled_by_tanh(acc, 0.7978845608028654 + 0.035677408136300125 * acc * acc)


@triton.jit
def silu_by_tanh(acc, rows, cols, operand):
    """`silu`, off by 2^-12 |x|."""
    return _scaled_by_tanh(acc, 0.5)


@triton.jit
def swiglu_by_tanh(acc, rows, cols, operand):
    """`swiglu`, off by 2^-12 |gate · up|."""
    gate, up = tl.split(acc.reshape([acc.shape[0], acc.shape[1] // 2, 2]))
    return _scaled_by_tanh(gate, 0.5) * up


@dataclass(frozen=True)
class EpilogueOp:
    """An op that problems name.

    Args:
        name: in `Problem.epilogue`.
        apply: the jit function.
        reference: the same in torch, of C (rows, columns), fp32 or wider, and the operand, if there is one.
        operand: the name of what it reads; "" for nothing.
        per: of what in this rank's C the operand has an element each: it is a vector of as many elements as there are
            columns, or rows, or a matrix.
        slope: by how much it makes an error in C larger, at most.
        multiplies: whether it multiplies C by its operand, which then makes an error larger, too.
        narrowing: how many columns side by side make one of what it returns; more than 1 of a last op alone.
        apply_fast: as `apply`, by fewer instructions of NVIDIA's, where C has 16 bits, whose rounding is larger than
            what this is off by; None for `apply`.
    """

    name: str
    apply: Any
    reference: Callable[..., torch.Tensor]
    operand: str = ""
    per: Literal["column", "row", "element"] = "column"
    slope: float = 1.0
    multiplies: bool = False
    narrowing: int = 1
    apply_fast: Any = None

    def applied(self, arch: str, dtype: torch.dtype) -> Any:
        """Return the jit function for a GPU ("sm_90", "gfx942", …) and C's dtype."""
        is_fast = self.apply_fast is not None and arch.startswith("sm_") and dtype.itemsize == 2
        return self.apply_fast if is_fast else self.apply

    def slope_with(self, operand: torch.Tensor | None) -> float:
        """Return by how much it makes an error in C larger, at most, where it reads this."""
        largest = float(operand.abs().max()) if self.multiplies and operand is not None and operand.numel() else 1.0
        return self.slope * largest

    def operand_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of the operand, for a C of so many rows and columns on a rank."""
        return {"column": (columns,), "row": (rows,), "element": (rows, columns)}[self.per]


_ops: dict[str, EpilogueOp] = {}


def register_epilogue_op(op: EpilogueOp) -> None:
    """Let problems name an op.

    Raises:
        ValueError: another has that name.
    """
    if _ops.setdefault(op.name, op) is not op:
        raise ValueError(f"there is an epilogue op {op.name!r} already")


def epilogue_ops(names: Sequence[str]) -> tuple[EpilogueOp, ...]:
    """Return the ops of these names.

    Raises:
        ValueError: there is none of a name, two read the same operand, or one that narrows C is not the last.
    """
    if not names:
        return ()
    for name in names:
        if name not in _ops:
            raise ValueError(f"there is no epilogue op {name!r}; there are {', '.join(_ops)}")
    found = tuple(_ops[name] for name in names)
    operands = [op.operand for op in found if op.operand]
    if len(set(operands)) < len(operands):
        raise ValueError(f"two ops of the epilogue {', '.join(names)} read the same operand")
    if narrowing := [op.name for op in found[:-1] if op.narrowing > 1]:
        raise ValueError(f"{narrowing[0]} narrows C, so it must be the last op of the epilogue {', '.join(names)}")
    return found


def reads_columns_alone(names: Sequence[str]) -> bool:
    """Return whether these ops read vectors with an element a column, at least one, and nothing else."""
    reading = [op.per for op in epilogue_ops(names) if op.operand]
    return bool(reading) and set(reading) == {"column"}


ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
GATED_ACTIVATIONS = ("swiglu",)

for _op in (
    EpilogueOp("scale", multiply_by_scale, lambda c, scale: c * scale.to(c.dtype), operand="scale", multiplies=True),
    EpilogueOp("bias", add_bias, lambda c, bias: c + bias.to(c.dtype), operand="bias"),
    EpilogueOp(
        "residual", add_residual, lambda c, residual: c + residual.to(c.dtype), operand="residual", per="element"
    ),
    EpilogueOp("relu", relu, torch.relu),
    EpilogueOp("gelu", gelu, torch.nn.functional.gelu, slope=1.13, apply_fast=gelu_by_tanh),
    EpilogueOp(
        "gelu_tanh",
        gelu_tanh,
        lambda c: torch.nn.functional.gelu(c, approximate="tanh"),
        slope=1.13,
        apply_fast=gelu_tanh_by_tanh,
    ),
    EpilogueOp("silu", silu, torch.nn.functional.silu, slope=1.1, apply_fast=silu_by_tanh),
    EpilogueOp(
        "swiglu",
        swiglu,
        lambda c: torch.nn.functional.silu(c[:, ::2]) * c[:, 1::2],
        narrowing=2,
        apply_fast=swiglu_by_tanh,
    ),
):
    register_epilogue_op(_op)


def epilogue_arguments(names: Sequence[str], operands: dict[str, torch.Tensor], first_row: int = 0) -> Epilogue:
    """Return what kernels take for the ops of these names.

    Args:
        names: of the ops, in order.
        operands: what they read, by name.
        first_row: of this rank's C, that a kernel's row 0 is.
    """
    ops = epilogue_ops(names)
    return Epilogue(tuple(_bundle(operands[op.operand]) if op.operand else () for op in ops), first_row if ops else ())


def _bundle(tensor: torch.Tensor) -> Vector | Matrix:
    return (Vector if tensor.ndim == 1 else Matrix)(tensor, *tensor.shape, *tensor.stride())


def finish_with_torch(c: torch.Tensor, names: Sequence[str], operands: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return C as these ops leave it, computed by torch in C's dtype."""
    for op in epilogue_ops(names):
        c = op.reference(c, operands[op.operand]) if op.operand else op.reference(c)
    return c
