"""Unix sockets between the ranks of one host: how they connect, and the messages between two of them.

Every rank connects to rank 0, by a Unix socket whose name is abstract (no file to leave behind) and random. The other
end's user is checked. A message is JSON, so nothing received is executed, and its size is bounded; file descriptors
travel with it. docs/reliability.md says what is trusted.
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
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import PeerError
from ..utils.owner import Owner

CONNECT_TIMEOUT_S = 180.0  # a rank imports torch before it connects, several at a time on few cores
MESSAGE_LIMIT_BYTES = 64 << 20  # of one rank; an answer holds every rank's
_LONGER = 1.25  # how much longer a rank waits to be accepted: rank 0 knows who is missing, and reports it
_HEADER = struct.Struct("!QQ")  # bytes, file descriptors
_HELLO = struct.Struct("!QQ")  # rank, number of ranks
_WELCOME = "welcome"
_RECEIVE_BYTES = 1 << 20
_FD_BYTES = array.array("i").itemsize


class MalformedMessage(Exception):
    """What came over a socket is not a message; nothing after it can be parsed."""


def random_address() -> str:
    """Return a fresh name under which ranks can meet, to be given to all of them."""
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
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.settimeout(self._timeout_s or None)
        try:
            sent = self._socket.sendmsg([whole], rights)
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
            self._close_fds()
        self._fill(_HEADER.size, deadline)
        size, count = _HEADER.unpack_from(self._received)
        if size > self._limit_bytes:
            raise MalformedMessage(f"announced a message of {size:,} bytes; the limit is {self._limit_bytes:,}")
        self._fill(_HEADER.size + size, deadline)
        data = bytes(self._received[_HEADER.size :])
        self._received.clear()
        if not (came := len(self._fds)) == count <= self._limit_fds:
            self._close_fds()
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
        self._close_fds()
        if self._owner.is_this_process:  # not in such a child
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _close_fds(self) -> None:
        for fd in self.take_fds():
            os.close(fd)

    def _fill(self, size: int, deadline: float | None) -> None:
        """Receive until there are `size` bytes, and never more: what follows may carry descriptors."""
        room = socket.CMSG_LEN((self._limit_fds + 1) * _FD_BYTES)  # one too many is seen
        while len(self._received) < size:
            self._socket.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
            try:
                received, ancillary, _, _ = self._socket.recvmsg(min(size - len(self._received), _RECEIVE_BYTES), room)
            except TimeoutError:
                raise
            except OSError:
                received, ancillary = b"", []
            for _, _, rights in ancillary:
                self._fds += array.array("i", rights[: len(rights) // _FD_BYTES * _FD_BYTES])
            if not received:
                raise EOFError
            self._received += received


def accept_all(address: str, world_size: int, *, timeout_s: float) -> dict[int, MessageSocket]:
    """Wait, as rank 0, until all other ranks have connected; return a socket to each, by rank.

    A connection that does not send its rank delays no other. Processes of other users are refused, and so is one that
    claims a rank that does not exist or is taken.

    Raises:
        PeerError: a rank did not connect in time, or another process has the address.
    """
    sockets: dict[int, MessageSocket] = {}
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    with contextlib.ExitStack() as strangers, selectors.DefaultSelector() as selector:
        listener = strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            listener.bind("\0" + address)
        except OSError:
            raise PeerError(f"the ranks' address is held by another process: {address}") from None
        listener.listen(world_size)
        selector.register(listener, selectors.EVENT_READ)
        while len(sockets) < world_size - 1:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                missing = sorted(set(range(1, world_size)) - set(sockets))
                why = f"rank(s) {missing} did not start on this host within {CONNECT_TIMEOUT_S:.0f} s"
                _send_to(sockets.values(), why)
                for message_socket in sockets.values():
                    message_socket.close()
                raise PeerError(why)
            for key, _ in ready:
                if key.fileobj is listener:
                    _accept(listener, selector, strangers)
                else:
                    _receive_hello(key, selector, world_size, sockets, timeout_s)
        _send_to(sockets.values(), _WELCOME)
    return dict(sorted(sockets.items()))


def connect(address: str, rank: int, world_size: int, *, timeout_s: float) -> MessageSocket:
    """Connect, as a rank other than 0, to rank 0; return when all ranks have.

    Raises:
        PeerError: a rank did not start in time, or rank 0 belongs to another user, or refused this rank.
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
        raise PeerError("the ranks' address is held by another user")
    limits = {"limit_bytes": 2 * MESSAGE_LIMIT_BYTES * world_size, "limit_fds": world_size}
    message_socket = MessageSocket(connection, timeout_s=timeout_s, **limits)
    limit_s = CONNECT_TIMEOUT_S * _LONGER
    try:
        connection.sendall(_HELLO.pack(rank, world_size))
        answer = message_socket.receive(time.monotonic() + limit_s)
        refusal = None if answer == _WELCOME else f"rank 0 refused rank {rank}: {answer}"
    except TimeoutError:
        refusal = f"rank 0 did not welcome rank {rank} within {limit_s:.0f} s"
    except (OSError, EOFError, MalformedMessage):  # it is not rank 0, or has gone
        refusal = "rank 0 left while connecting"
    if refusal:
        message_socket.close()
        raise PeerError(refusal)
    return message_socket


def _accept(listener: socket.socket, selector: selectors.BaseSelector, strangers: contextlib.ExitStack) -> None:
    """Accept a connection, of which nothing is known but the user."""
    stranger, _ = listener.accept()
    if not _same_user(stranger):
        stranger.close()
        return
    strangers.callback(stranger.close)
    selector.register(stranger, selectors.EVENT_READ, bytearray())


def _receive_hello(
    key: selectors.SelectorKey,
    selector: selectors.BaseSelector,
    world_size: int,
    sockets: dict[int, MessageSocket],
    timeout_s: float,
) -> None:
    """Receive what has come of a stranger's hello; once it is whole, keep its socket by rank, or refuse it."""
    stranger, hello = key.fileobj, key.data
    assert isinstance(stranger, socket.socket)
    received = _received_now(stranger, _HELLO.size - len(hello))
    hello += received
    if received and len(hello) < _HELLO.size:
        return
    selector.unregister(stranger)
    if not received:
        return
    rank, refusal = _rank_of(hello, world_size, sockets)
    # A copy of the descriptor, as the stranger's own is closed with all strangers'.
    message_socket = MessageSocket(stranger.dup(), timeout_s=timeout_s)
    if refusal:
        _send_to([message_socket], refusal)
        message_socket.close()
    else:
        sockets[rank] = message_socket


def _send_to(sockets: Iterable[MessageSocket], message: str) -> None:
    for message_socket in sockets:
        with contextlib.suppress(OSError):  # one that has gone is found at the first message
            message_socket.send(message)


def _rank_of(hello: bytearray, world_size: int, sockets: dict[int, MessageSocket]) -> tuple[int, str | None]:
    """Return which rank a newcomer claims to be, and why it is refused, or None."""
    rank, its_world_size = _HELLO.unpack(hello)
    if its_world_size != world_size:
        return rank, f"it counts {its_world_size} ranks, rank 0 counts {world_size}"
    if not 0 < rank < world_size:
        return rank, f"there is no rank {rank} to join; the others are 1 to {world_size - 1}"
    return rank, f"rank {rank} has connected already" if rank in sockets else None


def _received_now(connection: socket.socket, size: int) -> bytes:
    try:
        return connection.recv(size, socket.MSG_DONTWAIT)
    except OSError:
        return b""


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid == os.getuid()
