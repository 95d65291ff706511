"""What one rank does: move bytes in every way between every two ranks, check what arrived, time it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from iris_core import Context
from iris_kernels.common.calibration import timing
from iris_kernels.common.calibration.links import BLOCK, MOVES, move_kernel, round_trip_kernel

from ...measure.job import context
from .paths import paths

# Between two ranks, while all others wait; then all ranks with all their peers at once; then nothing but flags.
KINDS = {
    "store": "kernels read their own memory and store to a peer's",
    "load": "kernels load a peer's memory and store to their own",
    "atomic_add": "kernels add to a peer's memory, 32 bits at a time, relaxed",
    "copy": "a copy engine copies to a peer's memory",
    "all_store": "as store, to all peers in turn, all ranks at once",
    "all_load": "as load, from all peers in turn, all ranks at once",
    "all_copy": "as copy, to all peers in turn, all ranks at once",
    "device_barrier": "a barrier of all ranks' devices",
    "host_barrier": "a barrier of all ranks' hosts, after their devices' work",
    "round_trip": "a signal there and one back, both waited for by kernels",
}
ROUND_TRIPS = 20  # in a call
HOST_BARRIERS = 20
UNIT = 16  # elements: of a multiple of it kernels move 16 bytes at a time
PAIRWISE = (*MOVES, "copy")


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        elements: of 4 bytes, a multiple of UNIT, to or from each peer.
        with_flags: whether barriers and signals, which move nothing, are measured beside them.
    """

    elements: int
    with_flags: bool
    rounds: int
    burst: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What came of one measurement; the names are those of `LinkRecord`."""

    kind: str
    from_rank: int | None
    to_rank: int | None
    bytes: int
    time_us: float | None
    status: str
    path: str = ""


def measure(rank: int, world_size: int, plan: Plan) -> list[Outcome]:
    """Return all measurements, the same on every rank; collective.

    Raises:
        TimeoutError: a rank timed out in a wait for another.
    """
    run = _Run(context(), plan)
    moves: list[tuple[str, int | None, int | None]] = [
        (kind, first, second) for kind in PAIRWISE for first, second in itertools.permutations(range(world_size), 2)
    ]
    if world_size > 1:
        moves += [("all_store", None, None), ("all_load", None, None), ("all_copy", None, None)]
    wrong = {move for move in moves if not run.is_right(*move)}
    timed = [move for move in moves if move not in wrong]
    if plan.with_flags:
        timed += [("device_barrier", None, None), *(("round_trip", 0, peer) for peer in range(1, world_size))]
    subjects = [timing.Subject(" ".join(map(str, move)), run.call_of(*move)) for move in timed]
    nothing = (run.sent, run.sent)
    timing.measure(run.ctx, subjects, [nothing], rounds=plan.rounds, burst=plan.burst)
    medians = [timing.slowest_median(timing.steady([subject.samples], "time_us")[0]) for subject in subjects]
    by_rank = run.ctx.control_plane.all_gather(medians)
    outcomes = []
    for index, (kind, first, second) in enumerate(timed):
        of_ranks = [medians[index] for medians in by_rank]
        time_us = max(of_ranks) if first is None else of_ranks[first]
        outcomes.append(run.outcome(kind, first, second, time_us / (ROUND_TRIPS if kind == "round_trip" else 1)))
    outcomes += [run.outcome(*move, None) for move in moves if move in wrong]
    if plan.with_flags:
        outcomes.append(run.outcome("host_barrier", None, None, run.host_barrier_us()))
    run.close()
    found = paths(run.ctx)
    pairs = [(index, one.from_rank, one.to_rank) for index, one in enumerate(outcomes)]
    for index, first, second in pairs:
        if first is not None and second is not None:
            outcomes[index] = replace(outcomes[index], path=found[first][second])
    return outcomes


class _Run:
    """The buffers of one rank, and what is done with them."""

    def __init__(self, ctx: Context, plan: Plan) -> None:
        self.ctx, self.plan = ctx, plan
        self.rank, self.world_size = ctx.get_rank(), ctx.get_num_ranks()
        self.received = ctx.zeros((self.world_size, plan.elements), dtype=torch.int32)  # a row a sender
        self.sent = ctx.zeros((plan.elements,), dtype=torch.int32)
        self.landing = torch.zeros(self.world_size, plan.elements, dtype=torch.int32, device=ctx.get_device())
        self.flags = ctx.zeros((self.world_size,), dtype=torch.int64)
        ctx.watchdog.watch(self.flags, lambda word, _: f"the round trip of ranks 0 and {word}")
        self.trips = [0] * self.world_size
        self.stream = ctx.make_stream()
        self.sent.copy_(self._drawn(self.rank))
        ctx.barrier()

    def _drawn(self, rank: int) -> torch.Tensor:
        """Return what a rank sends."""
        device = self.ctx.get_device()
        generator = torch.Generator(device).manual_seed(self.plan.seed * 1000 + rank)
        size = (self.plan.elements,)
        return torch.randint(-(2**30), 2**30, size, generator=generator, dtype=torch.int32, device=device)

    def call_of(self, kind: str, first: int | None, second: int | None) -> Callable[..., object]:
        """Return what this rank calls for a measurement: nothing, if it is others'."""
        peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        if kind == "device_barrier":
            return lambda *_: self.ctx.device_barrier()
        if kind == "round_trip":
            assert second is not None
            return (lambda *_: self._round_trips(second)) if self.rank in (first, second) else (lambda *_: None)
        if first is None:
            return lambda *_: self._move(kind.removeprefix("all_"), peers)
        if self.rank != first:
            return lambda *_: None
        return lambda *_: self._move(kind, [second])

    def _move(self, kind: str, peers: Sequence[Any]) -> None:
        if kind == "copy":
            self.stream.wait_for_current()
            row = BLOCK if self.plan.elements % BLOCK == 0 else self.plan.elements
            for peer in peers:
                there = self.ctx.peer_view(self.received)[peer, self.rank]
                self.stream.copy_2d(there.view(-1, row), self.sent.view(-1, row))
            self.stream.current_waits()
            return
        for peer in peers:
            own, at_peer = (self.landing[peer], self.sent) if kind == "load" else (self.sent, self.received[self.rank])
            move_kernel[(self.ctx.get_cu_count(),)](
                own,
                at_peer,
                self.plan.elements,
                self.rank,
                peer,
                self.ctx.get_heap_bases(),
                KIND=MOVES.index(kind),
                BLOCK=BLOCK,
                PEERS=1,
                num_warps=16,
            )

    def _round_trips(self, with_rank: int) -> None:
        peer = with_rank if self.rank == 0 else 0
        first = self.trips[with_rank] + 1
        self.trips[with_rank] += ROUND_TRIPS
        words = (self.ctx.get_heap_bases(), self.ctx.get_watchdog())
        flag = self.flags[with_rank:]
        round_trip_kernel[(1,)](flag, first, ROUND_TRIPS, int(self.rank == 0), self.rank, peer, *words, num_warps=1)

    def is_right(self, kind: str, first: int | None, second: int | None) -> bool:
        """Do it once; return whether what arrived is what was sent, everywhere."""
        self.received.fill_(0 if kind == "atomic_add" else -1)
        self.landing.fill_(-1)
        self.ctx.barrier()
        self.call_of(kind, first, second)()
        self.ctx.barrier()
        senders = set(range(self.world_size)) - {self.rank}
        is_load = kind.endswith("load")
        if first is not None and second is not None:
            receiver, sender = (first, second) if is_load else (second, first)
            senders = {sender} if self.rank == receiver else set()
        arrived = self.landing if is_load else self.received
        right = all(torch.equal(arrived[sender], self._drawn(sender)) for sender in senders)
        return all(self.ctx.control_plane.all_gather(right))

    def host_barrier_us(self) -> float:
        """Return how long a barrier of the hosts takes, on the slowest rank."""
        self.ctx.barrier()
        start = time.perf_counter()
        for _ in range(HOST_BARRIERS):
            self.ctx.barrier()
        return float(max(self.ctx.control_plane.all_gather((time.perf_counter() - start) * 1e6 / HOST_BARRIERS)))

    def outcome(self, kind: str, first: int | None, second: int | None, time_us: float | None) -> Outcome:
        """Return a measurement's outcome; without a time it was wrong."""
        peers = self.world_size - 1 if kind.startswith("all_") else int(kind in PAIRWISE)
        moved = 4 * self.plan.elements * peers
        return Outcome(kind, first, second, moved, time_us, "wrong" if time_us is None else "ok")

    def close(self) -> None:
        """Give the buffers back; collective."""
        self.ctx.barrier()
        self.ctx.watchdog.unwatch(self.flags)
        for buffer in (self.received, self.sent, self.flags):
            self.ctx.free(buffer)
