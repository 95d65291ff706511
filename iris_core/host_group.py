"""What the ranks of one host say to each other outside kernels: gather, barrier, passing file descriptors.

A star around rank 0: the others say something, it answers all. A message names what its rank is doing, so ranks that do
different things hear of it, and an epoch, the number of times that the ranks have met again after a failure: what was
said before is dropped after, so it does not matter where in the conversation each rank failed. A rank that dies is seen
at once, as an end of file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any, NoReturn

from .errors import AllocationMismatch, HeapExhausted, PeerError
from .links import MESSAGE_LIMIT_BYTES, Link, MalformedMessage, accept_all, connect, random_address

__all__ = ["HostGroup", "random_address"]

# What a rank that is not rank 0 waits longer: rank 0 knows who is missing, and should be the one to say so.
_LONGER = 1.25
# What a message is, where not the name of what a rank is doing.
_ANSWER = "answer"
_FAILED = "failed"  # instead of an answer: what went wrong, and whether that is final
_REJOIN = "reset"
_GAVE_UP = "give up"  # its value says why
_UNSENT = "refused"  # instead of what a rank does: its value cannot be sent; of what type the error is, and why
# What a peer's failure is raised as on the other ranks, when it is one of these.
_SAME_TYPE = {t.__name__: t for t in (ValueError, TypeError, HeapExhausted, AllocationMismatch, NotImplementedError)}


class HostGroup:
    """The ranks of one context, on one host.

    After a `PeerError` every call raises the same again, until all ranks have called `rejoin`.

    Args:
        rank, world_size: this rank and the number of ranks.
        address: the group's name, from `random_address`, the same on every rank.
        timeout_s: limit of each operation in seconds; 0 for none.

    Attributes:
        failure: what the calls raise since one has failed, or None.
        is_lost: whether that is final: a rank has gone.

    Raises:
        PeerError: a rank did not connect, died, or did not answer within the limit.
    """

    def __init__(self, rank: int, world_size: int, address: str, *, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.failure: str | None = None
        self.is_lost = False
        self._epoch = 0
        self._early: dict[int, Any] = {}  # messages of ranks that wait in `rejoin`, for this one's call of it
        self._links = self._connect(address)

    def all_gather(self, value: Any, what: str = "gather values") -> list[Any]:
        """Return every rank's `value` (anything JSON can hold), by rank; `what` says what for, for messages.

        Raises:
            PeerError: a rank died, did not answer within the limit, or has given up.
            TypeError: JSON does not hold a rank's value; on every rank.
            ValueError: the ranks do different things, or a value is too large; on every rank.
        """
        self.check()
        refusal = _refusal(value, what)
        said = self._meet(self._epoch, *((what, value) if refusal is None else (_UNSENT, refusal)))
        for rank, (one, why) in enumerate(said):
            if one == _UNSENT:
                raise _SAME_TYPE[why[0]](f"rank {rank}: {why[1]}")
        doing = [one for one, _ in said]
        if len(set(doing)) > 1:
            listed = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(doing))
            raise ValueError(f"the ranks do different things together: {listed}")
        return [value for _, value in said]

    def broadcast(self, value: Any, root: int) -> Any:
        """Return `root`'s `value`, as JSON brings it, on the root too: what is a tuple there is a list everywhere."""
        heard = self.all_gather(value if self.rank == root else None, f"hear rank {root}")[root]
        return json.loads(json.dumps(heard))

    def agree(self, what: str, value: Any) -> None:
        """Raise on every rank unless all ranks give the same value.

        Raises:
            ValueError: the values differ; names every rank's.
        """
        values = self.all_gather(value, f"compare {what}")
        if any(other != values[0] for other in values):
            listed = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(values))
            raise ValueError(f"{what} must be the same on all ranks: {listed}")

    def barrier(self) -> None:
        """Return when every rank has called this."""
        self.all_gather(None, "meet")

    def exchange_fds(self, fd: int | None) -> list[int]:
        """Give every rank a copy of this rank's descriptor, or nothing; return copies of all that came, by rank."""
        self.check()
        own = [] if fd is None else [fd]
        if self.rank != 0:
            self._send_fds(0, own)
            return self._receive_fds(0)
        fds = [os.dup(one) for one in own]
        for peer in range(1, self.world_size):
            fds += self._receive_fds(peer)
        for peer in range(1, self.world_size):
            self._send_fds(peer, fds)
        return fds

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Do something all ranks must succeed at: if it raises on one, it raises on every one.

        The failing rank raises its own error; the others one that names it, of the same type where that is a type of
        this package or a caller's mistake, else `PeerError`.
        """
        failure: Exception | None = None
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            failure = error
        said = None if failure is None else [type(failure).__name__, str(failure)]
        try:
            answers = self.all_gather(said, what)
        except (PeerError, ValueError):
            if failure is not None:  # it says more than that a peer has given up waiting for this rank
                raise failure from None
            raise
        failures = [(peer, answer) for peer, answer in enumerate(answers) if answer]
        if failure is not None:
            raise failure
        if failures:
            peer, (kind, message) = failures[0]
            of_peer: Any = _SAME_TYPE.get(kind, PeerError)(f"rank {peer} failed to {what}: {message}")
            of_peer.of_rank = peer  # whose fault it is: `launch` looks at that
            raise of_peer

    def rejoin(self) -> None:
        """Meet all ranks again after a failure, wherever each of them failed; what was said before is forgotten.

        Raises:
            PeerError: a rank has gone, or did not call this within the limit.
        """
        if self.is_lost:
            self.check()
        self._meet(self._epoch + 1, _REJOIN, None)
        self._epoch += 1
        self.failure = None

    def give_up(self, why: str) -> None:
        """Tell the ranks, also those that wait for this one, that it will meet nobody before `rejoin`."""
        if self.failure is None:
            with contextlib.suppress(PeerError):
                if self.rank != 0:
                    self._send(0, [self._epoch, _GAVE_UP, why])
                self._fail(why)

    def check(self) -> None:
        """Raise if an earlier call has failed.

        Raises:
            PeerError: what it failed of.
        """
        if self.failure is not None:
            raise PeerError(self.failure)

    def close(self) -> None:
        """Leave the group."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _connect(self, address: str) -> dict[int, Link]:
        """Return a link to each rank that this one talks to: rank 0 to all, the others to rank 0."""
        if self.rank == 0:
            return accept_all(address, self.world_size, timeout_s=self.timeout_s)
        return {0: connect(address, self.rank, self.world_size, timeout_s=self.timeout_s * _LONGER)}

    # Messages: [epoch, what the rank does, value], from rank 0 [epoch, _ANSWER, messages] or [epoch, _FAILED, why] ---

    def _meet(self, epoch: int, what: str, value: Any) -> list[list[Any]]:
        """Return what each rank does, and its value."""
        if self.rank != 0:
            self._send(0, [epoch, what, value])
            return self._answer(epoch)
        said = [[what, value], *(self._said(peer, epoch, what) for peer in range(1, self.world_size))]
        for peer in range(1, self.world_size):
            self._send(peer, [epoch, _ANSWER, said])
        return said

    def _answer(self, epoch: int) -> Any:
        while True:
            answered, kind, value = self._receive(0)
            if kind == _FAILED and (answered == epoch or value[1]):
                self._fail(value[0], final=value[1])
            if answered == epoch:
                return value
            # Else it answers what this rank has given up since.

    def _said(self, peer: int, epoch: int, what: str) -> list[Any]:
        while True:
            message = self._early.pop(peer, None) or self._receive(peer)
            if message[0] > epoch:
                self._early[peer] = message
                self._fail(f"rank {peer} has given up and waits in reset()")
            if message[1] == _REJOIN and what != _REJOIN:
                continue  # it gave up waiting in `rejoin`, tried again, and the first time was answered after all
            if message[0] == epoch and message[1] == _GAVE_UP:
                self._fail(f"rank {peer} has given up: {message[2]}")
            if message[0] == epoch:
                return message[1:]
            if message[1] not in (_REJOIN, _GAVE_UP):  # it waits for an answer that rank 0 will not give
                self._send(peer, [message[0], _FAILED, ["rank 0 has given up and waits in reset()", False]])

    def _send(self, peer: int, message: Any) -> None:
        try:
            self._links[peer].send(message)
        except TimeoutError:
            self._fail(f"rank {peer} took no message within {self.timeout_s:g} s", final=True)
        except OSError:
            self._lost(peer, "left")

    def _receive(self, peer: int) -> Any:
        with self._hearing(peer):
            message = self._links[peer].receive()
        if not (isinstance(message, list) and len(message) == 3 and isinstance(message[0], int)):
            self._lost(peer, "sent a message that is none of ours")
        return message

    def _send_fds(self, peer: int, fds: list[int]) -> None:
        try:
            self._links[peer].send_fds(fds)
        except OSError:
            self._lost(peer, "left")

    def _receive_fds(self, peer: int) -> list[int]:
        with self._hearing(peer):
            fds = self._links[peer].receive_fds(self.world_size)
        return fds

    @contextlib.contextmanager
    def _hearing(self, peer: int) -> Iterator[None]:
        """Receive something from a peer, whose failure to send it is this group's."""
        try:
            yield
        except TimeoutError:
            self._late(peer)
        except EOFError:
            self._lost(peer, "left")
        except MalformedMessage as error:
            self._lost(peer, str(error))

    # Failures --------------------------------------------------------------------------------------------------

    def _late(self, peer: int) -> NoReturn:
        hint = "" if self.rank == 0 else "; it may be waiting for another rank"
        self._fail(f"rank {peer} did not answer within {self.timeout_s:g} s (twice the limit of a wait){hint}")

    def _lost(self, peer: int, how: str) -> NoReturn:
        self._fail(f"rank {peer} {how}", final=True, gone=peer)

    def _fail(self, why: str, *, final: bool = False, gone: int = 0) -> NoReturn:
        """Raise, from now on; rank 0 first tells those who wait for its answer, now or later."""
        if self.failure is None or final:
            self.failure, self.is_lost = why, self.is_lost or final
        for peer, link in self._links.items():
            if self.rank == 0 and peer not in (gone, 0):
                with contextlib.suppress(OSError):
                    link.send([self._epoch, _FAILED, [why, final]])
        raise PeerError(why)


def _refusal(value: Any, what: str) -> list[str] | None:
    """Return why a value cannot be sent, as the name of an error's type and its words, or None."""
    try:
        size = len(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        return ["TypeError", f"a {type(value).__name__} to {what}, which JSON does not hold: {error}"]
    if size > MESSAGE_LIMIT_BYTES // 2:
        limit = MESSAGE_LIMIT_BYTES // 2
        return ["ValueError", f"a value of {size:,} bytes to {what}; at most {limit:,} can be sent"]
    return None
