"""How kernels read A and B: by tensor descriptors, or where the GPU or the configuration has none, through pointers.

A descriptor names a matrix whose rows are contiguous and start on 16 bytes. An operand that it cannot name is copied
in every call, by one kernel ahead of the call's others: twice its bytes at the memory's rate, where pointers would load
its elements one by one, in every tile again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from iris_core import gdc_wait
from iris_core.backends.base import round_up
from iris_core.utils.torch_modes import plain_tensors

from ..config import GemmConfig
from ..workspace import lasting
from .gemm import DESCRIPTORS_B_KN, DESCRIPTORS_B_NK, POINTERS

ROW_BYTES = 16  # what descriptors ask of addresses, and of the distance between rows
LINE_BYTES = 128  # of the L2 cache
COPY_WARPS = 4
_ROWS, _COLUMNS = 16, 256  # of what a program copies


class Copied(NamedTuple):
    """A matrix (rows, columns), where it is copied to, by rows, and in how many tiles; strides are in elements.

    Behind each row, up to the next, the room is this matrix's alone.
    """

    src_ptr: Any
    dst_ptr: Any
    rows: int
    columns: int
    stride_src_m: int
    stride_src_k: int
    stride_dst_m: int
    tiles: int


@triton.jit
def copy_operands_kernel(a, b, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy the tiles of A, then those of B, a tile per program."""
    gdc_wait()  # what is overwritten may be read until then
    pid = tl.program_id(0)
    if pid < a.tiles:
        copy_tile(pid, a, ROWS, COLUMNS)
    else:
        copy_tile(pid - a.tiles, b, ROWS, COLUMNS)


@triton.jit
def copy_tile(tile, copied, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Copy one tile of a matrix, and zeroes behind its rows: so far it is stored 16 bytes at a time."""
    across = tl.cdiv(copied.columns, COLUMNS)
    rows = (tile // across) * ROWS + tl.arange(0, ROWS)
    columns = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows < copied.rows)[:, None]
    src = rows.to(tl.int64)[:, None] * copied.stride_src_m + columns.to(tl.int64)[None, :] * copied.stride_src_k
    dst = rows.to(tl.int64)[:, None] * copied.stride_dst_m + columns[None, :]
    value = tl.load(copied.src_ptr + src, mask=inside & (columns < copied.columns)[None, :], other=0.0)
    tl.store(copied.dst_ptr + dst, value, mask=inside & (columns < copied.stride_dst_m)[None, :])


class OperandCopies:
    """An operator's copies of operands that its descriptors cannot name.

    Args:
        owner: the operator, as errors name it.
        can_describe: whether its descriptors can name a matrix, by rows.
    """

    def __init__(self, owner: str, can_describe: Callable[[torch.Tensor], bool]) -> None:
        self._owner = owner
        self._can_describe = can_describe
        self._rooms: dict[Any, list[torch.Tensor]] = {}  # prepared calls use the earlier ones, too

    def are_needed(self, name: str, matrix: torch.Tensor) -> bool:
        """Return whether an operand must be copied; of B the columns may be what is contiguous."""
        if self._can_describe(matrix) or not matrix.numel():
            return False
        return name == "A" or not self._can_describe(matrix.t())

    def readable(
        self,
        run: Callable[..., None],
        a: torch.Tensor,
        b: torch.Tensor,
        room_of_a: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]:
        """Return the operands as descriptors can name them, and which of them are copies.

        Args:
            run: queues a kernel, as `Call.run` does.
            a, b: the call's; an empty one is returned as it is.
            room_of_a: where A is copied to; None for room of this object's own, made when it is first needed.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        copies: dict[str, Copied] = {}
        found = {"A": a, "B": b}
        for name, matrix in (("A", a), ("B", b)):
            if self.are_needed(name, matrix):
                room = room_of_a if name == "A" and room_of_a is not None else self._room_of(name, matrix)
                copies[name] = copied_to(*((matrix, room) if room.stride(1) == 1 else (matrix.t(), room.t())))
                found[name] = room
        if copies:
            none = next(iter(copies.values()))._replace(tiles=0)
            of_a, of_b = copies.get("A", none), copies.get("B", none)
            tile = {"ROWS": _ROWS, "COLUMNS": _COLUMNS}
            run(copy_operands_kernel, of_a.tiles + of_b.tiles, num_warps=COPY_WARPS, early=True, a=of_a, b=of_b, **tile)
        return found["A"], found["B"], tuple(copies)

    def clear(self) -> None:
        """Give the room back."""
        self._rooms.clear()

    def _room_of(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return where an operand is copied to; B lies there by columns, unless it does by rows where it is."""
        is_by_columns = name == "B" and matrix.stride(1) != 1
        rows, columns = map(int, matrix.t().shape if is_by_columns else matrix.shape)
        distance = padded(columns, matrix.dtype)
        rooms = self._rooms.setdefault((name, is_by_columns), [])
        if not rooms or rooms[-1].numel() < rows * distance:
            least = 2 * rooms[-1].numel() if rooms else 0
            try:
                size = max(rows * distance, least)
                with plain_tensors():
                    rooms.append(lasting(matrix.device, lambda: matrix.new_empty(size)))
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(
                    f"{self._owner}: no memory for a copy of {name}, {tuple(matrix.shape)} with strides "
                    f"{matrix.stride()}, which tensor descriptors cannot name; rows that are contiguous and start on "
                    f"{ROW_BYTES} bytes need no copy: {error}"
                ) from error
        room = rooms[-1][: rows * distance].view(rows, distance)[:, :columns]
        return room.t() if is_by_columns else room


def copied_to(matrix: torch.Tensor, room: torch.Tensor) -> Copied:
    """Return what the kernel takes to copy a matrix, by rows, to a room of its shape."""
    rows, columns = matrix.shape
    tiles = -(-rows // _ROWS) * -(-columns // _COLUMNS)
    return Copied(matrix, room, rows, columns, matrix.stride(0), matrix.stride(1), room.stride(0), tiles)


def loads_of(operands: dict[str, torch.Tensor]) -> int:
    """Return how these operands can be read."""
    if not all(describable(matrix) for name, matrix in operands.items() if name != "b"):
        return POINTERS.value
    if describable(operands["b"].t()):
        return DESCRIPTORS_B_NK.value
    return DESCRIPTORS_B_KN.value if describable(operands["b"]) else POINTERS.value


def descriptor_of(name: str, matrix: torch.Tensor, loads: int, config: GemmConfig) -> TensorDescriptor:
    """Return an operand's descriptor for a configuration's tiles; `name` is "b" or an A's."""
    if name != "b":
        return TensorDescriptor.from_tensor(matrix, [config.block_m, config.block_k])
    if loads == DESCRIPTORS_B_NK.value:
        return TensorDescriptor.from_tensor(matrix.t(), [config.block_n, config.block_k])
    return TensorDescriptor.from_tensor(matrix, [config.block_k, config.block_n])


def describable(matrix: torch.Tensor) -> bool:
    """Whether a tensor descriptor can name this matrix: rows contiguous, apart, and all on 16 bytes; not empty."""
    (rows, columns), (apart, step) = matrix.shape, matrix.stride()
    if step != 1 or not rows or not columns or (rows > 1 and apart < columns):
        return False
    return apart * matrix.element_size() % ROW_BYTES == 0 and matrix.data_ptr() % ROW_BYTES == 0


def rows_on_16_bytes(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix whose rows are contiguous and begin on 16 bytes: a copy, unless it is so."""
    return matrix if describable(matrix) else matrix.clone(memory_format=torch.contiguous_format)


def rows_lie_apart(matrix: torch.Tensor) -> bool:
    """Whether rows are contiguous and none overlaps another, as those of an empty matrix are."""
    are_apart = matrix.shape[0] <= 1 or matrix.stride(0) >= matrix.shape[1]
    return matrix.numel() == 0 or (matrix.stride(1) == 1 and are_apart)


def fill_rows(columns: int, dtype: torch.dtype) -> bool:
    """Whether rows of so many elements are on 16 bytes, one behind the other."""
    return columns > 0 and columns * dtype.itemsize % ROW_BYTES == 0


def padded(columns: int, dtype: torch.dtype) -> int:
    """Return the distance of rows, in elements, at which all are on 16 bytes: rows end to end, or else whole lines."""
    return columns if fill_rows(columns, dtype) else round_up(max(1, columns), LINE_BYTES // dtype.itemsize)
