"""One implementation of an overlap pattern in a kernel family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .axes import Agent, Arrangement, Mainloop, Schedule, Sync
from .machine import Machine


def full_name(pattern: str, mainloop: Mainloop, schedule: Schedule) -> str:
    """Return what an implementation of a pattern is called: ``pattern:mainloop[:schedule]``.

    Args:
        pattern: the overlap pattern.
        mainloop: which GEMM.
        schedule: who computes which tiles; only stream-K has a word in the name.
    """
    parts = [pattern, mainloop.value]
    return ":".join([*parts, schedule.value] if schedule is Schedule.STREAM_K else parts)


@dataclass(frozen=True)
class Choice:
    """What `Variant.choose` takes for a problem.

    Args:
        variant: the full name.
        config: its `GemmConfig` or such; None for what its plan takes.
        why: a word on the reason, for people.
    """

    variant: str
    config: Any
    why: str


@dataclass(frozen=True)
class Variant:
    """What a pattern is called, where it stands in the taxonomy, and how to make an operator of it.

    `build` and `unsupported_reason` belong to the family: this package passes them on and never looks inside.

    Args:
        family: the kernel family, e.g. ``"gemm_all_scatter"``.
        pattern: the overlap pattern, e.g. ``"producer_consumer"``: who communicates, and what it waits for.
        arrangement, agent, sync: its place in the taxonomy.
        summary: one line for tables.
        build: ``build(ctx, problem, config=None)`` returns an operator; collective over all ranks.
        unsupported_reason: ``unsupported_reason(problem, config)`` returns None, or why this variant cannot do it.
        mainloop, schedule: which of the pattern's implementations this is.
        is_baseline: True for what others made: the library's calls, and other projects' fused operators.
        can_trace: whether its kernels write down what they do, and when.
        choose: ``choose(ctx, problem, config)`` returns which variant does a problem and with what
            configuration, the same on all ranks; None where it is this one.
        predict: ``predict(machine, work)`` returns the predicted time of a call, in µs, without the copies of operands
            that kernels cannot read as they are; None where there is no model of it.
        former_name: what it was called in programs, results, tables and caches of older versions; "" for its pattern.
        retired: variants that are no more, for which this one is to be taken: their former names by their full names.
    """

    family: str
    pattern: str
    arrangement: Arrangement
    agent: Agent
    sync: Sync
    summary: str
    build: Callable[..., Any] = field(repr=False, compare=False)
    unsupported_reason: Callable[..., str | None] = field(repr=False, compare=False)
    mainloop: Mainloop = Mainloop.PORTABLE
    schedule: Schedule = Schedule.DATA_PARALLEL
    is_baseline: bool = False
    can_trace: bool = False
    choose: Callable[..., Choice] | None = field(default=None, repr=False, compare=False)
    predict: Callable[[Machine, Any], float] | None = field(default=None, repr=False, compare=False)
    former_name: str = ""
    retired: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def delegates(self) -> bool:
        """Whether `build` makes another variant's operator: there are no kernels of its own to check."""
        return self.choose is not None

    @property
    def name(self) -> str:
        """The full name, e.g. ``"copy_engine:sm90"``; the pattern alone where there are no kernels of its own."""
        return full_name(self.pattern, self.mainloop, self.schedule) if self.has_kernels else self.pattern

    @property
    def has_kernels(self) -> bool:
        """Whether kernels of ours are behind this name and no other."""
        return not self.is_baseline and not self.delegates
