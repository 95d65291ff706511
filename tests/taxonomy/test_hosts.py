"""The link between hosts in the cost model: two lanes, of work and of chunks on the link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlap_taxonomy import HOST_LINKS, MACHINES, HostLink, Step, Work, as_warm_as, over_hosts, schedule_us
from overlap_taxonomy.library_cost import library_gemm

LINK = HostLink("a link", gbps=1.0, us=0.0)  # 1000 bytes a µs


@pytest.mark.parametrize(
    ("steps", "us"),
    [
        ([Step(10.0), Step(10.0, arrives_bytes=5_000)], 20.0),  # hidden behind the first step
        ([Step(10.0), Step(10.0, arrives_bytes=15_000)], 25.0),  # 5 µs late
        ([Step(1.0), Step(1.0, arrives_bytes=2_000), Step(1.0, arrives_bytes=2_000)], 5.0),  # one after the other
        ([Step(10.0, leaves_bytes=5_000), Step(10.0), Step(1.0, is_last=True)], 21.0),
        ([Step(10.0, leaves_bytes=15_000), Step(10.0), Step(1.0, is_last=True)], 26.0),
        ([Step(1.0, leaves_bytes=5_000), Step(1.0, leaves_bytes=5_000), Step(0.0, is_last=True)], 11.0),
    ],
)
def test_work_waits_for_what_it_needs_alone(steps: list[Step], us: float) -> None:
    assert schedule_us(LINK, steps) == pytest.approx(us)


def test_each_transfer_has_a_latency() -> None:
    late = replace(LINK, us=3.0)
    assert schedule_us(late, [Step(1.0), Step(1.0, arrives_bytes=2_000), Step(1.0, arrives_bytes=2_000)]) == 11.0


def test_the_librarys_rings_cross_each_link_of_a_host_once() -> None:
    host, link = MACHINES["h200x8"], HOST_LINKS["ndr"]
    flat = over_hosts(host, 4, link)
    assert flat.world_size == 32
    assert flat.collective_gbps == min(host.collective_gbps, 8 * link.gbps)
    assert not flat.is_measured
    assert over_hosts(host, 4, replace(link, collective_gbps=7.0)).all_reduce_gbps == 7.0
    alone = over_hosts(replace(host, world_size=1), 2, link)
    assert alone.collective_gbps == link.gbps


def test_a_short_product_is_no_faster_for_being_short() -> None:
    host = MACHINES["h200x8"]
    warm = as_warm_as(host, 1e6)
    long, short = (Work("gemm_all_reduce", m, 8192, 8192, 1) for m in (1 << 17, 1024))
    assert library_gemm(warm, long).us == pytest.approx(library_gemm(host, long).us, rel=0.02)
    assert library_gemm(warm, short).us > 1.05 * library_gemm(host, short).us
