"""Where an operator's calls are queued: what all of them share, and what takes their kernels, copies and streams.

Launches go through Triton; or, while a call is recorded (../operators/prepared.py), to its recording.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from triton import knobs

from iris_core import Context
from iris_core.backends.base import PreparedStream, Step, Stream

from ..device.arguments import Peers
from ..portable.operands import OperandCopies
from .graphs import Graphs
from .kernels import Kernels, Launch, kind_of_integer, kinds_of
from .recording import PreparedCall, Recording, Template, recorded_launch
from .trace import Trace

_STEPS_OF_A_GRAPH = 8  # from which on a graph is less work for the host; fewer steps are queued in about 20 µs
_STEPS_OF_ONE_STREAM = 4  # from which on a graph is less work, where all steps are of one stream

OfOperands = Callable[..., None]  # of operands by name, outputs, and others
Place = tuple[Any, ...]  # where a call's operands lie, and how (`checked_place`)


class Channel:
    """What all calls of an operator share: its state (device/handshake.py), its streams, what was prepared of them.

    Args:
        ctx: the context.
        name: of the operator, in errors.
        state: the words of handshake.py; None for other projects' kernels.
        can_describe: whether the kernels' descriptors can name a matrix, by rows.

    Attributes:
        opened: what the implementation opened.
        given: the operands and outputs of the call that is queued, where torch has a part in it.
        recording: what the operations of the call that is being recorded are added to.
        side: the stream that its launches are for; None: the current one.
        prepared: calls, by their rows, where their new outputs are, and the place of their operands.
        templates: those that calls are made of, by all but rows and addresses.
        graphs: of calls.
        inner: what queues steps that are the same in every call of so many rows, by these and the place in the call.
    """

    opened: Any = None
    given: tuple[Mapping[str, torch.Tensor], Sequence[torch.Tensor]] = {}, ()
    recording: Recording | None = None
    side: PreparedStream | None = None
    _written_to: torch.Tensor | None = None
    _trace = Trace()
    _layout: Any = None  # what of its operands' strides decides its kernels
    _compiles = False  # whether it is not kept

    def __init__(
        self, ctx: Context, name: str, state: torch.Tensor | None, can_describe: Callable[[torch.Tensor], bool]
    ) -> None:
        self.ctx, self.state = ctx, state
        self.operand_copies = OperandCopies(name, can_describe)
        self.prepared: dict[tuple[int, tuple[int, ...], Place], PreparedCall] = {}
        self.templates: dict[Any, list[Template]] = {}
        self.graphs = Graphs(ctx.backend)
        self.inner: dict[Any, Step] = {}
        self._backend: Any = ctx.backend
        self._can_prepare = state is not None and ctx.backend.name == "cuda"
        self._kernels = Kernels()
        self._streams: dict[str, Any] = {}

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

    def call_torch(
        self, function: OfOperands, operands: Mapping[str, torch.Tensor], outputs: Sequence[torch.Tensor], *others: Any
    ) -> None:
        """Call a function of the call's operands by name, its outputs, and others, whenever the call is made.

        Args:
            function: what queues something by torch, on the current stream.
            operands, outputs: of this call; those of others are not kept, but `given` when they are queued.
            others: tensors in the workspace.
        """
        if self.recording is None:
            function(operands, outputs, *others)
            return

        def make(*others: Any) -> Step:
            return lambda: function(*self.given, *others)

        self.recording.calls_torch, self.recording.may_be_graph = True, False
        self.recording.add(make, *others)

    def stream(self, name: str) -> Stream:
        """Return the queue of work of this name beside the current stream, of high priority; for one call."""
        if name not in self._streams:
            self._streams[name] = self.ctx.make_stream()
        stream = self._streams[name]
        return stream if self.recording is None else RecordedStream(self, stream)

    @contextlib.contextmanager
    def in_one(self, stream: Stream) -> Iterator[None]:
        """Within the block all is queued on this stream, and the same in calls of so many rows; it is one step."""
        around = self.recording
        if around is None:
            yield
            return
        assert isinstance(stream, RecordedStream)
        around.may_be_graph = False
        self.recording = Recording(_STEPS_OF_ONE_STREAM, stream.handle)
        try:
            yield
            around.add_inner(self.recording)
        finally:
            self.recording = around

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
        self._layout = tuple([tuple(map(kind_of_integer, strides)) for strides in place[1::5]])
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


def _compile(kernel: Any, num_programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    """Have Triton compile a kernel for a launch, at once or in time, and return the jit function."""
    kernel.run(grid=(num_programs,), warmup=True, **arguments, **options)
    return kernel


class RecordedStream(Stream):
    """Adds a stream's operations to what the channel records, in place of queueing them.

    Args:
        channel: records a call.
        stream: the backend's.
    """

    def __init__(self, channel: Channel, stream: PreparedStream) -> None:
        self._channel, self._stream = channel, stream

    @property
    def recording(self) -> Recording:
        """What they are added to."""
        assert self._channel.recording is not None, "a stream is of the call that is recorded"
        return self._channel.recording

    @property
    def handle(self) -> int:
        """The driver's, of the stream."""
        return self._stream.handle

    def wait_for_current(self) -> None:
        assert self._channel.side is None, "what is recorded waits for the stream of the call alone"
        self.recording.add(self._stream.waiting_for_current)

    def current_waits(self) -> None:
        self.recording.add(self._stream.current_waiting)

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        self._channel.side = self._stream
        yield
        self._channel.side = None

    def wait_value(self, flag: torch.Tensor, value: int) -> None:
        self.recording.may_be_graph &= self.recording.stream is not None  # a graph of one stream has no branches
        self.recording.add(self._stream.waiting_for_value, flag, value)

    def write_value(self, flag: torch.Tensor, value: int) -> None:
        self.recording.add(self._stream.writing_value, flag, value)

    def copy_2d(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.recording.add(self._stream.copying_2d, dst, src)
