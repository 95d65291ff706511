"""What emulated kernels (gluon_emulator.py) compute with: memory of both kinds, registers, tensor descriptors."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import torch


class Shared:
    """Shared memory; tiles lie there in blocks of 128 bytes a row, as the hardware's widest swizzle has them."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.dtype = memory.dtype

    def index(self, i: int) -> Shared:
        assert 0 <= i < len(self.memory)
        return Shared(self.memory[i])

    @property
    def shape(self) -> torch.Size:
        return self.memory.shape

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.memory.narrow(dim, start, length))

    def permute(self, order: Any) -> Shared:
        return Shared(self.memory.permute(*order))

    def reshape(self, shape: Any) -> Shared:
        return Shared(self.memory.view(shape))

    def load(self, layout: Any) -> Register:
        return Register(self.memory.clone())

    def reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        return Shared(self.memory.view(shape)) if len(shape) == 4 else WholeTile(self.memory, shape)


class WholeTile(Shared):
    """The first blocks as one tile."""

    def __init__(self, memory: torch.Tensor, shape: list[int]) -> None:
        super().__init__(memory)
        self._rows, self._columns = shape

    def store(self, value: Register) -> None:
        columns = 128 // self.dtype.itemsize
        blocks = self.memory.view(-1)[: self._rows * self._columns].view(-1, self._rows, columns)
        blocks.copy_(value.value.reshape(self._rows, -1, columns).permute(1, 0, 2))


class Register:
    """A distributed tensor. Multiplications may be in flight; whoever reads it before waiting gets NaN."""

    def __init__(self, value: torch.Tensor, in_flight: tuple[Any, ...] = ()) -> None:
        self._value, self.in_flight = value, in_flight
        self.type = SimpleNamespace(layout=None)
        self.shape = list(value.shape)

    @property
    def value(self) -> torch.Tensor:
        return torch.full_like(self._value, float("nan")) if self.in_flight else self._value

    def after(self, last: int) -> Register:
        """Return it with the role's multiplications up to the `last`-th done: their operands are read now."""
        value = self._value
        for number, a, b, use_acc in self.in_flight:
            if number <= last:
                product = a.memory.float() @ b.memory.float()
                value = value + product if use_acc else product
        return Register(value, tuple([one for one in self.in_flight if one[0] > last]))

    def to(self, dtype: torch.dtype) -> Register:
        return Register(self.value.to(dtype))

    def reshape(self, shape: list[int]) -> Register:
        return Register(self.value.reshape(shape))

    def permute(self, order: list[int]) -> Register:
        return Register(self.value.permute(order))

    def split(self) -> tuple[Register, Register]:
        return Register(self.value[..., 0]), Register(self.value[..., 1])

    def __add__(self, other: Register) -> Register:
        return Register(self.value + other.value)

    def __mul__(self, other: Register | torch.Tensor) -> Register:
        return Register(self.value * (other.value if isinstance(other, Register) else other))

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.value[index]


class Pointer:
    """A place in global memory, or a block of them."""

    def __init__(self, memory: torch.Tensor, offsets: Any = 0) -> None:
        self.memory, self.offsets = memory, offsets

    def __add__(self, offsets: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + offsets)


def elements_from(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements from a tensor's first to its last, those between them too; of an empty one, NaN."""
    if not tensor.numel():
        return torch.full((1,), float("nan"), dtype=tensor.dtype)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,))


class Descriptor:
    """A tensor descriptor: what reaches past the end reads as zero and is not stored."""

    def __init__(self, made: Any) -> None:
        itemsize = made.base.dtype.itemsize
        assert not any(distance * itemsize % 16 for distance in made.strides[:-1])
        assert not made.base.data_ptr() % 16
        last = sum((size - 1) * stride for size, stride in zip(made.shape, made.strides, strict=True))
        memory = (ctypes.c_char * ((last + 1) * made.base.dtype.itemsize)).from_address(made.base.data_ptr())
        self.tensor = torch.frombuffer(memory, dtype=made.base.dtype).as_strided(made.shape, made.strides)
        num_bytes = torch.Size(made.block_shape).numel() * made.base.dtype.itemsize
        self.block_type = SimpleNamespace(shape=list(made.block_shape), nbytes=num_bytes)
        self.shape, self.dtype, self.layout = list(made.shape), made.base.dtype, None

    def _window(self, start: list[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        assert all(first >= 0 for first in start)
        stops = [first + size for first, size in zip(start, self.block_type.shape, strict=True)]
        inside = self.tensor[tuple(slice(first, stop) for first, stop in zip(start, stops, strict=True))]
        return inside, tuple(slice(0, size) for size in inside.shape)

    def read(self, start: list[int], into: torch.Tensor) -> None:
        inside, where = self._window(start)
        into.zero_()
        into[where] = inside

    def write(self, start: list[int], value: torch.Tensor) -> None:
        inside, where = self._window(start)
        inside.copy_(value[where])
