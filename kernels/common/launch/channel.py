"""Where an operator's calls are queued: what all of them share, and what takes their kernels, copies and streams.

Launches go through Triton; or, while a call is recorded (../operators/prepared.py), to its recording.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from triton import knobs

from iris_core import Context
from iris_core.backends.base import PreparedStream, Stream

from ..device.arguments import Peers
from ..portable.operands import OperandCopies, describable
from .graphs import Graphs, Sequence
from .kernels import Kernels, Launch, kind_of_integer, kinds_of
from .recording import PreparedCall, Recording, Template, recorded_launch
from .trace import Trace

_STEPS_OF_A_GRAPH = 8  # from which on a graph is less work for the host; fewer steps are queued in about 20 µs
_STEPS_OF_ONE_STREAM = 4  # from which on a graph is less work, where all steps are of one stream

Place = tuple[Any, ...]  # what a prepared call is found by; of `prepared.place_of`


class Channel:
    """What all calls of an operator share: its state (device/handshake.py), its streams, what was prepared of them.

    Args:
        ctx: the context.
        name: of the operator, in errors.
        state: the words of handshake.py; None for other projects' kernels.
        can_describe: whether the kernels' descriptors can name a matrix, by rows.

    Attributes:
        opened: what the implementation opened.
        recording: what the operations of the call that is being recorded are added to.
        side: the stream that its launches are for; None: the current one.
        prepared: calls, by their place.
        templates: those that calls are made of, by all but rows and addresses.
        graphs: of calls.
        inner: sequences that are the same in every call of so many rows, by these and the place in the call.
    """

    opened: Any = None
    recording: Recording | None = None
    side: PreparedStream | None = None
    _written_to: torch.Tensor | None = None
    _trace = Trace()
    _layout: Any = None  # what of its operands' strides decides its kernels
    _compiles = False  # whether it is not kept

    def __init__(
        self,
        ctx: Context,
        name: str,
        state: torch.Tensor | None,
        can_describe: Callable[[torch.Tensor], bool] = describable,
    ) -> None:
        self.ctx, self.state = ctx, state
        self.operand_copies = OperandCopies(name, can_describe)
        self.prepared: dict[Place, PreparedCall] = {}
        self.templates: dict[Any, list[Template]] = {}
        self.graphs = Graphs(ctx.backend)
        self.inner: dict[Any, Sequence] = {}
        self._backend: Any = ctx.backend
        self._can_prepare = state is not None and ctx.backend.name == "cuda"
        self._kernels = Kernels()
        self._streams: dict[str, SideStream] = {}

    @functools.cached_property
    def peers(self) -> Peers:
        """What kernels that talk to peers take."""
        ctx = self.ctx
        return Peers(self.state, ctx.get_rank(), ctx.get_heap_bases(), ctx.watchdog.words, self._written_to)

    def trace_to(self, trace: torch.Tensor | None) -> None:
        """Have kernels of later calls write down what they do (device/trace.py); None: nothing."""
        self._written_to = trace
        self.__dict__.pop("peers", None)
        self._forget()

    def clear(self) -> None:
        """Forget what was prepared, and give the room of copies back."""
        self._forget()
        self.operand_copies.clear()

    def _forget(self) -> None:
        self.forget_calls()
        self.templates.clear()
        self._kernels.clear()

    def forget_calls(self) -> None:
        """Forget the prepared calls, and their graphs."""
        self.prepared.clear()
        self.inner.clear()
        self.graphs.close()

    # What calls queue ------------------------------------------------------------------------------------------------

    def launch(self, kernel: Any, num_programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        """Launch a kernel, through Triton or as a step of the call that is being recorded."""
        if self.recording is None:
            kernel[(num_programs,)](**arguments, **options)
            return
        launch = Launch(kernel, num_programs, arguments, options)
        if self._compiles:
            self._kernels.of(launch.compilable(), *kinds_of(launch, self._layout))
            return
        stream = self._backend.current_stream if self.side is None else self.side.handle
        make, of = recorded_launch(self._trace, self._kernels, launch, stream, self._layout)
        self.recording.add(make, *of)

    def copy(self, destination: torch.Tensor, name: str, operand: torch.Tensor) -> None:
        """Copy the operand of a name, before anything else that the call queues."""
        if self.recording is None:
            destination.copy_(operand)
        else:
            self.recording.add_copy(name, destination)

    def stream(self, name: str) -> SideStream:
        """Return the queue of work of this name beside the current stream, of high priority."""
        if name not in self._streams:
            self._streams[name] = SideStream(self, self.ctx.make_stream())
        return self._streams[name]

    # Calls that are recorded -----------------------------------------------------------------------------------------

    @property
    def are_prepared(self) -> bool:
        """Whether calls are prepared rather than launched through Triton."""
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # a chain of hooks each, or one
        return self._can_prepare and not (getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    @contextlib.contextmanager
    def recording_of(self, trace: Trace, place: Place) -> Iterator[Recording]:
        """Within the block `launch` and the rest queue nothing: they add to the recording that this gives.

        Args:
            trace: of the call.
            place: of its operands.
        """
        self._trace = trace
        self._layout = tuple([tuple(map(kind_of_integer, strides)) for strides in place[3::5]])
        self.recording = Recording(_STEPS_OF_A_GRAPH)
        try:
            yield self.recording
        finally:
            self.recording = self.side = None
            self._trace = Trace()
            trace.close()

    @contextlib.contextmanager
    def compiling(self, place: Place) -> Iterator[None]:
        """Within the block `launch` asks Triton for the kernel, and nothing is kept."""
        kept, self._kernels, self._compiles = self._kernels, Kernels(_compile), True
        try:
            with self.recording_of(Trace(), place):
                yield
        finally:
            self._kernels, self._compiles = kept, False

    @contextlib.contextmanager
    def recording_inner(self, stream: PreparedStream) -> Iterator[None]:
        """Within the block what is added is all on one stream, and the same in calls of so many rows; it is a step."""
        around = self.recording
        assert around is not None
        around.may_be_graph = False
        self.recording = Recording(_STEPS_OF_ONE_STREAM, stream.handle)
        try:
            yield
            around.add_inner(self.recording)
        finally:
            self.recording = around


def _compile(kernel: Any, num_programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    """Have Triton compile a kernel for a launch, at once or in time, and return the jit function."""
    kernel.run(grid=(num_programs,), warmup=True, **arguments, **options)
    return kernel


class SideStream(Stream):
    """A stream beside the current one; while a call is recorded, its operations become steps.

    Args:
        channel: says whether one is recorded.
        stream: the backend's.
    """

    def __init__(self, channel: Channel, stream: Any) -> None:
        self._channel = channel
        self._stream = stream

    @property
    def _target(self) -> Stream:
        recording = self._channel.recording
        return self._stream if recording is None else _RecordedStream(self._channel, recording, self._stream)

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
        with (
            contextlib.nullcontext() if self._channel.recording is None else self._channel.recording_inner(self._stream)
        ):
            yield

    def wait_value(self, flag: torch.Tensor, value: int) -> None:
        self._target.wait_value(flag, value)

    def write_value(self, flag: torch.Tensor, value: int) -> None:
        self._target.write_value(flag, value)

    def copy_2d(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._target.copy_2d(dst, src)


class _RecordedStream(Stream):
    """Adds a stream's operations to a sequence, in place of queueing them."""

    def __init__(self, channel: Channel, recording: Recording, stream: PreparedStream) -> None:
        self._channel = channel
        self._recording = recording
        self._stream = stream

    def wait_for_current(self) -> None:
        self._recording.add(self._stream.waiting_for_current)

    def current_waits(self) -> None:
        self._recording.add(self._stream.current_waiting)

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        self._channel.side = self._stream
        yield
        self._channel.side = None

    def wait_value(self, flag: torch.Tensor, value: int) -> None:
        self._recording.may_be_graph &= self._recording.stream is not None  # a graph of one stream has no branches
        self._recording.add(self._stream.waiting_for_value, flag, value)

    def write_value(self, flag: torch.Tensor, value: int) -> None:
        self._recording.add(self._stream.writing_value, flag, value)

    def copy_2d(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._recording.add(self._stream.copying_2d, dst, src)
