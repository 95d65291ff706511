"""Memory for outputs that each call has anew: those that peers do not write."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..call import OUTPUT


class NewOutputs:
    """The new outputs of calls of so many rows.

    Args:
        names: of them.
        like: tensors of their shapes, dtypes and device; none is kept.
    """

    def __init__(self, names: Sequence[str], like: Sequence[torch.Tensor]) -> None:
        self._shapes: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}
        for name, one in zip(names, like, strict=True):  # no comprehension: a frame, a call
            self._shapes[name] = one.shape, one.dtype, one.device
        # Without memory: torch makes others like them in half the time that it takes by a shape.
        self._likes: dict[str, torch.Tensor] = {}

    def made(self, out: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return memory for them, by name: new, or `out` for C.

        Raises:
            ValueError: `out` does not fit, or C is no new output.
        """
        new, likes = {}, self._likes or self._make_likes()
        for name, like in likes.items():  # no comprehension: a frame, a call
            new[name] = torch.empty_like(like) if out is None or name != OUTPUT else out
        if out is not None:
            if not self.takes(out):
                raise ValueError(f"out is {tuple(out.shape)} of {out.dtype}; this call takes {self._what_is_taken()}")
            new[OUTPUT] = out.view(likes[OUTPUT].shape)
        return new

    def _what_is_taken(self) -> str:
        if OUTPUT not in self._shapes:
            return "none: its output is the operator's own"
        shape, dtype, _ = self._shapes[OUTPUT]
        return f"a contiguous {tuple(shape)} of {dtype}"

    def takes(self, out: torch.Tensor) -> bool:
        """Return whether this is memory for C as its rows lie there, which kernels may cut by shards."""
        if OUTPUT not in self._shapes:
            return False
        shape, dtype, _ = self._shapes[OUTPUT]
        if out.dtype != dtype or not out.is_contiguous():
            return False
        return out.shape[-1:] == shape[-1:] and out.numel() == math.prod(shape)

    def _make_likes(self) -> dict[str, torch.Tensor]:
        for name, (shape, dtype, device) in self._shapes.items():
            self._likes[name] = torch.empty(shape, dtype=dtype, device=device)
            self._likes[name].untyped_storage().resize_(0)
        return self._likes
