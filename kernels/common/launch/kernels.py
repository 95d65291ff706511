"""The compiled kernels that an operator's calls launch: few, whatever the numbers of rows.

Triton compiles a kernel anew for each set of its integers that are 1, or divisible by 16, and compiling takes up to a
second. Half a dozen integers of a launch follow from the rows, so 200 numbers of rows have some 30 such sets. But what
is compiled for any integer takes these, too. So of launches that are alike in all else

- the first has its kernel compiled as Triton would;
- one that no kernel takes has one compiled for any integer wherever its own are of another kind than that one's.

Operands' strides, which decide how wide accesses are, count among all else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from iris_core.collectives.loaded_kernel import LoadedKernel, compiled_kernel

from .trace import Number, tuple_like

ALIGNMENT_BYTES = 16  # what Triton specialises addresses and integers for
_ANY, _ONE = 0, 1  # kinds of integers, beside divisible ones; what is compiled for any takes all
_WIDE = 64  # is added for those of more than 32 bits
_OF_KIND = {  # an integer of each
    _ANY: 3,
    _ONE: 1,
    ALIGNMENT_BYTES: ALIGNMENT_BYTES,
    _WIDE + _ANY: (1 << 32) + 3,
    _WIDE + ALIGNMENT_BYTES: 1 << 32,
}


@dataclass(frozen=True, slots=True)
class Pointer:
    """Stands for a tensor that a kernel is compiled for, or that a descriptor names."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Return where it lies."""
        return self.address


class Launch(NamedTuple):
    """A launch as Triton takes it, of a call that may be traced.

    Args:
        kernel: the jit function.
        num_programs: of the grid.
        arguments: by name; compile-time ones are what they are, whatever the rows.
        options: such as ``num_warps``.
    """

    kernel: Any
    num_programs: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    def compilable(self) -> Launch:
        """Return a launch that the same kernels take, without what is traced, and without tensors' memory."""
        compiled = {param.name: param.is_constexpr for param in self.kernel.params}
        arguments = {name: one if compiled[name] else _without_memory(one) for name, one in self.arguments.items()}
        return self._replace(num_programs=1, arguments=arguments)


def kinds_of(launch: Launch, *others: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what Triton specialises a launch for.

    Args:
        launch: the launch.
        others: what else decides which launches share a kernel.

    Returns:
        The kinds of all but its integers, and where among them integers are; the kinds of these, in order, of traced
        ones numbers.
    """
    integers: list[Any] = []
    found: list[Any] = [launch.kernel, *launch.options.values(), *others]

    def add(argument: Any) -> None:
        if isinstance(argument, tuple):
            found.append(len(argument))
            for one in argument:
                add(one)
        elif isinstance(argument, Number):
            assert type(argument.value) is int, "of what depends on rows, kernels take integers"
            found.append(int)
            integers.append(argument.apply(kind_of_integer))
        elif type(argument) is int:
            found.append(int)
            integers.append(kind_of_integer(argument))
        elif hasattr(argument, "data_ptr"):
            found.append((argument.dtype, argument.data_ptr() % ALIGNMENT_BYTES == 0))
        elif hasattr(argument, "block_shape"):  # Triton's or Gluon's; the layout follows from the rest
            found.append((type(argument), tuple(argument.block_shape), argument.base.dtype))
        else:  # None, a flag, an op of an epilogue
            found.append(argument)

    for param in launch.kernel.params:
        if param.is_constexpr:
            found.append(launch.arguments[param.name])
        else:
            add(launch.arguments[param.name])
    return tuple(found), tuple(integers)


def kind_of_integer(value: int) -> int:
    """Return what of an integer Triton compiles for."""
    if not -(1 << 31) <= value < 1 << 31:
        return _WIDE + (_ANY if value % ALIGNMENT_BYTES else ALIGNMENT_BYTES)
    return _ONE if value == 1 else _ANY if value % ALIGNMENT_BYTES else ALIGNMENT_BYTES


def load(kernel: Any, num_programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> LoadedKernel:
    """Return a kernel, loaded, that is compiled for a launch as Triton takes it."""
    return LoadedKernel(compiled_kernel(kernel, num_programs, arguments, options))


class Kernels:
    """Kernels by what they were compiled for.

    Args:
        make: compiles one for a launch, as `load` does; what it returns is true.
    """

    def __init__(self, make: Callable[..., Any] = load) -> None:
        self._make = make
        self._made: dict[Any, list[tuple[Sequence[int], Any]]] = {}  # by all but the kinds of their integers

    def __len__(self) -> int:
        """Return how many there are."""
        return sum(map(len, self._made.values()))

    def of(self, launch: Launch, others: tuple[Any, ...], integers: tuple[int, ...]) -> Any:
        """Return one that takes a launch; compiled now, if there is none.

        Args:
            launch: the launch, or one that differs in its integers alone; compilable.
            others, integers: its kinds (`kinds_of`).
        """
        made = self._made.setdefault(others, [])
        for compiled_for, one in made:
            if _takes(compiled_for, integers):
                return one
        compiled_for = _common(made[-1][0], integers) if made else integers
        arguments = _with_integers(launch, compiled_for)
        made.append((compiled_for, self._make(launch.kernel, 1, arguments, launch.options)))
        return made[-1][1]

    def clear(self) -> None:
        """Forget them all."""
        self._made.clear()


def _takes(compiled_for: Sequence[int], integers: Sequence[int]) -> bool:
    """Whether a kernel that was compiled for these kinds of integers takes those."""
    pairs = zip(compiled_for, integers, strict=True)
    return all(one in (other, _WIDE) or (one == _ANY and other < _WIDE) for one, other in pairs)


def _common(some: Sequence[int], others: Sequence[int]) -> Sequence[int]:
    """Return for what a kernel that takes integers of these kinds and those must be compiled."""
    return [one if one == other else max(one, other) // _WIDE * _WIDE for one, other in zip(some, others, strict=True)]


def _without_memory(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple_like(argument, [_without_memory(one) for one in argument])
    if isinstance(argument, Number):
        return argument.value
    if hasattr(argument, "data_ptr"):
        return Pointer(0 if argument.data_ptr() % ALIGNMENT_BYTES == 0 else 1, argument.dtype)
    if hasattr(argument, "block_shape"):
        based = object.__new__(type(argument))  # its checks were made
        vars(based).update(vars(argument), base=Pointer(0, argument.base.dtype), shape=(), strides=())
        return based
    return argument


def _with_integers(launch: Launch, kinds: Sequence[int]) -> dict[str, Any]:
    """Return a kernel's arguments with integers of these kinds."""
    left = iter(kinds)
    return {
        param.name: launch.arguments[param.name]
        if param.is_constexpr
        else _of_kinds(launch.arguments[param.name], left)
        for param in launch.kernel.params
    }


def _of_kinds(argument: Any, kinds: Iterator[int]) -> Any:
    if isinstance(argument, tuple):
        return tuple_like(argument, [_of_kinds(one, kinds) for one in argument])
    return _OF_KIND[next(kinds)] if type(argument) is int else argument
