"""One round of messages between all ranks of a host, and its failures: a rank that is late, aborts, or is gone."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ..errors import PeerError, ranks_named
from . import unix_socket
from .unix_socket import LONGER, MalformedMessage, MessageSocket, close_fds

# What a message is, where not the name of a collective call.
ANSWER = "<answer>"
FAILED = "<failed>"  # instead of an answer: what went wrong, and whether that is final
REJOIN = "<reset>"
ABORTED = "<aborted>"  # its value says why


class Exchange(ABC):
    """How the ranks of a `ControlPlane` exchange values.

    Attributes:
        timeout_s: limit of a round in seconds; 0 for none.
        failure: why no round is possible before `rejoin`, or None.
        is_lost: whether that is final: a rank has gone.
        passes_fds: whether file descriptors can be exchanged, as between processes of one host.
    """

    timeout_s: float
    passes_fds = True
    failure: str | None = None
    is_lost = False

    @abstractmethod
    def exchange(self, what: str, value: Any, fds: Sequence[int] = ()) -> tuple[list[list[Any]], list[int]]:
        """Return what each rank calls, and its value, by rank, and copies of all file descriptors; collective.

        Raises:
            PeerError: a rank died, did not answer within the limit, or aborted.
        """

    @abstractmethod
    def rejoin(self) -> None:
        """Start again after a failure; collective. What was sent before is dropped.

        Raises:
            PeerError: a rank has gone, or did not call this within the limit.
        """

    @abstractmethod
    def abort(self, why: str) -> None:
        """Notify all ranks, also those that wait for this one, that it takes part in no round before `rejoin`."""

    @abstractmethod
    def close(self) -> None:
        """Leave."""


class SocketExchange(Exchange):
    """A star of sockets around rank 0: the others send it their values, it answers with all of them.

    A message carries the name of the call, so calls that differ are found, and an epoch, the number of times that the
    ranks have rejoined: messages of an older epoch are dropped, so it does not matter where each rank failed. A rank
    that dies is seen at once, as an end of file. One that times out sends that it aborted, and rank 0 looks for such
    messages before it answers: all ranks get an answer or none, unless a rank aborts while the answer is in flight.

    Args:
        rank, world_size: this rank and the number of ranks.
        address: from `random_address`, or of several hosts, "tcp://…"; the same on every rank.
        timeout_s: limit of rank 0 in seconds; the others wait `LONGER`; 0 for none.

    Raises:
        PeerError: a rank did not connect.
    """

    def __init__(self, rank: int, world_size: int, address: str, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._rank = rank
        self._epoch = 0
        self._rejoining: dict[int, list[Any]] = {}  # calls of ranks that wait in `rejoin`, for rank 0's own
        self.passes_fds = not address.startswith("tcp://")
        sockets: Any = unix_socket
        if not self.passes_fds:
            from . import tcp_socket as sockets  # which is no part of the core
        # Of rank 0 to all, of the others to rank 0.
        self._sockets: dict[int, MessageSocket] = (
            sockets.accept_all(address, world_size, timeout_s=timeout_s)
            if rank == 0
            else {0: sockets.connect(address, rank, world_size, timeout_s=timeout_s * LONGER)}
        )

    def exchange(self, what: str, value: Any, fds: Sequence[int] = ()) -> tuple[list[list[Any]], list[int]]:
        return self._round(self._epoch, what, value, fds)

    def rejoin(self) -> None:
        epoch = self._epoch + 1
        _, fds = self._round(epoch, REJOIN, None, ())
        close_fds(fds)
        self._epoch, self.failure = epoch, None

    def abort(self, why: str) -> None:
        if self.failure is None:
            self.failure = why
            self._notify_abort(self._epoch, why)

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        self._sockets.clear()

    # Messages: [epoch, call, value]; from rank 0 [epoch, ANSWER, all calls and values] or [epoch, FAILED, why] -------

    def _round(self, epoch: int, what: str, value: Any, fds: Sequence[int]) -> tuple[list[list[Any]], list[int]]:
        """Exchange values. Whatever ends this, an interrupt too, fails on the other ranks and in later calls.

        An answer that no rank waits for would be taken for that of the next call.
        """
        try:
            if self._rank == 0:
                return self._serve(epoch, what, value, fds)
            return self._request(epoch, what, value, fds)
        except BaseException as error:
            interrupt = f"it was interrupted by {type(error).__name__}"
            why = str(error) if isinstance(error, PeerError) else interrupt
            self.failure = self.failure or why
            self._notify_abort(epoch, why)
            raise

    def _request(self, epoch: int, what: str, value: Any, fds: Sequence[int]) -> tuple[list[list[Any]], list[int]]:
        self._send(0, [epoch, what, value], fds)
        while True:
            answered, kind, content = self._receive(0)
            if answered == epoch:
                self._epoch = epoch  # of `rejoin`: rank 0 is there, whatever comes of it
            if kind == FAILED and (answered == epoch or content[1]):
                self._fail(content[0], final=content[1])
            if answered == epoch:
                return content, self._sockets[0].take_fds()
            # Else it answers a call that this rank has aborted since.

    def _serve(self, epoch: int, what: str, value: Any, fds: Sequence[int]) -> tuple[list[list[Any]], list[int]]:
        others = self._receive_all(epoch, what)
        self._epoch, self._rejoining = epoch, {}  # from here on ranks may have the answer that ends `rejoin`
        calls = [json.loads(json.dumps([what, value])), *(others[peer] for peer in self._sockets)]
        shared = [os.dup(fd) for fd in fds]
        try:
            for connection in self._sockets.values():
                shared += connection.take_fds()
            for peer in self._sockets:
                self._send(peer, [epoch, ANSWER, calls], shared)
        except BaseException:
            close_fds(shared)
            raise
        return calls, shared

    def _receive_all(self, epoch: int, what: str) -> dict[int, list[Any]]:
        """Return each peer's call and value, once all wait for the answer; one limit holds for all of them."""
        calls = self._rejoining if what == REJOIN else {}
        deadline = time.monotonic() + self.timeout_s if self.timeout_s else None
        with selectors.PollSelector() as selector:
            for peer, connection in self._sockets.items():
                selector.register(connection, selectors.EVENT_READ, peer)
            # A peer that aborts or leaves after its call, before all have called, is seen too: it takes no answer.
            while (missing := self._sockets.keys() - calls.keys()) or selector.select(0):
                limit_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = selector.select(limit_s)
                if not ready:
                    self._fail_late(missing)
                for key, _ in ready:
                    self._receive_call(key.data, epoch, what, calls, deadline)
        return calls

    def _receive_call(
        self, peer: int, epoch: int, what: str, calls: dict[int, list[Any]], deadline: float | None
    ) -> None:
        """Receive a message, and put it into `calls` if it is of this round."""
        of_epoch, call, value = self._receive(peer, deadline)
        if of_epoch > epoch:
            self._rejoining[peer] = [call, value]
            self._fail(f"rank {peer} aborted and waits in reset()")
        elif of_epoch < epoch:
            if call not in (REJOIN, ABORTED):  # it waits for an answer that rank 0 will not give
                self._send(peer, [of_epoch, FAILED, ["rank 0 aborted and waits in reset()", False]])
        elif call == ABORTED:
            waited = calls.pop(peer, None)
            if what != REJOIN:  # to which it comes again
                missing = self._sockets.keys() - calls.keys() - {peer}
                late = f"; {ranks_named(missing)} had not come" if waited and missing else ""
                self._fail(f"rank {peer} aborted: {value}{late}")
        elif call != REJOIN or what == REJOIN:
            calls[peer] = [call, value]
        # Else it timed out in `rejoin`, tried again, and the first call was answered after all.

    def _send(self, peer: int, message: Any, fds: Sequence[int] = ()) -> None:
        try:
            self._sockets[peer].send(message, fds)
        except TimeoutError:
            self._fail(f"rank {peer} took no message within {self._limit()}", final=True)
        except OSError:
            self._fail_lost(peer, "left")

    def _receive(self, peer: int, deadline: float | None = None) -> Any:
        try:
            message = self._sockets[peer].receive(deadline)
        except TimeoutError:
            self._fail_late({peer})
        except EOFError:
            self._fail_lost(peer, "left")
        except MalformedMessage as error:
            self._fail_lost(peer, str(error))
        if not (isinstance(message, list) and len(message) == 3 and isinstance(message[0], int)):
            self._fail_lost(peer, "sent a message that is malformed")
        return message

    # Failures --------------------------------------------------------------------------------------------------

    def _limit(self) -> str:
        if self._rank == 0:
            return f"{self.timeout_s:g} s (twice the limit of a wait)"
        return f"{self.timeout_s * LONGER:g} s ({2 * LONGER:g} times the limit of a wait)"

    def _fail_late(self, peers: Iterable[int]) -> NoReturn:
        hint = "" if self._rank == 0 else "; it may be waiting for another rank"
        self._fail(f"{ranks_named(peers)} did not answer within {self._limit()}{hint}")

    def _fail_lost(self, peer: int, how: str) -> NoReturn:
        self._fail(f"rank {peer} {how}", final=True)

    def _fail(self, why: str, *, final: bool = False) -> NoReturn:
        """Raise, from now on."""
        if self.failure is None or final:
            self.failure, self.is_lost = why, self.is_lost or final
        raise PeerError(why)

    def _notify_abort(self, epoch: int, why: str) -> None:
        """Send the ranks that wait for this one, now or later, that it has aborted."""
        for peer, connection in self._sockets.items():
            # In `rejoin` rank 0's peers wait on: it may come again while they do.
            message = [epoch, ABORTED, why] if peer == 0 else [self._epoch, FAILED, [why, self.is_lost]]
            with contextlib.suppress(OSError):  # it has gone
                connection.send(message)
