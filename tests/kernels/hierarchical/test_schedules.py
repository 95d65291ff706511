"""Schedules over hosts: what their steps multiply and move, and which number of chunks is predicted to be fastest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import make_problem

from iris_core.rendezvous.topology import Topology
from iris_kernels.common.hierarchical.call import cut, hierarchy_of, length, padded
from iris_kernels.common.hierarchical.choosing import Schedules
from iris_kernels.common.hierarchical.prediction import best_chunks, predict_flat_us, predict_over_hosts_us
from overlap_taxonomy import HOST_LINKS, MACHINES

FAMILIES = ("all_gather_gemm", "gemm_reduce_scatter", "gemm_all_reduce", "gemm_all_scatter")
HOST, LINK = MACHINES["h200x8"], HOST_LINKS["ndr"]
TOPOLOGIES = [Topology(2, 1), Topology(2, 8), Topology(3, 2)]


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_is_multiplied_once_and_crosses_once(family: str, topology: Topology, chunks: int) -> None:
    m, n, k = 384 * topology.world_size, 768 * topology.world_size, 96 * topology.world_size
    problem = make_problem(family, m, n, k, topology.world_size, torch.bfloat16)
    steps = hierarchy_of(family).steps(problem, topology, chunks)
    assert sum(step.inside.flops for step in steps if step.inside) == problem.flops
    crossed = sum(step.arrives_bytes + step.leaves_bytes for step in steps)
    # A rank sends to each other host what it would send to each peer, or receive from it, of one.
    assert crossed == problem.wire_bytes // (topology.world_size - 1) * (topology.num_hosts - 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_sizes_are_padded_to_full_shards(family: str) -> None:
    topology = Topology(3, 2)
    problem = make_problem(family, 37, 41, 43, topology.world_size, torch.bfloat16)
    for inside in hierarchy_of(family).inside(problem, topology, 2):
        assert inside.world_size == 2
        assert {inside.a_shape(rank) for rank in range(2)} == {inside.a_shape(0)}
        assert {inside.b_shape(rank) for rank in range(2)} == {inside.b_shape(0)}


@pytest.mark.parametrize(("family", "k", "n"), [("all_gather_gemm", 8192, 28672), ("gemm_reduce_scatter", 28672, 8192)])
def test_two_hosts_beat_the_librarys_rings_where_the_gemm_is_long(family: str, k: int, n: int) -> None:
    topology = Topology(2, 8)
    problem = make_problem(family, 8192, n, k, topology.world_size, torch.bfloat16)
    chunks, us = best_chunks(HOST, LINK, hierarchy_of(family), problem, topology)
    flat_us = predict_flat_us(HOST, LINK, family, problem, topology, "library")
    assert us < flat_us / 1.2
    others = [
        predict_over_hosts_us(HOST, LINK, hierarchy_of(family), problem, topology, number) for number in (1, 2, 4, 8)
    ]
    assert us <= 1.02 * min(others)
    slow = replace(LINK, gbps=LINK.gbps / 4)
    assert predict_over_hosts_us(HOST, slow, hierarchy_of(family), problem, topology, chunks) > us


def test_few_rows_are_the_librarys_by_what_the_host_takes() -> None:
    topology = Topology(2, 8)
    problem = make_problem("gemm_all_reduce", 16, 8192, 8192, topology.world_size, torch.bfloat16)
    _, us = best_chunks(HOST, LINK, hierarchy_of("gemm_all_reduce"), problem, topology)
    assert us > predict_flat_us(HOST, LINK, "gemm_all_reduce", problem, topology, "library")


def test_a_table_is_looked_up_by_the_next_number_of_rows() -> None:
    schedules = Schedules([1, 64, 4096], [1, 2, 4], [True, True, False], "predicted")
    assert [schedules.index(m) for m in (1, 2, 64, 65, 4096)] == [0, 1, 1, 2, 2]


def test_a_family_without_a_schedule_is_named() -> None:
    with pytest.raises(ValueError, match="nothing has no schedule over several hosts; families that have: all_gather"):
        hierarchy_of("nothing")


@pytest.mark.parametrize(
    ("size", "chunks", "multiple"), [(10, 3, 1), (10, 1, 128), (300, 2, 128), (1, 8, 1), (64, 8, 1)]
)
def test_slices_cover_a_size(size: int, chunks: int, multiple: int) -> None:
    slices = cut(size, chunks, multiple)
    assert [index for one in slices for index in range(size)[one]] == list(range(size))
    assert len(slices) <= chunks
    assert all(length(one) % multiple == 0 for one in slices[:-1])


def test_what_is_as_large_already_is_not_copied() -> None:
    matrix = torch.ones(3, 4)
    assert padded(matrix, 3, 4) is matrix
    larger = padded(matrix, 5, 6)
    assert larger.shape == (5, 6)
    assert larger.sum() == matrix.sum()
    assert torch.equal(larger[:3, :4], matrix)


@pytest.mark.parametrize(("is_b", "strides"), [(True, (1, 7)), (False, (2, 1))])
def test_a_single_column_is_by_columns_in_b_alone(is_b: bool, strides: tuple[int, int]) -> None:
    """As both have the same strides, and tensor cores take fp8 of A by rows and of B by columns."""
    column = torch.ones(7, 1)
    assert column.stride() == (1, 1)
    assert padded(column, 7, 2, is_b=is_b).stride() == strides
