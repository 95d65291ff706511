"""Tensors on the symmetric heap, made as torch makes tensors.

Names are the Iris documentation's, and so are the arguments, which are torch's; see `Options` for those that all take.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from typing_extensions import Unpack

Size = int | Sequence[int]
Device = torch.device | str | int | None


class Options(TypedDict, total=False):
    """Arguments of torch's that all factories take, by keyword.

    Args:
        dtype: of the elements; without it, what torch would take.
        device: the context's own, which it is without this.
        out: a tensor on the heap of the shape, and the dtype if one is given, that is filled in place of a new one.
        layout: ``torch.strided``; there is no other.
        requires_grad: whether autograd records what is done with it.
        pin_memory: False; the heap is no memory to pin.
        memory_format: ``torch.contiguous_format``; `zeros_like` of a contiguous tensor takes ``preserve_format``, too.
    """

    dtype: torch.dtype | None
    device: Device
    out: torch.Tensor | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format


class TensorFactories(ABC):
    """Makes tensors on the heap. Every method here is collective: each rank must make the same calls in the same order.

    Values drawn at random come from the rank's own torch generator. All raise `HeapExhausted` where there is no room,
    ValueError for another device, layout, or an `out` that does not fit, and torch's RuntimeError where it would raise
    one.
    """

    @abstractmethod
    def _allocate(self, shape: Sequence[int], dtype: torch.dtype, device: Device) -> torch.Tensor: ...

    @abstractmethod
    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this rank's heap."""

    @abstractmethod
    def free(self, buffer: torch.Tensor) -> None:
        """Give a buffer back."""

    def empty(self, *size: Size, **options: Unpack[Options]) -> torch.Tensor:
        """Return a tensor whose values are whatever the memory holds."""
        return self._filled(size, options, lambda buffer: buffer)

    def zeros(self, *size: Size, **options: Unpack[Options]) -> torch.Tensor:
        """Return a tensor of zeros."""
        return self._filled(size, options, torch.Tensor.zero_)

    def ones(self, *size: Size, **options: Unpack[Options]) -> torch.Tensor:
        """Return a tensor of ones."""
        return self._filled(size, options, lambda buffer: buffer.fill_(1))

    def full(self, size: Size, fill_value: Any, **options: Unpack[Options]) -> torch.Tensor:
        """Return a tensor that holds `fill_value` everywhere."""
        if options.get("out") is None:
            options["dtype"] = options.get("dtype") or torch.tensor(fill_value, device="cpu").dtype
        return self._filled((size,), options, lambda buffer: buffer.fill_(fill_value))

    def zeros_like(self, input: torch.Tensor, **options: Unpack[Options]) -> torch.Tensor:
        """Return a tensor of zeros with the shape and dtype of `input`, which need not be on the heap."""
        if options.get("memory_format") is torch.preserve_format and input.is_contiguous():
            options["memory_format"] = torch.contiguous_format
        options["dtype"] = options.get("dtype") or input.dtype
        return self.zeros(input.shape, **options)

    def arange(self, start: Any = 0, end: Any = None, step: Any = 1, **options: Unpack[Options]) -> torch.Tensor:
        """Return ``start, start + step, …`` up to and without `end`; one argument is `end`."""
        if end is None:
            start, end = 0, start
        return self._copied(torch.arange(start, end, step, dtype=options.get("dtype"), device="cpu"), options)

    def linspace(self, start: float, end: float, steps: int, **options: Unpack[Options]) -> torch.Tensor:
        """Return `steps` values evenly from `start` to `end`, both included."""
        return self._copied(torch.linspace(start, end, steps, dtype=options.get("dtype"), device="cpu"), options)

    def rand(self, *size: Size, generator: torch.Generator | None = None, **options: Unpack[Options]) -> torch.Tensor:
        """Return values uniform in [0, 1)."""
        return self._filled(size, options, lambda buffer: buffer.uniform_(generator=generator))

    def uniform(self, size: Size, low: float = 0.0, high: float = 1.0, **options: Unpack[Options]) -> torch.Tensor:
        """Return values uniform in [low, high)."""
        return self._filled((size,), options, lambda buffer: buffer.uniform_(low, high))

    def randn(self, *size: Size, generator: torch.Generator | None = None, **options: Unpack[Options]) -> torch.Tensor:
        """Return values of the standard normal distribution."""
        return self._filled(size, options, lambda buffer: buffer.normal_(generator=generator))

    def randint(
        self,
        low: int | None = None,
        high: Any = None,
        size: Size | None = None,
        *,
        generator: torch.Generator | None = None,
        **options: Unpack[Options],
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
        options["dtype"] = options.get("dtype") or torch.int64
        return self._filled((size,), options, lambda buffer: buffer.random_(low or 0, high, generator=generator))

    def _filled(
        self, size: tuple[Any, ...], options: Options, fill: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return a tensor once it is filled; of one that cannot be, of that dtype, nothing is left on the heap."""
        out = options.get("out")
        dtype = options.get("dtype") or (torch.get_default_dtype() if out is None else out.dtype)
        shape = _shape(size)
        _check_options(options, dtype)
        if out is not None and (out.shape != shape or out.dtype != dtype or not self.is_symmetric(out)):
            where = "on the heap" if self.is_symmetric(out) else "not on the heap"
            raise ValueError(
                f"out is {tuple(out.shape)} of {out.dtype}, {where}; it takes {shape} of {dtype} on the heap"
            )
        buffer = self._allocate(shape, dtype, options.get("device")) if out is None else out
        try:
            return fill(buffer).requires_grad_(options.get("requires_grad", False) or buffer.requires_grad)
        except Exception:
            if out is None:
                self.free(buffer)
            raise

    def _copied(self, values: torch.Tensor, options: Options) -> torch.Tensor:
        """Return a tensor with these values, of their dtype or that of ``out``."""
        out = options.get("out")
        options["dtype"] = values.dtype if out is None else out.dtype
        return self._filled((values.shape,), options, lambda buffer: buffer.copy_(values))


def _check_options(options: Options, dtype: torch.dtype) -> None:
    """Raise for what a tensor on the heap cannot be."""
    if unknown := options.keys() - Options.__annotations__.keys():
        raise TypeError(f"unexpected keyword arguments {', '.join(sorted(unknown))}")
    if (layout := options.get("layout", torch.strided)) is not torch.strided:
        raise ValueError(f"layout is {layout}; tensors on the heap are torch.strided")
    if options.get("pin_memory"):
        raise RuntimeError("pin_memory=True: only dense CPU tensors can be pinned, and the heap's memory cannot")
    memory_format = options.get("memory_format", torch.contiguous_format)
    if memory_format is not torch.contiguous_format:
        raise RuntimeError(f"memory_format is {memory_format}; tensors on the heap are torch.contiguous_format")
    if options.get("requires_grad") and not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"only tensors of floating point and complex dtype can require gradients, not {dtype}")


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    """Both ``zeros(2, 3)`` and ``zeros((2, 3))``."""
    are_numbers = len(size) != 1 or hasattr(size[0], "__index__")
    return tuple(operator.index(part) for part in (size if are_numbers else size[0]))
