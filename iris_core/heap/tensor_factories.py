"""Tensors on the symmetric heap, made as torch makes tensors.

Names are the Iris documentation's, and so are the arguments, which are torch's; see `Options` for those that all take.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, get_type_hints

import torch
from typing_extensions import Unpack

Size = int | Sequence[int]
Device = torch.device | str | int | None


class _ButDtype(TypedDict, total=False):
    """Those of `Options` but the dtype, where a factory has that by place."""

    device: Device
    out: torch.Tensor | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format


class Options(_ButDtype, total=False):
    """Arguments of torch's that all factories take, by keyword.

    Args:
        dtype: of the elements; without it, what torch would take.
        device: the context's own, which it is without this.
        out: a tensor on the heap that is filled in place of a new one: of the shape, or contiguous and of as many
            elements, of which a view is returned; and of the dtype, if one is given.
        layout: ``torch.strided``; there is no other.
        requires_grad: whether autograd records what is done with it.
        pin_memory: False; the heap is no memory to pin.
        memory_format: of a new tensor, ``torch.contiguous_format`` or ``torch.channels_last``; `zeros_like` takes
            ``torch.preserve_format``, too, and without any.
    """

    dtype: torch.dtype | None


class TensorFactories(ABC):
    """Makes tensors on the heap. Every method here is collective: each rank must make the same calls in the same order.

    Values drawn at random come from the rank's own torch generator. All raise `HeapExhausted` where there is no room,
    ValueError for another layout, RuntimeError for another device or an `out` that does not fit, as Iris does, and
    torch's RuntimeError where it would raise one.
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
        """Return a tensor on the heap whose values are whatever the memory holds; collective.

        Args:
            size: the shape, as one sequence or as a number for each dimension.
            options: see `Options`.
        """
        return self._filled(size, options, lambda buffer: buffer)

    def zeros(self, *size: Size, **options: Unpack[Options]) -> torch.Tensor:
        """Return a tensor of zeros on the heap; collective.

        Args:
            size, options: as of `empty`.
        """
        return self._filled(size, options, torch.Tensor.zero_)

    def ones(self, *size: Size, **options: Unpack[Options]) -> torch.Tensor:
        """Return a tensor of ones on the heap; collective.

        Args:
            size, options: as of `empty`.
        """
        return self._filled(size, options, lambda buffer: buffer.fill_(1))

    def full(self, size: Size, fill_value: Any, **options: Unpack[Options]) -> torch.Tensor:
        """Return a tensor on the heap that holds one value everywhere; collective.

        Args:
            size: the shape, a sequence or one number.
            fill_value: the value, whose dtype, as `torch.tensor` makes it, is the tensor's where none is given.
            options: see `Options`.
        """
        if options.get("out") is None:
            options["dtype"] = options.get("dtype") or torch.tensor(fill_value, device="cpu").dtype
        return self._filled((size,), options, lambda buffer: buffer.fill_(fill_value))

    def zeros_like(self, input: torch.Tensor, **options: Unpack[Options]) -> torch.Tensor:
        """Return zeros on the heap with the shape and dtype of a tensor; collective.

        Args:
            input: the tensor, on the heap or not, on any device.
            options: see `Options`.
        """
        memory_format = options.get("memory_format", torch.preserve_format)
        strides = torch.empty_like(input, device="meta", memory_format=memory_format).stride()
        options["dtype"] = options.get("dtype") or input.dtype
        return self._filled((input.shape,), options, torch.Tensor.zero_, strides)

    def arange(self, start: Any = 0, end: Any = None, step: Any = 1, **options: Unpack[Options]) -> torch.Tensor:
        """Return ``start, start + step, …`` on the heap, up to and without `end`; collective.

        Args:
            start: the first value; of one argument it is `end`, and the first is 0.
            end: where it ends; None where `start` stands for it.
            step: the distance, which may be negative.
            options: see `Options`.

        Raises:
            ValueError: the step is 0, or leads away from `end`.
        """
        if end is None:
            start, end = 0, start
        if step == 0:
            raise ValueError("step must be non-zero; it is 0")
        if (end - start) * step < 0:
            raise ValueError(f"no steps of {step} lead from {start} to {end}; the sign of the step is wrong")
        return self._copied(torch.arange(start, end, step, dtype=options.get("dtype"), device="cpu"), options)

    def linspace(self, start: float, end: float, steps: int, **options: Unpack[Options]) -> torch.Tensor:
        """Return values on the heap, evenly from `start` to `end`; collective.

        Args:
            start, end: the first value, and the last.
            steps: how many values.
            options: see `Options`.
        """
        (steps,) = _shape((steps,))
        return self._copied(torch.linspace(start, end, steps, dtype=options.get("dtype"), device="cpu"), options)

    def rand(self, *size: Size, generator: torch.Generator | None = None, **options: Unpack[Options]) -> torch.Tensor:
        """Return values on the heap that are uniform in [0, 1); collective.

        Args:
            generator: of the context's device; None for the rank's own torch generator.
            size, options: as of `empty`.
        """
        return self._filled(size, options, lambda buffer: buffer.uniform_(generator=generator))

    def uniform(
        self,
        size: Size,
        low: float = 0.0,
        high: float = 1.0,
        dtype: torch.dtype | None = None,
        **options: Unpack[_ButDtype],
    ) -> torch.Tensor:
        """Return values on the heap that are uniform in [low, high); collective.

        Args:
            size: the shape, a sequence or one number.
            low, high: the bounds; `high` is not among the values.
            dtype: of the elements; None for torch's default dtype, or that of `out`.
            options: see `Options`.
        """
        of: Options = {**options, "dtype": dtype}
        return self._filled((size,), of, lambda buffer: buffer.uniform_(low, high))

    def randn(self, *size: Size, generator: torch.Generator | None = None, **options: Unpack[Options]) -> torch.Tensor:
        """Return values on the heap of the standard normal distribution; collective.

        Args:
            generator: of the context's device; None for the rank's own torch generator.
            size, options: as of `empty`.
        """
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
        """Return integers on the heap that are uniform in [low, high), int64 where no dtype is given; collective.

        ``randint(high, size)``, from 0, or ``randint(low, high, size)``.

        Args:
            low, high: the bounds; `high` is not among the values.
            size: the shape, a sequence or one number.
            generator: as of `rand`.
            options: see `Options`.

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
        self,
        size: tuple[Any, ...],
        options: Options,
        fill: Callable[[torch.Tensor], torch.Tensor],
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """Return a tensor once it is filled; of one that cannot be, of that dtype, nothing is left on the heap."""
        out = options.get("out")
        dtype = options.get("dtype") or (torch.get_default_dtype() if out is None else out.dtype)
        shape = _shape(size)
        _check_options(options, dtype)
        if out is not None:
            buffer = self._as_output(out, shape, dtype)
        else:
            if strides is None and "memory_format" in options:  # raises, if there is none such for the shape
                strides = torch.empty(shape, device="meta", memory_format=options["memory_format"]).stride()
            buffer = self._allocate(shape, dtype, options.get("device"))
            if strides is not None and buffer.stride() != strides:
                buffer = buffer.as_strided(shape, strides)
        try:
            return fill(buffer).requires_grad_(options.get("requires_grad", False) or buffer.requires_grad)
        except Exception:
            if out is None:
                self.free(buffer)
            raise

    def _as_output(self, out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that the caller gave to be filled, in this shape."""
        fits = out.shape == shape or (out.is_contiguous() and out.numel() == math.prod(shape))
        if not fits or out.dtype != dtype or not self.is_symmetric(out):
            where = "on the heap" if self.is_symmetric(out) else "not on the heap"
            raise RuntimeError(
                f"out is {tuple(out.shape)} of {out.dtype}, {where}; it takes {shape} of {dtype} on the heap"
            )
        return out if out.shape == shape else out.view(shape)

    def _copied(self, values: torch.Tensor, options: Options) -> torch.Tensor:
        """Return a tensor with these values, of the dtype asked for, else that of ``out``, else their own."""
        if options.get("out") is None:
            options["dtype"] = values.dtype
        return self._filled((values.shape,), options, lambda buffer: buffer.copy_(values))


def _check_options(options: Options, dtype: torch.dtype) -> None:
    """Raise for what a tensor on the heap cannot be."""
    if unknown := options.keys() - get_type_hints(Options).keys():
        raise TypeError(f"unexpected keyword arguments {', '.join(sorted(unknown))}")
    if (layout := options.get("layout", torch.strided)) is not torch.strided:
        raise ValueError(f"layout is {layout}; tensors on the heap are torch.strided")
    if options.get("pin_memory"):
        raise RuntimeError("pin_memory=True: only dense CPU tensors can be pinned, and the heap's memory cannot")
    if options.get("requires_grad") and not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"only tensors of floating point and complex dtype can require gradients, not {dtype}")


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    """Both ``zeros(2, 3)`` and ``zeros((2, 3))``, and ``zeros(((2, 3),))``, which a function may make of the second."""
    while len(size) == 1 and not hasattr(size[0], "__index__"):
        (size,) = size
    return tuple(map(operator.index, size))
