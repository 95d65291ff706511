"""Tensors on the symmetric heap, made as torch makes tensors.

Names are the Iris documentation's, and so are the arguments, as far as there are any for a buffer of the heap: of
torch's, `out`, `layout`, `requires_grad`, `pin_memory` and `memory_format` are not taken.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

Size = int | Sequence[int]
Device = torch.device | str | int | None


class TensorFactories(ABC):
    """Makes tensors on the heap. Every method here is collective: each rank must make the same calls in the same order.

    `device`, where given, must be the context's own. Values drawn at random come from the rank's own torch generator.
    All raise `HeapExhausted` where there is no room, and ValueError for another device.
    """

    @abstractmethod
    def _allocate(self, shape: Sequence[int], dtype: torch.dtype, device: Device) -> torch.Tensor: ...

    @abstractmethod
    def free(self, buffer: torch.Tensor) -> None:
        """Give a buffer back."""

    def empty(self, *size: Size, dtype: torch.dtype | None = None, device: Device = None) -> torch.Tensor:
        """Return a tensor whose values are whatever the memory holds."""
        return self._allocate(_shape(size), dtype or torch.get_default_dtype(), device)

    def zeros(self, *size: Size, dtype: torch.dtype | None = None, device: Device = None) -> torch.Tensor:
        """Return a tensor of zeros."""
        return self._filled(size, dtype, device, torch.Tensor.zero_)

    def ones(self, *size: Size, dtype: torch.dtype | None = None, device: Device = None) -> torch.Tensor:
        """Return a tensor of ones."""
        return self._filled(size, dtype, device, lambda buffer: buffer.fill_(1))

    def full(
        self, size: Size, fill_value: Any, *, dtype: torch.dtype | None = None, device: Device = None
    ) -> torch.Tensor:
        """Return a tensor that holds `fill_value` everywhere."""
        dtype = dtype or torch.tensor(fill_value, device="cpu").dtype
        return self._filled((size,), dtype, device, lambda buffer: buffer.fill_(fill_value))

    def zeros_like(
        self, input: torch.Tensor, *, dtype: torch.dtype | None = None, device: Device = None
    ) -> torch.Tensor:
        """Return a tensor of zeros with the shape and dtype of `input`, which need not be on the heap."""
        return self.zeros(input.shape, dtype=dtype or input.dtype, device=device)

    def arange(
        self, start: Any = 0, end: Any = None, step: Any = 1, *, dtype: torch.dtype | None = None, device: Device = None
    ) -> torch.Tensor:
        """Return ``start, start + step, …`` up to and without `end`; one argument is `end`."""
        if end is None:
            start, end = 0, start
        return self._place(torch.arange(start, end, step, dtype=dtype, device="cpu"), device)

    def linspace(
        self, start: float, end: float, steps: int, *, dtype: torch.dtype | None = None, device: Device = None
    ) -> torch.Tensor:
        """Return `steps` values evenly from `start` to `end`, both included."""
        return self._place(torch.linspace(start, end, steps, dtype=dtype, device="cpu"), device)

    def rand(
        self,
        *size: Size,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
    ) -> torch.Tensor:
        """Return values uniform in [0, 1)."""
        return self._filled(size, dtype, device, lambda buffer: buffer.uniform_(generator=generator))

    def uniform(
        self,
        size: Size,
        low: float = 0.0,
        high: float = 1.0,
        *,
        dtype: torch.dtype | None = None,
        device: Device = None,
    ) -> torch.Tensor:
        """Return values uniform in [low, high)."""
        return self._filled((size,), dtype, device, lambda buffer: buffer.uniform_(low, high))

    def randn(
        self,
        *size: Size,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: Device = None,
    ) -> torch.Tensor:
        """Return values of the standard normal distribution."""
        return self._filled(size, dtype, device, lambda buffer: buffer.normal_(generator=generator))

    def randint(
        self,
        low: int | None = None,
        high: Any = None,
        size: Size | None = None,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.int64,
        device: Device = None,
    ) -> torch.Tensor:
        """Return integers uniform in [low, high): ``randint(high, size)``, from 0, or ``randint(low, high, size)``.

        Raises:
            TypeError: there is no `high`, or no `size`.
        """
        if size is None:
            high, size = None, high
        if high is None:
            low, high = 0, low
        if high is None or size is None:
            raise TypeError("randint takes (high, size) or (low, high, size)")
        low = low or 0
        return self._filled((size,), dtype, device, lambda buffer: buffer.random_(low, high, generator=generator))

    def _filled(
        self,
        size: tuple[Any, ...],
        dtype: torch.dtype | None,
        device: Device,
        fill: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return a tensor once it is filled; of one that cannot be, of that dtype, nothing is left on the heap."""
        buffer = self.empty(*size, dtype=dtype, device=device)
        try:
            return fill(buffer)
        except Exception:
            self.free(buffer)
            raise

    def _place(self, values: torch.Tensor, device: Device) -> torch.Tensor:
        return self._allocate(values.shape, values.dtype, device).copy_(values)


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    """Both ``zeros(2, 3)`` and ``zeros((2, 3))``."""
    are_numbers = len(size) != 1 or hasattr(size[0], "__index__")
    return tuple(operator.index(part) for part in (size if are_numbers else size[0]))
