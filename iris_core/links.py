"""How the ranks of one host find each other, and the messages between two of them.

Every rank connects to rank 0, by a Unix socket whose name is abstract (no file to leave behind) and random. The other
end's user is checked. A message is JSON, so nothing received is executed, and its size is bounded. docs/safety.md says
what is trusted.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import time
from typing import Any

from .errors import PeerError

CONNECT_TIMEOUT_S = 180.0  # a rank imports torch before it connects, several at a time on few cores
MESSAGE_LIMIT_BYTES = 64 << 20  # of one rank; an answer holds every rank's
_HEADER = struct.Struct("!Q")
_HELLO = struct.Struct("!QQ")  # rank, number of ranks
_WELCOME = "welcome"
_PIECE_BYTES = 1 << 20


class MalformedMessage(Exception):
    """What came over a link is no message of ours; nothing after it can be understood."""


def random_address() -> str:
    """Return a fresh name for a group, to be given to all its ranks."""
    return f"iris-{secrets.token_hex(16)}"


class Link:
    """Messages to and from one rank.

    Args:
        connection: the socket, which this owns.
        timeout_s: how long a message may take to come or go; 0 for ever.
        limit_bytes: size of the largest message that is taken.
    """

    def __init__(self, connection: socket.socket, *, timeout_s: float, limit_bytes: int = MESSAGE_LIMIT_BYTES) -> None:
        self._socket = connection
        self._timeout_s = timeout_s
        self._limit_bytes = limit_bytes
        self._received = bytearray()  # of a message that has not come whole: a later call goes on

    def send(self, message: Any) -> None:
        """Send anything JSON holds.

        Raises:
            TimeoutError: the other end does not take it; what was sent of it cannot be called back.
            OSError: the other end has gone.
        """
        data = json.dumps(message).encode()
        self._socket.settimeout(self._timeout_s or None)
        self._socket.sendall(_HEADER.pack(len(data)) + data)

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            TimeoutError: none came within the limit.
            EOFError: the other end has gone.
            MalformedMessage: it is too large or no JSON.
        """
        deadline = time.monotonic() + self._timeout_s if self._timeout_s else None
        self._fill(_HEADER.size, deadline)
        (size,) = _HEADER.unpack_from(self._received)
        if size > self._limit_bytes:
            raise MalformedMessage(f"announced a message of {size:,} bytes; the limit is {self._limit_bytes:,}")
        self._fill(_HEADER.size + size, deadline)
        data = bytes(self._received[_HEADER.size :])
        self._received.clear()
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise MalformedMessage(f"sent {size:,} bytes that are not JSON ({type(error).__name__})") from None

    def send_fds(self, fds: list[int]) -> None:
        """Send file descriptors, or none.

        Raises:
            OSError: the other end has gone.
        """
        # Not socket.send_fds: it ignores its address argument and cannot send an empty list.
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.settimeout(self._timeout_s or None)
        self._socket.sendmsg([bytes([len(fds)])], rights)

    def receive_fds(self, most: int) -> list[int]:
        """Return the file descriptors that the other end has sent, at most so many.

        Raises:
            TimeoutError: nothing came within the limit.
            EOFError: the other end has gone.
            MalformedMessage: there are fewer or more of them than it said.
        """
        self._socket.settimeout(self._timeout_s or None)
        try:
            count, fds, _, _ = socket.recv_fds(self._socket, 1, most)
        except TimeoutError:
            raise
        except OSError:
            raise EOFError from None
        if count and len(fds) == count[0]:
            return fds
        for fd in fds:
            os.close(fd)
        if not count:
            raise EOFError
        raise MalformedMessage(f"sent {len(fds)} file descriptors and said {count[0]}")

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _fill(self, size: int, deadline: float | None) -> None:
        """Receive until there are `size` bytes, and never more: what follows may carry descriptors."""
        while len(self._received) < size:
            if deadline is not None:
                self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            else:
                self._socket.settimeout(None)
            try:
                piece = self._socket.recv(min(size - len(self._received), _PIECE_BYTES))
            except TimeoutError:
                raise
            except OSError:
                piece = b""
            if not piece:
                raise EOFError
            self._received += piece


def accept_all(address: str, world_size: int, *, timeout_s: float) -> dict[int, Link]:
    """Wait, as rank 0, until all other ranks have connected; return a link to each.

    Whoever connects and does not say which rank it is keeps nobody waiting. Processes of other users are turned away,
    and so is who claims a rank that does not exist or is taken.

    Raises:
        PeerError: a rank did not connect in time, or another process has the address.
    """
    links: dict[int, Link] = {}
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    with contextlib.ExitStack() as strangers, selectors.DefaultSelector() as selector:
        listener = strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            listener.bind("\0" + address)
        except OSError:
            raise PeerError(f"the group's address is held by another process: {address}") from None
        listener.listen(world_size)
        selector.register(listener, selectors.EVENT_READ)
        heard: dict[socket.socket, bytes] = {}
        while len(links) < world_size - 1:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                for link in links.values():
                    link.close()
                missing = sorted(set(range(1, world_size)) - set(links))
                raise PeerError(f"rank(s) {missing} did not start on this host within {CONNECT_TIMEOUT_S:.0f} s")
            for key, _ in ready:
                if key.fileobj is listener:
                    stranger, _ = listener.accept()
                    if not _same_user(stranger):
                        stranger.close()
                        continue
                    strangers.callback(stranger.close)
                    heard[stranger] = b""
                    selector.register(stranger, selectors.EVENT_READ)
                    continue
                stranger = key.fileobj  # type: ignore[assignment]
                piece = _received_now(stranger, _HELLO.size - len(heard[stranger]))
                heard[stranger] += piece
                if piece and len(heard[stranger]) < _HELLO.size:
                    continue
                selector.unregister(stranger)
                hello = heard.pop(stranger)
                if piece:
                    rank, refusal = _judge(hello, world_size, links)
                    # A copy of the descriptor, as the stranger's own is closed with all strangers'.
                    link = Link(stranger.dup(), timeout_s=timeout_s)
                    with contextlib.suppress(OSError):  # who has gone again is found out at the first message
                        link.send(refusal or _WELCOME)
                    if refusal:
                        link.close()
                    else:
                        links[rank] = link
    return links


def connect(address: str, rank: int, world_size: int, *, timeout_s: float) -> Link:
    """Connect, as a rank other than 0, to rank 0.

    Raises:
        PeerError: it did not start in time, belongs to another user, or turned this rank away.
    """
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        try:
            connection.connect("\0" + address)
            break
        except (ConnectionRefusedError, BlockingIOError, TimeoutError):  # rank 0 is not there yet, or busy
            connection.close()
            if time.monotonic() > deadline:
                raise PeerError(f"rank 0 did not start on this host within {CONNECT_TIMEOUT_S:.0f} s") from None
            time.sleep(0.02)
    if not _same_user(connection):
        connection.close()
        raise PeerError("the group's address is held by another user")
    answer: Any = None
    with contextlib.suppress(OSError, EOFError, MalformedMessage):  # it is no rank 0 of ours, or has gone
        connection.sendall(_HELLO.pack(rank, world_size))
        answer = Link(connection, timeout_s=max(1e-3, deadline - time.monotonic())).receive()
    if answer != _WELCOME:
        connection.close()
        raise PeerError(f"rank 0 turned rank {rank} away: {answer}" if answer else "rank 0 left while connecting")
    return Link(connection, timeout_s=timeout_s, limit_bytes=2 * MESSAGE_LIMIT_BYTES * world_size)


def _judge(hello: bytes, world_size: int, links: dict[int, Link]) -> tuple[int, str | None]:
    """Return which rank a newcomer says it is, and why it is turned away, or None."""
    rank, its_world_size = _HELLO.unpack(hello)
    if its_world_size != world_size:
        return rank, f"it counts {its_world_size} ranks, rank 0 counts {world_size}"
    if not 0 < rank < world_size:
        return rank, f"there is no rank {rank} to join; the others are 1 to {world_size - 1}"
    return rank, f"rank {rank} has connected already" if rank in links else None


def _received_now(connection: socket.socket, size: int) -> bytes:
    try:
        return connection.recv(size, socket.MSG_DONTWAIT)
    except OSError:
        return b""


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid == os.getuid()
