"""Topology: which ranks live on which host, and what hosts make none."""

from __future__ import annotations

import pytest

from iris_core.rendezvous.topology import Topology


def test_ranks_have_a_host_a_place_and_a_rail() -> None:
    topology = Topology.of(["a", "a", "b", "b", "c", "c"])
    assert topology == Topology(3, 2)
    assert topology.world_size == 6
    assert [(topology.host_of(rank), topology.place_of(rank)) for rank in (0, 3, 4)] == [(0, 0), (1, 1), (2, 0)]
    assert list(topology.rail_of(3)) == [1, 3, 5]
    assert list(topology.ranks_of(1)) == [2, 3]
    for rank in range(6):
        assert rank in topology.rail_of(rank)
        assert rank in topology.ranks_of(topology.host_of(rank))


def test_whole_hosts_are_named_as_hosts() -> None:
    topology = Topology(2, 2)
    assert topology.named([3, 2]) == "host 1 (ranks 2, 3)"
    assert topology.named([1]) == "rank 1 of host 0"
    assert topology.named([0, 2, 3]) == "rank 0 of host 0, host 1 (ranks 2, 3)"
    assert topology.named([]) == ""


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (["a", "a", "b"], "same number of ranks.*host 0: ranks 0, 1; host 1: rank 2"),
        (["a", "b", "a", "b"], "consecutive.*host 0: ranks 0, 2; host 1: ranks 1, 3"),
    ],
)
def test_uneven_and_interleaved_hosts_are_refused(hosts: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Topology.of(hosts)
