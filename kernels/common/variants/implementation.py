"""What a variant supplies: pure functions of a problem, from which an operator makes its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from iris_core import Context
from overlap_taxonomy import Agent, Arrangement, Machine, Mainloop, Schedule, Sync, Work, full_name

from ..call import Call, Device
from ..config import GemmConfig, default_config, invalid_reason
from ..portable.operands import describable
from ..problem import Problem
from ..workspace import Buffer

Outputs = tuple[torch.Tensor, ...]


def valid_config(problem: Problem, config: GemmConfig | None) -> str | None:
    """Return why a configuration makes no sense, or None; no variant has less to ask."""
    return invalid_reason(config) if config else None


def default_plan(problem: Problem, device: Device, comm_share: float = 0.0) -> GemmConfig:
    """Return what to start from for the rank that has most to do; `comm_share` as `default_config`'s."""
    return default_config(
        device.arch,
        device.num_sms,
        m=problem.m,
        n=problem.b_shape(0)[1],
        dtype=problem.dtype,
        shard_rows=min(problem.a_shape(0)[0], problem.c_shape(0)[0]),
        comm_share=comm_share,
        is_promoted=problem.is_promoted,
    )


@dataclass(frozen=True)
class Implementation:
    """What a variant is called, where it stands in the taxonomy, and how it does a problem.

    Args:
        family, pattern, mainloop, schedule: what it is called.
        place: in the taxonomy.
        summary: one line for tables.
        former_name, retired: as a `Variant`'s.
        plan: returns the configuration for a problem on a device, the same on all ranks; None where there is nothing
            to configure.
        fit: returns a configuration with what is not free in it for a problem; None: all is.
        workspace: returns the buffers that a call uses, by name, symmetric ones the same on all ranks. What is called
            "output" or "gathered" the caller reads.
        launch: queues a call.
        outputs: returns a call's outputs: C, then the family's others; None where each call has new ones, which
            `launch` returns.
        supports: returns why the variant cannot do a problem with a configuration (None: its plan), or None.
        options: the family's own arguments, the same on all ranks, with their defaults.
        gathered: returns A as the call gathers it: there its own rows may lie.
        as_matrix: returns C as one matrix; None where it is one.
        open: makes what all calls up to a problem need beside memory; collective.
        describe: says of what `open` made what there is to say in place of a configuration.
        can_describe: whether the kernels' descriptors can name a matrix, by rows.
        counts_chunks: whether `done` counts chunks (device/handshake.py), and no calls.
        is_ours: whether it runs kernels of ours, which have a state, and are prepared.
        predict: returns the predicted time of a call among others on a machine, in µs, without the copies of operands
            that kernels cannot read as they are; None where there is no model of it.
        spans_hosts: whether its operator works by itself where ranks live on several hosts, as a library's does.
        norms_rows: whether its kernel does a problem's norm; else the operator queues another kernel behind it.
    """

    family: str
    pattern: str
    plan: Callable[[Any, Device], GemmConfig | None]
    workspace: Callable[[Call[Any]], dict[str, Buffer]]
    launch: Callable[[Call[Any], torch.Tensor, torch.Tensor], Outputs | None]
    place: tuple[Arrangement, Agent, Sync] = field(kw_only=True)
    summary: str = field(kw_only=True)
    outputs: Callable[[Call[Any]], Outputs] | None = None
    fit: Callable[[Any, GemmConfig], GemmConfig] | None = None
    supports: Callable[[Any, GemmConfig | None], str | None] = valid_config
    options: Mapping[str, Any] = field(default_factory=dict)
    gathered: Callable[[Call[Any]], torch.Tensor] | None = None
    as_matrix: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    open: Callable[[Context, Any], Any] | None = None
    describe: Callable[[Any], str] | None = None
    can_describe: Callable[[torch.Tensor], bool] = describable
    counts_chunks: bool = False
    is_ours: bool = True
    predict: Callable[[Machine, Work], float] | None = None
    norms_rows: bool = False
    mainloop: Mainloop = Mainloop.PORTABLE
    schedule: Schedule = Schedule.DATA_PARALLEL
    spans_hosts: bool = False
    former_name: str = ""
    retired: Mapping[str, str] = field(default_factory=dict)

    @property
    def can_trace(self) -> bool:
        """Whether its kernels write traces: all of them are ours."""
        return self.is_ours and self.mainloop is not Mainloop.LIBRARY

    @property
    def variant(self) -> str:
        """The variant's name; see `Variant.name`."""
        return full_name(self.pattern, self.mainloop, self.schedule) if self.is_ours else self.pattern
