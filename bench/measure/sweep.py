"""A sweep: what is asked for, checked before any rank starts, and the loop that measures it and keeps the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from iris_core import PeerError
from overlap_taxonomy import get_variant, is_retired, known_names, list_variants, variants_named

from ..benchmarks.links.measured import Link, this_machines
from ..command.ranks import Ranks
from ..records.csv_rows import append_records, in_a_line
from ..records.record import COMMUNICATION_ALONE, GEMM_ALONE, LIBRARY, OPERAND_DTYPES, SCALES, YARDSTICKS, Record
from ..records.resume import Done, check_burst, check_device
from . import environment
from . import job as measure
from .families import FAMILIES
from .job import Job, Outcome
from .shapes import every, parse_shapes

_FLAGS_BYTES = 1 << 20  # of an operator: its flags, and rounding of its buffers
_CONTEXT_BYTES = 4 << 20
_GATHERS_BYTES = 256 << 20  # of collectives inside a host
_OPERATORS_INSIDE = 3  # a host that one over hosts makes at most: for chunks, and whole hosts, of other variants


@dataclass(frozen=True)
class Plan:
    """A sweep that can be run."""

    jobs: tuple[Job, ...]
    dtype: str  # as the command line names it
    device: str
    world_size: int
    heap_bytes: int
    link_gbps: float | None
    device_names: frozenset[str]  # of the rows that are there


def make_plan(
    *,
    families: str,
    variants: str,
    shapes: str,
    dtype: str,
    device: str,
    world_size: int,
    seed: int,
    rounds: int | None,
    burst: int | None,
    timed: bool,
    link_gbps: float | None = None,
    epilogue: str = "",
    scales: str = "",
    use_fast_accum: bool = False,
    step: int = 1,
    hosts: int = 1,
    done: Sequence[Record] = (),
) -> Plan:
    """Return the sweep that the command line asks for; `library` is always in it.

    Args:
        families, variants, shapes, dtype: as given; the first two are "all" or names separated by commas.
        device: "cpu" or "cuda".
        rounds, burst: None for what suits the device.
        link_gbps: None for what `iris-bench links` measured on this machine.
        epilogue: names of ops separated by commas; "" for none.
        scales: of fp8 operands, tensor, row or block; "" for row, or for other dtypes.
        use_fast_accum: of fp8, whether sums stay in the tensor cores' accumulators.
        step: of the shapes in order of rows, each `step`-th is measured.
        hosts: that the ranks are on.
        done: rows that are there; what they have is not measured again.

    Raises:
        ValueError: something given is unknown or makes no sense, or rows that are there were timed in other bursts;
            names it, and what would work.
    """
    if dtype not in OPERAND_DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known dtypes: {', '.join(OPERAND_DTYPES)}")
    scaled = how_scaled(dtype, scales, use_fast_accum=use_fast_accum)
    for name, value in (("--rounds", rounds), ("--burst", burst), ("--link-gbps", link_gbps), ("--every", step)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} {value} makes no sense; it takes a positive number")
    is_cpu = device == "cpu"
    there = Done(done, timed=timed)
    implied = (LIBRARY, *YARDSTICKS) if timed else (LIBRARY,)
    jobs = []
    ops = tuple(_names(epilogue)) if epilogue else ()
    selected = select_variants(select_families(families), variants)
    for family, names in selected.items():
        found = parse_shapes(shapes, collective=FAMILIES[family].collective, world_size=world_size)
        for shape in every(found, step):
            problem = FAMILIES[family].problem(
                m=shape.m,
                n=shape.n,
                k=shape.k,
                world_size=world_size,
                dtype=getattr(torch, OPERAND_DTYPES[dtype]),
                epilogue=ops,
            )
            keys = {
                name: (family, name, shape.m, shape.n, shape.k, world_size, dtype, device, ",".join(ops), scaled)
                for name in dict.fromkeys((*implied, *names))
            }
            wanted = [
                name
                for name, key in keys.items()
                if not there.is_finished(key) and not there.stays_unsupported(key, problem)
            ]
            if wanted:
                job = Job(
                    family=family,
                    variants=(LIBRARY, *(name for name in wanted if name not in implied)),
                    shape=shape,
                    dtype=OPERAND_DTYPES[dtype],
                    world_size=world_size,
                    seed=seed,
                    rounds=rounds or (1 if is_cpu else 20),
                    burst=burst or (1 if is_cpu else 10),
                    timed=timed,
                    epilogue=ops,
                    scales=scaled,
                )
                jobs.append(job)
    if jobs and timed:
        check_burst(done, device=device, burst=jobs[0].burst)
    operators, gathers_bytes = (1, 0) if hosts == 1 else (_OPERATORS_INSIDE, _GATHERS_BYTES)
    heap_bytes = _CONTEXT_BYTES + gathers_bytes + operators * max(map(_heap_bytes, jobs), default=0)
    device_names = frozenset(record.device_name for record in done if record.device == device)
    return Plan(tuple(jobs), dtype, device, world_size, heap_bytes, link_gbps, device_names)


def run(plan: Plan, ranks: Ranks, keep: Callable[[Job, list[Record]], None]) -> None:
    """Measure job by job, and give each job's rows to `keep` as it ends.

    Raises:
        TimeoutError, PeerError: a rank died, or timed out in a wait for another. The rows of the job in which that
            happened say so.
    """
    columns: dict[str, Any] = environment.versions() | _open_ranks(plan, ranks)
    check_device(plan.device_names, columns["device_name"])
    link = _link(plan, columns["device_name"])
    for job in plan.jobs:
        try:
            outcomes = ranks.call(measure.measure, job)
        except Exception as error:
            keep(job, to_records(plan, job, _ended(job, error), columns, link))
            raise
        keep(job, to_records(plan, job, outcomes, columns, link))
    ranks.call(measure.close_rank)


def _open_ranks(plan: Plan, ranks: Ranks) -> dict[str, str]:
    try:
        return ranks.call(measure.open_rank, plan.heap_bytes, plan.device)
    except (TimeoutError, PeerError):
        raise
    except (OSError, RuntimeError) as error:
        largest = max(plan.jobs, key=_heap_bytes)
        raise RuntimeError(
            f"{error} (the heap is for the largest problem, {largest.family} {largest.shape}; nothing was measured)"
        ) from error


class Output:
    """The file that rows go to, if there is one, and all rows so far.

    Args:
        path: None to keep rows in memory alone.
        done: rows that are in the file already.
        timed: whether those to come have times.
        replace: whether what is in the file is another sweep's, and goes when the first rows come.
    """

    def __init__(
        self, path: Path | None, done: Sequence[Record] = (), *, timed: bool = True, replace: bool = False
    ) -> None:
        self.path = path
        self._replace = replace
        self.records = list(done)
        self._done = Done(done, timed=timed)

    def add(self, records: Sequence[Record]) -> None:
        """Keep rows; those of `library` and of yardsticks are not repeated where they are right, and there already.

        Nor are those that say again that something is unsupported.
        """
        new = [record for record in records if not self._is_there_already(record)]
        self.records += new
        if self.path:
            append_records(self.path, new, replace=self._replace)
            self._replace = False

    def _is_there_already(self, record: Record) -> bool:
        is_implied = record.variant in {LIBRARY, *YARDSTICKS} and record.status == "ok"
        return (is_implied and self._done.is_finished(record.key)) or self._done.repeats(record)

    @property
    def is_there(self) -> bool:
        """Whether there is a file with rows of this sweep."""
        return self.path is not None and self.path.exists() and not self._replace


def how_scaled(dtype: str, scales: str, *, use_fast_accum: bool) -> str:
    """Return how operands are scaled, as `Record.scales` has it, by what a command was given.

    Raises:
        ValueError: there are no such scales, or the operands are not fp8.
    """
    if dtype != "fp8" and (scales or use_fast_accum):
        raise ValueError(f"--scales and --fast-accum are of --dtype fp8, not {dtype}")
    if scales and scales not in SCALES:
        raise ValueError(f"unknown --scales {scales!r}; it takes {', '.join(SCALES)}")
    return (scales or "row") + ("-fast" if use_fast_accum else "") if dtype == "fp8" else ""


def _link(plan: Plan, device_name: str) -> Link:
    if plan.device == "cpu" or plan.world_size == 1:  # nothing that is timed crosses a link
        return Link(None, "")
    return Link(plan.link_gbps, "--link-gbps") if plan.link_gbps else this_machines(device_name, plan.world_size)


def to_records(plan: Plan, job: Job, outcomes: Sequence[Outcome], columns: dict[str, Any], link: Link) -> list[Record]:
    """Return a job's rows, with what follows from its times. On the CPU nothing does: its times are no performance."""
    problem = job.problem()
    times = {outcome.variant: outcome.time_us for outcome in outcomes}
    library_us, gemm_us = times.get(LIBRARY), times.get(GEMM_ALONE)
    is_gpu = plan.device != "cpu"
    is_known = is_gpu and gemm_us and (link.gbps or not problem.wire_bytes)
    ideal_us = problem.ideal_us(gemm_us=gemm_us, link_gbps=link.gbps or math.inf) if is_known else None
    shape = job.shape
    records = []
    for outcome in outcomes:
        time_us = outcome.time_us
        is_variant = outcome.variant not in YARDSTICKS
        flops = 0 if outcome.variant == COMMUNICATION_ALONE else problem.flops
        records.append(
            Record(
                family=job.family,
                variant=outcome.variant,
                shape_set=shape.shape_set,
                m=shape.m,
                n=shape.n,
                k=shape.k,
                epilogue=",".join(job.epilogue),
                scales=job.scales,
                world_size=plan.world_size,
                dtype=plan.dtype,
                device=plan.device,
                status=outcome.status,
                correct=outcome.correct,
                error=outcome.error,
                time_us=time_us,
                latency_us=outcome.latency_us,
                host_us=outcome.host_us if is_gpu else None,
                library_us=library_us,
                ideal_us=ideal_us,
                tflops=flops / time_us / 1e6 if is_gpu and time_us and flops else None,
                speedup_vs_library=library_us / time_us if is_gpu and is_variant and library_us and time_us else None,
                overlap_efficiency=ideal_us / time_us if is_variant and ideal_us and time_us else None,
                reason=outcome.reason,
                config=outcome.config,
                rounds=job.rounds,
                burst=job.burst,
                seed=job.seed,
                link_gbps=link.gbps,
                link_source=link.source,
                timestamp=environment.timestamp(),
                **columns,
            )
        )
    return records


def select_families(text: str) -> list[str]:
    """Return the families that a command line names: "all", or names separated by commas; ValueError for others."""
    known = list(FAMILIES)
    if text == "all":
        return known
    names = _names(text)
    for name in names:
        if name not in known:
            raise ValueError(f"unknown family {name!r}; known families: all, {', '.join(known)}")
    return names


def select_variants(families: Sequence[str], text: str) -> dict[str, list[str]]:
    """Return the full names of the variants that a command line names, by family; ValueError for what no family has.

    A pattern's name is that of all its implementations.
    """
    if text == "all":
        return {family: [variant.name for variant in list_variants(family)] for family in families}
    chosen: dict[str, list[str]] = {family: [] for family in families}
    for name in _names(text):
        found = {family: [variant.name for variant in variants_named(family, name)] for family in families}
        if not any(found.values()):
            for family in families:
                if is_retired(family, name):
                    get_variant(family, name)  # says what to take
            known = known_names(*families)
            raise ValueError(f"unknown variant {name!r} of {', '.join(families)}; known variants: all, {known}")
        for family, names in found.items():
            chosen[family] += names
    return {family: list(dict.fromkeys(names)) for family, names in chosen.items() if names}


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


def _ended(job: Job, error: Exception) -> list[Outcome]:
    """Every variant's outcome where the ranks are no more: which of them is to blame, the error alone can say."""
    reason = f"the sweep ended in this problem: {in_a_line(error)}"
    return [Outcome(variant, status="error", reason=reason) for variant in job.variants]


def _heap_bytes(job: Job) -> int:
    fused = [name for name in job.variants if not get_variant(job.family, name).is_baseline]
    return len(fused) * (FAMILIES[job.family].heap_bytes(job.problem()) + _FLAGS_BYTES)
