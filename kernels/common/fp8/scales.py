"""Scales of fp8 operands: of what an operand has one each, their shapes, and which formats are multiplied together.

A rank's A (m, k) and B (k, n) stand for ``a_scale · A`` and ``b_scale · B``, with fp32 scales:

| A's | shape of `a_scale` | B's | shape of `b_scale` |
|---|---|---|---|
| tensor | () or (1,) | tensor | () or (1,) |
| row | (m, 1) | column | (1, n) |
| block | (m, ⌈k / 128⌉) | block | (⌈k / 128⌉, ⌈n / 128⌉) |

Sizes are those of the rank's own operands, so ranks that share a dimension have scales of their own. Scales of tensors,
rows and columns multiply a finished sum over k; those of blocks the sum of each 128 of k, in fp32.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

SCALE_BLOCK = 128  # of k, and of n
LEAST_LARGEST = 2.0**-100  # magnitude of what shares a scale, for that: all of it may be zeros
SCALE_KINDS = (("tensor", "row", "block"), ("tensor", "column", "block"))  # A's, B's

_OPEN = (torch.float8_e4m3fn, torch.float8_e5m2)
_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
Shape = tuple[int, ...]


def check_formats(a: torch.dtype, b: torch.dtype) -> None:
    """Raise for dtypes of A and B that are not multiplied together.

    Raises:
        ValueError: says what A can be multiplied by.
    """
    for formats in (_OPEN, _FNUZ):
        if a in formats and b in formats:
            return
    if a != b:
        partners = next((formats for formats in (_OPEN, _FNUZ) if a in formats), (a,))
        quantised = b in _OPEN + _FNUZ and a not in _OPEN + _FNUZ
        more = ", or quantised: all_gather_gemm takes quantize='row'" if quantised else ""
        raise ValueError(f"A is {a} and B is {b}; {a} is multiplied by {' or '.join(map(str, partners))}{more}")


def check_scales(scales: tuple[str, ...], dtype: torch.dtype) -> None:
    """Raise for scales that there are not, that do not go together, or that have no fp8 operands.

    Raises:
        ValueError: says which do.
    """
    if not scales:
        return
    are_known = len(scales) == 2 and all(kind in kinds for kind, kinds in zip(scales, SCALE_KINDS, strict=True))
    if not are_known or scales.count("block") == 1:
        raise ValueError(
            f"scales are {scales}; they are of tensor or row for A and tensor or column for B, or of block for both"
        )
    if dtype not in _OPEN + _FNUZ:
        raise ValueError(
            f"a_scale and b_scale are those of fp8 operands, and A is {dtype}; `scale` multiplies any product"
        )


def check_quantize(quantize: str | None, a: torch.dtype, b: torch.dtype, *, has_scale: bool) -> None:
    """Raise for a `quantize` that there is not, or for operands of which A is not quantised.

    Args:
        quantize: of what A gets a scale each as it is quantised, "row"; None for nothing.
        a, b: the dtypes of A, as it is given, and of B.
        has_scale: whether A's scale is given.

    Raises:
        ValueError: says what would work.
    """
    if quantize is None:
        return
    if quantize != "row":
        raise ValueError(f"quantize is {quantize!r}; it takes 'row', for a scale of each row of A, or None")
    if a in _OPEN + _FNUZ or has_scale:
        given = "a_scale is given" if has_scale else f"A is {a}"
        raise ValueError(
            f"quantize is 'row' and {given}; leave quantize out: of fp8 and its scale nothing is quantised"
        )
    if b not in _OPEN + _FNUZ:
        raise ValueError(
            f"quantize is 'row' and B is {b}; A is quantised for a B of {', '.join(map(str, _OPEN + _FNUZ))}"
        )


def quantised_dtype(b: torch.dtype) -> torch.dtype:
    """Return the format to which A is quantised for a B of another: the one of most mantissa bits of its kind."""
    return _FNUZ[0] if b in _FNUZ else _OPEN[0]


def scale_shapes(scales: tuple[str, ...], a_shape: Shape, b_shape: Shape) -> dict[str, Shape]:
    """Return the shapes of a_scale and b_scale for operands of these shapes, as operators take them; {} without scales.

    One of a tensor is (1, 1).
    """
    if not scales:
        return {}
    (m, k), (_, n) = a_shape, b_shape
    steps = -(-k // SCALE_BLOCK)
    of_a = {"tensor": (1, 1), "row": (m, 1), "block": (m, steps)}
    of_b = {"tensor": (1, 1), "column": (1, n), "block": (steps, -(-n // SCALE_BLOCK))}
    return {"a_scale": of_a[scales[0]], "b_scale": of_b[scales[1]]}


def scale_strides(scale: torch.Tensor, kind: str) -> tuple[int, int]:
    """Return the strides with which a scale of this kind, of (rows or blocks, columns or blocks), is read."""
    by_row, by_column = kind in ("row", "block"), kind in ("column", "block")
    return scale.stride(0) if by_row else 0, scale.stride(1) if by_column else 0


def quantise(
    matrix: torch.Tensor, dtype: torch.dtype, kind: str, *, is_b: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in fp8, and its scale, by which the largest of what shares one becomes the largest of the format.

    Where an infinity or a NaN shares it, it is infinite: all that is multiplied by it becomes NaN.

    Args:
        matrix: (rows, columns), of a wider dtype.
        dtype: an fp8 format.
        kind: of what there is a scale each: tensor, row, column or block.
        is_b: whether it is a B, whose blocks are of 128 rows, too.

    Returns:
        The matrix, rows contiguous, and the scale, fp32, of the shape of `scale_shapes`.
    """
    rows, columns = matrix.shape
    high = {"row": 1, "block": SCALE_BLOCK if is_b else 1}.get(kind, max(rows, 1))
    wide = {"column": 1, "block": SCALE_BLOCK}.get(kind, max(columns, 1))
    tall = 1 if kind in ("tensor", "column") else -(-rows // high)
    across = 1 if kind in ("tensor", "row") else -(-columns // wide)
    padded = F.pad(matrix.float(), (0, across * wide - columns, 0, tall * high - rows))
    blocks, most = padded.view(tall, high, across, wide), torch.finfo(dtype).max
    scale = scale_by_largest(blocks, (1, 3), most)
    small = (blocks / scale).clamp_(-most, most).to(dtype)
    return small.view(padded.shape)[:rows, :columns].contiguous(), scale[:, 0, :, 0]


def scale_by_largest(matrix: torch.Tensor, dims: tuple[int, ...], most: float) -> torch.Tensor:
    """Return the scales by which the largest magnitude along `dims`, which stay, becomes `most`."""
    largest = matrix.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).amax(dims, keepdim=True)
    # By a tensor: on GPUs torch multiplies by the reciprocal of a number, which rounds twice.
    return largest.clamp(min=LEAST_LARGEST) / largest.new_full((), most)


def dequantised(matrix: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return what an operand and its scale stand for, in fp32."""
    wide = matrix.float()
    if scale is None:
        return wide
    for dim in (0, 1):
        if scale.ndim == 2 and scale.shape[dim] not in (1, wide.shape[dim]):
            scale = scale.repeat_interleave(SCALE_BLOCK, dim).narrow(dim, 0, wide.shape[dim])
    return wide * scale


@functools.lru_cache(4096)
def kinds_of(a_shape: Shape, b_shape: Shape, a_scale: Shape | None, b_scale: Shape | None) -> tuple[str, ...]:
    """Return of what operands of these shapes have a scale each, by the shapes of their scales; () without scales.

    Raises:
        ValueError: one is missing, or has no such shape; says which shapes would do.
    """
    if a_scale is None and b_scale is None:
        return ()
    if a_scale is None or b_scale is None:
        raise ValueError(
            f"{'a_scale' if a_scale is None else 'b_scale'} is missing; A and B have a scale both or neither"
        )
    shapes = [scale_shapes(kinds, a_shape, b_shape) for kinds in (("row", "column"), ("block", "block"))]
    rows, blocks = ((shape["a_scale"], shape["b_scale"]) for shape in shapes)
    if (a_scale, b_scale) == blocks and b_scale != rows[1]:
        return ("block", "block")
    kinds = []
    for name, given, index, kind in (("a_scale", a_scale, 0, "row"), ("b_scale", b_scale, 1, "column")):
        if given not in ((), (1,), (1, 1), rows[index]):
            shape = (a_shape, b_shape)[index]
            raise ValueError(
                f"{name} is {given}, of {name[0].upper()} {shape}; it takes () for the tensor, {rows[index]} for each "
                f"{kind}, or, with the other of blocks too, {blocks[index]} for blocks of {SCALE_BLOCK} of k"
            )
        kinds.append(kind if given == rows[index] else "tensor")
    return tuple(kinds)
