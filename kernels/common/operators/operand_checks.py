"""Whether ranks ask for the same, and operands can be taken: what they are, shapes, dtypes, devices, where they lie."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

import torch

from iris_core import Context

from ..config import GemmConfig
from ..launch.channel import Place
from ..problem import Problem, check_size

PLAIN = (torch.Tensor, torch.nn.Parameter)  # what nearly all calls are given
_STRIDED = torch.strided


def check_asked(
    operator: object, ctx: Context, problem: Problem, options: Mapping[str, Any], known: Collection[str]
) -> None:
    """Raise for what no operator of these options can be made for.

    Raises:
        ValueError: the problem is for another number of ranks.
        TypeError: an option is not among those that are known.
    """
    if problem.world_size != ctx.get_num_ranks():
        raise ValueError(f"the problem is for {problem.world_size} ranks, the context has {ctx.get_num_ranks()}")
    if unknown := options.keys() - known:
        raise TypeError(f"{operator} takes no {', '.join(sorted(unknown))}")


def check_types(ctx: Context, a: torch.Tensor, b: torch.Tensor, config: GemmConfig | None) -> None:
    """Raise ValueError for what is no context, no matrix of torch's, or no configuration."""
    if not isinstance(ctx, Context):
        raise ValueError(f"ctx is a {type(ctx).__name__}; it must be an iris_core.Context, as iris_core.iris() returns")
    check_is_tensor("A", a)
    check_is_tensor("B", b)
    if not (config is None or isinstance(config, GemmConfig)):
        raise ValueError(f"config is a {type(config).__name__}; it must be a GemmConfig, or None for the defaults")


def check_is_tensor(name: str, value: object) -> None:
    """Raise ValueError for an operand that is no tensor; names it."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}; it must be a torch.Tensor")


def check_sizes(sizes: Mapping[str, int | None]) -> None:
    """Raise ValueError for a size of the whole product that is no positive integer; None is none."""
    for name, size in sizes.items():
        if size is not None:
            check_size(name, size)  # what equals an integer and is none would be found as that one


def check_matrices(a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise ValueError for shapes that cannot be multiplied."""
    for name, tensor in (("A", a), ("B", b)):
        if tensor.ndim != 2:
            raise ValueError(f"{name} is {tuple(tensor.shape)}; it must be a matrix")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"A is {tuple(a.shape)} and B is {tuple(b.shape)}; A's columns must be B's rows")


def agree(
    operator: object, ctx: Context, problem: Problem, options: Mapping[str, Any], config: GemmConfig | None
) -> int:
    """Return a digest of what the ranks ask for, but the rows, when they have compared it; collective.

    Raises:
        ValueError: they ask for different things.
    """
    asked = {name: str(value) for name, value in (asdict(problem) | dict(options)).items()}
    ctx.agree("what the ranks ask for", {"operator": str(operator), **asked, "config": str(config)})
    return zlib.crc32(f"{operator} { {name: size for name, size in asked.items() if name != 'm'} }".encode())


def rows_of(operator: object, problem: Problem, rank: int, a: torch.Tensor, m: int | None) -> int:
    """Return the m of a call with this A, of an operator that was made for a problem.

    Raises:
        ValueError: it cannot be told, or A has not so many rows.
    """
    if a.ndim != 2:
        return problem.m  # `check_operands` says what is wrong
    found = problem.m_of(a.shape[0], rank) if m is None else m
    if found is None:
        raise ValueError(
            f"{operator}: A is {tuple(a.shape)} on rank {rank}; the operator was made for "
            f"{problem.a_shape(rank)} of M={problem.m}; with fewer rows, give m, those of all ranks"
        )
    if not isinstance(found, int) or isinstance(found, bool):  # it would be found as the integer that it equals
        raise ValueError(f"{operator}: m is {found!r}; it takes a positive integer")
    if not 1 <= found <= problem.m:
        raise ValueError(
            f"{operator}: A has {found} rows{'' if m is None else ' over all ranks'}; the operator was made for "
            f"{problem.m}, and takes 1 to {problem.m}"
        )
    return found


def checked_place(operator: object, operands: Mapping[str, torch.Tensor], expected: Collection[str]) -> Place:
    """Check each operand's type, layout and gradient; return where it lies, and how. Part of every call.

    Args:
        operator: what is called, in messages.
        operands: its operands, by name.
        expected: the names that it takes.

    Returns:
        Address, strides, shape, dtype and number of the device of each, in the order of `expected`.

    Raises:
        ValueError: one is not there or not expected, is no dense tensor, is a negated view, or requires a gradient.
    """
    if (len(operands) > 2 or len(expected) > 2) and operands.keys() != expected:
        raise ValueError(
            f"{operator}: the operands are {', '.join(operands)}; it takes {', '.join(expected)}, what its problem's "
            "epilogue reads among them"
        )
    are_recorded = torch.is_grad_enabled()
    place: Place = ()
    for name in expected:
        tensor = operands[name]
        is_plain = type(tensor) in PLAIN and tensor.layout is _STRIDED and not tensor.is_neg()
        if not is_plain or (are_recorded and tensor.requires_grad):
            _check_kind(operator, name, tensor)
        place += (tensor.data_ptr(), tensor.stride(), tensor.shape, tensor.dtype, tensor.get_device())
    return place


def _check_kind(operator: object, name: str, tensor: torch.Tensor) -> None:
    is_plain = type(tensor) in PLAIN
    if not is_plain and not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{operator}: {name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.layout is not _STRIDED or (not is_plain and hasattr(tensor, "__tensor_flatten__")):
        raise ValueError(
            f"{operator}: {name} is a {type(tensor).__name__} of layout {tensor.layout}; it must be dense, of a "
            "DTensor the to_local()"
        )
    if tensor.is_neg():
        raise ValueError(f"{operator}: {name} is a negated view of its memory; give it as resolve_neg()")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{operator}: {name} requires a gradient, which an operator does not compute; call it under "
            "torch.no_grad(), in a torch.autograd.Function, or with detach(), or call the family's function"
        )


def check_operands(
    operator: object,
    problem: Problem,
    rank: int,
    operands: Mapping[str, torch.Tensor],
    *,
    device: torch.device,
    most: int,
) -> None:
    """Raise for operands that are not those of a call on its rank.

    Args:
        operator: what is called, in messages.
        problem: the call's.
        rank: this one.
        operands: its operands, by name.
        device: where they must be.
        most: rows that the operator was made for.

    Raises:
        ValueError: a shape, dtype or device is another.
    """
    a, b = operands["A"], operands["B"]
    if a.ndim == 2 and b.ndim == 2 and a.shape[1] != b.shape[0]:
        raise ValueError(f"{operator}: A is {tuple(a.shape)} and B is {tuple(b.shape)}; A's columns must be B's rows")
    shapes = {"A": problem.a_shape(rank), "B": problem.b_shape(rank), **problem.operand_shapes(rank)}
    for name, tensor in operands.items():
        shape = shapes[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{operator}: {name} is {tuple(tensor.shape)} on rank {rank}; it must be {shape}: the operator was "
                f"made for N={problem.n}, K={problem.k} and up to M={most}, the call is of M={problem.m}, on "
                f"{problem.world_size} ranks"
            )
        if tensor.dtype != problem.operand_dtype(name):
            raise ValueError(
                f"{operator}: {name} is {tensor.dtype}; the operator was made for {problem.operand_dtype(name)}"
            )
        if tensor.device != device:
            raise ValueError(f"{operator}: {name} is on {tensor.device}; it must be on {device}")


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one dtype have the same elements in the same order."""
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


def overlap(matrix: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a row of a matrix, or a column where these lie further apart, has bytes among those of another tensor.

    A vector is a matrix of one row.

    Of the other, all from its first element to its last count.
    """
    if not matrix.numel() or not other.numel():
        return False
    if matrix.data_ptr() >= _end_of_storage(other) or other.data_ptr() >= _end_of_storage(matrix):
        return False  # as in almost every call, where the rest would cost the host 2 us
    matrix = torch.atleast_2d(matrix)
    size = matrix.element_size()
    (lines, apart), (length, step) = sorted(zip(matrix.shape, matrix.stride(), strict=True), key=lambda dim: -dim[1])
    line_bytes = ((length - 1) * step + 1) * size
    first, end = _extent(other)
    before = first - matrix.data_ptr() - line_bytes  # a line that begins there, or before, ends before the other begins
    if not apart:
        lines = 1
    earliest = 0 if before < 0 else before // (apart * size) + 1 if apart else 1
    return earliest < lines and matrix.data_ptr() + earliest * apart * size < end


def _end_of_storage(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return storage.data_ptr() + storage.nbytes()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def lies_within(matrix: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all of a tensor is between the first and the last element of another."""
    (first, end), (others_first, others_end) = _extent(matrix), _extent(other)
    return others_first <= first and end <= others_end
