"""How the ranks of one host talk, and what becomes of that when one is late, gives up, or is gone.

A star around rank 0: the others say something, it answers all. A message names what its rank is doing, so ranks that do
different things hear of it, and an epoch, the number of times that the ranks have met again after a failure: what was
said before is dropped after, so it does not matter where in the conversation each rank failed. A rank that dies is seen
at once, as an end of file. One that gives up waiting says so, and rank 0 looks for that before it answers: an answer is
every rank's or nobody's, but where a rank gives up in the moment in which the answer is on its way.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from ..errors import PeerError
from .unix_socket import MalformedMessage, MessageSocket

# What a rank that is not rank 0 waits longer: rank 0 knows who is missing, and should be the one to say so.
LONGER = 1.25
# What a message is, where not the name of what a rank is doing.
ANSWER = "<answer>"
FAILED = "<failed>"  # instead of an answer: what went wrong, and whether that is final
REJOIN = "<reset>"
ABORTED = "<aborted>"  # its value says why
UNSENT = "<refused>"  # instead of what a rank does: its value cannot be sent; of what type the error is, and why
FDS = "<share file descriptors>"  # its value says how many come with it


class Exchange:
    """A rank's part in what the ranks of a `ControlPlane` say; `converse` is collective.

    Attributes:
        failure: what the calls raise since one has failed, or None.
        is_lost: whether that is final: a rank has gone.
    """

    rank: int
    timeout_s: float  # of rank 0; the others wait `LONGER`
    failure: str | None = None
    is_lost = False
    _epoch = 0
    _links: dict[int, MessageSocket]  # of rank 0 to all, of the others to rank 0

    def __init__(self) -> None:
        self._rejoining: dict[int, list[Any]] = {}  # what ranks said that wait in `rejoin`, for rank 0's call of it

    # Messages: [epoch, what the rank does, value]; from rank 0 [epoch, ANSWER, all that] or [epoch, FAILED, why] ------

    def _exchange(self, epoch: int, what: str, value: Any, fds: list[int]) -> tuple[list[list[Any]], list[int]]:
        """Return what each rank does, and its value, and copies of all descriptors.

        Whatever ends it on this rank, an interrupt too, is heard by the others and by later calls: an answer that
        nobody waits for would be taken for that of the next question.
        """
        try:
            if self.rank == 0:
                return self._answer(epoch, what, value, fds)
            return self._ask(epoch, what, value, fds)
        except BaseException as error:
            interrupt = f"it was interrupted by {type(error).__name__}"
            why = str(error) if isinstance(error, PeerError) else interrupt
            self.failure = self.failure or why
            self._notify_abort(epoch, why)
            raise

    def _ask(self, epoch: int, what: str, value: Any, fds: list[int]) -> tuple[list[list[Any]], list[int]]:
        self._send(0, [epoch, what, value], fds)
        while True:
            answered, kind, heard = self._receive(0)
            if answered == epoch:
                self._epoch = epoch  # of `rejoin`: rank 0 is there, whatever comes of it
            if kind == FAILED and (answered == epoch or heard[1]):
                self._fail(heard[0], final=heard[1])
            if answered == epoch:
                return heard, self._links[0].take_fds()
            # Else it answers what this rank has given up since.

    def _answer(self, epoch: int, what: str, value: Any, fds: list[int]) -> tuple[list[list[Any]], list[int]]:
        others = self._hear_all(epoch, what)
        self._epoch, self._rejoining = epoch, {}  # from here on ranks may have the answer that ends `rejoin`
        said = [json.loads(json.dumps([what, value])), *(others[peer] for peer in self._links)]
        shared = [os.dup(fd) for fd in fds]
        try:
            for link in self._links.values():
                shared += link.take_fds()
            for peer in self._links:
                self._send(peer, [epoch, ANSWER, said], shared)
        except BaseException:
            close_fds(shared)
            raise
        return said, shared

    def _hear_all(self, epoch: int, what: str) -> dict[int, list[Any]]:
        """Return what each peer does, and its value, once all wait for the answer; they have one limit together."""
        said = self._rejoining if what == REJOIN else {}
        deadline = time.monotonic() + self.timeout_s if self.timeout_s else None
        with selectors.PollSelector() as selector:
            for peer, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, peer)
            # Who has spoken, and gives up or leaves before all have, is heard too: it takes no answer.
            while (missing := self._links.keys() - said.keys()) or selector.select(0):
                limit_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = selector.select(limit_s)
                if not ready:
                    self._late(missing)
                for key, _ in ready:
                    self._hear(key.data, epoch, what, said, deadline)
        return said

    def _hear(self, peer: int, epoch: int, what: str, said: dict[int, list[Any]], deadline: float | None) -> None:
        """Receive a message, and note in `said` what it says of this meeting, if anything."""
        of_epoch, doing, value = self._receive(peer, deadline)
        if of_epoch > epoch:
            self._rejoining[peer] = [doing, value]
            self._fail(f"rank {peer} aborted and waits in reset()")
        elif of_epoch < epoch:
            if doing not in (REJOIN, ABORTED):  # it waits for an answer that rank 0 will not give
                self._send(peer, [of_epoch, FAILED, ["rank 0 aborted and waits in reset()", False]])
        elif doing == ABORTED:
            waited = said.pop(peer, None)
            if what != REJOIN:  # to which it comes again
                missing = self._links.keys() - said.keys() - {peer}
                late = f"; {ranks_named(missing)} had not come" if waited and missing else ""
                self._fail(f"rank {peer} aborted: {value}{late}")
        elif doing != REJOIN or what == REJOIN:
            said[peer] = [doing, value]
        # Else it gave up waiting in `rejoin`, tried again, and the first time was answered after all.

    def _send(self, peer: int, message: Any, fds: Sequence[int] = ()) -> None:
        try:
            self._links[peer].send(message, fds)
        except TimeoutError:
            self._fail(f"rank {peer} took no message within {self._limit()}", final=True)
        except OSError:
            self._lost(peer, "left")

    def _receive(self, peer: int, deadline: float | None = None) -> Any:
        try:
            message = self._links[peer].receive(deadline)
        except TimeoutError:
            self._late({peer})
        except EOFError:
            self._lost(peer, "left")
        except MalformedMessage as error:
            self._lost(peer, str(error))
        if not (isinstance(message, list) and len(message) == 3 and isinstance(message[0], int)):
            self._lost(peer, "sent a message that is malformed")
        return message

    # Failures --------------------------------------------------------------------------------------------------

    def _limit(self) -> str:
        if self.rank == 0:
            return f"{self.timeout_s:g} s (twice the limit of a wait)"
        return f"{self.timeout_s * LONGER:g} s ({2 * LONGER:g} times the limit of a wait)"

    def _late(self, peers: Iterable[int]) -> NoReturn:
        hint = "" if self.rank == 0 else "; it may be waiting for another rank"
        self._fail(f"{ranks_named(peers)} did not answer within {self._limit()}{hint}")

    def _lost(self, peer: int, how: str) -> NoReturn:
        self._fail(f"rank {peer} {how}", final=True)

    def _fail(self, why: str, *, final: bool = False) -> NoReturn:
        """Raise, from now on."""
        if self.failure is None or final:
            self.failure, self.is_lost = why, self.is_lost or final
        raise PeerError(why)

    def _notify_abort(self, epoch: int, why: str) -> None:
        """Let those hear who wait for this rank, now or later, that it has given up."""
        for peer, link in self._links.items():
            # In `rejoin` rank 0's peers wait on: it may come again while they do.
            message = [epoch, ABORTED, why] if peer == 0 else [self._epoch, FAILED, [why, self.is_lost]]
            with contextlib.suppress(OSError):  # it has gone
                link.send(message)


def ranks_named(numbers: Iterable[int]) -> str:
    """Return "rank 1", or "ranks 1, 2"."""
    listed = sorted(numbers)
    return f"rank{'s' * (len(listed) > 1)} {', '.join(map(str, listed))}"


def close_fds(fds: Iterable[int]) -> None:
    """Close file descriptors."""
    for fd in fds:
        os.close(fd)
