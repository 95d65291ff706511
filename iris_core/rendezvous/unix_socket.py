"""Unix sockets between the ranks of one host: how they connect, and the messages between two of them.

Every rank connects to rank 0, by a Unix socket whose name is abstract (no file to leave behind) and random. Its own end
has a name, too, which says which rank it is: rank 0 knows as it accepts, and waits for no newcomer to say so. The other
end's user is checked. A message is JSON, so nothing received is executed, and its size is bounded; file descriptors
travel with it. docs/reliability.md says what is trusted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import PeerError
from ..utils.owner import Owner

CONNECT_TIMEOUT_S = 180.0  # a rank imports torch before it connects, several at a time on few cores
MESSAGE_LIMIT_BYTES = 64 << 20  # of one rank; an answer holds every rank's
LONGER = 1.25  # how much longer a rank other than 0 waits: rank 0 knows who is missing, and should report it
_HEADER = struct.Struct("!QQ")  # bytes, file descriptors
_WELCOME = "welcome"
_RECEIVE_BYTES = 1 << 20


class MalformedMessage(Exception):
    """What came over a socket is not a message; nothing after it can be parsed."""


def random_address() -> str:
    """Return a fresh name for rank 0's socket, to be given to all ranks."""
    return f"iris-{secrets.token_hex(16)}"


class MessageSocket:
    """Messages to and from one rank.

    Args:
        connection: the socket, which this owns.
        timeout_s: how long a message may take to come or go; 0 for ever.
        limit_bytes: size of the largest message that is taken.
        limit_fds: how many file descriptors are taken with one.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        timeout_s: float,
        limit_bytes: int = MESSAGE_LIMIT_BYTES,
        limit_fds: int = 1,
    ) -> None:
        self._socket = connection
        self._timeout_s = timeout_s
        self._limit_bytes = limit_bytes
        self._limit_fds = limit_fds
        self._received = bytearray()  # of a message that has not come whole: a later call goes on
        self._fds: list[int] = []  # that came with it, or with the one before, until they are taken
        self._owner = Owner()

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait on."""
        return self._socket.fileno()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send anything JSON holds, and copies of file descriptors.

        Raises:
            TimeoutError: the other end does not take it; what was sent of it cannot be called back.
            OSError: the other end has gone, or an earlier message was not sent whole.
        """
        data = json.dumps(message).encode()
        whole = memoryview(_HEADER.pack(len(data), len(fds)) + data)
        self._socket.settimeout(self._timeout_s or None)
        try:
            sent = socket.send_fds(self._socket, [whole], fds)
            if rest := whole[sent:]:  # to send nothing fails too where the other end, having all, has gone
                self._socket.sendall(rest)
        except BaseException:  # an interrupt too: the other end is to wait for the rest of it no longer
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
            raise

    def receive(self, deadline: float | None = None) -> Any:
        """Return the next message; `take_fds` returns what came with it, until the next call.

        Args:
            deadline: when it must have come, by `time.monotonic`; None for the socket's own limit.

        Raises:
            TimeoutError: none came within the limit.
            EOFError: the other end has gone.
            MalformedMessage: it is too large, no JSON, or came with more or fewer file descriptors than it says.
        """
        if deadline is None and self._timeout_s:
            deadline = time.monotonic() + self._timeout_s
        if not self._received:
            close_fds(self.take_fds())
        self._fill(_HEADER.size, deadline)
        size, count = _HEADER.unpack_from(self._received)
        if size > self._limit_bytes:
            raise MalformedMessage(f"announced a message of {size:,} bytes; the limit is {self._limit_bytes:,}")
        self._fill(_HEADER.size + size, deadline)
        data = bytes(self._received[_HEADER.size :])
        self._received.clear()
        if not (came := len(self._fds)) == count <= self._limit_fds:
            close_fds(self.take_fds())
            raise MalformedMessage(f"sent {came} file descriptors instead of {count}; the limit is {self._limit_fds}")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise MalformedMessage(f"sent {size:,} bytes that are not JSON ({type(error).__name__})") from None

    def take_fds(self) -> list[int]:
        """Return the file descriptors that came with the last message, now the caller's."""
        fds, self._fds = self._fds, []
        return fds

    def close(self) -> None:
        """Close the socket at both ends, though a child of this process may hold a copy of it."""
        close_fds(self.take_fds())
        if self._owner.is_this_process:  # not in such a child
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _fill(self, size: int, deadline: float | None) -> None:
        """Receive until there are `size` bytes, and never more: what follows may carry descriptors."""
        while (missing := size - len(self._received)) > 0:
            self._socket.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
            try:
                received, fds, _, _ = socket.recv_fds(
                    self._socket,
                    min(missing, _RECEIVE_BYTES),
                    self._limit_fds + 1,  # one too many is seen
                )
            except TimeoutError:
                raise
            except OSError:
                received, fds = b"", []
            self._fds += fds
            if not received:
                raise EOFError
            self._received += received


def close_fds(fds: Iterable[int]) -> None:
    """Close file descriptors."""
    for fd in fds:
        os.close(fd)


def accept_all(address: str, world_size: int, *, timeout_s: float) -> dict[int, MessageSocket]:
    """Wait, as rank 0, until all other ranks have connected; return a socket to each, by rank.

    Processes of other users are refused, and so is one that is of no rank, or of one that does not exist or is taken.

    Raises:
        PeerError: a rank did not connect in time, or another process has the address.
    """

    def admit(connection: socket.socket, name: Any) -> tuple[int, int, MessageSocket] | None:
        place = re.fullmatch(re.escape("\0" + address) + r"/(\d+)/(\d+)/\w+", os.fsdecode(name))
        if place is None or not _same_user(connection):
            return None
        rank, its_world_size = map(int, place.groups())
        return rank, its_world_size, MessageSocket(connection, timeout_s=timeout_s)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind("\0" + address)
        except OSError:
            raise PeerError(f"the ranks' address is held by another process: {address}") from None
        return admit_all(listener, world_size, admit, "on this host ")


def admit_all(
    listener: socket.socket,
    world_size: int,
    admit: Callable[[socket.socket, Any], tuple[int, int, MessageSocket] | None],
    where: str,
) -> dict[int, MessageSocket]:
    """Accept connections until each other rank has one, then welcome them all; return them by rank.

    Args:
        listener: bound already.
        world_size: number of ranks.
        admit: gives for a connection, and the name of its other end, the rank there, its world size and the socket to
            use; None if it is no rank's.
        where: the ranks are, for the error.

    Raises:
        PeerError: a rank did not connect in time.
    """
    sockets: dict[int, MessageSocket] = {}
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    listener.listen(world_size)
    while len(sockets) < world_size - 1:
        listener.settimeout(max(1e-3, deadline - time.monotonic()))
        try:
            connection, name = listener.accept()
        except ConnectionAbortedError:
            continue
        except TimeoutError:
            missing = sorted(set(range(1, world_size)) - set(sockets))
            why = f"rank(s) {missing} did not start {where}within {CONNECT_TIMEOUT_S:.0f} s"
            _refuse(sockets.values(), why)
            raise PeerError(why) from None
        admitted = admit(connection, name)
        if admitted is None:
            connection.close()
            continue
        rank, its_world_size, message_socket = admitted
        if refusal := _refusal(rank, its_world_size, world_size, sockets):
            _refuse([message_socket], refusal)
        else:
            sockets[rank] = message_socket
    _send_to(sockets.values(), _WELCOME)
    return dict(sorted(sockets.items()))


def connect(address: str, rank: int, world_size: int, *, timeout_s: float) -> MessageSocket:
    """Connect, as a rank other than 0, to rank 0; return when all ranks have.

    Raises:
        PeerError: a rank did not start in time, or rank 0 belongs to another user, or refused this rank.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    limits = {"limit_bytes": 2 * MESSAGE_LIMIT_BYTES * world_size, "limit_fds": world_size}
    message_socket = MessageSocket(connection, timeout_s=timeout_s, **limits)
    try:
        # Random at its end: another user, who can see rank 0's name, cannot take it.
        connection.bind(f"\0{address}/{rank}/{world_size}/{secrets.token_hex(16)}")
        connect_to(connection, "\0" + address, "on this host ")
        if not _same_user(connection):
            raise PeerError("the ranks' address is held by another user")
        await_welcome(message_socket, rank)
    except BaseException:
        message_socket.close()
        raise
    return message_socket


def await_welcome(message_socket: MessageSocket, rank: int) -> None:
    """Return when rank 0 has connected to all ranks.

    Raises:
        PeerError: it did not in time, has left, or refused this rank.
    """
    limit_s = CONNECT_TIMEOUT_S * LONGER
    try:
        answer = message_socket.receive(time.monotonic() + limit_s)
    except TimeoutError:
        raise PeerError(f"rank 0 did not welcome rank {rank} within {limit_s:.0f} s") from None
    except (EOFError, MalformedMessage):  # it is not rank 0, or has gone
        raise PeerError("rank 0 left while connecting") from None
    if answer != _WELCOME:
        raise PeerError(f"rank 0 refused rank {rank}: {answer}")


def connect_to(connection: socket.socket, name: Any, where: str) -> None:
    """Connect to rank 0 by the name of its socket, once it is there; `where` it is to be is for the error.

    Raises:
        PeerError: it did not come in time.
    """
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        try:
            return connection.connect(name)
        except (ConnectionRefusedError, BlockingIOError, TimeoutError):  # rank 0 is not there yet, or busy
            if time.monotonic() > deadline:
                raise PeerError(f"rank 0 did not start {where}within {CONNECT_TIMEOUT_S:.0f} s") from None
            time.sleep(0.02)


def _refusal(rank: int, its_world_size: int, world_size: int, sockets: dict[int, MessageSocket]) -> str | None:
    """Return why a newcomer is refused, or None."""
    if its_world_size != world_size:
        return f"it counts {its_world_size} ranks, rank 0 counts {world_size}"
    if not 0 < rank < world_size:
        return f"there is no rank {rank} to join; the others are 1 to {world_size - 1}"
    return f"rank {rank} has connected already" if rank in sockets else None


def _refuse(sockets: Iterable[MessageSocket], why: str) -> None:
    _send_to(sockets, why)
    for message_socket in sockets:
        message_socket.close()


def _send_to(sockets: Iterable[MessageSocket], message: str) -> None:
    for message_socket in sockets:
        with contextlib.suppress(OSError):  # one that has gone is found at the first message
            message_socket.send(message)


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid == os.getuid()
