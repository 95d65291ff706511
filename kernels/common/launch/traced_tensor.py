"""What stands for a tensor in a traced call: memory, and a shape that may depend on the rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from .trace import Number, Trace, Untraceable, fixed, is_traced, value_of


class Memory(NamedTuple):
    """What a traced tensor lies in: a tensor, or a `Traced` one, and the address of its first element."""

    tensor: Any
    address: Any


class TracedTensor:
    """As much of a tensor's interface as variants use on the host: where it lies, its shape, views of it.

    Args:
        trace: of the call.
        memory: what it lies in.
        offset: of its first element, in elements from the memory's.
        shape, strides: as a tensor's; of numbers that may depend on the rows.
        dtype: the elements'.

    Raises:
        Untraceable: it is asked for anything else.
    """

    def __init__(
        self, trace: Trace, memory: Memory, offset: Any, shape: tuple[Any, ...], strides: tuple[Any, ...], dtype: Any
    ) -> None:
        self.trace, self.memory, self.offset = trace, memory, offset
        self.shape, self._strides, self.dtype = shape, strides, dtype

    @classmethod
    def over(cls, trace: Trace, memory: Memory, shape: tuple[Any, ...], dtype: torch.dtype) -> TracedTensor:
        """Return the first elements of some memory as a contiguous tensor."""
        return cls(trace, memory, 0, shape, contiguous_strides(shape), dtype)

    def __getattr__(self, name: str) -> NoReturn:
        raise Untraceable(f"the {name} of a tensor is not known while a call is traced")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> NoReturn:
        raise Untraceable(f"{function} takes a tensor that is there; a call is being traced")

    # Where it lies ---------------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        """That of the memory."""
        found: torch.device = value_of(self.memory.tensor).device
        return found

    def stride(self, dim: int | None = None) -> Any:
        """Return the strides, or that of a dimension."""
        return self._strides if dim is None else self._strides[dim]

    def numel(self) -> Any:
        """Return the number of elements."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return int(self.dtype.itemsize)

    def __len__(self) -> Any:
        return self.shape[0]

    def data_ptr(self) -> Any:
        """Return its address; as torch, 0 if it is empty."""
        return self.memory.address + self.offset * self.dtype.itemsize if self.numel() != 0 else 0

    def is_contiguous(self) -> bool:
        """Return whether its elements lie one behind the other; as torch, True if it is empty."""
        if self.numel() == 0:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self._strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected = expected * size
        return True

    def new_empty(self, size: Any) -> torch.Tensor:
        """Return other memory on its device, in a shape that the trace then relies on."""
        return torch.empty(fixed(size), dtype=self.dtype, device=self.device)

    # Views -----------------------------------------------------------------------------------------------------------

    def as_strided(self, shape: Any, strides: Any) -> TracedTensor:
        """Return the memory from its first element on in another shape."""
        return TracedTensor(self.trace, self.memory, self.offset, tuple(shape), tuple(strides), self.dtype)

    def t(self) -> TracedTensor:
        """Return the transpose of a matrix."""
        return self.as_strided(self.shape[::-1], self._strides[::-1])

    def view(self, *shape: Any) -> TracedTensor:
        """Return it in another shape, of which one size may be -1; a contiguous one."""
        if any(isinstance(size, (tuple, torch.dtype)) for size in shape) or not self.is_contiguous():
            raise Untraceable(f"a view of {shape} is not made while a call is traced")
        rest = math.prod([size for size in shape if size != -1])
        sizes = tuple(self.numel() // rest if size == -1 else size for size in shape)
        return self.as_strided(sizes, contiguous_strides(sizes))

    def flatten(self, first: int = 0, last: int = -1) -> TracedTensor:
        """Return it with dimensions as one, whose elements lie apart as those of the last."""
        last %= self.ndim
        for dim in range(first, last):
            if self._strides[dim] != self._strides[dim + 1] * self.shape[dim + 1]:
                raise Untraceable(f"dimensions {first} to {last} do not lie as one")
        size = math.prod(self.shape[first : last + 1])
        shape = (*self.shape[:first], size, *self.shape[last + 1 :])
        return self.as_strided(shape, (*self._strides[:first], *self._strides[last:]))

    def __getitem__(self, index: Any) -> TracedTensor:
        shape, strides, offset, dim = [], [], self.offset, 0
        for one in index if isinstance(index, tuple) else (index,):
            if one is None:
                shape.append(1)
                strides.append(self.shape[dim] * self._strides[dim] if dim < self.ndim else 1)  # as torch has it
                continue
            size, stride = self.shape[dim], self._strides[dim]
            dim += 1
            if isinstance(one, slice):
                start, stop = _bounds(one, size)
                shape.append(stop - start)
                strides.append(stride)
                offset = offset + start * stride
            elif _is_index(one, size):
                offset = offset + one * stride
            else:
                raise Untraceable(f"{one!r} is no index of {size} that a traced tensor takes")
        return TracedTensor(
            self.trace, self.memory, offset, (*shape, *self.shape[dim:]), (*strides, *self._strides[dim:]), self.dtype
        )

    def of_peers(self, peer_view: Callable[[torch.Tensor], torch.Tensor]) -> TracedTensor:
        """Return every rank's; `peer_view` returns that of a tensor that is there."""
        if is_traced(self.memory.tensor):
            raise Untraceable("operands and new outputs are no peers'")
        whole = peer_view(self.memory.tensor.view(-1))
        shape, strides = (len(whole), *self.shape), (whole.stride(0), *self._strides)
        return TracedTensor(self.trace, Memory(whole, whole.data_ptr()), self.offset, shape, strides, self.dtype)

    def as_tensor(self) -> Any:
        """Return it as a tensor of the function."""
        what = self.memory.tensor, self.shape, self._strides, self.offset
        if not is_traced(what):
            return strided(*what)
        return self.trace.computed(f"{self.trace.text(strided)}{self.trace.text(what)}", strided(*value_of(what)))


def strided(tensor: torch.Tensor, shape: Any, strides: Any, offset: int) -> torch.Tensor:
    """Return a view of a tensor's memory, `offset` elements from its first."""
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


def contiguous_strides(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the strides of elements that lie one behind the other."""
    strides: list[Any] = []
    stride: Any = 1
    for size in reversed(shape):
        strides.insert(0, stride)
        stride = stride * size
    return tuple(strides)


def _is_index(index: Any, size: Any) -> bool:
    is_number: bool = isinstance(index, (int, Number))
    return is_number and bool(index >= 0) and bool(index < size)


def _bounds(index: slice, size: Any) -> tuple[Any, Any]:
    """Return where a slice starts and stops."""
    start, stop = 0 if index.start is None else index.start, size if index.stop is None else index.stop
    if index.step is not None or start < 0 or stop < 0:
        raise Untraceable(f"{index} is no slice that a traced tensor takes")
    start = min(start, size)
    return start, max(start, min(stop, size))
