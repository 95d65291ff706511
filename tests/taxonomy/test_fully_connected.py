"""Peers behind links of their own: what goes to all of them has the rate of all links, what goes to one that of one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlap_taxonomy import MACHINES, Work, list_variants, machine_for, predict_us
from overlap_taxonomy.transfer_cost import copies_us, copy_us, push_us

MI300X, H200 = MACHINES["mi300xx8"], MACHINES["h200x8"]
FAMILIES = ["gemm_all_scatter", "all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce"]
WORKS = [Work(family, 8192, 4096, 12288, 8) for family in FAMILIES]
SIZE, PEERS = 25 << 20, 7


def test_copies_over_links_of_their_own_take_no_longer_than_the_bytes_over_all_links() -> None:
    for copies in (PEERS, 2 * PEERS):
        us = copies_us(MI300X, SIZE, 512, copies=copies, peers=PEERS)
        in_a_row = copies // PEERS
        assert us <= copies * SIZE / MI300X.link_gbps / 1e3 + in_a_row * MI300X.engine_us
        assert us == in_a_row * copy_us(MI300X, SIZE, 512), "one after the other to the same peer"


def test_copies_through_one_port_are_made_one_after_the_other() -> None:
    assert [machine.name for machine in MACHINES.values() if machine.is_fully_connected] == [MI300X.name]
    for copies in (PEERS, 2 * PEERS):
        assert copies_us(H200, SIZE, 512, copies=copies, peers=PEERS) == copies * copy_us(H200, SIZE, 512)


def test_copies_of_a_rank_by_itself_take_no_time() -> None:
    for machine in (MI300X, H200):
        assert copies_us(machine, 0, 512, copies=0, peers=0) == 0


@pytest.mark.parametrize("work", WORKS, ids=FAMILIES)
def test_no_large_product_waits_for_one_link_after_the_other(work: Work) -> None:
    """All but stream-K, which is for few rows, whose programs send to one owner at a time."""
    library = predict_us(MI300X, "library", work)
    shared = replace(MI300X, is_fully_connected=False)
    assert library is not None
    slower = set()
    for variant in list_variants(work.family):
        us, by_one = (predict_us(machine, variant.name, work) for machine in (MI300X, shared))
        if us is None or by_one is None or not variant.has_kernels or variant.name.endswith("stream_k"):
            continue
        assert us < 1.1 * library, variant.name
        if by_one > 1.5 * us:
            slower.add(variant.name)
    one_at_a_time = {
        "gemm_all_scatter": {"copy_engine:portable"},
        "all_gather_gemm": {
            *("copy_engine:portable", "copy_engine:library"),
            *("producer_consumer:portable", "workgroup_specialized:portable"),
        },
        "gemm_reduce_scatter": {
            *("copy_engine:portable", "producer_consumer:portable"),
            *("workgroup_specialized:portable", "fused_sequential:portable"),
        },
        "gemm_all_reduce": {"workgroup_specialized:portable"},
    }
    assert slower == one_at_a_time[work.family]


def test_a_shard_is_there_when_all_are_where_all_come_at_the_same_time() -> None:
    work, variant = WORKS[1], "copy_engine:portable"
    us = predict_us(MI300X, variant, work)
    arrival = copy_us(MI300X, 1024 * 12288 * 2, 512)
    at_once = replace(MI300X, engine_gbps=1e9, engine_us=0.0)
    rest = predict_us(at_once, variant, work)
    assert us is not None
    assert rest is not None
    assert arrival < us < arrival + rest


def test_fewer_ranks_have_fewer_links() -> None:
    for world_size in (2, 4):
        machine = machine_for("AMD Instinct MI300X", world_size)
        assert machine is not None
        assert machine.world_size == world_size
        assert machine.link_gbps == pytest.approx(MI300X.link_gbps * (world_size - 1) / 7)
        to_all = push_us(machine, (world_size - 1) * SIZE, narrow=False)
        assert to_all == pytest.approx(push_us(MI300X, PEERS * SIZE, narrow=False))
        library = machine.collective_gbps, machine.small_collective_gbps, machine.all_reduce_gbps
        assert max(library) < machine.link_gbps
    for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        three, four = (machine_for(name, world_size) for world_size in (3, 4))
        assert three is not None
        assert four is not None
        assert three.link_gbps == four.link_gbps, "through a switch a rank has all its links in any number"
