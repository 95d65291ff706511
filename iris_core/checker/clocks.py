"""Vector clocks of agents, and what releases leave behind for acquires to find.

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
    """Something that acts in an order of its own, on one rank.

    Args:
        id: its component of the clocks.
        rank, name: for reports.
        first_thread: of a program; None for an agent that is one thread.
    """

    id: int
    rank: int
    name: str
    first_thread: Agent | None = None


class Clocks:
    """The clocks of all agents.

    A program is many threads. All of them access blocks, and load scalars; the first one stores these, as Triton
    compiles it, and its atomic on a scalar releases what it knows: what all threads did before their last barrier, and
    what it did itself. So a program is two agents, and a barrier brings each up to the other.
    """

    def __init__(self) -> None:
        self.agents: list[Agent] = []
        self.rank_of = np.zeros(0, dtype=np.int32)
        self.program_of = np.zeros(0, dtype=np.int32)  # of a first thread, its program; of others, themselves
        self._clocks = np.zeros((0, 0), dtype=np.int32)
        self._now = np.zeros(0, dtype=np.int32)  # each agent's next stamp; zero is for what never happened
        self._converged = np.zeros(0, dtype=np.int32)  # its last stamp before its program's threads last converged

    def add(self, rank: int, name: str) -> Agent:
        """Return a new agent that is one thread."""
        return self._add(Agent(len(self.agents), rank, name))

    def add_program(self, rank: int, name: str) -> Agent:
        """Return a new agent that is many threads."""
        first = self.add(rank, name)
        program = self._add(Agent(len(self.agents), rank, name, first))
        self.program_of[first.id] = program.id
        return program

    def _add(self, agent: Agent) -> Agent:
        self.agents.append(agent)
        if agent.id >= len(self.rank_of):
            size = max(32, 2 * len(self.rank_of))
            grow = ((0, size - len(self.rank_of)),)
            for name in ("rank_of", "program_of", "_now", "_converged"):
                setattr(self, name, np.pad(getattr(self, name), grow))
            self._clocks = np.pad(self._clocks, grow * 2)
        self.rank_of[agent.id], self.program_of[agent.id] = agent.rank, agent.id
        self._now[agent.id] = 1
        return agent

    def stamp(self, agent: Agent) -> int:
        """Return the stamp of what the agent does now."""
        return int(self._now[agent.id])

    def known(self, agent: Agent) -> Clock:
        """Return what happens before what the agent does next; of its own program, what was before they converged."""
        known = self._clocks[agent.id].copy()
        program = self.agents[self.program_of[agent.id]]
        if program.first_thread is None:
            known[agent.id] = self._now[agent.id]
        else:
            for part in (program.id, program.first_thread.id):
                known[part] = self._converged[part]
        return known

    def join(self, agent: Agent, clock: Clock) -> None:
        """Order what led to `clock` before what the agent does next."""
        for part in parts(agent):
            mine = self._clocks[part.id, : len(clock)]
            np.maximum(mine, clock, out=mine)

    def snapshot(self, agent: Agent) -> Clock:
        """Return the agent's clock for another to join; what it does from now on is later."""
        both = parts(agent)
        clock = self._clocks[[part.id for part in both]].max(axis=0)
        for part in both:
            clock[part.id] = self._now[part.id]
            self._now[part.id] += 1
        return clock

    def release(self, agent: Agent) -> Clock:
        """Return what one thread can release; what it does from now on is later."""
        return self.snapshot(agent.first_thread or agent)

    def pass_barrier(self, program: Agent) -> None:
        """Pass a barrier of all threads of a program: each is after what the others did before."""
        self.converge(program)
        self.join(program, self.snapshot(program))

    def converge(self, program: Agent) -> None:
        """Note that all threads of a program have come this far, which orders them among themselves alone."""
        for part in parts(program):
            self._converged[part.id] = self._now[part.id]
            self._now[part.id] += 1


def parts(agent: Agent) -> list[Agent]:
    """Return an agent, and a program's first thread."""
    return [agent] if agent.first_thread is None else [agent, agent.first_thread]


def joined(first: Clock | None, second: Clock) -> Clock:
    """Return the join of two clocks."""
    if first is None:
        return second.copy()
    if len(first) < len(second):
        first, second = second, first
    result = first.copy()
    np.maximum(result[: len(second)], second, out=result[: len(second)])
    return result


@dataclass(frozen=True)
class _Released:
    """What an acquire of a word finds: by agents of any rank at system scope, by agents of one rank in its GPU.

    Args:
        value: of the word.
        system, by_rank: what was released, with all that a read-modify-write went on with.
    """

    value: int
    system: Clock | None = None
    by_rank: dict[int, Clock] = field(default_factory=dict)


class Releases:
    """What was released at each word, value by value; a read-modify-write goes on with what others released there."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._at: dict[int, list[_Released]] = {}  # by word, the oldest first

    def update(self, agent: Agent, address: int, value: int, scope: int, *, releases: bool) -> None:
        """Note that a read-modify-write has left a value at a word, and with it, if it `releases`, what it can."""
        at = self._at.get(address)
        releases = releases and scope >= GPU
        if at is None and not releases:
            return
        system, by_rank = (at[-1].system, at[-1].by_rank) if at else (None, {})
        if releases:
            clock = self._clocks.release(agent)
            by_rank = {**by_rank, agent.rank: joined(by_rank.get(agent.rank), clock)}
            system = joined(system, clock) if scope == SYSTEM else system
        self._at.setdefault(address, []).append(_Released(value, system, by_rank))

    def acquire(self, agent: Agent, address: int, scope: int, awaited: int | None = None) -> None:
        """Take what was released at a word, as far as both scopes reach.

        With `awaited`, the least value that ends the agent's wait, only what came with the first such value: the wait
        might have ended there, and what others released since it need not have seen.
        """
        at = self._at.get(address)
        if at is None or scope < GPU:
            return
        released = at[-1]
        if awaited is not None:
            for before in reversed(at):
                if before.value < awaited:
                    break
                released = before
        if agent.rank in released.by_rank:
            self._clocks.join(agent, released.by_rank[agent.rank])
        if scope == SYSTEM and released.system is not None:
            self._clocks.join(agent, released.system)

    def overwritten(self, addresses: np.ndarray) -> None:
        """Forget what was released at words that begin at these bytes: a plain store took their place."""
        words = np.fromiter(self._at, dtype=np.int64, count=len(self._at))
        for word in words[np.isin(words, addresses)].tolist():
            del self._at[word]
