"""The predicted time of a schedule over several hosts, and of the library's collectives over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from iris_core.rendezvous.topology import Topology
from overlap_taxonomy import (
    HostLink,
    Machine,
    Step,
    as_warm_as,
    list_variants,
    over_hosts,
    predict_us,
    schedule_us,
)

from ..choice.ranking import work_of
from ..problem import Problem
from .call import Hierarchy, HostStep

CHUNKS = (1, 2, 4, 8)  # that are tried
_NEARLY = 1.02  # times the fastest
HOST_US = 40.0  # of the host, to queue a transfer or a product: what a call of few rows takes at least


def inside_us(machine: Machine, family: str, problem: Problem, names: Sequence[str]) -> float:
    """Return the predicted time of the fastest variant of these inside a host, in µs."""
    work = work_of(family, problem)
    times = [us for name in names if (us := predict_us(machine, name, work)) is not None]
    if not times:
        raise ValueError(f"{family} has no variant of {', '.join(names)} that the cost model knows")
    return min(times)


def predict_over_hosts_us(
    machine: Machine,
    link: HostLink,
    hierarchy: Hierarchy,
    problem: Problem,
    topology: Topology,
    chunks: int,
    names: Sequence[str] = (),
    host_us: float = HOST_US,
) -> float:
    """Return the predicted time of a call over several hosts, in µs.

    Args:
        machine: of a host's ranks, with the SMs that they have beside the transfers.
        link: to the other hosts.
        hierarchy, problem, topology, chunks: what is done.
        names: variants that operators inside a host may take; none for all that are modelled.
        host_us: what the host takes to queue a transfer or a product; 0 in a CUDA graph.
    """
    family = hierarchy.family
    names = names or [one.name for one in list_variants(family) if one.predict is not None]
    steps = hierarchy.steps(problem, topology, chunks)
    products = [step.inside for step in steps if step.inside is not None]
    alone_us = {one: inside_us(machine, family, one, names) for one in set(products)}
    warm = as_warm_as(machine, sum(alone_us[one] for one in products))
    products_us = {one: inside_us(warm, family, one, names) for one in alone_us}
    timed = [_timed(warm, step, products_us) for step in steps]
    queued = sum((step.inside is not None) + bool(step.arrives_bytes or step.leaves_bytes) for step in steps)
    return max(schedule_us(link, timed), queued * host_us)


def _timed(machine: Machine, step: HostStep, products_us: Mapping[Problem, float]) -> Step:
    us = 0.0 if step.inside is None else products_us[step.inside]
    if step.moved_bytes:
        us += step.moved_bytes / machine.memory_gbps / 1e3 + machine.launch_us
    if step.gathered_bytes:
        us += step.gathered_bytes / machine.link_gbps / 1e3 + machine.handshake_us
    return Step(us, step.arrives_bytes, step.leaves_bytes, step.is_last)


def best_chunks(
    machine: Machine,
    link: HostLink,
    hierarchy: Hierarchy,
    problem: Problem,
    topology: Topology,
    names: Sequence[str] = (),
    host_us: float = HOST_US,
) -> tuple[int, float]:
    """Return the fewest chunks that are predicted to be about fastest, and the time in µs; arguments as above."""
    times = {
        chunks: predict_over_hosts_us(machine, link, hierarchy, problem, topology, chunks, names, host_us)
        for chunks in CHUNKS
    }
    fastest_us = min(times.values())
    fewest = next(chunks for chunks in CHUNKS if times[chunks] <= _NEARLY * fastest_us)
    return fewest, times[fewest]


def predict_flat_us(
    machine: Machine, link: HostLink, family: str, problem: Problem, topology: Topology, baseline: str
) -> float:
    """Return the predicted time of a library's variant over all ranks of all hosts, in µs."""
    flat = over_hosts(replace(machine, world_size=topology.ranks_per_host), topology.num_hosts, link)
    return inside_us(flat, family, problem, [baseline])
