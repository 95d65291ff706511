"""Matrices and vectors in parts that are multiplied as one, without a copy where they were laid together."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from ..config import is_fp8
from .operand_checks import PLAIN

_wholes: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by where they lie


def lay_together(parts: Sequence[torch.Tensor]) -> None:
    """Move matrices, or vectors, so that they lie one above the other as one: `joined` then copies none of them.

    A part has a storage of its own, as what aliases another's is refused by `torch.compile` in a DTensor. Where a part
    is moved, as by `copy.deepcopy`, `joined` copies.

    Args:
        parts: of one width, dtype and device; their memory is exchanged.
    """
    whole = torch.cat([part.detach() for part in parts])
    storage, start = whole.untyped_storage(), 0
    for part in parts:
        stop = start + part.nbytes
        own = storage[start:stop]
        part.data = whole.new_empty(0).set_(own, 0, part.shape, whole.stride())
        weakref.finalize(own, _forget, whole).atexit = False  # it lives while a part does
        start = stop
    _wholes[whole.data_ptr()] = whole


def _forget(whole: torch.Tensor) -> None:
    """Nothing is left to do: the finalizer that calls this holds the whole no longer."""


def joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Return matrices as one, side by side (1) or one above the other (0), as vectors are.

    That is a copy, unless they were laid together.
    """
    first, *others = parts
    if not others:
        return first
    if first.ndim > 1 and first.stride(0) < first.stride(1):
        return joined([part.t() for part in parts], 1 - dim).t()
    whole = _whole_of(parts) if dim == 0 else None
    if whole is not None:
        return whole
    if is_fp8(first.dtype):  # which autocast, that has a say in what is joined, does not know
        return torch.cat([part.view(torch.uint8) for part in parts], dim).view(first.dtype)
    return torch.cat(list(parts), dim)


def lie_together(parts: Sequence[torch.Tensor]) -> bool:
    """Return whether `joined` takes these, one above the other, without a copy."""
    return _whole_of(parts) is not None


def _whole_of(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the matrix that parts are all of, in their order, where they were laid together."""
    if type(parts[0]) not in PLAIN:  # such as a fake tensor, which has no memory
        return None
    whole = _wholes.get(parts[0].data_ptr())
    return whole if whole is not None and _are_all(parts, whole) else None


def _are_all(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> bool:
    """Whether parts are all of a matrix that lie where one of them begins, in their order."""
    address = whole.data_ptr()
    for part in parts:
        if part.data_ptr() != address or part.stride() != whole.stride() or part.dtype != whole.dtype:
            return False
        address += part.nbytes
    return address == whole.data_ptr() + whole.nbytes
