"""The handshake of emulated ranks: what stands for its device functions where warp-specialised kernels are emulated."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

from gluon_emulator import Machine

from iris_core.tracing import Span

_KINDS = {"sys": "tile", "gpu": "split"}  # flags that `wait` is called for, by the scope it is called with


class World:
    """The handshake of all ranks, and what stands for its functions in the kernels' modules."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._words: dict[Any, int] = defaultdict(int)  # (what, at rank, from rank or tile) -> its number
        self._times = itertools.count()
        self.set_in_a_call: set[tuple[int, int]] = set()  # flags, at rank, that copies set
        self.spans: dict[int, list[Span]] = defaultdict(list)  # of each rank's traced calls
        self.names = {
            name: getattr(self, name)
            for name in (
                *("begin_call", "wait_ready", "wait_ready_of", "finish_call", "finish_after_arrivals"),
                *("current_call", "finish_and_clear", "finish_after_counts"),
                *("count_tiles", "wait", "signal_partial", "signal"),
                *("trace_time", "trace_span", "trace_until"),
            )
        }

    def epoch(self, rank: int) -> int:
        return self._words["epoch", rank]

    def begin_call(self, peers: Any, world_size: int) -> int:
        if self._machine.task.program == 0:
            for peer in range(world_size):
                self._words["ready", peer, peers.rank] = self.epoch(peers.rank) + 1
        return self.epoch(peers.rank) + 1

    def current_call(self, peers: Any, world_size: int) -> int:
        return self.epoch(peers.rank) + 1

    def set_flag(self, rank: int, flag: int) -> None:
        assert not self._words["tile", rank, flag], "the flag of the call before is still set"
        self._words["tile", rank, flag] = 1

    def wait_ready(self, peers: Any, epoch: int, world_size: int) -> None:
        for peer in set(range(world_size)) - {peers.rank}:
            self.wait_ready_of(peers, peer, epoch)

    def wait_ready_of(self, peers: Any, peer: int, epoch: int) -> None:
        self._await(("ready", peers.rank, peer), epoch)

    def finish_call(self, peers: Any, epoch: int, num_programs: int, world_size: int) -> None:
        self._sent_has_arrived()
        if self._is_last(peers, epoch, num_programs):
            self._end_with_peers(peers, epoch, world_size)

    def finish_and_clear(
        self, peers: Any, epoch: int, num_programs: int, flags: int, num_flags: int, world_size: int
    ) -> None:
        if self._is_last(peers, epoch, num_programs):
            for flag in range(flags, flags + num_flags):
                is_set = bool(self._words["tile", peers.rank, flag])
                assert is_set == ((peers.rank, flag) in self.set_in_a_call), "a flag that may be set later"
                self._words["tile", peers.rank, flag] = 0
            self._end_with_peers(peers, epoch, world_size)

    def _end_with_peers(self, peers: Any, epoch: int, world_size: int) -> None:
        for peer in range(world_size):
            self._words["done", peer, peers.rank] = epoch
        for peer in range(world_size):
            self._await(("done", peers.rank, peer), epoch)
        self._words["epoch", peers.rank] = epoch

    def finish_after_arrivals(self, peers: Any, epoch: int, num_programs: int, world_size: int) -> None:
        if self._is_last(peers, epoch, num_programs):
            self._words["epoch", peers.rank] = epoch

    def finish_after_counts(
        self, peers: Any, epoch: int, num_programs: int, counts: int, num_counts: int, world_size: int
    ) -> None:
        if self._is_last(peers, epoch, num_programs):
            for count in range(counts, counts + num_counts):
                self._words["tile", peers.rank, count] = 0
            self._words["epoch", peers.rank] = epoch

    def count_tiles(self, shard: Any, peers: Any, peer: int, chunk: int, tiles: int) -> None:
        self._words["tile", peer, peers.rank * shard.chunks + chunk] += tiles

    def signal_partial(self, shards: Any, peers: Any, index: int, tiles: int, epoch: int, world_size: int) -> None:
        owner = (peers.rank + 1 + index // tiles) % world_size
        self._words["tile", owner, peers.rank * tiles + index % tiles] = epoch

    def wait(self, flag: int, expected: int, watchdog: Any, scope: str = "sys") -> None:
        self._await((_KINDS[scope], self._machine.task.rank, flag), expected)

    def signal(self, flag: int, value: int, scope: str) -> None:
        self._words[_KINDS[scope], self._machine.task.rank, flag] = value
        self._machine.wait(lambda: True)  # who waits for it may go on before whoever has signalled

    def trace_time(self, bundle: Any) -> int:
        return next(self._times)

    def trace_span(self, bundle: Any, kind: Any, tile: int, begin: int) -> int:
        end = next(self._times)
        self.trace_until(bundle, kind, tile, begin, end)
        return end

    def trace_until(self, bundle: Any, kind: Any, tile: int, begin: int, end: int) -> None:
        if bundle.trace_ptr is not None:
            task = self._machine.task
            self.spans[task.rank].append(Span(task.program, kind.value, tile, begin, end))

    def _await(self, word: Any, expected: int) -> None:
        self._machine.wait(lambda: self._words[word] >= expected)

    def _is_last(self, peers: Any, epoch: int, num_programs: int) -> bool:
        self._words["arrivals", peers.rank] += 1
        return self._words["arrivals", peers.rank] == epoch * num_programs

    def _sent_has_arrived(self) -> None:
        assert all(state == "arrived" for state in self._machine.task.stores)
