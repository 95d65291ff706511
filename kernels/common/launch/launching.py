"""Calls that cost the host little: what a call queues is prepared once, and from then on only queued.

A launch through Triton binds, specialises and looks up its arguments, and encodes its tensor descriptors, every time.
An operator's calls differ in where A and B lie, and in how many rows there are:

| A and B | the host |
|---|---|
| lie where they lay in an earlier call, with as many rows | queues the steps of that call |
| lie elsewhere, or have other rows, and pass a template's guards (trace.py) | makes steps of what its function gives |
| otherwise | has the variant queue the call, traced, which gives another template |

For each launch a kernel is found that takes its integers (kernels.py), or compiled.

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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from triton import knobs

from iris_core.backends.base import Backend, PreparedStream

from ..config import GemmConfig
from .graphs import Graphs, Sequence
from .kernels import Kernels, Kinds, Launch, kind_of_integer
from .recording import Made, New, PreparedCall, Recorded, Recording, Template, recorded_launch
from .trace import Trace, value_of

_MOST_CALLS = 1024  # prepared calls that an operator keeps: of some 10 KB each
_MOST_KINDS, _MOST_OF_A_KIND = 64, 64  # templates that an operator keeps: of some 20 KB each
_STEPS_OF_A_GRAPH = 8  # from which on a graph is less work for the host; fewer steps are queued in about 20 µs
_STEPS_OF_ONE_STREAM = 4  # from which on a graph is less work, where all steps are of one stream

Place = tuple[Any, ...]  # what a prepared call is found by; of `place_of`


class Calls:
    """An operator's prepared calls, the templates that they are made of, and the one that is being recorded.

    Args:
        backend: whose kernels are launched.
        are_ours: whether calls launch kernels of this library, and no others.

    Attributes:
        find: returns the call that was prepared for rows, operands and outputs that lie as a place says, or None.
        recording: what the operations of the call that is being recorded are added to.
        stream: that its launches are for; None: the current one.
    """

    recording: Recording | None = None
    stream: PreparedStream | None = None
    _trace = Trace()
    _layout: Any = None  # what of its operands' strides decides its kernels
    _compiles = False  # whether it is not kept

    def __init__(self, backend: Backend, *, are_ours: bool = True) -> None:
        self._backend: Any = backend
        self._can_prepare = are_ours and backend.name == "cuda"
        self._calls: dict[Place, PreparedCall] = {}
        self.find = self._calls.get
        self._templates: dict[Any, list[Template]] = {}  # by all but rows and addresses
        self._graphs = Graphs(backend)
        self._kernels = Kernels()
        self._inner: dict[Any, Sequence] = {}  # the same in every call of so many rows, by the place in the call

    @property
    def are_prepared(self) -> bool:
        """Whether calls are prepared rather than launched through Triton."""
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # a chain of hooks each, or one
        return self._can_prepare and not (getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    def keep(self, place: Place, call: PreparedCall) -> None:
        """Keep a call, to be found by a place; it is to be made behind `make_room`."""
        self._calls[place] = call

    def make_room(self) -> None:
        """Forget all calls, and their graphs, if no more are kept."""
        if len(self._calls) >= _MOST_CALLS:
            self._forget_calls()

    def bind(self, kind: Any, rows: int, new: New, operands: Iterable[torch.Tensor]) -> Made | None:
        """Return a call made of a template, and its new outputs; None if there is no template that fits.

        Args:
            kind: of its operands and its plan, as given to `add`.
            rows, new, operands: as `Template.bind` takes them.
        """
        templates = self._templates.get(kind, ())
        for number, template in enumerate(templates):
            if made := template.bind(rows, new, operands):
                if number:  # the first is tried first
                    templates.insert(0, templates.pop(number))  # type: ignore[union-attr]
                return made
        return None

    def add(self, kind: Any, template: Template) -> None:
        """Keep a template for calls of a kind."""
        if kind not in self._templates and len(self._templates) == _MOST_KINDS:
            self._templates.clear()
        templates = self._templates.setdefault(kind, [])
        templates.insert(0, template)
        del templates[_MOST_OF_A_KIND:]

    @contextlib.contextmanager
    def recording_of(self, trace: Trace, place: Place) -> Iterator[Recording]:
        """Within the block, `launch` and the rest queue nothing: they add to the recording that this gives.

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
            self.recording = self.stream = None
            self._trace = Trace()
            trace.close()

    @contextlib.contextmanager
    def compiling(self, place: Place) -> Iterator[None]:
        """Within the block, `launch` asks Triton for the kernel, and nothing is kept."""
        kept, self._kernels, self._compiles = self._kernels, Kernels(_compile), True
        try:
            with self.recording_of(Trace(), place):
                yield
        finally:
            self._kernels, self._compiles = kept, False

    @contextlib.contextmanager
    def recording_inner(self, stream: PreparedStream) -> Iterator[None]:
        """Within the block, what is added is all on one stream, and the same in calls of so many rows; it is a step."""
        around = self.recording
        assert around is not None
        around.may_be_graph = False
        self.recording = Recording(_STEPS_OF_ONE_STREAM, stream.handle)
        try:
            yield
            around.add_inner(self.recording)
        finally:
            self.recording = around

    def recorded(self, trace: Trace, rows: int, recorded: Recorded) -> tuple[Template, Made]:
        """Return what calls are made of that do what was recorded, and the call that was."""
        arguments, destinations = recorded.recording.taken()
        parts = arguments, destinations, recorded.outputs, tuple(recorded.new.values())
        kept = recorded.recording, trace.source(parts), tuple(recorded.new), recorded.config, recorded.copied
        template = Template(*kept, self._graphs, self._inner)
        return template, template.made(rows, *value_of(parts))

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
        """Launch a kernel, through Triton or as a step of the call that is being recorded."""
        if self.recording is None:
            kernel[(num_programs,)](**arguments, **options)
            return
        launch = Launch(kernel, num_programs, arguments, options)
        if self._compiles:
            kinds = Kinds(launch, self._layout)
            self._kernels.of(launch.compilable(), tuple(kinds.others), tuple(kinds.integers))
            return
        stream = self._backend.current_stream if self.stream is None else self.stream.handle
        make, of = recorded_launch(self._trace, self._kernels, launch, stream, self._layout)
        self.recording.add(make, *of)

    def copy(self, destination: torch.Tensor, name: str, operand: torch.Tensor) -> None:
        """Copy the operand of a name, before anything else that the call queues."""
        if self.recording is None:
            destination.copy_(operand)
        else:
            self.recording.add_copy(name, destination)

    def clear(self) -> None:
        """Forget the prepared calls, and what they are made of."""
        self._forget_calls()
        self._templates.clear()
        self._kernels.clear()

    def _forget_calls(self) -> None:
        self._calls.clear()
        self._inner.clear()
        self._graphs.close()


def place_of(operands: Mapping[str, torch.Tensor], rows: int = 0, outputs: Iterable[torch.Tensor] = ()) -> Place:
    """Return all that matters of a call's operands but what is in them, its rows, and where its new outputs are."""
    addresses: tuple[int, ...] = ()
    for one in outputs:  # no comprehension: a frame, a call
        addresses += (one.data_ptr(),)
    place: Place = (rows, addresses)
    for one in operands.values():
        place += (one.data_ptr(), one.stride(), one.shape, one.dtype, one.get_device())
    return place


def kind_of(place: Place, config: GemmConfig | None) -> Any:
    """Return what calls of one template have in common: how operands lie, and the plan."""
    return config, place[3::5], place[5::5], place[6::5]


def _compile(kernel: Any, num_programs: int, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    """Have Triton compile a kernel for a launch, at once or in time, and return the jit function."""
    kernel.run(grid=(num_programs,), warmup=True, **arguments, **options)
    return kernel
