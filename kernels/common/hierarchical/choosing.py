"""What a call over several hosts takes: how many chunks, or the library over all ranks.

Rank 0 of all makes a table by numbers of rows and all ranks have it, as all must do the same; a call looks a row up.
The link between hosts is measured with the first table: how fast the ranks of a rail exchange, on the SMs that
kernels leave to them, and how fast the library's all-reduce over all ranks is.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from iris_core import Context
from iris_core.context.hierarchical import HierarchicalContext
from overlap_taxonomy import Choice, HostLink, Machine, get_variant, machine_for, predict_us

from ..calibration.kept import kept_machine
from ..choice.measured import device_name
from ..choice.ranking import work_of
from ..problem import Problem
from .call import Hierarchy, hierarchy_of, multiplies_alone
from .prediction import best_chunks, predict_flat_us

_UNTIMED_CHUNKS = 2  # where there is no performance to choose by: interpreted kernels, or a GPU that is not known
_MARGIN = 0.97  # of the library's time, below which chunks are taken
_LEAST_ROWS = 16384  # of a table
_MEASURED_BYTES = 64 << 20
_MEASURED_TIMES = 5
_MEASURED_ROUNDS = 4  # the fastest counts, as a busy host only adds time


@dataclass(frozen=True)
class Schedules:
    """What calls take, by rows.

    Args:
        rows: in ascending order; the last is the most that it is for.
        chunks: for each.
        is_library: whether the library is predicted to be faster, for each.
        why: a word on it.
    """

    rows: list[int]
    chunks: list[int]
    is_library: list[bool]
    why: str

    def index(self, m: int) -> int:
        """Return the place of a number of rows, `rows[-1]` at most."""
        return bisect.bisect_left(self.rows, m)


@dataclass
class _Known:
    machine: Machine | None  # of rank 0, which chooses; others may not have it
    link: HostLink


@dataclass
class _OfContext:
    known: _Known | None
    schedules: dict[Any, Schedules] = field(default_factory=dict)


def schedules_for(
    ctx: HierarchicalContext, family: str, hierarchy: Hierarchy, problem: Problem, variant: str
) -> Schedules:
    """Return the table of a product; collective the first time, and for more rows.

    Args:
        ctx, family, hierarchy, problem: where, and what.
        variant: of the operators inside a host; "auto" for the fastest there.
    """
    key = (family, variant, problem.with_rows(1))
    if _OfContext not in ctx.kept:
        ctx.kept[_OfContext] = _OfContext(_known_of(ctx))
    known, schedules = ctx.kept[_OfContext].known, ctx.kept[_OfContext].schedules
    found = schedules.get(key)
    if found is not None and found.rows[-1] >= problem.m:
        return found
    most = max(problem.m, _LEAST_ROWS)
    if known is None:
        found = Schedules([most], [_UNTIMED_CHUNKS], [False], "not timed here")
    else:
        made = None
        with ctx.collective_section(f"choose for {family} over {ctx.topology.num_hosts} hosts"):
            if ctx.get_rank() == 0:
                made = _made(ctx, known, family, hierarchy, problem, variant, most)
        rows, chunks, is_library = ctx.broadcast(made, 0)
        found = Schedules(rows, chunks, is_library, "predicted")
    schedules[key] = found
    return found


def choose_over_hosts(ctx: Context, family: str, problem: Problem, others: str) -> Choice:
    """Return the library's variant over all ranks, or `others`, what is built over hosts, as is predicted to be faster.

    Where the library cannot do the problem that is `others`. Collective the first time for a product, and for more
    rows.
    """
    assert isinstance(ctx, HierarchicalContext)
    hierarchy = hierarchy_of(family)
    if reason := get_variant(family, hierarchy.baseline).unsupported_reason(problem, None):
        return Choice(others, None, f"{hierarchy.baseline} cannot do this: {reason}")
    schedules = schedules_for(ctx, family, hierarchy, problem, others)
    is_library = schedules.is_library[schedules.index(problem.m)]
    return Choice(hierarchy.baseline if is_library else others, None, schedules.why)


def _known_of(ctx: HierarchicalContext) -> _Known | None:
    """Return the constants of a host's GPUs, and the link; None where rank 0 knows nothing of such GPUs."""
    if ctx.is_interpreted() or ctx.ranks_on_device > 1:
        return None
    gpu, size = device_name(ctx.get_device()), ctx.topology.ranks_per_host
    machine = kept_machine(gpu, size) or machine_for(gpu, size)
    return _Known(machine, measured_link(ctx)) if ctx.broadcast(machine is not None, 0) else None


def _made(
    ctx: HierarchicalContext,
    known: _Known,
    family: str,
    hierarchy: Hierarchy,
    problem: Problem,
    variant: str,
    most: int,
) -> list[Any]:
    assert known.machine is not None
    beside = known.machine.with_sms(ctx.local.get_cu_count())
    inside = work_of(hierarchy.family, hierarchy.inside(problem, ctx.topology, 1)[0])
    if multiplies_alone(problem, variant, ctx.topology):
        names: tuple[str, ...] = ("library",)
    else:
        is_modelled = variant != "auto" and predict_us(beside, variant, inside) is not None
        names = (variant,) if is_modelled else ()
    rows = [1 << bit for bit in range(most.bit_length())]
    rows += [most] * (rows[-1] < most)
    chunks, is_library = [], []
    for m in rows:
        asked = replace(problem, m=m, epilogue=(), norm=None)  # which take as long either way
        number, us = best_chunks(beside, known.link, hierarchy, asked, ctx.topology, names)
        library_us = predict_flat_us(known.machine, known.link, family, asked, ctx.topology, hierarchy.baseline)
        chunks.append(number)
        is_library.append(us > _MARGIN * library_us)
    return [rows, chunks, is_library]


def measured_link(ctx: HierarchicalContext) -> HostLink:
    """Return the link between hosts as it is measured here, the slowest rank's; collective."""
    device, (hosts, own) = ctx.get_device(), (ctx.topology.num_hosts, ctx.rail.host)
    large, small = (torch.zeros(2, size, dtype=torch.uint8, device=device) for size in (_MEASURED_BYTES, 16))
    group, ranks = ctx.process_group(), ctx.get_num_ranks()

    def exchange(both: torch.Tensor) -> None:
        ctx.rail.exchange((own + 1) % hosts, both[0], (own - 1) % hosts, both[1]).wait()

    times = [
        _slowest_s(ctx, lambda: exchange(large)),
        _slowest_s(ctx, lambda: exchange(small)),
        _slowest_s(ctx, lambda: dist.all_reduce(large[0], group=group)),
    ]
    large_s, small_s, reduce_s = times
    sent = 2 * (ranks - 1) / ranks * _MEASURED_BYTES  # by each rank
    return HostLink("measured", _MEASURED_BYTES / large_s / 1e9, small_s * 1e6, sent / reduce_s / 1e9)


def _slowest_s(ctx: HierarchicalContext, call: Callable[[], object]) -> float:
    call()
    fastest = math.inf
    for _ in range(_MEASURED_ROUNDS):
        ctx.barrier()
        start = time.perf_counter()
        for _ in range(_MEASURED_TIMES):
            call()
        ctx.backend.synchronize()
        fastest = min(fastest, (time.perf_counter() - start) / _MEASURED_TIMES)
    return max(ctx.control_plane.all_gather(fastest, "time transfers"))
