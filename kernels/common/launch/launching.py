"""Calls that cost the host little: what a call queues is prepared once, and from then on only queued.

A launch through Triton binds, specialises and looks up its arguments, and encodes its tensor descriptors, every time.
An operator's calls differ in where A and B lie, and in how many rows there are:

| A and B | the host |
|---|---|
| lie where they lay in an earlier call, with as many rows | queues the steps of that call |
| lie elsewhere, and are in all else like those of an earlier call | makes its steps again, with other addresses |
| have other rows, and kernels of earlier calls take them (kernels.py) | has the variant make steps for these |
| otherwise | first asks Triton for the kernels, which specialises them as for any launch |

A call of many steps, such as copies and waits between streams, becomes a graph when it is made again (graphs.py): then
it costs the host one launch. No graph is made of a call in which a stream waits for a word that a kernel counts:
streams take work in the order in which it was queued, the kernel first, and a graph's branches in any order. There what
the stream does, which is the same in every call, is a graph of its own, queued behind the kernel (`SideStream.in_one`).

A step hands a compiled kernel's launcher what Triton would hand it: Triton's own code expands the descriptors, and
addresses are passed as numbers. No step keeps an operand. All kernels of a call are loaded before the first is queued.

Only on NVIDIA GPUs. Elsewhere, in debug mode, and while Triton has launch hooks (a profiler's), launches go through
Triton.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from triton import knobs

from iris_core.backends.base import Backend, PreparedStream, Stream

from ..config import GemmConfig
from .graphs import Graphs, Sequence
from .kernels import ALIGNMENT_BYTES, Kernels, Kinds, kind_of_integer
from .moving import Operands, Spans, movable, movable_copy, placed

_MOST_CALLS = 1024  # prepared calls that an operator keeps: of some 10 KB each
_STEPS_OF_A_GRAPH = 8  # from which on a graph is less work for the host; fewer steps are queued in about 20 µs
_STEPS_OF_ONE_STREAM = 4  # from which on a graph is less work, where all steps are of one stream

Place = tuple[Any, ...]  # what a prepared call is found by; of `place_of`


@dataclass
class PreparedCall:
    """What a call queues, and what it runs with.

    Args:
        sequence: what it queues, behind copies of operands.
        copies: of which, by name, and where to.
        config: what it runs with.
        copied: of which operands it makes copies, "A" or "B".
        gives_new: whether it returns the new memory of its outputs as it is, and nothing else.
    """

    sequence: Sequence
    copies: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    config: GemmConfig | None = None
    copied: tuple[str, ...] = ()
    gives_new: bool = False


class Calls:
    """An operator's prepared calls, and the one that is being prepared.

    Args:
        backend: whose kernels are launched.
        are_ours: whether calls launch kernels of this library, and no others.
    """

    def __init__(self, backend: Backend, *, are_ours: bool = True) -> None:
        self._backend: Any = backend
        self._can_prepare = are_ours and backend.name == "cuda"
        self._calls: dict[Place, PreparedCall] = {}
        self._alike: dict[Place, PreparedCall] = {}  # one of those that differ in nothing but addresses
        self._graphs = Graphs(backend)
        self._kernels = Kernels()
        self._sequences: dict[Any, Sequence] = {}  # the same in every call of so many rows, by the place in the call
        self._rows = 0  # of the call that is being prepared
        self._layout: Any = None  # what of its operands' strides decides its kernels
        self.spans: Spans | None = None  # of its operands
        self._call: PreparedCall | None = None  # that one
        self.recording: Sequence | None = None  # what its operations are added to
        self._only_compiles = False  # whether none of that is kept
        self.stream: PreparedStream | None = None  # that launches are being prepared for; None: the current one

    @property
    def are_prepared(self) -> bool:
        """Whether calls are prepared rather than launched through Triton."""
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # a chain of hooks each, or one
        return self._can_prepare and not (getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    def find(self, place: Place) -> PreparedCall | None:
        """Return the call that was prepared for rows, operands and outputs that lie where these lie."""
        return self._calls.get(place)

    def moved(self, place: Place, operands: Operands) -> PreparedCall | None:
        """Return a call made of one whose operands lie elsewhere, and keep it; None if there is no such call.

        Args:
            place: what it is found by.
            operands: the memory of its new outputs, and its operands; none lies on the heap.
        """
        alike = self._alike.get(_without_addresses(place))
        if alike is None or len(self._calls) == _MOST_CALLS:  # that many are forgotten first, this one too
            return None
        sequence = alike.sequence.moved(operands)
        moved = PreparedCall(sequence, alike.copies, alike.config, alike.copied, alike.gives_new)
        self._calls[place] = moved
        return moved

    @contextlib.contextmanager
    def preparing(self, place: Place, rows: int, operands: Operands | None) -> Iterator[PreparedCall]:
        """Within the block, `launch` and the rest queue nothing: they add to the call that this gives, and keeps.

        Args:
            place: what it is found by.
            rows: of the call.
            operands: as `moved` takes them, where it is to make others of this; else None.
        """
        if len(self._calls) == _MOST_CALLS:
            self._forget_calls()
        spans = Spans(operands or ())
        is_movable = operands is not None and spans.are_apart
        self._rows, self.spans = rows, spans if is_movable else Spans(())
        self._layout = tuple([tuple(map(kind_of_integer, strides)) for strides in place[3::5]])
        self._record()
        assert self._call is not None
        try:
            yield self._call
            self._calls[place] = self._call
        finally:
            self._record_no_longer()
        if is_movable:
            self._alike[_without_addresses(place)] = self._calls[place]

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Within the block, `launch` asks Triton for the kernel, the rest does nothing, and nothing is kept."""
        kept, self._sequences, self._kernels = (self._sequences, self._kernels), {}, Kernels(_compile)
        self._only_compiles, self.spans = True, Spans(())
        self._record()
        try:
            yield
        finally:
            self._record_no_longer()
            self._only_compiles = False
            self._sequences, self._kernels = kept

    def _record(self) -> None:
        self.recording = Sequence(self._graphs, _STEPS_OF_A_GRAPH)
        self._call = PreparedCall(self.recording)

    def _record_no_longer(self) -> None:
        self._call = self.recording = self.stream = self.spans = None

    @contextlib.contextmanager
    def preparing_once(self, stream: PreparedStream) -> Iterator[None]:
        """Within the block, what is added is all on one stream, and the same in calls of so many rows; it is a step."""
        around = self.recording
        assert around is not None
        around.may_be_graph = False
        self.recording = Sequence(self._graphs, _STEPS_OF_ONE_STREAM, stream.handle)
        try:
            yield
            place = (self._rows, stream.handle, len(around.steps))
            around.add(self._sequences.setdefault(place, self.recording))
        finally:
            self.recording = around

    def queue(self, call: PreparedCall, operands: Mapping[str, torch.Tensor], *, is_captured: bool) -> None:
        """Queue a call on the current stream.

        Args:
            call: the call.
            operands: its own, by name, which lie where they lay when the call was prepared.
            is_captured: whether the caller captures the stream.
        """
        self._graphs.is_captured = is_captured
        for name, destination in call.copies:
            destination.copy_(operands[name])
        call.sequence()

    def launch(self, kernel: Any, num_programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        """Launch a kernel, through Triton or as a step of the call that is being prepared."""
        if self.recording is None:
            kernel[(num_programs,)](**arguments, **options)
            return
        assert self.spans is not None
        kinds = Kinds(self._layout)
        places, moved = placed(self.spans, kernel, arguments, kinds)
        loaded = self._kernels.of(kernel, num_programs, arguments, options, kinds)
        if self._only_compiles:
            return
        stream = self._backend.current_stream if self.stream is None else self.stream.handle
        launching = functools.partial(loaded.launching, num_programs, stream, are_numbers=True)
        self.recording.add(*movable(self.spans, places, moved, launching))

    def copy(self, destination: torch.Tensor, name: str, operand: torch.Tensor) -> None:
        """Copy the operand of a name, before anything else that the call queues."""
        if self._call is None:
            destination.copy_(operand)
        else:
            assert not self._call.sequence.steps, "copies of operands come first"
            self._call.copies.append((name, destination))

    def clear(self) -> None:
        """Forget the prepared calls."""
        self._forget_calls()
        self._kernels.clear()

    def _forget_calls(self) -> None:
        self._calls.clear()
        self._alike.clear()
        self._sequences.clear()
        self._graphs.close()


class SideStream(Stream):
    """A stream beside the current one; while a call is prepared, its operations become steps.

    Args:
        calls: which say whether one is prepared.
        stream: the backend's.
    """

    def __init__(self, calls: Calls, stream: Any) -> None:
        self._calls = calls
        self._stream = stream

    @property
    def _target(self) -> Stream:
        recording = self._calls.recording
        return self._stream if recording is None else _RecordedStream(self._calls, recording, self._stream)

    def wait_for_current(self) -> None:
        self._target.wait_for_current()

    def current_waits(self) -> None:
        self._target.current_waits()

    def as_current(self) -> AbstractContextManager[None]:
        return self._target.as_current()

    @contextlib.contextmanager
    def in_one(self) -> Iterator[None]:
        """Within the block, all is queued on this stream, and is the same in every call: the host queues it as one.

        Waits for what the call's kernels count are allowed, of those queued before: this comes behind them.
        """
        with contextlib.nullcontext() if self._calls.recording is None else self._calls.preparing_once(self._stream):
            yield

    def wait_value(self, flag: torch.Tensor, value: int) -> None:
        self._target.wait_value(flag, value)

    def write_value(self, flag: torch.Tensor, value: int) -> None:
        self._target.write_value(flag, value)

    def copy_2d(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._target.copy_2d(dst, src)


class _RecordedStream(Stream):
    """Adds a stream's operations to a sequence, in place of queueing them."""

    def __init__(self, calls: Calls, recording: Sequence, stream: PreparedStream) -> None:
        self._calls = calls
        self._recording = recording
        self._stream = stream

    def wait_for_current(self) -> None:
        self._recording.add(self._stream.waiting_for_current())

    def current_waits(self) -> None:
        self._recording.add(self._stream.current_waiting())

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        self._calls.stream = self._stream
        yield
        self._calls.stream = None

    def wait_value(self, flag: torch.Tensor, value: int) -> None:
        self._recording.may_be_graph &= self._recording.is_of_one_stream
        self._recording.add(self._stream.waiting_for_value(flag, value))

    def write_value(self, flag: torch.Tensor, value: int) -> None:
        self._recording.add(self._stream.writing_value(flag, value))

    def copy_2d(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        spans, copying = self._calls.spans, functools.partial(self._stream.copying_2d, dst)
        assert spans is not None
        self._recording.add(copying(src), movable_copy(spans, src, copying))


def place_of(operands: Mapping[str, torch.Tensor], rows: int = 0, outputs: Iterable[torch.Tensor] = ()) -> Place:
    """Return all that matters of a call's operands but what is in them, its rows, and where its new outputs are."""
    addresses: tuple[int, ...] = ()
    for one in outputs:  # no comprehension: a frame, a call
        addresses += (one.data_ptr(),)
    place: Place = (rows, addresses)
    for one in operands.values():
        place += (one.data_ptr(), one.stride(), one.shape, one.dtype, one.get_device())
    return place


@functools.lru_cache(1)  # a call that is prepared asks twice
def _without_addresses(place: Place) -> Place:
    """Return a place, and of its addresses only what a call depends on beside that they stand in it."""
    starts = [address % ALIGNMENT_BYTES for address in (*place[1], *place[2::5])]
    return (place[0], *starts, *place[3::5], *place[4::5], *place[5::5], *place[6::5])


def _compile(kernel: Any, num_programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    """Have Triton compile a kernel for a launch, at once or in time, and return the jit function."""
    kernel.run(grid=(num_programs,), warmup=True, **arguments, **options)
    return kernel
