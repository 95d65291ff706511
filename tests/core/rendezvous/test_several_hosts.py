"""Ranks that connect by TCP: who is admitted, and what such ranks can do. All are of one host here."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from ranks import raised

from iris_core.context.process_group import make_process_group
from iris_core.errors import PeerError
from iris_core.rendezvous import shared_memory, tcp_socket, unix_socket
from iris_core.rendezvous.control_plane import ControlPlane

TOKEN, OTHER = "a token of all ranks", "a token of somebody else"
LIMIT_S = 60.0
# Each rank is a thread here, and may have another environment.
_of_thread = threading.local()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("IRIS_HOST", "127.0.0.1")
    monkeypatch.setenv("IRIS_TOKEN", TOKEN)
    monkeypatch.setattr(unix_socket, "CONNECT_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(tcp_socket, "_token", lambda: getattr(_of_thread, "token", TOKEN).encode())
    return


def as_rank(address: str, rank: int, world_size: int, do: Callable[[ControlPlane], Any], token: str = TOKEN) -> Any:
    """Connect as a rank, and return what `do` returns, or the error."""
    _of_thread.token = token
    try:
        control_plane = ControlPlane.connect(rank, world_size, address, timeout_s=LIMIT_S)
        try:
            return do(control_plane)
        finally:
            control_plane.close()
    except (PeerError, ValueError) as error:
        return error


def together(address: str, world_size: int, do: Callable[[ControlPlane], Any]) -> list[Any]:
    with ThreadPoolExecutor(world_size) as threads:
        ranks = [threads.submit(as_rank, address, rank, world_size, do) for rank in range(world_size)]
        return [rank.result() for rank in ranks]


def talk(control_plane: ControlPlane) -> Any:
    with control_plane.collective_section("do this"):
        pass
    control_plane.agree("this", 1)
    words = shared_memory.share_words(control_plane, 4, "mine")
    words[0] = control_plane.rank
    assert not control_plane.passes_fds
    assert raised(make_process_group, control_plane, None)[0] == "RuntimeError"
    return control_plane.all_gather([control_plane.rank, words[0], "x" * 3_000_000])


def test_ranks_exchange_values_by_tcp() -> None:
    expected = [[rank, rank, "x" * 3_000_000] for rank in range(3)]
    assert together(tcp_socket.listen(), 3, talk) == [expected] * 3


def test_an_error_of_one_is_an_error_of_all() -> None:
    def fail(control_plane: ControlPlane) -> Any:
        with control_plane.collective_section("try"):
            if control_plane.rank == 1:
                raise ValueError("this is wrong")

    of_others = "rank 1 failed to try: this is wrong"
    assert list(map(str, together(tcp_socket.listen(), 3, fail))) == [of_others, "this is wrong", of_others]


def test_only_ranks_with_the_token_are_admitted() -> None:
    address = tcp_socket.listen()
    port = int(address.rpartition(":")[2])
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(as_rank, address, 0, 2, lambda one: one.all_gather(one.rank))
        impostor = as_rank(address, 1, 2, talk, OTHER)
        assert isinstance(impostor, PeerError)
        assert "its IRIS_TOKEN is another" in str(impostor)
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 15 + b"\4null", b"\xff" * 64):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(sent)
        assert not first.done()  # it waits for the rank still
        _of_thread.token = TOKEN
        assert as_rank(address, 1, 2, lambda one: one.all_gather(one.rank)) == first.result() == [0, 1]


def test_a_proof_is_of_one_rank_and_one_connection() -> None:
    """What a rank has answered once admits no other, and not a second time."""
    given = tcp_socket._proof(TOKEN.encode(), "challenge", "own", 1, 2)
    assert tcp_socket._is_proof(given, TOKEN.encode(), "challenge", "own", 1, 2)
    for others in (("another", "own", 1, 2), ("challenge", "another", 1, 2), ("challenge", "own", 0, 2)):
        assert not tcp_socket._is_proof(given, TOKEN.encode(), *others)
    for nonsense in (None, 7, "", "é", given[:-1]):
        assert not tcp_socket._is_proof(nonsense, TOKEN.encode(), "challenge", "own", 1, 2)


def test_a_rank_does_not_take_another_for_rank_0() -> None:
    """One that echoes, and answers with what it was sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def pretend() -> None:
            connection, _ = listener.accept()
            end = unix_socket.MessageSocket(connection, timeout_s=LIMIT_S)
            end.send("challenge")
            end.send(end.receive()[-1])
            end.close()

        server = threads.submit(pretend)
        refused = as_rank(f"tcp://127.0.0.1:{listener.getsockname()[1]}", 1, 2, talk)
        server.result()
    assert isinstance(refused, PeerError)
    assert "is not rank 0, or its IRIS_TOKEN is another" in str(refused)


@pytest.mark.parametrize("token", ["", "short"])
def test_a_token_is_a_secret_of_some_length(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("IRIS_TOKEN", token)
    with pytest.raises(ValueError, match=rf"has {len(token)} characters.*openssl rand -hex 32"):
        tcp_socket.listen()
