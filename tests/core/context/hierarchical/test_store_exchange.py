"""Rounds of messages through a store, the pulses of ranks there, and failures that all ranks hear of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist
from limits import wait_until

from iris_core import PeerError
from iris_core.context.hierarchical import store_exchange
from iris_core.context.hierarchical.store_exchange import StoreExchange
from iris_core.rendezvous.topology import Topology

TOPOLOGY = Topology(2, 1)


def opened(timeout_s: float, on_failure: Callable[[], object] = lambda: None) -> list[StoreExchange]:
    """Return the exchanges of two ranks, which are threads."""
    store = dist.HashStore()

    def open_rank(rank: int) -> StoreExchange:
        return StoreExchange(rank, TOPOLOGY, store, timeout_s=timeout_s, on_failure=on_failure)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(open_rank, range(2)))


def at_once(exchanges: list[StoreExchange], *calls: tuple[str, object]) -> list[list[list[object]]]:
    with ThreadPoolExecutor(2) as threads:
        return [found for found, _ in threads.map(lambda one, call: one.exchange(*call), exchanges, calls)]


def test_all_ranks_get_all_values_round_after_round() -> None:
    exchanges = opened(0.0)
    for number in range(3):
        found = at_once(exchanges, ("a", number), ("b", [number]))
        assert found == [[["a", number], ["b", [number]]]] * 2
    for one in exchanges:
        one.close()


def test_a_rank_that_aborts_is_named_on_the_others() -> None:
    told = threading.Event()
    exchanges = opened(0.0, told.set)
    exchanges[1].abort("its disk is full")
    with pytest.raises(PeerError, match=r"host 1 \(rank 1\) aborted: its disk is full"):
        exchanges[0].exchange("a", None)
    assert told.is_set()
    assert exchanges[0].is_lost
    for one in exchanges:
        one.close()


def test_the_first_failure_is_that_of_all_ranks() -> None:
    exchanges = opened(0.0)
    exchanges[1].failure = "so that it does not read what follows"
    exchanges[0].abort("its disk is full")
    exchanges[1].failure = None
    exchanges[1].abort("its wait timed out")
    assert exchanges[1].failure == exchanges[0].failure == "host 0 (rank 0) aborted: its disk is full"
    for one in exchanges:
        one.close()


def test_who_aborts_after_another_waits_until_the_failure_is_handled() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def handle() -> None:
        begun.set()
        may_end.wait()

    exchanges = opened(0.0, handle)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(exchanges[1].abort, "its disk is full")
        assert begun.wait(60)
        second = threads.submit(exchanges[1].abort, "it has left")
        try:
            with pytest.raises(TimeoutError):
                second.result(0.2)
        finally:
            may_end.set()
        first.result(), second.result()
    for one in exchanges:
        one.close()


def test_a_rank_that_does_not_come_to_a_round_is_named() -> None:
    exchanges = opened(0.0)
    with mock.patch.object(exchanges[0], "timeout_s", 0.2), pytest.raises(PeerError, match=r"host 1 .* did not answer"):
        exchanges[0].exchange("a", None)
    for one in exchanges:
        one.close()


def test_a_pulse_that_stands_still_fails_though_nobody_waits() -> None:
    told = threading.Event()
    with mock.patch.object(store_exchange, "_LONGEST_PULSE_S", 0.05):
        exchanges = opened(0.0, told.set)
    exchanges[1]._stopped.set()
    exchanges[1]._thread.join()
    exchanges[0].timeout_s = 0.2
    wait_until(told.is_set)
    assert exchanges[0].failure == "host 1 (rank 1) gave no sign of life for 0.2 s"
    for one in exchanges:
        one.close()


def test_a_rank_that_has_closed_its_context_is_not_missed() -> None:
    with mock.patch.object(store_exchange, "_LONGEST_PULSE_S", 0.05):
        exchanges = opened(0.0)
    exchanges[1].close()
    exchanges[0].timeout_s = 0.1
    looked = mock.Mock(wraps=exchanges[0]._read_failure)
    with mock.patch.object(exchanges[0], "_read_failure", looked):
        wait_until(lambda: looked.call_count > 8)
    assert exchanges[0].failure is None
    exchanges[0].close()
