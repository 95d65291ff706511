"""Several hosts: the link between them, and the predicted time of a schedule that sends chunks over it.

Between hosts a rank exchanges chunks with one other rank at a time, by a library's transfers, while its own host
multiplies. So there are two lanes: the work of the host's ranks, and the link. Chunks pass the link one after the
other; a step of the work that needs some waits for them, and those that a step gives queue behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .gemm_cost import clock
from .machine import Machine


@dataclass(frozen=True)
class HostLink:
    """The link of a rank to the other hosts.

    Args:
        name: what it is.
        gbps: what a rank exchanges with one of another host, in 10⁹ bytes a second each way.
        us: of a transfer, beside its bytes.
        collective_gbps: what the library's collectives over all ranks reach, as `Machine.collective_gbps`; 0 for as
            much as the links of a host's ranks give together: the library's rings pass each of them once.
    """

    name: str
    gbps: float
    us: float
    collective_gbps: float = 0.0


# Of data sheets: 400 Gb/s a GPU, of which NCCL reaches nine tenths; a small message takes some 10 µs.
NDR = HostLink("400 Gb/s InfiniBand a GPU", gbps=45.0, us=10.0)
HOST_LINKS = {"ndr": NDR}


@dataclass(frozen=True)
class Step:
    """A step of a schedule, the same on all hosts.

    Args:
        us: of the work.
        arrives_bytes: that a rank receives, sent as the call begins, before this step.
        leaves_bytes: that it sends behind this step.
        is_last: whether the step waits for all that was sent.
    """

    us: float
    arrives_bytes: int = 0
    leaves_bytes: int = 0
    is_last: bool = False


def schedule_us(link: HostLink, steps: Sequence[Step]) -> float:
    """Return the time of a schedule, in µs.

    Args:
        link: between hosts.
        steps: what is computed, and what crosses the link before and after it, in order.
    """
    work_us = link_us = 0.0
    for step in steps:
        if step.arrives_bytes:
            link_us += transfer_us(link, step.arrives_bytes)
        if step.arrives_bytes or step.is_last:
            work_us = max(work_us, link_us)
        work_us += step.us
        if step.leaves_bytes:
            link_us = max(link_us, work_us) + transfer_us(link, step.leaves_bytes)
    return work_us


def as_warm_as(machine: Machine, us: float) -> Machine:
    """Return the machine whose calls, of any length, find the clock as calls of this length leave it.

    The products of a schedule follow one another: a short one is not faster for being short.

    Args:
        machine: as calls of other lengths find it.
        us: how long a call of that length takes, in µs.
    """
    share = clock(machine, us)
    return replace(machine, boost_tflops=machine.boost_tflops * share, hot_share=1.0)


def transfer_us(link: HostLink, size: int) -> float:
    """Return the time of one transfer of so many bytes."""
    return size / link.gbps / 1e3 + link.us


def over_hosts(machine: Machine, num_hosts: int, link: HostLink) -> Machine:
    """Return the machine that the library's collectives see, whose ranks are those of several hosts.

    Args:
        machine: of a host's ranks.
        num_hosts: how many hosts there are.
        link: of each rank.
    """
    rate = link.collective_gbps or machine.world_size * link.gbps
    limited: Any = {
        name: min(getattr(machine, name), rate) if machine.world_size > 1 else rate
        for name in ("collective_gbps", "small_collective_gbps", "all_reduce_gbps")
    }
    return replace(machine, world_size=num_hosts * machine.world_size, is_measured=False, **limited)
