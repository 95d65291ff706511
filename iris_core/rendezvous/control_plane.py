"""What the ranks of one host say to each other outside kernels: gather, barrier, passing file descriptors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from ..errors import AllocationMismatch, HeapExhausted, PeerError
from ..utils.owner import Owner
from .exchange import FDS, LONGER, REJOIN, UNSENT, Exchange, close_fds
from .unix_socket import MESSAGE_LIMIT_BYTES, MessageSocket, accept_all, connect, random_address

__all__ = ["ControlPlane", "random_address"]

# What a peer's failure is raised as on the other ranks, when it is one of these.
_SAME_TYPE = {t.__name__: t for t in (ValueError, TypeError, HeapExhausted, AllocationMismatch, NotImplementedError)}


class ControlPlane(Exchange):
    """The ranks of one context, on one host.

    After a `PeerError` every call raises the same again, until all ranks have called `rejoin`. In a process forked from
    the rank every call raises RuntimeError, and `close` does nothing.

    Args:
        rank, world_size: this rank and the number of ranks.
        address: the group's name, from `random_address`, the same on every rank.
        timeout_s: limit of each operation in seconds; 0 for none.

    Raises:
        PeerError: a rank did not connect, died, or did not answer within the limit.
    """

    def __init__(self, rank: int, world_size: int, address: str, *, timeout_s: float) -> None:
        super().__init__()
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._owner = Owner()
        self._links = self._connect(address)

    def all_gather(self, value: Any, what: str = "gather values") -> list[Any]:
        """Return every rank's `value` (anything JSON can hold), by rank; `what` says what for, for messages.

        All are as JSON brings them, this rank's own too: what is a tuple there is a list everywhere.

        Raises:
            PeerError: a rank died, did not answer within the limit, or aborted.
            TypeError: JSON does not hold a rank's value; on every rank.
            ValueError: the ranks are in different collective calls, or a value is too large; on every rank.
        """
        self.check()
        refusal = _refusal(value, what)
        said = self._meet(self._epoch, *((what, value) if refusal is None else (UNSENT, refusal)))
        return _values(said)

    def broadcast(self, value: Any, root: int) -> Any:
        """Return `root`'s `value`, as JSON brings it, on the root too."""
        return self.all_gather(value if self.rank == root else None, f"broadcast from rank {root}")[root]

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
        self.all_gather(None, "barrier")

    def exchange_fds(self, fd: int | None) -> list[int]:
        """Give every rank a copy of this rank's descriptor, or nothing; return copies of all that came, by rank.

        Raises:
            As `all_gather`.
        """
        self.check()
        own = [] if fd is None else [fd]
        said, fds = self._exchange(self._epoch, FDS, len(own), own)
        try:
            _values(said)
        except (TypeError, ValueError):
            close_fds(fds)
            raise
        return fds

    @contextlib.contextmanager
    def collective_section(self, what: str) -> Iterator[None]:
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
        self.check_owner()
        if self.is_lost:
            self.check()
        epoch = self._epoch + 1
        self._meet(epoch, REJOIN, None)
        self._epoch, self.failure = epoch, None

    def abort(self, why: str) -> None:
        """Tell the ranks, also those that wait for this one, that it will meet nobody before `rejoin`."""
        self.check_owner()
        if self.failure is None:
            self.failure = why
            self._notify_abort(self._epoch, why)

    def check(self) -> None:
        """Raise if an earlier call has failed, or this is not the rank's own process.

        Raises:
            PeerError: what it failed of.
            RuntimeError: see `check_owner`.
        """
        self.check_owner()
        if self.failure is not None:
            raise PeerError(self.failure)

    @property
    def is_owned(self) -> bool:
        """Whether this process is the rank, and not one forked from it."""
        return self._owner.is_this_process

    def check_owner(self) -> None:
        """Raise unless this process is the rank, and not one forked from it.

        Raises:
            RuntimeError: names both processes.
        """
        self._owner.check("opened this context")

    def close(self) -> None:
        """Leave the group."""
        if not self.is_owned:
            return
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _connect(self, address: str) -> dict[int, MessageSocket]:
        """Return a link to each rank that this one talks to: rank 0 to all, the others to rank 0."""
        if self.rank == 0:
            return accept_all(address, self.world_size, timeout_s=self.timeout_s)
        return {0: connect(address, self.rank, self.world_size, timeout_s=self.timeout_s * LONGER)}

    def _meet(self, epoch: int, what: str, value: Any) -> list[list[Any]]:
        """Return what each rank does, and its value."""
        said, fds = self._exchange(epoch, what, value, [])
        close_fds(fds)  # of ranks that do something else
        return said


def _values(said: list[list[Any]]) -> list[Any]:
    """Return the values that the ranks gave, all for the same; see `ControlPlane.all_gather` for what is raised."""
    for rank, (one, why) in enumerate(said):
        if one == UNSENT:
            raise _SAME_TYPE[why[0]](f"rank {rank}: {why[1]}")
    doing = [one for one, _ in said]
    if len(set(doing)) > 1:
        listed = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(doing))
        raise ValueError(f"the ranks are in different collective calls: {listed}")
    return [value for _, value in said]


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
