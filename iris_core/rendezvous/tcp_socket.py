"""TCP sockets between ranks of several hosts, and how the two ends of one prove that they have the same token.

Every rank connects to rank 0, as on one host (unix_socket.py), and messages are the same: JSON, bounded, and
nothing received is executed. Who may connect is settled by a secret, ``IRIS_TOKEN``, which what starts the ranks gives
to all of them. It never travels: each end sends a random challenge, and answers the other's with an HMAC-SHA256 of both
challenges, its rank and the world size under the token. After that the connection is neither encrypted nor protected
from a network that changes what is sent.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from typing import Any

from ..errors import PeerError
from .unix_socket import (
    LONGER,
    MESSAGE_LIMIT_BYTES,
    MalformedMessage,
    MessageSocket,
    admit_all,
    await_welcome,
    connect_to,
)

_LEAST_TOKEN = 16  # characters
_PROOF_S = 10.0  # that a newcomer may take, while others wait
_PROOF_BYTES = 1024  # of a message from one that has proved nothing

_listeners: dict[str, socket.socket] = {}  # of rank 0, by address, until it accepts


def listen() -> str:
    """Listen, as rank 0, at a free port; return the address for all ranks: "tcp://HOST:PORT".

    HOST is ``IRIS_HOST``, or what this host's name stands for.

    Raises:
        ValueError: the token is too short, or the host's name stands for nothing.
    """
    _token()
    try:
        host = os.environ.get("IRIS_HOST") or socket.gethostbyname(socket.gethostname())
        listener = socket.create_server((host, 0))
    except OSError as error:
        raise ValueError(
            f"rank 0 cannot listen: {error}; IRIS_HOST takes an address of its host that the others reach"
        ) from error
    address = f"tcp://{host}:{listener.getsockname()[1]}"
    _listeners[address] = listener
    return address


def accept_all(address: str, world_size: int, *, timeout_s: float) -> dict[int, MessageSocket]:
    """Wait, as rank 0, until all other ranks have connected; return a socket to each, by rank.

    Connections without the token, of no rank, or of one that does not exist or is taken, are refused.

    Raises:
        PeerError: a rank did not connect in time.
    """
    token = _token()

    def admit(connection: socket.socket, name: Any) -> tuple[int, int, MessageSocket] | None:
        newcomer = MessageSocket(connection, timeout_s=_PROOF_S, limit_bytes=_PROOF_BYTES)
        challenge = secrets.token_hex(32)
        try:
            newcomer.send(challenge)
            rank, its_world_size, its_challenge, proof = newcomer.receive(time.monotonic() + _PROOF_S)
            if not _is_proof(proof, token, challenge, its_challenge, rank, its_world_size):
                return None
            newcomer.send(_proof(token, its_challenge, challenge, 0, its_world_size))
        except (OSError, EOFError, MalformedMessage, TypeError, ValueError):  # it has gone, or is no rank
            return None
        _keep_alive(connection)
        return rank, its_world_size, MessageSocket(connection, timeout_s=timeout_s)

    with _listeners.pop(address) as listener:
        return admit_all(listener, world_size, admit, "")


def connect(address: str, rank: int, world_size: int, *, timeout_s: float) -> MessageSocket:
    """Connect, as a rank other than 0, to rank 0; return when all ranks have.

    Raises:
        ValueError: there is no token here, or it is too short.
        PeerError: a rank did not start in time, or rank 0 refused this rank, or has another token.
    """
    token = _token()
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    limit_bytes = 2 * MESSAGE_LIMIT_BYTES * world_size
    message_socket = MessageSocket(connection, timeout_s=timeout_s, limit_bytes=limit_bytes)
    try:
        connect_to(connection, (host, int(port)), f"at {host}:{port} ")
        _keep_alive(connection)
        own = secrets.token_hex(32)
        limit_s = _PROOF_S * world_size * LONGER  # rank 0 takes one newcomer at a time
        try:
            challenge = message_socket.receive(time.monotonic() + limit_s)
            message_socket.send([rank, world_size, own, _proof(token, challenge, own, rank, world_size)])
            proof = message_socket.receive(time.monotonic() + limit_s)
        except (OSError, EOFError, MalformedMessage) as error:
            why = f"rank 0 at {host}:{port} did not admit rank {rank}: its IRIS_TOKEN is another, or it has left"
            raise PeerError(f"{why} ({type(error).__name__})") from None
        if not _is_proof(proof, token, own, challenge, 0, world_size):
            raise PeerError(f"what answers at {host}:{port} is not rank 0, or its IRIS_TOKEN is another")
        await_welcome(message_socket, rank)
    except BaseException:
        message_socket.close()
        raise
    return message_socket


def _token() -> bytes:
    token = os.environ.get("IRIS_TOKEN", "")
    if len(token) < _LEAST_TOKEN:
        raise ValueError(
            f"IRIS_TOKEN has {len(token)} characters; ranks of several hosts need the same secret, of at least "
            f"{_LEAST_TOKEN}: IRIS_TOKEN=$(openssl rand -hex 32), given to all ranks by what starts them"
        )
    return token.encode()


def _proof(token: bytes, challenge: Any, own_challenge: Any, rank: int, world_size: int) -> str:
    """Return the answer to a challenge, which no other rank, nor the other end, can give."""
    said = f"{challenge}/{own_challenge}/{rank}/{world_size}"
    return hmac.new(token, said.encode(), "sha256").hexdigest()


def _is_proof(proof: Any, token: bytes, challenge: str, its_challenge: Any, rank: int, world_size: int) -> bool:
    expected = _proof(token, challenge, its_challenge, rank, world_size)
    return isinstance(proof, str) and proof.isascii() and hmac.compare_digest(proof, expected)


def _keep_alive(connection: socket.socket) -> None:
    """Let a host that is lost without a word be noticed, in seconds; one that dies ends the connection itself."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
