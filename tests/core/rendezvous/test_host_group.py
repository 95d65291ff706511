"""What ranks say to each other outside kernels, here between threads: a failure is everyone's, nobody waits in vain."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import raised as error_of

from iris_core import AllocationMismatch, HeapExhausted, PeerError
from iris_core.rendezvous import exchange
from iris_core.rendezvous.control_plane import ControlPlane
from iris_core.rendezvous.unix_socket import random_address


def run(body: Callable[[ControlPlane], Any], world_size: int = 3, timeout_s: float = 20.0) -> list[Any]:
    """Run a body as every rank; return what each returned or raised."""
    address = random_address()
    results: list[Any] = [None] * world_size

    def be(rank: int) -> None:
        group = ControlPlane.connect(rank, world_size, address, timeout_s=timeout_s)
        try:
            results[rank] = body(group)
        except Exception as error:
            results[rank] = error
        finally:
            group.close()

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_hear_what_each_says(world_size: int) -> None:
    said = run(lambda group: group.all_gather({"rank": group.rank, "words": ["ä", None, 1.5]}), world_size)
    assert said == [[{"rank": rank, "words": ["ä", None, 1.5]} for rank in range(world_size)]] * world_size


def test_one_speaks_to_all() -> None:
    assert run(lambda group: group.broadcast(group.rank * 10, 2)) == [20, 20, 20]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_cannot_be_sent_is_an_error_on_every_rank(rank: int) -> None:
    def body(group: ControlPlane) -> list[Any]:
        value = {torch.float32} if group.rank == rank else "something else"
        errors: list[Any] = [error_of(group.broadcast, value, rank), error_of(group.all_gather, value)]
        return [*errors, group.all_gather(group.rank)]

    for of_broadcast, of_gather, after in run(body):
        for kind, message in (of_broadcast, of_gather):
            assert kind == "TypeError"
            assert message.startswith(f"rank {rank}: a set to ")
        assert after == [0, 1, 2]


def test_long_messages_arrive_whole() -> None:
    def body(group: ControlPlane) -> list[int]:
        return [len(word) for word in group.all_gather("x" * (1_000_000 * (group.rank + 1)))]

    assert run(body) == [[1_000_000, 2_000_000, 3_000_000]] * 3


def test_descriptors_are_shared() -> None:
    """Each rank writes into a pipe of its own; every rank holds every pipe's end."""

    def body(group: ControlPlane) -> int:
        receive, send = os.pipe()
        fds = group.exchange_fds(send)
        for fd in fds:
            os.write(fd, bytes([group.rank]))
        group.barrier()
        heard = sum(os.read(receive, 100))
        for fd in (*fds, receive, send):
            os.close(fd)
        return heard

    assert run(body) == [3, 3, 3]


def test_one_rank_shares_a_descriptor_with_all() -> None:
    def body(group: ControlPlane) -> int:
        own = os.open(os.devnull, os.O_RDONLY) if group.rank == 1 else None
        fds = group.exchange_fds(own)
        for fd in {*fds, own} - {None}:
            os.close(fd)  # type: ignore[arg-type]
        return len(fds)

    assert run(body) == [1, 1, 1]


@pytest.mark.parametrize(
    ("error", "heard"),
    [
        (ValueError, ValueError),
        (HeapExhausted, HeapExhausted),
        (AllocationMismatch, AllocationMismatch),
        (TimeoutError, PeerError),
        (OSError, PeerError),
    ],
)
@pytest.mark.parametrize("failing", [0, 2])
def test_what_fails_on_one_fails_on_all(error: type[Exception], heard: type[Exception], failing: int) -> None:
    def body(group: ControlPlane) -> None:
        with group.collective_section("do it"):
            if group.rank == failing:
                raise error("of its own")

    for rank, raised in enumerate(run(body)):
        assert type(raised) is (error if rank == failing else heard)
        assert str(raised) == ("of its own" if rank == failing else f"rank {failing} failed to do it: of its own")


def test_what_succeeds_on_all_goes_on() -> None:
    def body(group: ControlPlane) -> list[int]:
        with group.collective_section("do it"):
            pass
        return group.all_gather(group.rank)

    assert run(body) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_rank_that_left_is_named(leaving: int) -> None:
    def body(group: ControlPlane) -> None:
        if group.rank != leaving:
            group.barrier()

    for rank, raised in enumerate(run(body)):
        if rank != leaving:
            assert isinstance(raised, PeerError)
            # A rank that comes late finds that rank 0, which heard of it first, has left as well.
            assert str(raised) in (f"rank {leaving} left", "rank 0 left")


def test_a_rank_that_does_not_answer_is_named_to_all() -> None:
    done = threading.Event()

    def body(group: ControlPlane) -> None:
        if group.rank == 1:
            done.wait(30)
            return
        try:
            group.barrier()
        finally:
            if group.rank == 0:
                done.set()

    for rank, raised in enumerate(run(body, timeout_s=1.0)):
        if rank != 1:
            assert isinstance(raised, PeerError)
            assert "did not answer within" in str(raised)


def test_a_ranks_own_failure_is_not_hidden_by_its_peers_impatience() -> None:
    """Rank 0 gives up and leaves before rank 1 fails: what rank 1 has to say is more than that a peer has left."""
    gave_up = threading.Event()

    def body(group: ControlPlane) -> None:
        if group.rank == 0:
            with pytest.raises(PeerError, match="rank 1 did not answer within"):
                group.barrier()
            gave_up.set()
            return
        with group.collective_section("do it"):
            gave_up.wait(30)
            raise TimeoutError("of its own")

    assert str(run(body, world_size=2, timeout_s=0.5)[1]) == "of its own"


def impatient(group: ControlPlane) -> Any:
    """Let this rank, which is not rank 0, give up soon."""
    return mock.patch.object(group.exchange._sockets[0], "_timeout_s", 0.2)


def again(group: ControlPlane) -> list[int]:
    """Meet again, as often as it takes."""
    for _ in range(5):
        with contextlib.suppress(PeerError):
            group.rejoin()
            return group.all_gather(group.rank)
    raise AssertionError(f"rank {group.rank} met nobody")


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_one_has_given_up_nobody_completes(world_size: int) -> None:
    """Rank 1 gives up before the others come: they would go on with what it has undone."""
    gave_up = threading.Event()

    def body(group: ControlPlane) -> Any:
        if group.rank == 1:
            with impatient(group):
                error = error_of(group.barrier)
            gave_up.set()
        else:
            assert gave_up.wait(30)
            error = error_of(group.barrier)
        return error, again(group)

    for rank, ((kind, message), met) in enumerate(run(body, world_size)):
        assert kind == "PeerError"
        own = "rank 0 did not answer within 25 s (2.5 times the limit of a wait); it may be waiting for another rank"
        assert message.startswith(own if rank == 1 else f"rank 1 aborted: {own}")
        assert met == list(range(world_size))


def test_who_is_late_is_named_where_another_gives_up_first() -> None:
    over, done = threading.Event(), threading.Barrier(3)

    def body(group: ControlPlane) -> Any:
        if group.rank == 2:
            assert over.wait(30)
        with impatient(group) if group.rank == 1 else contextlib.nullcontext():
            error = error_of(group.barrier)
        if group.rank == 0:
            over.set()
        done.wait(30)
        return error

    first, _, third = run(body)
    assert first == third
    assert "rank 1 aborted: rank 0 did not answer" in first[1]
    assert first[1].endswith("; rank 2 had not come")


def test_all_ranks_have_one_limit_together() -> None:
    """When rank 1 has come the limit is over: what rank 2 gets of it is what rank 1 has left."""
    over, done = threading.Event(), threading.Barrier(3)
    clock = SimpleNamespace(monotonic=lambda: 1e4 * clock.has_come, has_come=False)

    def body(group: ControlPlane) -> Any:
        hear = group.exchange._receive_call

        def hear_one(*arguments: Any) -> None:
            hear(*arguments)
            clock.has_come = True

        if group.rank == 2:
            assert over.wait(30)
        with mock.patch.object(group.exchange, "_receive_call", hear_one):
            error = error_of(group.barrier)
        if group.rank == 0:
            over.set()
        done.wait(30)
        return error

    with mock.patch.object(exchange, "time", clock):
        errors = run(body, timeout_s=600)
    assert errors == [("PeerError", "rank 2 did not answer within 600 s (twice the limit of a wait)")] * 3


@pytest.mark.parametrize("collective", ["broadcast", "exchange_fds"])
@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupt_is_heard_of_and_no_answer_is_taken_for_anothers(interrupted: int, collective: str) -> None:
    was = threading.Event()

    def meet(group: ControlPlane, word: str) -> Any:
        return group.broadcast(word, 0) if collective == "broadcast" else group.exchange_fds(None)

    def body(group: ControlPlane) -> Any:
        if group.rank == interrupted:
            with (
                mock.patch.object(group.exchange, "_receive", side_effect=KeyboardInterrupt),
                pytest.raises(KeyboardInterrupt),
            ):
                meet(group, "first")
            was.set()
        elif group.rank == 0:
            assert was.wait(30)
        errors = [error_of(meet, group, word) for word in ("first", "second")]
        group.rejoin()
        return errors, group.broadcast("third", 0)

    why = "it was interrupted by KeyboardInterrupt"
    for rank, (errors, heard) in enumerate(run(body)):
        said = why if interrupted in (0, rank) else f"rank {interrupted} aborted: {why}"
        assert errors[0] == errors[1]
        assert errors[0][0] == "PeerError"
        assert errors[0][1].startswith(said)
        assert heard == "third"


def test_a_reset_that_is_interrupted_can_be_repeated() -> None:
    """Rank 1 has the answer that ends it, rank 2 has not, when rank 0 is interrupted."""

    def body(group: ControlPlane) -> Any:
        if group.rank == 0:
            send = group.exchange._send

            def send_one(peer: int, *message: Any) -> None:
                if peer == 2:
                    raise KeyboardInterrupt
                send(peer, *message)

            with mock.patch.object(group.exchange, "_send", send_one), pytest.raises(KeyboardInterrupt):
                group.rejoin()
        return again(group)

    assert run(body) == [[0, 1, 2]] * 3


def test_a_rank_that_stopped_waiting_in_reset_is_waited_for_again() -> None:
    gave_up, over = threading.Event(), threading.Event()

    def body(group: ControlPlane) -> Any:
        error = None
        if group.rank == 1:
            with impatient(group):
                error = error_of(group.rejoin)
            gave_up.set()
            assert over.wait(30)
        elif group.rank == 0:
            assert gave_up.wait(30)
            with mock.patch.object(group.exchange, "timeout_s", 0.2):
                error = error_of(group.rejoin)
            over.set()
        group.rejoin()
        return error, group.all_gather(group.rank)

    for rank, (error, met) in enumerate(run(body)):
        assert met == [0, 1, 2]
        if rank < 2:
            assert error[0] == "PeerError"
            assert f"rank {1 - rank} did not answer" in error[1] or (rank == 0 and "1, 2 did not" in error[1])


def test_a_failure_while_descriptors_are_shared_is_told() -> None:
    gc.collect()  # what other tests left behind
    before = len(os.listdir("/proc/self/fd"))

    def body(group: ControlPlane) -> Any:
        if group.rank == 2:
            return None
        with open(os.devnull) as file:
            return error_of(group.exchange_fds, file.fileno())

    first, second, _ = run(body)
    assert first == ("PeerError", "rank 2 left")
    assert second in (first, ("PeerError", "rank 0 left"))
    assert len(os.listdir("/proc/self/fd")) <= before  # a thread of an earlier test may end only now


def test_descriptors_of_ranks_that_do_different_things_are_closed() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))

    def body(group: ControlPlane) -> Any:
        if group.rank == 2:
            return error_of(group.barrier)
        with open(os.devnull) as file:
            return error_of(group.exchange_fds, file.fileno())

    for kind, message in run(body):
        assert kind == "ValueError"
        assert "rank 1: <share file descriptors>; rank 2: barrier" in message
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_rank_hears_its_own_value_as_json_brings_it() -> None:
    def body(group: ControlPlane) -> list[Any]:
        group.agree("the shape", (1, 2))
        group.agree("the names", {1: "one"})
        return group.all_gather((group.rank, {1: None}))

    assert run(body) == [[[rank, {"1": None}] for rank in range(3)]] * 3


def test_of_many_things_that_ranks_ask_for_those_that_differ_come_first() -> None:
    def body(group: ControlPlane) -> Any:
        asked = {"m": 8 + (group.rank == 2), "n": 4} | ({"k": 3} if group.rank else {})
        return [error_of(group.agree, "what is asked", one) for one in (asked, group.rank, {"m": asked["m"]})]

    for of_several, of_number, of_one in run(body):
        listed = "rank 0: {'m': 8}; rank 1: {'m': 8, 'k': 3}; rank 2: {'m': 9, 'k': 3}; all ranks: {'n': 4}"
        assert of_several == ("ValueError", f"what is asked must be the same on all ranks: {listed}")
        assert of_number[1] == "what is asked must be the same on all ranks: rank 0: 0; rank 1: 1; rank 2: 2"
        assert of_one[1].endswith("rank 0: {'m': 8}; rank 1: {'m': 8}; rank 2: {'m': 9}")
