"""Triton's driver of an NVIDIA GPU that is not there: launches are written down, kernels compiled as far as these need.

All of Triton's launch path runs but its last step, the compiled launcher, in whose place calls are recorded.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from compiling import TARGETS, Case, StubContext, make_problem
from stages import for_launches
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from iris_core.backends.base import PreparedStream, Step
from iris_core.context.context import _contexts
from iris_kernels.common import call
from iris_kernels.common.hopper import host as hopper
from iris_kernels.common.operators.calls_by_rows import CallsByRows
from iris_kernels.common.workspace import NewOutputs
from overlap_taxonomy import Variant, get_variant

SIDE_STREAM, GRAPH_STREAM = 7, 9
HAS_COMPILED_LAUNCHERS = hasattr(nvidia, "_BASE_ARGS_FORMAT")  # Triton 3.6; later ones have one for all
SIZE = 1024

_numbering = itertools.count()


class Log:
    """What was queued, in order; called in place of a launcher."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.descriptors = 0  # encoded
        self.graph_streams: list[int] = []  # of the graphs launched

    @property
    def graphs(self) -> int:
        """The number of graphs launched."""
        return len(self.graph_streams)

    def __call__(self, *arguments: Any) -> None:
        """Write down a launch: Triton's launch hooks are left out, and tensors are their addresses."""
        if HAS_COMPILED_LAUNCHERS:
            *head, _metadata, _enter, _exit = arguments[:13]
            rest = arguments[13:]
        else:
            head, (_metadata, _enter, _exit, *scratch), rest = arguments[:8], arguments[8:13], arguments[13:]
            head = [*head, *scratch]
        self.entries.append(("launch", *_numbers(head), *_numbers(rest)))

    def product(self, problem: Any, given: Any, *matrices: torch.Tensor, is_partial: bool, a_scale: Any) -> None:
        """Write down a product that torch would make, in place of `multiply_with_torch`, to which rows mean nothing."""
        scales = a_scale if a_scale is not None else given.get("a_scale"), given.get("b_scale")
        where = [(one.data_ptr(), tuple(one.shape), one.stride()) for one in (*matrices, *scales) if one is not None]
        self.entries.append(("product", problem.with_rows(1), is_partial, *where))

    def encode(self, *what: Any) -> Any:
        """Return what stands for an encoded descriptor."""
        self.descriptors += 1
        return ("descriptor", *_numbers(what))

    def take(self) -> list[Any]:
        """Return the entries and forget them."""
        taken, self.entries = self.entries, []
        return taken


def _numbers(arguments: Any) -> Any:
    if isinstance(arguments, (tuple, list)):
        return tuple(_numbers(one) for one in arguments)
    return arguments.data_ptr() if hasattr(arguments, "data_ptr") else arguments


def on_stream(entry: Any, stream: int) -> Any:
    """Return an entry as it would be with another current stream."""
    if entry[0] == "launch":
        return entry if entry[4] == SIDE_STREAM else (*entry[:4], stream, *entry[5:])
    return (entry[0], stream) if entry[0] in ("fork", "join") else entry


class LoggedStream(PreparedStream):
    """A side stream that writes down what is queued there."""

    def __init__(self, log: Log, streams: list[int]) -> None:
        self.handle = SIDE_STREAM
        self._log = log
        self._streams = streams

    def _entry(self, *entry: Any) -> Step:
        return lambda: self._log.entries.append(entry)

    def waiting_for_current(self) -> Step:
        return lambda: self._log.entries.append(("fork", self._streams[-1]))

    def current_waiting(self) -> Step:
        return lambda: self._log.entries.append(("join", self._streams[-1]))

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        self._streams.append(self.handle)
        yield
        self._streams.pop()

    def waiting_for_value(self, flag: torch.Tensor, value: int) -> Step:
        return self._entry("wait", flag.data_ptr(), value)

    def writing_value(self, flag: torch.Tensor, value: int) -> Step:
        return self._entry("write", flag.data_ptr(), value)

    def copying_2d(self, dst: torch.Tensor, src: torch.Tensor) -> Step:
        return self._entry("copy", dst.data_ptr(), src.data_ptr(), *dst.stride(), *src.stride(), *src.shape)


class StubGraph:
    """A graph that, launched, writes down what it was captured from."""

    def __init__(self, steps: list[Step], log: Log, streams: list[int]) -> None:
        self._log = log
        self._streams = streams
        self.is_open = True
        queued, log.entries = log.entries, []
        streams.append(GRAPH_STREAM)
        for step in steps:
            step()
        streams.pop()
        self._captured, log.entries = log.entries, queued

    def launch(self, stream: int) -> None:
        assert self.is_open
        self._log.graph_streams.append(stream)
        self._log.entries += [on_stream(entry, stream) for entry in self._captured]

    def close(self) -> None:
        self.is_open = False


@contextlib.contextmanager
def driven(case: Case) -> Iterator[tuple[StubContext, Log, list[int]]]:
    """Put the driver in place; give a context that is as on a GPU, the log, and the stack of current streams."""
    log, streams = Log(), [0]
    device = f"GPU {next(_numbering)} of none"  # a new one: what Triton keeps of a device keeps its log
    target = TARGETS[case.target].gpu
    utils = mock.Mock()
    utils.fill_tma_descriptor = utils.fill_tma_descriptor_tiled = log.encode
    utils.build_signature_metadata = tuple
    utils.launch = log
    utils.load_binary.return_value = (object(), 11, 0, 0, 1024)
    utils.get_device_properties.return_value = {"max_shared_mem": 227 << 10}
    fake = SimpleNamespace(
        get_current_device=lambda: device,
        get_current_stream=lambda device: streams[-1],
        get_current_target=lambda: target,
        launcher_cls=nvidia.CudaLauncher,
        utils=utils,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
    ctx: Any = StubContext(case)
    ctx.name = device
    _contexts[ctx.name] = ctx  # by which ops find it, as long as it is there
    ctx.backend.name = "cuda"
    ctx.backend.current_stream = lambda: streams[-1]
    ctx.backend.capture = lambda steps, stream: StubGraph(steps, log, streams)
    ctx.make_stream = lambda: LoggedStream(log, streams)
    before = driver._active
    driver.set_active(fake)
    try:
        with for_launches(), contextlib.ExitStack() as patched:
            patched.enter_context(mock.patch.object(call, "multiply_with_torch", log.product))
            if HAS_COMPILED_LAUNCHERS:
                compiled = SimpleNamespace(launch=log)
                patched.enter_context(mock.patch.object(nvidia, "compile_module_from_src", return_value=compiled))
                patched.enter_context(mock.patch.object(nvidia, "library_dirs", return_value=[]))
            else:
                patched.enter_context(mock.patch.object(nvidia, "PyKernelArg", lambda **of: tuple(of.values())))
            yield ctx, log, streams
    finally:
        driver._active = before


@contextlib.contextmanager
def same_outputs() -> Iterator[None]:
    """Within the block new outputs of a number, a shape and a dtype have the same memory in every call."""
    rooms: dict[Any, torch.Tensor] = {}

    def room(number: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        place = number, tuple(shape), dtype
        if place not in rooms:
            rooms[place] = torch.empty(place[1], dtype=dtype)
        return rooms[place]

    def made(self: NewOutputs, out: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        kinds = enumerate(self._shapes.items())
        return {name: room(number, shape, dtype) for number, (name, (shape, dtype, _)) in kinds}

    with (
        mock.patch.object(CallsByRows, "new_memory", lambda self, *of: room(*of)),
        mock.patch.object(NewOutputs, "made", made),
    ):
        yield


def case_of(variant: Variant, **changes: Any) -> Case:
    return Case(variant.name, "sm_90", family=variant.family, size=SIZE, rank=1, **changes)


def matrix(
    shape: tuple[int, int], *, by_columns: bool = False, shift: int = 0, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return a matrix, `shift` elements behind where its memory starts."""
    rows, columns = shape[::-1] if by_columns else shape
    lines = torch.empty(rows * columns + shift, dtype=dtype)[shift:].view(rows, columns)
    return lines.t() if by_columns else lines


def operands(case: Case, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    problem = make_problem(case)
    a = matrix(problem.a_shape(case.rank), dtype=problem.a_dtype, **changes)
    return a, matrix(problem.b_shape(case.rank), by_columns=True, dtype=problem.b_dtype)


def build(case: Case, ctx: Any, **options: Any) -> Any:
    with mock.patch.object(hopper, "machine_reason", return_value=None):
        return get_variant(case.family, case.variant).build(ctx, make_problem(case), None, **options)


def flat(entry: Any) -> list[Any]:
    """Return all that stands in an entry, in tuples too."""
    return [one for part in entry for one in flat(part)] if isinstance(entry, tuple) else [entry]


def through_triton(operator: Any, log: Log, *data: torch.Tensor, **others: torch.Tensor) -> list[Any]:
    """Return what a call queues while Triton has a hook; its launches on a side stream say so."""
    with mock.patch.object(knobs.runtime, "launch_enter_hook", mock.Mock()):
        operator(*data, **others)
    return log.take()


def counted(call: Callable[[], object]) -> tuple[Counter[str], int]:
    """Return how often a call of ours asks torch's C++ for what, and how many functions of ours in Python it enters."""
    of_torch: Counter[str] = Counter()
    frames = 0

    def count(frame: Any, event: str, what: Any) -> None:
        nonlocal frames
        is_ours = str(frame.f_globals.get("__name__", "")).startswith("iris_")
        frames += is_ours and event == "call"
        if event == "c_call" and is_ours and "torch" in f"{what.__module__} {type(what.__self__)}":
            of_torch[what.__name__] += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return of_torch, frames
