"""What ranks say to each other outside kernels, here between threads: a failure is everyone's, nobody waits in vain."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import raised as error_of

from iris_core import AllocationMismatch, HeapExhausted, PeerError
from iris_core.host_group import HostGroup, random_address


def run(body: Callable[[HostGroup], Any], world_size: int = 3, timeout_s: float = 20.0) -> list[Any]:
    """Run a body as every rank; return what each returned or raised."""
    address = random_address()
    results: list[Any] = [None] * world_size

    def be(rank: int) -> None:
        group = HostGroup(rank, world_size, address, timeout_s=timeout_s)
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
    def body(group: HostGroup) -> list[Any]:
        value = {torch.float32} if group.rank == rank else "something else"
        errors: list[Any] = [error_of(group.broadcast, value, rank), error_of(group.all_gather, value)]
        return [*errors, group.all_gather(group.rank)]

    for of_broadcast, of_gather, after in run(body):
        for kind, message in (of_broadcast, of_gather):
            assert kind == "TypeError"
            assert message.startswith(f"rank {rank}: a set to ")
        assert after == [0, 1, 2]


def test_long_messages_arrive_whole() -> None:
    def body(group: HostGroup) -> list[int]:
        return [len(word) for word in group.all_gather("x" * (1_000_000 * (group.rank + 1)))]

    assert run(body) == [[1_000_000, 2_000_000, 3_000_000]] * 3


def test_descriptors_are_shared() -> None:
    """Each rank writes into a pipe of its own; every rank holds every pipe's end."""

    def body(group: HostGroup) -> int:
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
    def body(group: HostGroup) -> int:
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
    def body(group: HostGroup) -> None:
        with group.together("do it"):
            if group.rank == failing:
                raise error("of its own")

    for rank, raised in enumerate(run(body)):
        assert type(raised) is (error if rank == failing else heard)
        assert str(raised) == ("of its own" if rank == failing else f"rank {failing} failed to do it: of its own")


def test_what_succeeds_on_all_goes_on() -> None:
    def body(group: HostGroup) -> list[int]:
        with group.together("do it"):
            pass
        return group.all_gather(group.rank)

    assert run(body) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_rank_that_left_is_named(leaving: int) -> None:
    def body(group: HostGroup) -> None:
        if group.rank != leaving:
            group.barrier()

    for rank, raised in enumerate(run(body)):
        if rank != leaving:
            assert isinstance(raised, PeerError)
            # A rank that comes late finds that rank 0, which heard of it first, has left as well.
            assert str(raised) in (f"rank {leaving} left", "rank 0 left")


def test_a_rank_that_does_not_answer_is_named_to_all() -> None:
    done = threading.Event()

    def body(group: HostGroup) -> None:
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

    def body(group: HostGroup) -> None:
        if group.rank == 0:
            with pytest.raises(PeerError, match="rank 1 did not answer within"):
                group.barrier()
            gave_up.set()
            return
        with group.together("do it"):
            gave_up.wait(30)
            raise TimeoutError("of its own")

    assert str(run(body, world_size=2, timeout_s=0.5)[1]) == "of its own"
