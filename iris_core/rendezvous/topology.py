"""Topology: which ranks live on which host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import ranks_named


@dataclass(frozen=True)
class Topology:
    """Hosts × ranks: rank `host * ranks_per_host + place` is number `place` on that host.

    Args:
        num_hosts: hosts that the ranks live on.
        ranks_per_host: ranks on each of them.
    """

    num_hosts: int
    ranks_per_host: int

    @classmethod
    def of(cls, hosts: Sequence[str]) -> Topology:
        """Return the topology of ranks whose hosts these are, by rank.

        Raises:
            ValueError: the hosts have different numbers of ranks, or a host's ranks are not consecutive.
        """
        names = list(dict.fromkeys(hosts))
        ranks_of = [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
        listed = "; ".join(f"host {number}: {ranks_named(ranks)}" for number, ranks in enumerate(ranks_of))
        if len({len(ranks) for ranks in ranks_of}) > 1:
            raise ValueError(f"every host must have the same number of ranks; these have {listed}")
        if any(ranks != list(range(ranks[0], ranks[0] + len(ranks))) for ranks in ranks_of):
            raise ValueError(f"the ranks of a host must be consecutive, as torchrun numbers them; these are {listed}")
        return cls(len(names), len(ranks_of[0]))

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.num_hosts * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        """Return the number of the host that a rank lives on."""
        return rank // self.ranks_per_host

    def place_of(self, rank: int) -> int:
        """Return which of its host's ranks a rank is."""
        return rank % self.ranks_per_host

    def ranks_of(self, host: int) -> range:
        """Return a host's ranks."""
        return range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host)

    def rail_of(self, rank: int) -> range:
        """Return the ranks at a rank's place on every host, by host."""
        return range(self.place_of(rank), self.world_size, self.ranks_per_host)

    def named(self, ranks: Iterable[int]) -> str:
        """Return "host 1 (ranks 2, 3)" where these are all of a host's ranks, else "rank 3 of host 1", for errors."""
        by_host: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            by_host.setdefault(self.host_of(rank), []).append(rank)
        return ", ".join(
            f"host {host} ({ranks_named(there)})"
            if len(there) == self.ranks_per_host
            else f"{ranks_named(there)} of host {host}"
            for host, there in by_host.items()
        )
