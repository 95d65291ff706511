"""Rounds of messages between ranks on several hosts through a store of torch's, and the ranks' pulses there.

In a round each rank sets a key of its own and reads everybody's. A thread of each rank counts a key up, its *pulse*,
and reads the others': a host that stops, is cut off or dies is found by a pulse that stands still, also while this rank
waits for a collective between hosts. What fails on a rank, it writes into the key ``failed``, which all read. A failure
is final: collectives between hosts that were under way cannot be continued.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch.distributed as dist

from ...errors import PeerError
from ...rendezvous.exchange import Exchange
from ...rendezvous.topology import Topology
from ...rendezvous.unix_socket import CONNECT_TIMEOUT_S
from ...utils.backoff import back_off

_FAILED = "failed"
_LEFT = "left"  # the pulse of a rank that has closed its context
_LONGEST_PULSE_S = 1.0
_PULSES = 8  # in a limit, at least


class StoreExchange(Exchange):
    """The rounds, and the thread, of one rank.

    Args:
        rank: this one.
        topology: of all ranks.
        store: that they share, for this alone; of a client's operations one runs at a time.
        timeout_s: limit of a round, and of how long a pulse may stand still, in seconds; 0 for none.
        on_failure: is called once, from any thread, with what has failed.

    Raises:
        PeerError: a rank did not come.
    """

    def __init__(
        self, rank: int, topology: Topology, store: dist.Store, *, timeout_s: float, on_failure: Callable[[], object]
    ) -> None:
        self.timeout_s = CONNECT_TIMEOUT_S
        self._rank, self._topology, self._store = rank, topology, store
        self._on_failure = on_failure
        self._rounds = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._handled = threading.Event()  # of a failure: `on_failure` has returned
        self._pulses = [f"pulse/{peer}" for peer in range(topology.world_size)]
        store.set(self._pulses[rank], "0")
        self.exchange("connect", None)
        self.timeout_s = timeout_s
        period_s = min(_LONGEST_PULSE_S, timeout_s / _PULSES) if timeout_s else _LONGEST_PULSE_S
        self._thread = threading.Thread(target=self._watch, args=(period_s,), name="pulse of a rank", daemon=True)
        self._thread.start()

    def exchange(self, what: str, value: Any, fds: Sequence[int] = ()) -> tuple[list[list[Any]], list[int]]:
        assert not fds, "file descriptors are of one host"
        self._rounds += 1
        keys = [f"{self._rounds}/{peer}" for peer in range(self._topology.world_size)]
        try:
            self._store.set(keys[self._rank], json.dumps([what, value]))
            self._wait(keys)
            calls = [json.loads(call) for call in self._store.multi_get(keys)]
            self._store.delete_key(f"{self._rounds - 1}/{self._rank}")  # all have begun this round, and read the last
        except PeerError:
            raise
        except RuntimeError as error:  # of torch's
            self._fail_without_store(error)
        except BaseException as error:
            self.abort(f"it was interrupted by {type(error).__name__}")
            raise
        return calls, []

    def rejoin(self) -> NoReturn:
        raise PeerError("a failure between hosts is final: close() this context, and start the ranks again")

    def abort(self, why: str) -> None:
        """Fail on all ranks, unless a failure is known, and return once `on_failure` has."""
        if self.failure is None:
            self._fail(f"{self._topology.named([self._rank])} aborted: {why}")
        self._handled.wait(self.timeout_s or None)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(self.timeout_s or None)
        with contextlib.suppress(RuntimeError):  # the store has gone
            self._store.set(self._pulses[self._rank], _LEFT)

    def report(self, why: str) -> NoReturn:
        """Fail on all ranks, of what was found out between hosts, unless a failure is known."""
        self._fail(why)
        raise PeerError(self.failure)

    def _wait(self, keys: Sequence[str]) -> None:
        deadline, looks = time.monotonic() + self.timeout_s if self.timeout_s else None, 0
        while not self._store.check(list(keys)):
            self._read_failure()
            if self.failure is not None:
                raise PeerError(self.failure)
            if deadline is not None and time.monotonic() > deadline:
                missing = [peer for peer, key in enumerate(keys) if not self._store.check([key])]
                self.report(f"{self._topology.named(missing)} did not answer within {self.timeout_s:g} s")
            looks += 1
            back_off(looks)

    # Failures --------------------------------------------------------------------------------------------------------

    def _watch(self, period_s: float) -> None:
        """Count this rank's pulse up and look at the others', until the context closes or something has failed."""
        seen: dict[int, tuple[bytes, float]] = {}
        count = 0
        while self.failure is None and not self._stopped.wait(period_s):
            count += 1
            try:
                self._store.set(self._pulses[self._rank], str(count))
                self._read_failure()
                pulses = self._store.multi_get(self._pulses)
            except RuntimeError as error:
                with contextlib.suppress(PeerError):
                    self._fail_without_store(error)
                return
            now = time.monotonic()
            for peer, pulse in enumerate(pulses):
                if pulse == _LEFT.encode() or peer not in seen or seen[peer][0] != pulse:
                    seen[peer] = pulse, now
            self._fail_still([peer for peer, (_, since) in seen.items() if now - since > self.timeout_s > 0])

    def _read_failure(self) -> None:
        if self._store.check([_FAILED]):
            self._fail(self._store.get(_FAILED).decode())

    def _fail_still(self, peers: Iterable[int]) -> None:
        if named := self._topology.named(peers):
            self._fail(f"{named} gave no sign of life for {self.timeout_s:g} s")

    def _fail_without_store(self, error: RuntimeError) -> NoReturn:
        self._fail(f"torch's store has gone, and with it {self._topology.named([0])}, or who else held it: {error}")
        raise PeerError(self.failure)

    def _fail(self, why: str) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure, self.is_lost = why, True
        with contextlib.suppress(RuntimeError):
            self.failure = self._store.compare_set(_FAILED, "", why).decode()  # another rank's, if it was before
        self._on_failure()
        self._handled.set()
