"""What a call queues, recorded: steps, and of which numbers, addresses and tensors each is made.

| recorded of | gives |
|---|---|
| tensors | the call with operands that lie there |
| what stands for them, traced (trace.py) | a template, of which calls are made: a function gives what each step takes |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from iris_core.backends.base import Step

from ..config import GemmConfig
from . import graphs
from .kernels import Kernels, Launch, kinds_of
from .trace import Several, Source, Trace, fixed, is_traced, value_of
from .traced_tensor import TracedTensor, strided

_MOST_DESCRIPTORS = 256  # encoded ones that a launch keeps of each argument: those of weights are the same for any rows

Make = Callable[..., Step]  # makes a step of what it is recorded with
New = Callable[[int, tuple[int, ...], torch.dtype], torch.Tensor]  # gives the new output of a number, shape and dtype
Made = tuple["PreparedCall", tuple[torch.Tensor, ...]]  # a call, and the memory of its new outputs


@dataclass(slots=True)
class PreparedCall:
    """What a call queues, and what it runs with.

    Args:
        queue: queues its steps, behind copies of operands.
        copies: of which, by name, and where to.
        outputs: what it returns: the number of a new output, a part of one (number, shape, strides, offset), or a
            tensor.
        config: what it runs with.
        copied: of which operands it makes copies, "A" or "B".
        new: the names of its new outputs.
        calls_torch: whether it is queued with its operands and outputs `given`.
    """

    queue: Step
    copies: tuple[tuple[str, torch.Tensor], ...]
    outputs: tuple[Any, ...]
    config: GemmConfig | None
    copied: tuple[str, ...]
    new: tuple[str, ...]
    calls_torch: bool

    def outputs_of(self, new: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return its outputs, of which some are these."""
        found: tuple[torch.Tensor, ...] = ()
        for one in self.outputs:  # no comprehension: a frame, a call
            if type(one) is int:
                found += (new[one],)
            elif type(one) is tuple:
                number, *how = one
                found += (strided(new[number], *how),)
            else:
                found += (one,)
        return found


class _Entry(NamedTuple):
    """A step: what makes it; or, in `inner`, steps that are queued as one. `is_same`: in all calls."""

    make: Make | None
    is_same: bool
    inner: Recording | None = None


class Recording:
    """What a call, or a side stream in it, queues in order.

    Args:
        fewest: steps from which on a graph is less work for the host.
        stream: as a `graphs.Sequence`'s.

    Attributes:
        may_be_graph: as a `graphs.Sequence`'s, of many steps.
        calls_torch: as a `PreparedCall`'s.
        entries: its steps.
        copies: of which operands, by name, copies come before.
    """

    def __init__(self, fewest: int, stream: int | None = None) -> None:
        self.fewest, self.stream = fewest, stream
        self.may_be_graph, self.calls_torch = True, False
        self.entries: list[_Entry] = []
        self.copies: list[str] = []
        self._arguments: list[Any] = []
        self._destinations: list[Any] = []
        self._steps: dict[int, Step] = {}  # those that are the same in all calls

    def add(self, make: Make, *arguments: Any) -> None:
        """Add a step that is made of these; tensors among them may be traced."""
        of = tuple(map(_as_tensor, arguments))
        self.entries.append(_Entry(make, not is_traced(of)))
        self._arguments.append(of)

    def add_copy(self, name: str, destination: torch.Tensor) -> None:
        """Add a copy of the operand of a name."""
        assert not self.entries, "copies of operands come first"
        self.copies.append(name)
        self._destinations.append(_as_tensor(destination))

    def add_inner(self, inner: Recording) -> None:
        """Add what is queued as one, and is the same in every call of so many rows."""
        of, _ = inner.taken()
        self.entries.append(_Entry(None, False, inner))
        self._arguments.append(of)

    def taken(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return what its steps are made of, and where copies go; it keeps none of that."""
        taken = tuple(self._arguments), tuple(self._destinations)
        self._arguments, self._destinations = [], []
        return taken

    def step(self, number: int, arguments: tuple[Any, ...]) -> Step:
        """Return a step of it, made of these in place of what was recorded."""
        made = self._steps.get(number)
        if made is None:
            make, is_same, _ = self.entries[number]
            assert make is not None
            made = make(*arguments)
            if is_same:
                self._steps[number] = made
        return made


@dataclass(eq=False)
class Template:
    """Calls of any rows, with operands anywhere, that do what a recorded one did; it keeps no operand.

    Args:
        recording: of that one.
        source: gives the parts of a call: what its steps are made of, where copies go, outputs, new outputs.
        new: the names of new outputs.
        config, copied: as a `PreparedCall`'s.
        kept_graphs: an operator's.
        inner: what queues steps that are the same in calls of so many rows, by these and their place.
    """

    recording: Recording
    source: Source
    new: tuple[str, ...]
    config: GemmConfig | None
    copied: tuple[str, ...]
    kept_graphs: graphs.Graphs
    inner: dict[Any, Step]
    _function: Callable[..., Any] | None = None

    def bind(self, rows: int, new: New, operands: Iterable[torch.Tensor]) -> Made | None:
        """Return the call of so many rows, with operands that lie elsewhere; None if it does not what this one does."""
        if self._function is None:
            self._function = self.source.compiled()
        parts = self._function(rows, new, *operands)
        return None if parts is None else self.made(rows, *parts)

    def made(self, rows: int, arguments: Any, destinations: Any, outputs: Any, new: Any) -> Made:
        """Return a call of its parts."""
        queue = self._queuing(rows, self.recording, arguments)
        copies = tuple(zip(self.recording.copies, destinations, strict=True)) if destinations else ()
        has_torch = self.recording.calls_torch
        return PreparedCall(queue, copies, outputs, self.config, self.copied, self.new, has_torch), new

    def _queuing(self, rows: int, recording: Recording, arguments: Any) -> Step:
        steps: list[Step] = []
        for number, (entry, of) in enumerate(zip(recording.entries, arguments, strict=True)):
            if entry.inner is None:
                steps.append(recording.step(number, of))
                continue
            place = rows, entry.inner.stream, number
            if place not in self.inner:
                self.inner[place] = self._queuing(rows, entry.inner, of)
            steps.append(self.inner[place])
        may_be_graph = recording.may_be_graph and len(steps) >= recording.fewest
        if len(steps) == 1 and not may_be_graph:
            return steps[0]
        return graphs.Sequence(steps, self.kept_graphs, recording.stream, may_be_graph=may_be_graph)


def recorded_launch(
    trace: Trace, kernels: Kernels, launch: Launch, stream: int | Callable[[], int], *others: Any
) -> tuple[Make, tuple[Any, ...]]:
    """Return what makes launches that differ in integers, addresses and descriptors, and of what this one is made.

    Args:
        trace: of the call.
        kernels: an operator's.
        launch: the one that is recorded.
        stream: the driver's handle of the stream, or what gives it.
        others: decide with the launch's arguments which kernel it needs.
    """
    constant = {param.name for param in launch.kernel.params if param.is_constexpr}
    arguments = {name: fixed(one) if name in constant else one for name, one in launch.arguments.items()}
    launch = launch._replace(arguments=arguments)
    compilable, (all_others, integers) = launch.compilable(), kinds_of(launch, *others)
    launching: dict[tuple[int, ...], Any] = {}  # by kinds of integers

    def make(num_programs: int, kinds: tuple[int, ...], arguments: tuple[Any, ...]) -> Step:
        prepare = launching.get(kinds)
        if prepare is None:
            prepare = launching[kinds] = kernels.of(compilable, all_others, kinds).launching_expanded
        step: Step = prepare(num_programs, stream, arguments)
        return step

    first = kernels.of(compilable, all_others, value_of(integers))
    places: list[Any] = []
    for index, param in enumerate(launch.kernel.params):
        argument = arguments[param.name]
        if hasattr(argument, "block_shape") and param.name not in constant:
            places += _expanded(trace, first, index, argument)
        else:
            places.append(argument if param.name in constant else _numbers(argument))
    return make, (launch.num_programs, integers, tuple(places))


def _expanded(trace: Trace, loaded: Any, index: int, descriptor: Any) -> tuple[Any, ...]:
    """Return what the launcher takes for a descriptor, argument number `index`."""
    assert getattr(descriptor, "padding", "zero") == "zero", "elements past the end are zeros"
    expand = loaded.expanding(index)
    how = tuple(descriptor.shape), tuple(descriptor.strides)
    where = (descriptor.base.data_ptr(), *how)
    if not is_traced(how):  # of weights, or of the workspace: the same in many calls
        expand = functools.lru_cache(_MOST_DESCRIPTORS)(expand)
    found = expand(*value_of(where))
    return (Several(f"*{trace.text(expand)}{trace.text(where)}", found),) if is_traced(where) else found


def _numbers(argument: Any) -> Any:
    """Return an argument with addresses in place of tensors, so that it keeps no memory."""
    if isinstance(argument, tuple):
        return tuple([_numbers(one) for one in argument])
    return argument.data_ptr() if hasattr(argument, "data_ptr") else argument


def _as_tensor(argument: Any) -> Any:
    return argument.as_tensor() if isinstance(argument, TracedTensor) else argument
