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
from typing import Any

import torch

from iris_core.collectives.loaded_kernel import LoadedKernel, compiled_kernel

ALIGNMENT_BYTES = 16  # what Triton specialises addresses and integers for
_ANY, _ONE = 0, 1  # kinds of integers, beside divisible ones; what is compiled for any takes all
_WIDE = 64  # is added for those of more than 32 bits
_ORDINARY = 3  # an integer of no kind that Triton compiles for


class Kinds:
    """What Triton specialises a launch for.

    Args:
        others: what else decides which launches share a kernel.

    Attributes:
        integers: the kinds of those, in order.
        others: those of all else, and where among them integers are.
    """

    __slots__ = ("integers", "others")

    def __init__(self, *others: Any) -> None:
        self.integers: list[int] = []
        self.others: list[Any] = [*others]


def kind_of_integer(value: int) -> int:
    """Return what of an integer Triton compiles for."""
    if not -(1 << 31) <= value < 1 << 31:
        return _WIDE + (_ANY if value % ALIGNMENT_BYTES else ALIGNMENT_BYTES)
    return _ONE if value == 1 else _ANY if value % ALIGNMENT_BYTES else ALIGNMENT_BYTES


def kind_of_tensor(tensor: torch.Tensor) -> Any:
    """Return what of a tensor."""
    return tensor.dtype, tensor.data_ptr() % ALIGNMENT_BYTES == 0


def kind_of_descriptor(descriptor: Any) -> Any:
    """Return what of a tensor descriptor, Triton's or Gluon's, whose layout follows from the rest."""
    return type(descriptor), tuple(descriptor.block_shape), descriptor.base.dtype


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
        self._found: dict[Any, Any] = {}  # by all kinds of a launch
        self._made: dict[Any, list[tuple[Sequence[int], Any]]] = {}  # by all but those of its integers

    def __len__(self) -> int:
        """Return how many there are."""
        return sum(map(len, self._made.values()))

    def of(
        self, kernel: Any, num_programs: int, arguments: dict[str, Any], options: dict[str, Any], kinds: Kinds
    ) -> Any:
        """Return one that takes a launch; compiled now, if there is none.

        Args:
            kernel, num_programs, arguments, options: the launch, as Triton takes it.
            kinds: of its arguments; of compile-time ones, themselves.
        """
        place = (kernel, *options.values(), *kinds.others), tuple(kinds.integers)
        found = self._found.get(place)  # once: a place takes microseconds to hash
        if found is None:
            alike, integers = place
            made = self._made.setdefault(alike, [])
            taking = [one for compiled_for, one in made if _takes(compiled_for, integers)]
            if not taking:
                compiled_for = _common(made[-1][0], integers) if made else integers
                taking = [self._make(kernel, num_programs, _with_integers(kernel, arguments, compiled_for), options)]
                made.append((compiled_for, taking[0]))
            found = self._found[place] = taking[0]
        return found

    def clear(self) -> None:
        """Forget them all."""
        self._found.clear()
        self._made.clear()


def _takes(compiled_for: Sequence[int], integers: Sequence[int]) -> bool:
    """Whether a kernel that was compiled for these kinds of integers takes those."""
    pairs = zip(compiled_for, integers, strict=True)
    return all(one in (other, _WIDE) or (one == _ANY and other < _WIDE) for one, other in pairs)


def _common(some: Sequence[int], others: Sequence[int]) -> Sequence[int]:
    """Return for what a kernel that takes integers of these kinds and those must be compiled."""
    return [one if one == other else max(one, other) // _WIDE * _WIDE for one, other in zip(some, others, strict=True)]


def _with_integers(kernel: Any, arguments: dict[str, Any], kinds: Sequence[int]) -> dict[str, Any]:
    """Return a kernel's arguments with integers of these kinds."""
    left = iter(kinds)
    return {
        param.name: arguments[param.name] if param.is_constexpr else _of_kinds(arguments[param.name], left)
        for param in kernel.params
    }


def _of_kinds(argument: Any, kinds: Iterator[int]) -> Any:
    if isinstance(argument, tuple):
        parts = [_of_kinds(one, kinds) for one in argument]
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    if type(argument) is not int:
        return argument
    kind = next(kinds)
    if kind % _WIDE != _ANY:
        return argument
    return _ORDINARY + (1 << 32) * (kind >= _WIDE)
