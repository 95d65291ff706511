"""What the ranks of one host say to each other outside kernels: gather, barrier, passing file descriptors.

A star of Unix sockets around rank 0. Their names are abstract (no file to leave behind) and random, the peer's user
is checked, messages are JSON (nothing received is executed), and a rank that dies is seen at once as an end of file.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from .errors import AllocationMismatch, HeapExhausted, PeerError

CONNECT_TIMEOUT_S = 180.0  # a rank imports torch before it connects, several at a time on few cores
_HEADER = struct.Struct("!Q")
_REPORTED = "reported"  # key of a hub's message that replaces the answer: what went wrong, and where
# What a peer's failure is raised as on the other ranks, when it is one of these.
_SAME_TYPE = {t.__name__: t for t in (ValueError, TypeError, HeapExhausted, AllocationMismatch, NotImplementedError)}


def random_address() -> str:
    """Return a fresh name for a group, to be given to all its ranks."""
    return f"iris-{secrets.token_hex(16)}"


class HostGroup:
    """The ranks of one context, on one host.

    Args:
        rank, world_size: this rank and the number of ranks.
        address: the group's name, from `random_address`, the same on every rank.
        timeout_s: limit of each operation in seconds; 0 for none.

    Raises:
        PeerError: a rank did not connect, died, or did not answer within the limit.
    """

    def __init__(self, rank: int, world_size: int, address: str, *, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._links: dict[int, socket.socket] = {}
        if rank == 0:
            self._accept(address)
        else:
            self._connect(address)

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's `value` (anything JSON can hold), by rank."""
        if self.rank != 0:
            self._send(0, value)
            return self._receive(0)
        values = [value, *(self._receive(peer) for peer in range(1, self.world_size))]
        for peer in range(1, self.world_size):
            self._send(peer, values)
        return values

    def broadcast(self, value: Any, root: int) -> Any:
        """Return `root`'s `value`."""
        return self.all_gather(value if self.rank == root else None)[root]

    def barrier(self) -> None:
        """Return when every rank has called this."""
        self.all_gather(None)

    def exchange_fds(self, fd: int | None) -> list[int]:
        """Give every rank a copy of this rank's descriptor, or nothing; return copies of all that came, by rank."""
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
            answers = self.all_gather(said)
        except PeerError:
            if failure is not None:  # it says more than that a peer has given up waiting for this rank
                raise failure from None
            raise
        failures = [(peer, answer) for peer, answer in enumerate(answers) if answer]
        if failure is not None:
            raise failure
        if failures:
            peer, (kind, message) = failures[0]
            raise _SAME_TYPE.get(kind, PeerError)(f"rank {peer} failed to {what}: {message}")

    def close(self) -> None:
        """Leave the group."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    # Connecting ------------------------------------------------------------------------------------------------

    def _accept(self, address: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("\0" + address)
            listener.listen(self.world_size)
            deadline = time.monotonic() + CONNECT_TIMEOUT_S
            while len(self._links) < self.world_size - 1:
                listener.settimeout(max(0.0, deadline - time.monotonic()))
                try:
                    link, _ = listener.accept()
                except (TimeoutError, BlockingIOError):
                    missing = sorted(set(range(1, self.world_size)) - set(self._links))
                    raise PeerError(f"rank(s) {missing} did not start within {CONNECT_TIMEOUT_S:.0f} s") from None
                if not _same_user(link):
                    link.close()
                    continue
                link.settimeout(self._limit)
                (peer,) = _HEADER.unpack(self._read(link, _HEADER.size, peer=-1))
                self._links[peer] = link

    def _connect(self, address: str) -> None:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                link.connect("\0" + address)
                break
            except ConnectionRefusedError:  # rank 0 is not there yet
                link.close()
                if time.monotonic() > deadline:
                    raise PeerError(f"rank 0 did not start within {CONNECT_TIMEOUT_S:.0f} s") from None
                time.sleep(0.02)
        if not _same_user(link):
            link.close()
            raise PeerError("the group's address is held by another user")
        link.settimeout(self._limit)
        link.sendall(_HEADER.pack(self.rank))
        self._links[0] = link

    # Messages --------------------------------------------------------------------------------------------------

    @property
    def _limit(self) -> float | None:
        return self.timeout_s or None

    def _send(self, peer: int, value: Any) -> None:
        data = json.dumps(value).encode()
        try:
            self._links[peer].sendall(_HEADER.pack(len(data)) + data)
        except OSError:
            self._lost(peer, "left")

    def _receive(self, peer: int) -> Any:
        link = self._links[peer]
        (size,) = _HEADER.unpack(self._read(link, _HEADER.size, peer))
        value = json.loads(self._read(link, size, peer))
        if isinstance(value, dict) and _REPORTED in value:
            raise PeerError(value[_REPORTED])
        return value

    def _read(self, link: socket.socket, size: int, peer: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = link.recv(size - len(data))
            except TimeoutError:
                self._lost(peer, f"did not answer within {self.timeout_s:g} s (IRIS_TIMEOUT_S)")
            except OSError:
                piece = b""
            if not piece:
                self._lost(peer, "left")
            data += piece
        return bytes(data)

    def _send_fds(self, peer: int, fds: list[int]) -> None:
        # Not socket.send_fds: it ignores its address argument and cannot send an empty list.
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._links[peer].sendmsg([bytes([len(fds)])], rights)
        except OSError:
            self._lost(peer, "left")

    def _receive_fds(self, peer: int) -> list[int]:
        try:
            count, fds, _, _ = socket.recv_fds(self._links[peer], 1, self.world_size)
        except OSError:
            count, fds = b"", []
        if not count or len(fds) != count[0]:
            self._lost(peer, "left while passing descriptors")
        return fds

    def _lost(self, peer: int, how: str) -> NoReturn:
        """Raise; rank 0 first tells those who still wait for its answer."""
        message = f"rank {peer} {how}" if peer >= 0 else f"a rank {how} while connecting"
        for other, link in self._links.items():
            if self.rank == 0 and other != peer:
                data = json.dumps({_REPORTED: message}).encode()
                with contextlib.suppress(OSError):
                    link.sendall(_HEADER.pack(len(data)) + data)
        raise PeerError(message)


def _same_user(link: socket.socket) -> bool:
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid == os.getuid()
