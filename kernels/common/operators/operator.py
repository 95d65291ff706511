"""An operator: one variant of a family, bound to a context and a problem, with its buffers, flags and call number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch.autograd.graph import increment_version

from iris_core import Context
from iris_core.utils.torch_modes import plain_tensors

from ..call import Call
from ..config import GemmConfig
from ..launch.channel import Place
from ..launch.recording import PreparedCall
from ..problem import Problem
from ..variants.implementation import Implementation
from ..workspace import OUTPUT
from .calls_by_rows import CallsByRows
from .operand_checks import agree, check_asked, check_operands, checked_place, lies_within, overlap, rows_of
from .prepared import PreparedCalls

P = TypeVar("P", bound=Problem)

_Operands = dict[str, torch.Tensor]  # "A", "B", and what the epilogue reads, by name


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
        self.rank = ctx.get_rank()
        self.family, self.variant = implementation.family, implementation.variant
        self._implementation = implementation
        self.keeps_gathered = bool(options.get("keep_gathered"))
        options = {**implementation.options, **options}
        self._expected = {"A": None, "B": None, **problem.operand_shapes(self.rank)}.keys()
        self._calls = CallsByRows(
            ctx, self, implementation, config, config_of, new_outputs=new_outputs, options=options
        )
        self._note_call = ctx.recovery.note_call
        self._copied: tuple[str, ...] = ()  # of which operands the last call made copies
        with ctx.collective_section(f"make {self}"):
            check_asked(self, ctx, problem, options, implementation.options.keys())
            self._calls.plan(problem)
        self._digest = agree(self, ctx, problem, options, self.config)
        with ctx.collective_allocation(f"make {self}"), plain_tensors():
            self._channel = self._calls.open()
        self._prepared = PreparedCalls(self._channel, self._calls, self._check, self._launch)
        self.state, self.keeps_outputs = self._channel.state, self._calls.keeps_outputs
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
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        m: int | None = None,
        out: torch.Tensor | None = None,
        **operands: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """As a call of the operator, and return all that it gives: the output, then the gathered A if it is kept.

        Args:
            a, b, m, operands: the call's.
            out: contiguous memory for an output that would be new, of its shape and dtype, where the call `takes_out`;
                None for new memory.
        """
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(self.call)(a, b, m=m, out=out, **operands)
        outputs = self._queue({"A": a, "B": b, **operands}, m, out)
        if not self.keeps_outputs:
            return outputs
        # Kernels wrote, and peers' did, which autograd does not see: what it kept of an earlier call is overwritten.
        increment_version(outputs)
        # Another tensor each time, over the same memory: what autograd writes on one it does not find on the next.
        return tuple([one.detach() for one in outputs])

    def takes_out(self, out: torch.Tensor, m: int) -> bool:
        """Return whether a call can have a tensor for its `out`.

        Not where peers write C, and where kernels need room beside it: for whole tiles of every shard, or for rows that
        begin on 16 bytes.

        Args:
            out: the tensor; where it is not contiguous, or not of the output's shape and dtype, it cannot.
            m: rows of the call, over all ranks.
        """
        return not self.keeps_outputs and self._calls.new_outputs_of(m).takes(out)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Return what the last call gave, and the next call overwrites; see `call`."""
        if not self.keeps_outputs:
            raise AttributeError(f"{self} has no outputs of its own: each call returns new memory")
        outputs, last = self._implementation.outputs, self._calls.last
        assert outputs is not None
        return (*outputs(last), *last.normed())

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
                self._calls.check_not_capturing(m)
                self._calls.plan(before.with_rows(m))
                self.ctx.agree("the rows that the ranks make room for", m)
            with self.ctx.collective_allocation(what), plain_tensors():
                self._calls.allocate()
        except BaseException:
            self._calls.plan(before)
            self._calls.last_rows = before.m
            raise
        self.ctx.barrier()  # no peer writes here before all is zeroed

    def _queue(self, operands: _Operands, m: int | None, out: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Queue a call. What is done in every call is done here in few frames: each costs the host, which is cold."""
        if self.is_closed or self.ctx.debug_mode:
            self._compare(operands, m)
        place, calls = checked_place(self, operands, self._expected), self._calls
        if len(operands) > 2:
            operands = {name: operands[name] for name in self._expected}  # in one order, by which calls are found
        rows = calls.rows.get((m, operands["A"].shape))
        if rows is None:
            rows = rows_of(self, self.problem, self.rank, operands["A"], m)
            calls.note_rows(m, operands["A"].shape, rows)
        calls.last_rows = rows
        if self.ctx.profiler_range is None:
            return self._queue_rows(rows, place, operands, out)
        with self.ctx.profiler_range(calls.name_of_last()):
            return self._queue_rows(rows, place, operands, out)

    def _queue_rows(
        self, m: int, place: Place, operands: _Operands, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """As `_queue`, of so many rows: what was prepared is queued again (prepared.py), or else launched."""
        ctx, channel, prepared = self.ctx, self._channel, None
        if channel.are_prepared and not ctx.debug_mode:
            prepared, new = self._prepared.of(m, place, operands, out)
        elif not self._calls.was_checked(m, place):
            self._check(self._calls.of(m), operands)
            self._calls.note_checked(m, place)
        is_captured = ctx.backend.is_capturing()
        if is_captured:  # and compared with no other rank's: the host has no part in replays
            ctx.check()
            self._calls.was_captured = True
        else:
            self._note_call(self, self._digest, m)
        if prepared is None:
            return self._queue_unprepared(m, operands, out)
        self.ran_config, self._copied = prepared.config, prepared.copied
        channel.graphs.is_captured = is_captured
        for name, destination in prepared.copies:
            destination.copy_(operands[name])
        if prepared.calls_torch:
            return self._queue_with_torch(prepared, operands, new)
        prepared.queue()
        return prepared.outputs_of(new) if new else prepared.outputs

    def _queue_with_torch(self, prepared: PreparedCall, operands: _Operands, new: Any) -> tuple[torch.Tensor, ...]:
        """Queue a prepared call in which torch has a part."""
        channel, outputs = self._channel, prepared.outputs_of(new)
        channel.given = operands, outputs
        try:
            prepared.queue()
        finally:
            channel.given = {}, ()
        return outputs

    def _queue_unprepared(self, m: int, operands: _Operands, out: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Queue a call through Triton, or one of another project's kernels."""
        call = self._calls.of(m)
        outputs = self._launch(call, operands, self._calls.new_outputs_of(m).made(out))
        self.ran_config, self._copied = call.ran_config, call.copied
        return outputs

    def _compare(self, operands: _Operands, m: int | None) -> None:
        """Raise on every rank unless all can make this call, and make the same."""
        self._check_open()
        self.ctx.agree("the operators the ranks call", f"{self} for {self.problem}")
        with self.ctx.collective_section(f"call {self}"):
            checked_place(self, operands, self._expected)
            m = self._calls.last_rows = rows_of(self, self.problem, self.rank, operands["A"], m)
        self.ctx.agree("the rows of A over all ranks", m)
        with self.ctx.collective_section(f"call {self}"):
            self._check(self._calls.of(m), operands)

    def _launch(self, call: Call[P], operands: Any, new: Any) -> tuple[torch.Tensor, ...]:
        """Have the variant queue a call, with operands and new outputs by name, and return its outputs."""
        call.ran_config, call.copied = call.config, ()
        implementation = self._implementation
        call.take(operands, new)
        try:
            returned = implementation.launch(call, operands["A"], operands["B"])
            outputs = implementation.outputs(call) if implementation.outputs else returned
            assert outputs is not None
            if call.problem.norm and not implementation.norms_rows:
                call.norm_rows(outputs[0], finishes=not implementation.is_ours)
            return (*outputs, *call.normed())
        finally:
            call.give_back(new)

    # What it says of itself ------------------------------------------------------------------------------------------

    @property
    def problem(self) -> P:
        """Sizes, dtype and number of ranks; its m is the most that calls may have."""
        return self._calls.problem

    @property
    def config(self) -> GemmConfig | None:
        """The configuration for the whole problem; None where there is nothing to configure."""
        return self._calls.whole_config

    @property
    def was_captured(self) -> bool:
        """Whether a captured graph may hold calls, and so use their memory."""
        return self._calls.was_captured

    @property
    def last_call(self) -> Call[P]:
        """What was queued last, or would be for the whole problem: its plan, its memory."""
        return self._calls.last

    @property
    def output(self) -> torch.Tensor:
        """C, as the last call left it."""
        return self.outputs()[0]

    @property
    def gathered(self) -> torch.Tensor:
        """A, likewise, where the family gathers it."""
        if self._implementation.gathered is None:
            raise AttributeError(f"{self} gathers nothing")
        return self._implementation.gathered(self._calls.last)

    def as_matrix(self, output: torch.Tensor) -> torch.Tensor:
        """Return an output of this operator as the matrix the family defines; a copy where the layout differs."""
        as_matrix = self._implementation.as_matrix
        return as_matrix(self._calls.last.problem, output) if as_matrix else output

    def compile_kernels(self, a: torch.Tensor, b: torch.Tensor, **others: torch.Tensor) -> None:
        """Compile what a call on operands that lie as these do launches, and queue nothing (launch/compile_ahead.py).

        Nothing is compiled where calls are not prepared.

        Args:
            a, b: as a call's; of their values nothing is read.
            others: a call's `operands`.

        Raises:
            ValueError: operands that a call does not take.
        """
        if self._channel.are_prepared:
            operands = {"A": a, "B": b, **others}
            m, place = rows_of(self, self.problem, self.rank, a, None), checked_place(self, operands, self._expected)
            call, new = self._calls.of(m), self._calls.new_outputs_of(m).made()
            self._check(call, operands)
            with self._channel.compiling(place):
                self._launch(call, operands, new)

    def trace_to(self, trace: torch.Tensor | None) -> None:
        """Have later calls write down what their programs do (device/trace.py), or no longer.

        Raises:
            ValueError: this variant's kernels cannot.
        """
        if trace is not None and not self._implementation.can_trace:
            raise ValueError(f"{self}: not all its kernels write traces; those of other variants do")
        if trace is not None and self.config and self.config.pingpong:
            raise ValueError(f"{self}: nothing is traced with pingpong; trace with pingpong=False")
        self._channel.trace_to(trace)

    def close(self) -> None:
        """Give the buffers back; collective. The output must not be used after this."""
        if self._implementation.is_ours:
            self.ctx.barrier()
        self._calls.close()
        self.is_closed = True

    def describe_config(self) -> str:
        """Return what the last call ran with, for a table; behind the variant's name where that was chosen."""
        describe = self._implementation.describe
        config = describe(self._channel.opened) if describe else str(self.ran_config or "")
        said = f"{self.chosen_by}: {self.variant} {config}".rstrip() if self.chosen_by else config
        return said + (f" copied={','.join(self._copied)}" if self._copied else "")

    def __str__(self) -> str:
        chosen = f" (chosen by {self.chosen_by})" if self.chosen_by else ""
        return f"{self.family}/{self.variant}{chosen}"

    # Checks ----------------------------------------------------------------------------------------------------------

    def _check(self, call: Call[P], operands: Mapping[str, torch.Tensor]) -> None:
        check_operands(self, call.problem, self.rank, operands, device=self.ctx.get_device(), most=self.problem.m)
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
            return name != "A" or problem.is_quantised or not own.numel() or not lies_within(operand, own)
        outputs = (OUTPUT, *call.problem.normed_shapes(self.rank))
        return any(overlap(operand, call.memory[output]) for output in outputs if output in call.memory)

    def _check_open(self) -> None:
        self.ctx.check()
        if self.is_closed:
            raise RuntimeError(f"{self} was closed: its buffers were given back; make another")
