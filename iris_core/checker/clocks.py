"""Who has heard of what: vector clocks of agents, and what releases leave behind for acquires to find.

An agent is anything that acts in an order of its own: a rank's host, a stream, a program of a grid. Component j of
agent i's clock is the last stamp of j that happens before what i does next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

# How far an access is synchronised: weak accesses race with any other; strong ones not with those in their scope.
WEAK, CTA, GPU, SYSTEM = range(4)

Clock = np.ndarray  # int32, a component an agent; shorter ones are as if filled with zeros


@dataclass(frozen=True)
class Agent:
    """Something that acts in an order of its own, on one rank."""

    id: int
    rank: int
    name: str


class Clocks:
    """The clocks of all agents.

    A program is many threads, and an atomic on a scalar is one thread's: it releases what that thread knows, which is
    what the whole program did before its last barrier. So a program has two clocks, and a barrier brings the second up
    to the first.
    """

    def __init__(self) -> None:
        self.agents: list[Agent] = []
        self.rank_of = np.zeros(0, dtype=np.int32)
        self._clocks = np.zeros((0, 0), dtype=np.int32)
        self._at_barrier = np.zeros((0, 0), dtype=np.int32)

    def add(self, rank: int, name: str) -> Agent:
        """Return a new agent."""
        agent = Agent(len(self.agents), rank, name)
        self.agents.append(agent)
        if agent.id >= len(self.rank_of):
            size = max(32, 2 * len(self.rank_of))
            grow = ((0, size - len(self.rank_of)),)
            self.rank_of = np.pad(self.rank_of, grow)
            self._clocks = np.pad(self._clocks, grow * 2)
            self._at_barrier = np.pad(self._at_barrier, grow * 2)
        self.rank_of[agent.id] = rank
        self._clocks[agent.id, agent.id] = 1  # zero is for what never happened
        return agent

    def of(self, agent: Agent) -> Clock:
        """Return an agent's clock, a view."""
        return self._clocks[agent.id]

    def stamp(self, agent: Agent, *, by_one_thread: bool = False) -> int:
        """Return the stamp of what the agent does now.

        An atomic is done `by_one_thread`, which always releases what it did itself: it counts as done at the barrier.
        """
        clocks = self._at_barrier if by_one_thread else self._clocks
        return int(clocks[agent.id, agent.id])

    def hear(self, agent: Agent, clock: Clock) -> None:
        """Order what led to `clock` before what the agent does next."""
        for clocks in (self._clocks, self._at_barrier):
            mine = clocks[agent.id, : len(clock)]
            np.maximum(mine, clock, out=mine)

    def tell(self, agent: Agent) -> Clock:
        """Return the agent's clock for another to hear; what it does from now on is later."""
        told = self._clocks[agent.id].copy()
        self._clocks[agent.id, agent.id] += 1
        return told

    def pass_barrier(self, agent: Agent) -> None:
        """All threads of a program meet: each knows what the others did."""
        self._at_barrier[agent.id] = self.tell(agent)

    def releasable(self, agent: Agent) -> Clock:
        """Return what one thread of a program can release."""
        return self._at_barrier[agent.id]


def joined(first: Clock | None, second: Clock) -> Clock:
    """Return a clock that has heard both."""
    if first is None:
        return second.copy()
    if len(first) < len(second):
        first, second = second, first
    result = first.copy()
    np.maximum(result[: len(second)], second, out=result[: len(second)])
    return result


@dataclass
class _Released:
    """What an acquire of one word finds: by agents of any rank at system scope, by agents of one rank in its GPU."""

    system: Clock | None = None
    by_rank: dict[int, Clock] = field(default_factory=dict)


class Releases:
    """What was released at each word; a read-modify-write goes on with what others released there before."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._at: dict[int, _Released] = {}

    def release(self, agent: Agent, address: int, scope: int) -> None:
        """Leave at a word what the agent can release."""
        if scope < GPU:
            return
        released = self._at.setdefault(address, _Released())
        clock = self._clocks.releasable(agent)
        released.by_rank[agent.rank] = joined(released.by_rank.get(agent.rank), clock)
        if scope == SYSTEM:
            released.system = joined(released.system, clock)

    def acquire(self, agent: Agent, address: int, scope: int) -> None:
        """Take what was released at a word, as far as both scopes reach."""
        released = self._at.get(address)
        if released is None or scope < GPU:
            return
        if agent.rank in released.by_rank:
            self._clocks.hear(agent, released.by_rank[agent.rank])
        if scope == SYSTEM and released.system is not None:
            self._clocks.hear(agent, released.system)

    def overwritten(self, addresses: np.ndarray) -> None:
        """Forget what was released at words that begin at these bytes: a plain store took their place."""
        words = np.fromiter(self._at, dtype=np.int64, count=len(self._at))
        for word in words[np.isin(words, addresses)].tolist():
            del self._at[word]
