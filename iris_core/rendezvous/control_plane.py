"""The control plane: rank-to-rank messages on the host, outside kernels."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from ..errors import AllocationMismatch, HeapExhausted, PeerError
from ..utils.owner import Owner
from .exchange import Exchange, SocketExchange
from .unix_socket import MESSAGE_LIMIT_BYTES, close_fds

_UNSENT = "<refused>"  # instead of the call: its value cannot be sent; of what type the error is, and why
_FDS = "<share file descriptors>"  # its value says how many come with it

# What a peer's failure is raised as on the other ranks, when it is one of these.
_SAME_TYPE = {t.__name__: t for t in (ValueError, TypeError, HeapExhausted, AllocationMismatch, NotImplementedError)}


class ControlPlane:
    """Collectives of the ranks of one context, on the host.

    After a `PeerError` every call raises the same again, until all ranks have called `rejoin`. In a process forked from
    the rank every call raises RuntimeError, and `close` does nothing.

    Args:
        rank, world_size: this rank and the number of ranks.
        exchange: how their values get to one another.
    """

    def __init__(self, rank: int, world_size: int, exchange: Exchange) -> None:
        self.rank = rank
        self.world_size = world_size
        self.exchange = exchange
        self._owner = Owner()

    @classmethod
    def connect(cls, rank: int, world_size: int, address: str, *, timeout_s: float) -> ControlPlane:
        """Connect processes of one host by sockets; see `SocketExchange`."""
        return cls(rank, world_size, SocketExchange(rank, world_size, address, timeout_s=timeout_s))

    @property
    def timeout_s(self) -> float:
        """The limit of each call in seconds; 0 for none."""
        return self.exchange.timeout_s

    @property
    def failure(self) -> str | None:
        """What the calls raise since one has failed, or None."""
        return self.exchange.failure

    @property
    def is_lost(self) -> bool:
        """Whether that is final: a rank has gone."""
        return self.exchange.is_lost

    @property
    def passes_fds(self) -> bool:
        """Whether `exchange_fds` works: all ranks are of one host."""
        return self.exchange.passes_fds

    def all_gather(self, value: Any, what: str = "gather values") -> list[Any]:
        """Return every rank's `value` (anything JSON can hold), by rank; `what` names the call in error messages.

        All are as JSON brings them, this rank's own too: what is a tuple there is a list everywhere.

        Raises:
            PeerError: a rank died, did not answer within the limit, or aborted.
            TypeError: JSON does not hold a rank's value; on every rank.
            ValueError: the ranks are in different collective calls, or a value is too large; on every rank.
        """
        self.check()
        refusal = _refusal(value, what)
        calls, fds = self.exchange.exchange(*((what, value) if refusal is None else (_UNSENT, refusal)))
        close_fds(fds)  # of ranks in another call
        return _values(calls)

    def broadcast(self, value: Any, root: int) -> Any:
        """Return `root`'s `value`, as JSON brings it, on the root too."""
        return self.all_gather(value if self.rank == root else None, f"broadcast from rank {root}")[root]

    def agree(self, what: str, value: Any) -> None:
        """Raise on every rank unless all ranks give the same value.

        Raises:
            ValueError: the values differ; names every rank's, of dicts first the items that differ.
        """
        values = self.all_gather(value, f"compare {what}")
        if any(other != values[0] for other in values):
            raise ValueError(f"{what} must be the same on all ranks: {_listed(values)}")

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
        calls, fds = self.exchange.exchange(_FDS, len(own), own)
        try:
            _values(calls)
        except (TypeError, ValueError):
            close_fds(fds)
            raise
        return fds

    @contextlib.contextmanager
    def collective_section(self, what: str) -> Iterator[None]:
        """Run a block in which all ranks must succeed: if it raises on one, it raises on every one.

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
        own = None if failure is None else [type(failure).__name__, str(failure)]
        try:
            outcomes = self.all_gather(own, what)
        except (PeerError, ValueError):
            if failure is not None:  # it says more than that a peer has aborted
                raise failure from None
            raise
        failures = [(peer, outcome) for peer, outcome in enumerate(outcomes) if outcome]
        if failure is not None:
            raise failure
        if failures:
            peer, (kind, message) = failures[0]
            of_peer: Any = _SAME_TYPE.get(kind, PeerError)(f"rank {peer} failed to {what}: {message}")
            of_peer.of_rank = peer  # whose fault it is: `launch` looks at that
            raise of_peer

    def rejoin(self) -> None:
        """Start again with all ranks after a failure, wherever each of them failed.

        Raises:
            PeerError: a rank has gone, or did not call this within the limit.
        """
        self.check_owner()
        if self.is_lost:
            self.check()
        self.exchange.rejoin()

    def abort(self, why: str) -> None:
        """Notify the ranks, also those that wait for this one, that it takes part in nothing before `rejoin`."""
        self.check_owner()
        self.exchange.abort(why)

    def check(self) -> None:
        """Raise if an earlier call has failed, or this is not the rank's own process.

        Raises:
            PeerError: why it failed.
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
        """Leave the other ranks."""
        if self.is_owned:
            self.exchange.close()


def _listed(values: list[Any]) -> str:
    """Return the ranks' values as text; where these are dicts, the items that all ranks have alike once, at the end."""
    items = values[0].items() if all(isinstance(one, dict) for one in values) else ()
    same = dict([item for item in items if all(item in one.items() for one in values)])
    own = [{key: item for key, item in one.items() if key not in same} for one in values] if same else values
    return "; ".join([f"rank {rank}: {one}" for rank, one in enumerate(own)] + [f"all ranks: {same}"] * bool(same))


def _values(calls: list[list[Any]]) -> list[Any]:
    """Return the values that the ranks gave, all in one call; see `ControlPlane.all_gather` for what is raised."""
    for rank, (call, why) in enumerate(calls):
        if call == _UNSENT:
            raise _SAME_TYPE[why[0]](f"rank {rank}: {why[1]}")
    names = [call for call, _ in calls]
    if len(set(names)) > 1:
        listed = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise ValueError(f"the ranks are in different collective calls: {listed}")
    return [value for _, value in calls]


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
