"""Who may join the ranks of a host, and what they may say: strangers are turned away and keep nobody waiting.

Here the ranks are threads; a stranger is a socket. docs/reliability.md says what is trusted.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from limits import wait_until

from iris_core import PeerError
from iris_core.rendezvous import unix_socket
from iris_core.rendezvous.control_plane import ControlPlane
from iris_core.rendezvous.shared_memory import share_memory
from iris_core.rendezvous.unix_socket import random_address


def start(
    address: str, rank: int, world_size: int, results: dict[Any, Any], body: Callable[[ControlPlane], Any]
) -> Any:
    """Be a rank in a thread; what it returned or raised is in `results` afterwards."""

    def be() -> None:
        group = None
        try:
            group = ControlPlane.connect(rank, world_size, address, timeout_s=10)
            results[rank] = body(group)
        except Exception as error:
            results[rank] = error
        finally:
            if group:
                group.close()

    thread = threading.Thread(target=be)
    thread.start()
    return thread


def meet(group: ControlPlane) -> list[int]:
    return group.all_gather(group.rank)


def stranger(address: str, place: str = "") -> socket.socket:
    """Connect to rank 0 as soon as it is there; `place` is the rank and the number of ranks, for one that says so."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if place:
        connection.bind(f"\0{address}/{place}/token")
    deadline = time.monotonic() + 60
    while True:
        try:
            connection.connect("\0" + address)
            connection.settimeout(20)
            return connection
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def with_strangers(act: Callable[[str], Any]) -> tuple[dict[Any, Any], Any]:
    """Start rank 0 of two, let a stranger act, then start rank 1; return what the ranks met with, and the stranger."""
    address, results = random_address(), {}
    first = start(address, 0, 2, results, meet)
    acted = act(address)
    second = start(address, 1, 2, results, meet)
    for thread in (first, second):
        thread.join(30)
        assert not thread.is_alive()
    return results, acted


def test_who_connects_without_a_name_keeps_nobody_waiting() -> None:
    results, connections = with_strangers(lambda address: [stranger(address) for _ in range(3)])
    assert results == {0: [0, 1], 1: [0, 1]}
    for connection in connections:
        assert connection.recv(1) == b""
        connection.close()


def claim(place: str) -> Callable[[str], bytes]:
    def act(address: str) -> bytes:
        with stranger(address, place) as connection:
            return connection.recv(1000)

    return act


@pytest.mark.parametrize(
    ("place", "answer"),
    [
        ("0/2", b"there is no rank 0 to join"),
        ("2/2", b"there is no rank 2 to join"),
        (f"{2**64 - 1}/2", b"there is no rank"),
        ("1/3", b"it counts 3 ranks, rank 0 counts 2"),
    ],
)
def test_a_rank_that_does_not_exist_is_turned_away(place: str, answer: bytes) -> None:
    results, heard = with_strangers(claim(place))
    assert results == {0: [0, 1], 1: [0, 1]}
    assert answer in heard


@pytest.mark.parametrize("place", ["1", "1/2/3", "-1/2", "one/2"])
def test_one_that_is_of_no_rank_is_turned_away(place: str) -> None:
    results, heard = with_strangers(claim(place))
    assert results == {0: [0, 1], 1: [0, 1]}
    assert heard == b""


def test_a_rank_that_is_taken_is_turned_away() -> None:
    """Two claim to be rank 1; one of them is in, whichever it is, and waits with rank 0 for rank 2."""
    address, results, claims = random_address(), {}, [{}, {}]
    first = start(address, 0, 3, results, meet)
    claimants = [start(address, 1, 3, claim, meet) for claim in claims]
    wait_until(lambda: any(claims))
    (refused,) = [claim[1] for claim in claims if claim]
    third = start(address, 2, 3, results, meet)
    for thread in (first, third, *claimants):
        thread.join(30)
        assert not thread.is_alive()
    assert results == {0: [0, 1, 2], 2: [0, 1, 2]}
    assert {1: [0, 1, 2]} in claims
    assert isinstance(refused, PeerError)
    assert "rank 0 refused rank 1: rank 1 has connected already" in str(refused)


def seen(judge: Callable[..., Any], event: threading.Event) -> Any:
    """Say when somebody has said which rank it is."""

    def judged(*arguments: Any) -> Any:
        event.set()
        return judge(*arguments)

    return mock.patch.object(unix_socket, "_refusal", judged)


def test_nobody_goes_on_before_all_are_there() -> None:
    """A rank that did would have less time for the others than it takes to start them."""
    address, results, has_come, is_in = random_address(), {}, threading.Event(), threading.Event()

    def say_so_and_meet(group: ControlPlane) -> list[int]:
        is_in.set()
        return meet(group)

    with seen(unix_socket._refusal, has_come):
        threads = [start(address, rank, 3, results, say_so_and_meet) for rank in (0, 1)]
        assert has_come.wait(30)
        assert not is_in.wait(0.5)
        threads.append(start(address, 2, 3, results, meet))
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    assert results == {0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2]}


def test_who_has_come_hears_who_has_not() -> None:
    address, results, has_come = random_address(), {}, threading.Event()
    clock = SimpleNamespace(monotonic=lambda: 1e4 * has_come.is_set())
    with seen(unix_socket._refusal, has_come), mock.patch.object(unix_socket, "time", clock):
        first = start(address, 0, 3, results, meet)
        with stranger(address, "1/3") as connection:
            answer = connection.recv(1000)
        first.join(30)
    assert str(results[0]) == "rank(s) [2] did not start on this host within 180 s"
    assert str(results[0]).encode() in answer


def test_a_rank_0_that_says_nothing_is_waited_for_no_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_socket, "CONNECT_TIMEOUT_S", 0.4)
    address = random_address()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind("\0" + address)
        mute.listen(1)
        with pytest.raises(PeerError, match="rank 0 did not welcome rank 1 within"):
            ControlPlane.connect(1, 2, address, timeout_s=1)


def test_another_users_process_is_not_let_in() -> None:
    address, results, turned_away = random_address(), {}, threading.Event()
    clock = SimpleNamespace(monotonic=lambda: 10.0 * turned_away.is_set())
    with (
        mock.patch.object(unix_socket, "_same_user", return_value=False),
        mock.patch.object(unix_socket, "CONNECT_TIMEOUT_S", 1.0),
        mock.patch.object(unix_socket, "time", clock),
    ):
        first = start(address, 0, 2, results, meet)
        with stranger(address, "1/2") as connection:
            assert connection.recv(1) == b""
        turned_away.set()
        first.join(30)
    assert "rank(s) [1] did not start on this host within 1 s" in str(results[0])


def test_nor_is_one_joined_that_holds_the_address() -> None:
    address = random_address()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other,
        mock.patch.object(unix_socket, "_same_user", return_value=False),
    ):
        other.bind("\0" + address)
        other.listen(1)
        with pytest.raises(PeerError, match="held by another user"):
            ControlPlane.connect(1, 2, address, timeout_s=1)
        with pytest.raises(PeerError, match="held by another process"):
            ControlPlane.connect(0, 2, address, timeout_s=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_start_is_named(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_socket, "CONNECT_TIMEOUT_S", 0.5)
    began = time.monotonic()
    with pytest.raises(PeerError, match=r"rank\(s\) \[1\] did not start" if rank == 0 else "rank 0 did not start"):
        ControlPlane.connect(rank, 2, random_address(), timeout_s=1)
    assert time.monotonic() - began < 60  # less than the usual limit


MESSAGES = {
    "too large": (
        struct.pack("!QQ", 1 << 60, 0),
        "announced a message of 1,152,921,504,606,846,976 bytes; the limit is",
    ),
    "no JSON": (struct.pack("!QQ", 4, 0) + b"\xff{]x", "that are not JSON"),
    "nested": (struct.pack("!QQ", 100_000, 0) + b"[" * 100_000, "that are not JSON (RecursionError)"),
    "another shape": (struct.pack("!QQ", 2, 0) + b"42", "malformed"),
    "another epoch": (struct.pack("!QQ", 13, 0) + b'["x", "y", 1]', "malformed"),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_malformed_message_is_an_error_that_names_its_rank(message: str) -> None:
    """Neither memory nor time goes into it, and no rank goes on as if nothing had been said."""
    data, expected = MESSAGES[message]
    address, results = random_address(), {}
    first = start(address, 0, 3, results, meet)
    third = start(address, 2, 3, results, meet)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with stranger(address, "1/3") as connection:
        assert b"welcome" in connection.recv(100)
        connection.sendall(data)
        for thread in (first, third):
            thread.join(30)
            assert not thread.is_alive()
    assert isinstance(results[0], PeerError)
    assert str(results[0]).startswith("rank 1 ")
    assert expected in str(results[0])
    assert str(results[2]) in (str(results[0]), "rank 0 left")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_value_that_is_too_large_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    import iris_core.rendezvous.control_plane

    monkeypatch.setattr(iris_core.rendezvous.control_plane, "MESSAGE_LIMIT_BYTES", 1000)
    group = ControlPlane.connect(0, 1, random_address(), timeout_s=1)
    with pytest.raises(ValueError, match="a value of 602 bytes to gather values; at most 500 can be sent"):
        group.all_gather("x" * 600)
    group.close()


@pytest.mark.parametrize(("said", "sent"), [(2, 1), (1, 2), (2, 2), (0, 1), (1, 0)])
def test_descriptors_of_a_malformed_message_are_closed(said: int, sent: int) -> None:
    ours, theirs = socket.socketpair()
    link = unix_socket.MessageSocket(ours, timeout_s=5)
    before = len(os.listdir("/proc/self/fd"))
    message = struct.pack("!QQ", 2, said) + b"[]"
    if sent:
        socket.send_fds(theirs, [message], [theirs.fileno()] * sent)
    else:
        theirs.sendall(message)
    with pytest.raises(
        unix_socket.MalformedMessage, match=f"sent {sent} file descriptors instead of {said}; the limit is 1"
    ):
        link.receive()
    assert len(os.listdir("/proc/self/fd")) == before
    theirs.close()
    link.close()


def test_descriptors_that_nobody_takes_are_closed() -> None:
    """As of an answer that comes when its rank has given up."""
    ours, theirs = socket.socketpair()
    one, other = unix_socket.MessageSocket(ours, timeout_s=5), unix_socket.MessageSocket(theirs, timeout_s=5)
    before = len(os.listdir("/proc/self/fd"))
    for fds in ([theirs.fileno()], []):
        other.send("late", fds)
        assert one.receive() == "late"
        assert len(os.listdir("/proc/self/fd")) == before + len(fds)
    other.send("last", [theirs.fileno()])
    assert one.receive() == "last"
    one.close()
    other.close()
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_a_message_that_comes_in_pieces_is_whole_though_the_first_wait_for_it_failed() -> None:
    ours, theirs = socket.socketpair()
    link = unix_socket.MessageSocket(ours, timeout_s=0.1)
    data = struct.pack("!QQ", 7, 0) + b'["all"]'
    theirs.sendall(data[:11])
    with pytest.raises(TimeoutError):
        link.receive()
    theirs.sendall(data[11:])
    assert link.receive() == ["all"]
    theirs.close()
    link.close()


def test_a_link_that_is_closed_is_so_though_a_child_holds_it() -> None:
    """As workers do that a rank has forked."""
    ours, theirs = socket.socketpair()
    one, other = unix_socket.MessageSocket(ours, timeout_s=20), unix_socket.MessageSocket(theirs, timeout_s=20)
    wait_for, go = os.pipe()
    child = os.fork()
    if child == 0:
        held = ours.dup()
        one.close()  # its own copy, of which the parent's is none the worse
        other.send("closed")
        os.read(wait_for, 1)
        held.close()
        os._exit(0)
    try:
        assert one.receive() == "closed"
        one.send("still open")
        assert other.receive() == "still open"
        one.close()
        with pytest.raises(EOFError):
            other.receive()
    finally:
        os.write(go, b"x")
        os.waitpid(child, 0)
        for fd in (wait_for, go):
            os.close(fd)
        other.close()


def test_shared_memory_has_no_name_and_no_descriptor_is_left() -> None:
    group = ControlPlane.connect(0, 1, random_address(), timeout_s=1)
    before, files = len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    memory = share_memory(group, 4096, "iris_test")
    maps = Path("/proc/self/maps").read_text()
    assert "/memfd:iris_test (deleted)" in maps
    assert set(os.listdir("/dev/shm")) == files
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # Python's mmap keeps a copy of its own
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == before
    group.close()
