"""An operator over several hosts: what a family's function calls where a context's ranks live on several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NoReturn, TypeVar

import torch

from iris_core import Context
from iris_core.context.hierarchical import HierarchicalContext
from iris_core.utils.torch_modes import plain_tensors

from ..config import GemmConfig
from ..operators.operand_checks import agree, check_asked, check_operands, checked_place, rows_of
from ..problem import Problem
from ..variants.implementation import Implementation
from .call import HierarchicalCall, hierarchies, hierarchy_of
from .choosing import schedules_for

P = TypeVar("P", bound=Problem)


class HierarchicalOperator(Generic[P]):
    """Call it as an `Operator`; it returns new memory in each call.

    Making one is collective, and makes the operators inside each host that its calls take.

    Args:
        ctx: over several hosts.
        family: of the operator.
        problem: of all ranks; its m is the most that calls may have.
        variant: of the operators inside a host.
        config: of these; None for the plan of each.
        new_outputs: each call returns new memory, also where none is asked for.
        config_of: not taken: the operators inside a host choose by problems of their own.
        options: the family's own.

    Attributes:
        keeps_outputs: never: each call returns new memory.
        keeps_gathered: whether they return the gathered A, too.
        is_closed: whether it was closed; a call then raises RuntimeError.
        was_captured: whether a stream was captured of a call.
        chosen_by: the variant that was asked for, where that one chose this.

    Raises:
        ValueError: the family has no schedule over hosts; or the ranks ask for different things, or for what the
            variant cannot do.
        HeapExhausted: a host's heap has no room for the operators inside it.
    """

    keeps_outputs = False
    is_closed = False
    was_captured = False
    chosen_by = ""

    def __init__(
        self,
        ctx: Context,
        family: str,
        problem: P,
        variant: str,
        config: GemmConfig | None = None,
        *,
        new_outputs: bool = True,
        config_of: Any = None,
        **options: Any,
    ) -> None:
        assert isinstance(ctx, HierarchicalContext)
        hierarchy = hierarchy_of(family)
        self.ctx, self.family, self.variant, self.problem = ctx, family, variant, problem
        self.rank = ctx.get_rank()
        self._hierarchy, self._config = hierarchy, config
        self._options = {**hierarchy.options, **options}
        self.keeps_gathered = bool(self._options.get("keep_gathered"))
        with ctx.collective_section(f"make {self}"):
            check_asked(self, ctx, problem, self._options, hierarchy.options.keys())
        self._digest = agree(self, ctx, problem, self._options, config)
        self._sizes: dict[int, tuple[P, int]] = {}  # the problem and the chunks of a number of rows
        self.reserve(problem.m)

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, *, m: int | None = None, **operands: torch.Tensor
    ) -> torch.Tensor:
        """Queue one call on the current stream, and return this rank's output; on a CPU the host waits for it.

        Args:
            a, b, m, operands: as of `Operator.__call__`.

        Raises:
            ValueError: an operand does not fit the problem.
            RuntimeError: the operator was closed.
            TimeoutError, PeerError: an earlier wait for a peer timed out, or another host died or is late.
        """
        return self.call(a, b, m=m, **operands)[0]

    def call(
        self, a: torch.Tensor, b: torch.Tensor, *, m: int | None = None, **operands: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """As a call of the operator, and return all that it gives: the output, then the gathered A if it is kept."""
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(self.call)(a, b, m=m, **operands)
        if self.is_closed:
            raise RuntimeError(f"{self} was closed; make another")
        given = {"A": a, "B": b, **operands}
        checked_place(self, given, {"A": None, "B": None, **self.problem.operand_shapes(self.rank)}.keys())
        problem = self.problem.with_rows(rows_of(self, self.problem, self.rank, a, m))
        check_operands(self, problem, self.rank, given, device=self.ctx.get_device(), most=self.problem.m)
        if self.ctx.backend.is_capturing():
            self.ctx.check()
            self.was_captured = True
        else:
            self.ctx.recovery.note_call(self, self._digest, problem.m)
        if self.ctx.debug_mode:
            self.ctx.agree("the operators the ranks call", f"{self} for {problem}")
        with torch.no_grad(), self.ctx.recovery.raising_root_cause():
            return self._hierarchy.run(self._call_of(problem.m, operands), a, b)

    def reserve(self, m: int) -> None:
        """Make the operator one of more rows, `m`; collective.

        Raises:
            ValueError: the variant cannot do so many.
            HeapExhausted: a host's heap has no room.
        """
        problem, call = self.problem.with_rows(m), self._call_of(m, {})
        with self.ctx.collective_section(f"make the operators inside each host of {self}"), plain_tensors():
            if not call.is_alone:
                for inside in self._hierarchy.inside(problem, self.ctx.topology, call.chunks):
                    call.operator(inside)
            if self._hierarchy.gathers_inside and self.ctx.topology.ranks_per_host > 1:
                self.ctx.local.ccl.prepare()
        self.problem = problem

    def outputs(self) -> NoReturn:
        """Raise: each call returns new memory."""
        raise AttributeError(f"{self} has no outputs of its own: each call returns new memory")

    def as_matrix(self, output: torch.Tensor) -> torch.Tensor:
        """Return an output as the matrix the family defines: it is one."""
        return output

    def compile_kernels(self, a: torch.Tensor, b: torch.Tensor, **others: torch.Tensor) -> None:
        """Compile nothing: the operators inside a host compile with their first calls."""

    def describe_config(self) -> str:
        """Return what the last call ran with, for a table."""
        call = self._call_of(self.problem.m, {})
        if call.is_alone:
            return f"chunks={call.chunks} inside: torch.mm"
        inside = self._hierarchy.inside(self.problem, self.ctx.topology, call.chunks)[0]
        operator = call.operator(inside)
        return f"chunks={call.chunks} inside: {operator.variant} {operator.describe_config()}".rstrip()

    def close(self) -> None:
        """Close it; the operators inside a host are the host's context's, and stay for other calls."""
        self.is_closed = True

    def __str__(self) -> str:
        return f"{self.family}/{self.variant} over {self.ctx.topology.num_hosts} hosts"

    def _call_of(self, m: int, operands: Mapping[str, torch.Tensor]) -> HierarchicalCall[P]:
        if m not in self._sizes:
            problem = self.problem.with_rows(m)
            schedules = schedules_for(self.ctx, self.family, self._hierarchy, problem, self.variant)
            self._sizes[m] = problem, schedules.chunks[schedules.index(m)]
        problem, chunks = self._sizes[m]
        asked = self._hierarchy.family, self.variant, self._config, self._options
        return HierarchicalCall(self.ctx, problem, *asked, chunks, operands)


def spans_hosts(ctx: Context) -> bool:
    """Return whether a context's ranks live on several hosts."""
    return isinstance(ctx, HierarchicalContext)


def over_hosts(
    ctx: Context, implementation: Implementation, problem: Problem, config: GemmConfig | None, **options: Any
) -> HierarchicalOperator[Any]:
    """Return an operator over several hosts, whose operators inside a host are of this variant; collective.

    Raises:
        ValueError: the variant cannot do the problem, or cannot span hosts; or as `HierarchicalOperator`.
    """
    assert isinstance(ctx, HierarchicalContext)
    family, variant = implementation.family, implementation.variant
    with ctx.collective_section(f"make {family}/{variant}"):
        able, reason = sorted(hierarchies), implementation.supports(problem, config)
        if not implementation.is_ours or family not in able:
            reason = (
                f"it is for ranks of one host, and these live on {ctx.topology.num_hosts}; variants with kernels of "
                f"this library, and library, of {', '.join(able)} can span hosts"
            )
        if reason:
            raise ValueError(f"{family}/{variant} cannot do this: {reason}")
    return HierarchicalOperator(ctx, family, problem, variant, config, **options)
