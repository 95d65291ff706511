"""An operator: one variant of a family, bound to a context and a problem, with its buffers, flags and call number."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Generic, TypeVar

import torch
from torch.autograd.graph import increment_version

from iris_core import Context
from iris_core.utils.torch_modes import plain_tensors

from .call import Call, Channel, Device
from .config import GemmConfig
from .device.handshake import call_of_state, describe_state, state_words
from .implementation import Implementation
from .launch.launching import Place, PreparedCall, place_of
from .operand_checks import check_kinds, check_operands, is_same, lies_within, overlap
from .plans import Plans
from .problem import Problem, doublings
from .workspace import Buffer, Workspace

P = TypeVar("P", bound=Problem)

_STATE = "state"
_OUTPUT = "output"
_Operands = dict[str, torch.Tensor]  # "A", "B", and what the epilogue reads, by name
_MOST_CALLS = 256  # numbers of rows whose plans an operator keeps


class Operator(Generic[P]):
    """Call it with this rank's A and B; it queues the work on the current stream and returns this rank's output.

    Making one is collective: all ranks must ask for the same thing. It is made for a number of rows, and can be called
    with fewer, another number each time, the same on all ranks; where A is cut by rows, a call must say how many there
    are of all ranks. The output belongs to the operator and is overwritten by its next call. Peers may store into it as
    soon as this rank's stream reaches that call, which is when the rank signals *ready*: read the output, in stream
    order, before calling again.

    Args:
        ctx: the context; what peers write is allocated on its heap.
        implementation: the variant's.
        problem: sizes, dtype and number of ranks; its m is the most that calls may have.
        config: tunables; None for the plan of each call's problem on this device.
        config_of: returns the configuration of a problem of another m where it is known to be the best; None for the
            plan. The same on all ranks.
        new_outputs: return new memory from torch's allocator in each call, where peers do not write the output.
        options: the family's own.

    Attributes:
        ran_config: what the last call ran with, where its operands did not allow for all of `config`.
        chosen_by: the variant that was asked for, where that one chose this.
        keeps_outputs: whether calls return the same memory each time.
        keeps_gathered: whether they return the gathered A, too.
        is_closed: whether its buffers were given back; a call then raises RuntimeError.
        was_captured: whether a stream was captured that a call was queued on: a graph may use its memory.
        output: that memory, as the last call left it.
        gathered: likewise A (m, k), where the family gathers it; its rows may lie further apart than they are long.
        state: the words of handshake.py, on the heap.

    Raises:
        ValueError: the ranks ask for different things, or for what the variant cannot do.
        HeapExhausted: the heap has no room for the operator's buffers.
    """

    chosen_by = ""
    is_closed = False

    def __init__(
        self,
        ctx: Context,
        implementation: Implementation,
        problem: P,
        config: GemmConfig | None = None,
        *,
        config_of: Callable[[P], GemmConfig | None] = lambda problem: None,
        new_outputs: bool = False,
        **options: Any,
    ) -> None:
        self.ctx = ctx
        self.problem = problem
        self.rank = ctx.get_rank()
        self.family, self.variant = implementation.family, implementation.variant
        self._implementation = implementation
        self._new_outputs = new_outputs
        self.keeps_gathered = bool(options.get("keep_gathered"))
        self._options = {**(implementation.options or {}), **options}
        self._expected = {"A": None, "B": None, **problem.operand_shapes(self.rank)}.keys()
        self._device = Device.of(ctx)
        self._plans_of = functools.partial(Plans, implementation, self._device, config, config_of)
        self._calls: dict[int, Call[P]] = {}
        self.was_captured = False
        self._note_call = ctx.note_call
        self._heap = range(ctx.heap.base, ctx.heap.base + ctx.heap.stride)
        with ctx.collective_section(f"make {self}"):
            if problem.world_size != ctx.get_num_ranks():
                raise ValueError(
                    f"the problem is for {problem.world_size} ranks, the context has {ctx.get_num_ranks()}"
                )
            if unknown := self._options.keys() - (implementation.options or {}).keys():
                raise TypeError(f"{self} takes no {', '.join(sorted(unknown))}")
            self._size(problem)
        asked = {name: str(value) for name, value in (asdict(problem) | self._options).items()}
        sizes = {name: value for name, value in asked.items() if name != "m"}
        self._digest = zlib.crc32(f"{self.family} {self.variant} {sizes}".encode())
        ctx.agree("what the ranks ask for", {"operator": str(self), **asked, "config": str(self.config)})
        with ctx.collective_allocation(f"make {self}"), plain_tensors():
            self._workspace = Workspace(ctx, lambda: self._sized)
            self._channel = self._open()
            self._allocate(keep=False)
        self.ran_config = self.config
        ctx.barrier()

    # Calls -----------------------------------------------------------------------------------------------------------

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, *, m: int | None = None, **operands: torch.Tensor
    ) -> torch.Tensor:
        """Queue one call on the current stream; a graph of `torch.compile` ends before it.

        Args:
            a, b: this rank's operands, of the shapes the problem gives, but that A may have fewer rows, its dtype, and
                on the context's device; any strides. They need not be on the heap, and have no gradient: call with
                those that require one under ``torch.no_grad()``.
            m: rows of A over all ranks; needed where A is cut by rows and the rank has not as many as of the whole
                problem.
            operands: what the problem's epilogue reads, by name, of its dtype and of any strides
                (`Problem.operand_shapes`).

        Returns:
            This rank's output, complete when the stream gets there.

        Raises:
            ValueError: an operand does not fit the problem, is no dense tensor, requires a gradient, or lies in the
                operator's own output.
            RuntimeError: the operator was closed.
            TimeoutError, PeerError: an earlier call waited in vain for a peer, on whatever rank; `Context.check`.
        """
        return self.call(a, b, m=m, **operands)[0]

    def call(
        self, a: torch.Tensor, b: torch.Tensor, *, m: int | None = None, **operands: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """As a call of the operator, and return all that it gives: the output, then the gathered A if it is kept."""
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(self.call)(a, b, m=m, **operands)
        outputs = self._queue({"A": a, "B": b, **operands}, m)
        if not self.keeps_outputs:
            return outputs
        # Kernels wrote, and peers' did, which autograd does not see: what it kept of an earlier call is overwritten.
        increment_version(outputs)
        # Another tensor each time, over the same memory: what autograd writes on one it does not find on the next.
        return tuple([one.detach() for one in outputs])

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Return what the last call gave, and the next call overwrites; see `call`."""
        if not self.keeps_outputs:
            raise AttributeError(f"{self} has no outputs of its own: each call returns new memory")
        return self._outputs_of(self._last)

    def reserve(self, m: int) -> None:
        """Make the operator one of more rows, `m`; collective. Outputs of earlier calls must not be used after this.

        Raises:
            ValueError: the variant cannot do so many.
            RuntimeError: a stream is being captured.
            HeapExhausted: the heap has no room; the operator is as before.
        """
        self._check_open()
        before, what = self.problem, f"make room for {m} rows in {self}"
        try:
            with self.ctx.collective_section(what):
                self._check_not_capturing(m)
                self._size(before.with_rows(m))
                self.ctx.agree("the rows that the ranks make room for", m)
            with self.ctx.collective_allocation(what), plain_tensors():
                self._allocate(keep=self.was_captured)
        except BaseException:
            self._size(before)
            self._call_of(before.m)
            raise
        self.ctx.barrier()  # no peer writes here before all is zeroed

    def _queue(self, operands: _Operands, m: int | None) -> tuple[torch.Tensor, ...]:
        if self.is_closed or self.ctx.debug_mode:
            return self._queue_compared(operands, m)
        check_kinds(self, operands, self._expected)
        call = None if m is None else self._calls.get(m)  # an A of other rows is found nowhere, and checked
        if call is None or call is not self._last:
            call = self._call_of(self._rows_of(operands["A"], m))
        if self.ctx.profiler_range is None:
            return self._queue_call(call, operands)
        with self.ctx.profiler_range(self._sized):
            return self._queue_call(call, operands)

    def _queue_compared(self, operands: _Operands, m: int | None) -> tuple[torch.Tensor, ...]:
        """As `_queue`, but that the ranks first compare what they call."""
        self._check_open()
        self.ctx.agree("the operators the ranks call", f"{self} for {self.problem}")
        with self.ctx.collective_section(f"call {self}"):
            check_kinds(self, operands, self._expected)
            m = self._rows_of(operands["A"], m)
        self.ctx.agree("the rows of A over all ranks", m)
        with self.ctx.collective_section(f"call {self}"):
            call = self._call_of(m)
            self._check(call, operands)
        self._note(call)
        return self._launch(call, operands, call.new_output())

    def _queue_call(self, call: Call[P], operands: _Operands) -> tuple[torch.Tensor, ...]:
        calls, output = self._channel.calls, call.new_output()
        if not calls.are_prepared:
            self._check(call, operands)
            self._note(call)
            return self._launch(call, operands, output)
        place = place_of(operands, call.problem.m, 0 if output is None else output.data_ptr())
        prepared = calls.find(place)
        if prepared is None:
            prepared = self._prepare(place, call, operands, output)
        is_captured = self._note(call)
        self.ran_config, call.copied = prepared.config, prepared.copied
        calls.queue(prepared, operands["A"], is_captured=is_captured)
        return (output,) if output is not None and prepared.gives_output else self._outputs_of(call, output)

    def _prepare(self, place: Place, call: Call[P], operands: _Operands, output: torch.Tensor | None) -> PreparedCall:
        calls, moved = self._channel.calls, None
        if not any(one.data_ptr() in self._heap for one in operands.values()):
            moved = list(operands.values()) if output is None else [output, *operands.values()]
            if prepared := calls.moved(place, moved):  # like one whose operands were checked
                if _OUTPUT in call.memory:
                    self._check_not_overwritten(call, operands)
                return prepared
        self._check(call, operands)
        with calls.preparing(place, call.problem.m, moved) as prepared:
            outputs = self._launch(call, operands, output)
        prepared.config, prepared.copied = self.ran_config, call.copied
        prepared.gives_output = len(outputs) == 1 and output is not None and is_same(outputs[0], output)
        return prepared

    def _note(self, call: Call[P]) -> bool:
        """Raise if the context cannot be used, or ranks' calls differ; return whether the call is captured.

        What is captured is not compared: the host has no part in its replays.
        """
        if self.ctx.backend.is_capturing():
            self.ctx.check()
            self.was_captured = True
            return True
        self._note_call(self, self._digest, call.problem.m)
        return False

    def _outputs_of(self, call: Call[P], output: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Return what a call gives; `output`: the memory that it had for that, if it was new."""
        assert self._implementation.outputs is not None
        outputs = self._implementation.outputs
        if output is None:
            return call.kept("outputs", lambda: outputs(call))
        with call.writing(output):
            return outputs(call)

    def _launch(self, call: Call[P], operands: _Operands, output: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        call.ran_config, call.copied = call.config, ()
        with call.reading(operands), call.writing(output):
            outputs = self._implementation.launch(call, operands["A"], operands["B"])
        self.ran_config = call.ran_config
        return outputs

    def _rows_of(self, a: torch.Tensor, m: int | None) -> int:
        """Return the m of a call with this A.

        Raises:
            ValueError: it cannot be told, or A has not so many rows.
        """
        problem = self.problem
        if a.ndim != 2:
            return problem.m  # `_check` says what is wrong
        found = problem.m_of(a.shape[0], self.rank) if m is None else m
        if found is None:
            raise ValueError(
                f"{self}: A is {tuple(a.shape)} on rank {self.rank}; the operator was made for "
                f"{problem.a_shape(self.rank)} of M={problem.m}; with fewer rows, give m, those of all ranks"
            )
        if not 1 <= found <= problem.m:
            raise ValueError(
                f"{self}: A has {found} rows{'' if m is None else ' over all ranks'}; the operator was made for "
                f"{problem.m}, and takes 1 to {problem.m}"
            )
        return found

    # Plans and memory ------------------------------------------------------------------------------------------------

    def _size(self, problem: P) -> None:
        """Be an operator for a problem, without memory for it yet.

        Raises:
            ValueError: the variant cannot do so many rows.
        """
        self.problem, self._plans = problem, self._plans_of(problem)
        if reason := self._plans.unsupported_reason():
            raise ValueError(f"{self} cannot do this: {reason}")

    @property
    def config(self) -> GemmConfig | None:
        """The configuration for the whole problem; None where there is nothing to configure."""
        return self._plans.whole

    def _open(self) -> Channel:
        """Make what calls share beside memory."""
        implementation, state = self._implementation, None
        if implementation.is_ours:
            asked = {_STATE: _state(self.problem.world_size, implementation.counts_chunks)}
            self._workspace.grow(asked, keep=False)
            state = self._workspace.views(asked)[_STATE]
        self.state = state
        return Channel(self.ctx, str(self), state, can_describe=implementation.can_describe)

    def _allocate(self, *, keep: bool) -> None:
        """Make the memory of calls up to the whole problem, and bind the call of that.

        With `keep`, what that outgrows stays, as captured graphs use it.
        """
        implementation, most = self._implementation, self.problem.m
        self._last = self._unbound(most)
        self._forget_calls()
        # Fewer rows have other plans, which may ask for more of something.
        for m in doublings(most):
            self._workspace.grow(self._asked(self._unbound(m)), keep=keep)
        if implementation.open:
            self._channel.opened = implementation.open(self.ctx, self.problem)
        last = self._call_of(most)
        self.keeps_outputs = implementation.outputs is not None and last.output_room is None

    def _forget_calls(self) -> None:
        self._channel.clear()
        self._calls.clear()

    def _asked(self, call: Call[P]) -> dict[str, Buffer]:
        """Return what a call needs of the workspace; where its output is new memory, the call is told of what kind."""
        asked = self._implementation.workspace(call)
        if self._new_outputs and _OUTPUT in asked and not asked[_OUTPUT].is_symmetric:
            call.output_room = asked.pop(_OUTPUT)
        return asked

    def _call_of(self, m: int) -> Call[P]:
        """Return the call of so many rows, with memory; the one that reports of waits describe."""
        call = self._calls.get(m)
        if call is None:
            call = self._unbound(m)
            self._bind(call)
            if len(self._calls) == _MOST_CALLS:
                self._calls.clear()
            self._calls[m] = call
        if call is not self._last:
            self._last = call
            self._workspace.describe_as(call.asked)
        return call

    def _unbound(self, m: int) -> Call[P]:
        config: Any = self._plans.of(m)
        return Call(self.problem.with_rows(m), config, self.rank, self._device, self._options)

    def _bind(self, call: Call[P]) -> None:
        """Give a call its memory; make more where its plan asks for more than was foreseen.

        Raises:
            RuntimeError: a stream is being captured.
            HeapExhausted: the heap has no room.
        """
        asked = self._asked(call)
        if not self._workspace.fits(asked):
            self._check_not_capturing(call.problem.m)
            is_collective = self._workspace.grows_on_heap(asked)
            section = self.ctx.collective_allocation(f"make room for {self}")
            with section if is_collective else contextlib.nullcontext(), plain_tensors():
                self._workspace.grow(asked, keep=self.was_captured, is_foreseen=False)
            if is_collective:
                self.ctx.barrier()  # as in `reserve`
            self._forget_calls()
        call.bind(self._channel, asked, self._workspace.views(asked), self._workspace.half_size)

    # What it says of itself ------------------------------------------------------------------------------------------

    @property
    def last_call(self) -> Call[P]:
        """What was queued last, or would be for the whole problem: its plan, its memory."""
        return self._last

    @property
    def output(self) -> torch.Tensor:
        """C, as the last call left it."""
        return self.outputs()[0]

    @property
    def gathered(self) -> torch.Tensor:
        """A, likewise, where the family gathers it."""
        if self._implementation.gathered is None:
            raise AttributeError(f"{self} gathers nothing")
        return self._implementation.gathered(self._last)

    def as_matrix(self, output: torch.Tensor) -> torch.Tensor:
        """Return an output of this operator as the matrix the family defines; a copy where the layout differs."""
        as_matrix = self._implementation.as_matrix
        return as_matrix(self._last.problem, output) if as_matrix else output

    def compile_kernels(self, a: torch.Tensor, b: torch.Tensor, **others: torch.Tensor) -> None:
        """Compile what a call on operands that lie as these do launches, and queue nothing (launch/compile_ahead.py).

        Nothing is compiled where calls are not prepared.
        """
        if self._channel.calls.are_prepared:
            operands = {"A": a, "B": b, **others}
            call = self._call_of(self._rows_of(a, None))
            self._check(call, operands)
            with self._channel.calls.compiling():
                self._launch(call, operands, call.new_output())

    def trace_to(self, trace: torch.Tensor | None) -> None:
        """Have later calls write down what their programs do (device/trace.py), or no longer.

        Raises:
            ValueError: this variant's kernels cannot.
        """
        if trace is not None and not self._implementation.can_trace:
            raise ValueError(f"{self}: its kernels do not write traces; those of other variants do")
        if trace is not None and self.config and self.config.pingpong:
            raise ValueError(f"{self}: nothing is traced with pingpong; trace with pingpong=False")
        self._channel.trace = trace
        self._channel.calls.clear()

    def close(self) -> None:
        """Give the buffers back; collective. The output must not be used after this."""
        if self._implementation.is_ours:
            self.ctx.barrier()
        self._forget_calls()
        self._workspace.close()
        self.is_closed = True

    def describe_config(self) -> str:
        """Return what the last call ran with, for a table; behind the variant's name where that was chosen."""
        describe = self._implementation.describe
        config = describe(self._channel.opened) if describe else str(self.ran_config or "")
        said = f"{self.chosen_by}: {self.variant} {config}".rstrip() if self.chosen_by else config
        return said + (f" copied={','.join(self._last.copied)}" if self._last.copied else "")

    def __str__(self) -> str:
        chosen = f" (chosen by {self.chosen_by})" if self.chosen_by else ""
        return f"{self.family}/{self.variant}{chosen}"

    @property
    def _sized(self) -> str:
        """What reports of waits, and profilers, call the last call: of one variant a model has many operators."""
        problem = self._last.problem
        return f"{self} of {problem.m}x{problem.n}x{problem.k}"

    # Checks ----------------------------------------------------------------------------------------------------------

    def _check(self, call: Call[P], operands: _Operands) -> None:
        check_operands(self, call, operands, device=self.ctx.get_device(), most=self.problem.m)
        self._check_not_overwritten(call, operands)

    def _check_not_overwritten(self, call: Call[P], operands: _Operands) -> None:
        for name, operand in operands.items():
            if self._overwrites(call, name, operand):
                raise ValueError(
                    f"{self}: {name} lies in memory of this operator, which the call overwrites while it reads {name}; "
                    "give it as clone()"
                )

    def _overwrites(self, call: Call[P], name: str, operand: torch.Tensor) -> bool:
        """Whether a call writes where this operand lies."""
        if (gathered := self._implementation.gathered) and overlap(operand, all_rows := gathered(call)):
            problem: Any = call.problem
            own = all_rows[slice(*problem.rows(self.rank))]  # nobody else writes there
            return name != "A" or not own.numel() or not lies_within(operand, own)
        return _OUTPUT in call.memory and overlap(operand, call.memory[_OUTPUT])

    def _check_not_capturing(self, m: int) -> None:
        """Raise if memory for calls of `m` rows cannot be made now."""
        if self.ctx.backend.is_capturing():
            raise RuntimeError(
                f"{self}: {m} rows need memory that there is not yet, and a stream is being captured; make a call of "
                "so many rows before the capture, or iris_tensor_parallel.prepare the model"
            )

    def _check_open(self) -> None:
        self.ctx.check()
        if self.is_closed:
            raise RuntimeError(f"{self} was closed: its buffers were given back; make another")


def _state(world_size: int, counts_chunks: bool) -> Buffer:
    """Return the buffer of an operator's state."""
    return Buffer(
        (state_words(world_size),),
        torch.int64,
        is_symmetric=True,
        describe=lambda word: describe_state(world_size, word),
        call_of=lambda word, expected: call_of_state(world_size, word, expected, counts_chunks),
    )
