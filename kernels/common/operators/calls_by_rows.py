"""The calls of an operator, by their number of rows: the plan of each, and its part of the operator's memory."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import torch

from iris_core import Context
from iris_core.utils.torch_modes import plain_tensors

from ..call import Call, Device
from ..config import GemmConfig, fp8_formats, is_fp8
from ..device.handshake import call_of_state, describe_state, state_words
from ..launch.channel import Channel, Place
from ..launch.recording import New
from ..launch.trace import Trace, Untraceable, value_of
from ..launch.traced_tensor import Memory, TracedTensor
from ..problem import Problem, all_plan_rows, all_tile_rows, plan_rows, tile_rows
from ..variants.implementation import Implementation
from ..workspace import OUTPUT, Buffer, NewOutputs, Workspace

P = TypeVar("P", bound=Problem)

_STATE = "state"
_MOST_CALLS = 256  # numbers of rows whose calls an operator keeps, which reports and other projects' kernels need
_MOST_KNOWN = 1024  # numbers of rows whose new outputs' shapes it keeps, those of A's shapes, and places of operands
_MOST_PLANNED = 1 << 14  # plans that a process keeps, some 70 for an operator of 8192 rows


class CallsByRows(Generic[P]):
    """Calls of up to as many rows as a problem has. `plan`, then `open`, before any other use.

    Args:
        ctx: the context.
        operator: what is called, in messages.
        implementation: the variant's.
        config: of all calls; None to have them planned.
        config_of: returns the configuration of a problem of another m where it is known to be the best; None for the
            plan. The same on all ranks.
        new_outputs: whether each call has new memory for its outputs, where peers do not write them.
        options: the family's own.

    Attributes:
        problem: its m is the most.
        whole_config: the configuration for the whole problem; None where there is nothing to configure.
        bound: the calls that have memory.
        last_rows: of what was queued last, or would be for the whole problem.
        new_outputs: those of calls, by their rows.
        rows: of calls, by the m that they were given, or None, and A's shape.
        was_captured: whether captured graphs hold calls, and so their memory.
    """

    problem: P
    last_rows: int
    was_captured = False

    def __init__(
        self,
        ctx: Context,
        operator: object,
        implementation: Implementation,
        config: GemmConfig | None,
        config_of: Callable[[P], GemmConfig | None],
        *,
        new_outputs: bool,
        options: Mapping[str, Any],
    ) -> None:
        self._ctx, self._torch_device, self._device = ctx, ctx.get_device(), Device.of(ctx)
        self._operator, self._implementation, self._options = operator, implementation, options
        self._given_config, self._known_config = config, config_of
        self._has_new_outputs = new_outputs
        self.bound: dict[int, Call[P]] = {}
        self.new_outputs: dict[int, NewOutputs] = {}
        self.rows: dict[tuple[int | None, torch.Size], int] = {}
        self._checked: set[tuple[int, Place]] = set()
        self._heap = range(ctx.heap.base, ctx.heap.base + ctx.heap.stride)

    # Plans -----------------------------------------------------------------------------------------------------------

    def plan(self, problem: P) -> None:
        """Plan the calls of a problem, without memory for them yet.

        Raises:
            ValueError: the variant cannot do so many rows.
        """
        self.problem = problem
        self._configs: dict[int, GemmConfig | None] = {}
        self._same: dict[GemmConfig | None, GemmConfig | None] = {}  # one of those that are equal: found sooner
        self.whole_config = self.config_of(problem.m)
        if reason := self._unsupported_reason():
            raise ValueError(f"{self._operator} cannot do this: {reason}")

    def config_of(self, m: int) -> GemmConfig | None:
        """Return the configuration for so many rows."""
        rows, fit = plan_rows(m, self.problem.m), self._implementation.fit
        if rows not in self._configs:
            config = self._given_config or self._known_config(self.problem.with_rows(rows)) or self._planned(rows)
            self._configs[rows] = self._same.setdefault(config, config)
        config = self._configs[rows]
        return fit(self.problem.with_rows(m), config) if fit and config else config

    def _planned(self, rows: int) -> GemmConfig | None:
        problem = self.problem.with_rows(tile_rows(rows, self.problem.m))
        return _planned(self._implementation.plan, problem, self._device)

    def _unsupported_reason(self) -> str | None:
        """Return why the whole problem cannot be done here so, or None."""
        problem, config, device = self.problem, self.whole_config, self._device
        if reason := fp8_reason(problem, device):
            return reason
        if reason := self._implementation.supports(problem, config):
            return reason
        if problem.norm and (reason := problem.norm.unsupported_reason(device.arch)):
            return reason
        is_limited = device.arch != "cpu" or device.reserved_sms > 0
        if config and config.num_sms > device.num_sms and is_limited:
            beside = f", beside the {device.reserved_sms} that reserve_sms keeps free" if device.reserved_sms else ""
            return (
                f"num_sms is {config.num_sms}; programs wait for each other, and this GPU has room for "
                f"{device.num_sms} at once{beside}: num_sms={device.num_sms}"
            )
        return None

    # Memory ----------------------------------------------------------------------------------------------------------

    def open(self) -> Channel:
        """Make the memory of all calls, and return what they share beside it; collective."""
        implementation, state = self._implementation, None
        self._workspace = Workspace(self._ctx, self.name_of_last, lambda: self.last.asked)
        if implementation.is_ours:
            asked = {_STATE: _state(self.problem.world_size, implementation.counts_chunks)}
            self._workspace.grow(asked, keep=False)
            views = self._workspace.views(asked)
            assert views is not None
            state = views[_STATE]
        self._channel = Channel(self._ctx, str(self._operator), state, implementation.can_describe)
        self.allocate()
        return self._channel

    def allocate(self) -> None:
        """Make the memory of calls up to the whole problem, and bind the call of that.

        What that outgrows stays where captured graphs may use it.
        """
        implementation, most = self._implementation, self.problem.m
        self.last_rows = most
        self._forget()
        # Fewer rows have other plans, which may ask for more of something, and take up to some milliseconds to make: no
        # call is to wait for either.
        for m in all_plan_rows(most):
            self.config_of(m)
        for m in reversed(all_tile_rows(most)):
            self._workspace.grow(self._asked(self._unbound(m)), keep=self.was_captured)
        if implementation.open:
            self._channel.opened = implementation.open(self._ctx, self.problem)
        asked = self.of(most).asked
        outputs = [asked[name] for name in (OUTPUT, *self.problem.normed_shapes(self._ctx.get_rank())) if name in asked]
        self._keeps_off_heap = not all(one.is_symmetric for one in outputs)

    @property
    def last(self) -> Call[P]:
        """What was queued last."""
        return self.of(self.last_rows)

    @property
    def keeps_outputs(self) -> bool:
        """Whether calls return the same memory each time."""
        return self._implementation.outputs is not None and OUTPUT not in self.last.new

    def may_overwrite(self, operands: Iterable[torch.Tensor]) -> bool:
        """Return whether calls write to memory in which one of these may lie."""
        may_overwrite = self._keeps_off_heap
        for one in operands:  # no comprehension: a frame, a call
            may_overwrite = may_overwrite or one.data_ptr() in self._heap
        return may_overwrite

    def of(self, m: int) -> Call[P]:
        """Return the call of so many rows, with memory."""
        call = self.bound.get(m)
        if call is None:
            call = self._unbound(m)
            self._bind(call)
            if len(self.bound) == _MOST_CALLS:
                del self.bound[next(iter(self.bound))]  # the oldest: to free all at once takes a millisecond
            self.bound[m] = call
        return call

    def traced(
        self, trace: Trace, m: int, operands: Mapping[str, torch.Tensor], memory: New
    ) -> tuple[Call[P], dict[str, TracedTensor], dict[str, TracedTensor]]:
        """Return the call of a number of rows that is traced, and what stands for its operands and its new outputs.

        The function that is traced takes the rows, what gives new outputs, and the operands.

        Args:
            trace: of the call.
            m, operands: what its numbers are.
            memory: gives new outputs.
        """
        rank, call = self._ctx.get_rank(), self._unbound(trace.argument("m", m))
        trace.argument("new", memory)
        asked = self._asked(call)
        views: dict[str, Any] = {}
        for name, buffer in asked.items():
            whole = self._workspace.memory(name)
            if buffer.size > whole.shape[1]:
                raise Untraceable(f"there is no room for {name}")
            views[name] = TracedTensor.over(trace, Memory(whole, whole.data_ptr()), buffer.shape, buffer.dtype)
        call.bind(self._channel, asked, views, self._workspace.half_size)
        shapes = {"A": call.problem.a_shape(rank), "B": call.problem.b_shape(rank), **call.problem.operand_shapes(rank)}
        stand_ins = {}
        for name, tensor in operands.items():
            argument = trace.argument(f"of_{name}", tensor)
            trace.guard(f"{argument.text}.shape == {trace.text(shapes[name])}", True)
            place = Memory(argument, trace.computed(f"{argument.text}.data_ptr()", tensor.data_ptr()))
            stand_ins[name] = TracedTensor(trace, place, 0, shapes[name], tensor.stride(), tensor.dtype)
        new = {}
        for number, (name, buffer) in enumerate(call.new.items()):
            text = f"new({number}, {trace.text(buffer.shape)}, {trace.text(buffer.dtype)})"
            made = trace.computed(text, memory(number, value_of(buffer.shape), buffer.dtype))
            place = Memory(made, trace.computed(f"{made.text}.data_ptr()", made.value.data_ptr()))
            new[name] = TracedTensor.over(trace, place, buffer.shape, buffer.dtype)
        return call, stand_ins, new

    def new_memory(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a new output, from torch's allocator."""
        return torch.empty(shape, dtype=dtype, device=self._torch_device)

    def new_outputs_of(self, m: int) -> NewOutputs:
        """Return the new outputs of calls of so many rows."""
        if m not in self.new_outputs:
            rooms = {name: room.new(self._torch_device) for name, room in self.of(m).new.items()}
            self.note_new_outputs(m, tuple(rooms), tuple(rooms.values()))
        return self.new_outputs[m]

    def note_new_outputs(self, m: int, names: tuple[str, ...], new: tuple[torch.Tensor, ...]) -> None:
        """Note what new outputs calls of so many rows have."""
        if m not in self.new_outputs:
            _make_room_in(self.new_outputs)
            self.new_outputs[m] = NewOutputs(names, new)

    def note_rows(self, m: int | None, shape: torch.Size, rows: int) -> None:
        """Note how many rows a call has that is given `m`, and an A of this shape."""
        _make_room_in(self.rows)
        self.rows[m, shape] = rows

    def was_checked(self, m: int, place: Place) -> bool:
        """Return whether operands at this place were found to be those of a call of so many rows."""
        return (m, place) in self._checked

    def note_checked(self, m: int, place: Place) -> None:
        """Note that operands at this place are those of a call of so many rows."""
        _make_room_in(self._checked)
        self._checked.add((m, place))

    def name_of_last(self) -> str:
        """Return what reports of waits, and profilers, call the last call: a model has many operators of a variant."""
        return f"{self._operator} of {self.last_rows}x{self.problem.n}x{self.problem.k}"

    def check_not_capturing(self, m: int) -> None:
        """Raise if memory for calls of `m` rows cannot be made now.

        Raises:
            RuntimeError: a stream is being captured.
        """
        if self._ctx.backend.is_capturing():
            raise RuntimeError(
                f"{self._operator}: {m} rows need memory that there is not yet, and a stream is being captured; make a "
                "call of so many rows before the capture, or iris_tensor_parallel.prepare the model"
            )

    def close(self) -> None:
        """Give the memory back; collective."""
        self._forget()
        self._workspace.close()

    def _forget(self) -> None:
        self._channel.clear()
        for known in (self.bound, self.new_outputs, self.rows, self._checked):
            known.clear()

    def _unbound(self, m: Any) -> Call[P]:
        """Return the call of so many rows, which may be traced, without memory."""
        config: Any = self.config_of(value_of(m))
        problem = copy.copy(self.problem)
        object.__setattr__(problem, "m", m)  # the rest was checked
        return Call(problem, config, self._ctx.get_rank(), self._device, self._options)

    def _asked(self, call: Call[P]) -> dict[str, Buffer]:
        """Return what a call needs of the workspace; of outputs that are new memory the call is told what they need."""
        normed = {name: Buffer(*kind) for name, kind in call.problem.normed_shapes(call.rank).items()}
        asked = self._implementation.workspace(call) | normed
        if self._has_new_outputs:
            outputs = [name for name in (OUTPUT, *normed) if name in asked and not asked[name].is_symmetric]
            call.new = {name: asked.pop(name) for name in outputs}
        return asked

    def _bind(self, call: Call[P]) -> None:
        """Give a call its memory; make more where its plan asks for more than was foreseen.

        Raises:
            RuntimeError: a stream is being captured.
            HeapExhausted: the heap has no room.
        """
        asked = self._asked(call)
        views = self._workspace.views(asked)
        if views is None:
            self.check_not_capturing(call.problem.m)
            is_collective = self._workspace.grows_on_heap(asked)
            section = self._ctx.collective_allocation(f"make room for {self._operator}")
            with section if is_collective else contextlib.nullcontext(), plain_tensors():
                self._workspace.grow(asked, keep=self.was_captured, is_foreseen=False)
            if is_collective:
                self._ctx.barrier()  # no peer writes here before all is zeroed
            self._forget()
            views = self._workspace.views(asked)
            assert views is not None
        call.bind(self._channel, asked, views, self._workspace.half_size)


def _make_room_in(known: dict[Any, Any] | set[Any]) -> None:
    """Forget all that is known, where there is no more to be kept."""
    if len(known) == _MOST_KNOWN:
        known.clear()


@functools.lru_cache(_MOST_PLANNED)
def _planned(plan: Callable[[Any, Device], GemmConfig | None], problem: Problem, device: Device) -> GemmConfig | None:
    return plan(problem, device)


def fp8_reason(problem: Problem, device: Device) -> str | None:
    """Return why a device cannot multiply a problem's fp8 formats, or None: as others it would do so in software."""
    found = fp8_formats(device.arch)
    for dtype in (problem.dtype, problem.b_dtype):
        if is_fp8(dtype) and dtype not in found:
            has = f"it multiplies {' and '.join(map(str, found))}" if found else "it has no fp8: bf16 and fp16 work"
            return f"{device.arch} does not multiply {dtype}; {has}"
    return None


def _state(world_size: int, counts_chunks: bool) -> Buffer:
    """Return the buffer of an operator's state."""
    return Buffer(
        (state_words(world_size),),
        torch.int64,
        is_symmetric=True,
        describe=lambda word: describe_state(world_size, word),
        call_of=lambda word, expected: call_of_state(world_size, word, expected, counts_chunks),
    )
