"""Barriers of groups and streams, copies to the heap, log records with ranks, and `do_bench`."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from ranks import Ranks, context, raised

import iris_core


def meet_in_groups(rank: int, world_size: int) -> tuple[str, str] | None:
    ctx = context()
    pair, last = ctx.ccl.new_group([1, 0]), ctx.ccl.new_group([2])
    own = pair if rank < 2 else last
    here = ctx.zeros(1)
    ctx.barrier()
    for call in (1, 2, 3):
        ctx.peer_view(here)[1 - rank if rank < 2 else rank].fill_(call)
        ctx.device_barrier(own)
        ctx.backend.synchronize()
        assert here.item() == call
        ctx.barrier(group=own)
    ctx.barrier()
    return raised(ctx.barrier, group=pair) if rank == 2 else None


def test_groups_meet_without_the_others(ranks: Callable[[int], Ranks]) -> None:
    *_, error = ranks(3).call(meet_in_groups)
    assert error == ("ValueError", "rank 2 is not in Group([1, 0]); only its ranks take part in its collectives")


def wait_for_stream(rank: int, world_size: int) -> int:
    class Stream:
        waits = 0

        def synchronize(self) -> None:
            self.waits += 1

    stream = Stream()
    context().barrier(stream)
    return stream.waits


def test_a_barrier_waits_for_the_stream_it_is_given(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(wait_for_stream) == [1, 1]


def copy_to_heap(rank: int, world_size: int) -> None:
    ctx = context()
    given = torch.arange(6, dtype=torch.int16).view(2, 3).t() + rank
    made = ctx.as_symmetric(given)
    assert ctx.is_symmetric(made)
    assert not ctx.is_symmetric(given)
    assert not ctx.is_symmetric(3)  # type: ignore[arg-type]
    assert ctx.as_symmetric(made) is made
    ctx.barrier()
    assert torch.equal(ctx.peer_view(made)[1 - rank].cpu(), given + 1 - 2 * rank)
    ctx.barrier()
    ctx.free(made)


def test_a_tensor_is_copied_to_the_heap_once(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).call(copy_to_heap)


def log_all(rank: int, world_size: int) -> list[str]:
    ctx = context()
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(  # type: ignore[method-assign]
        f"{record.levelname} {vars(record)['iris_rank']}/{vars(record)['iris_num_ranks']} {record.getMessage()}"
    )
    iris_core.logger.addHandler(handler)
    iris_core.set_logger_level(iris_core.WARNING)
    for write in (ctx.debug, ctx.info, ctx.warning, ctx.error):
        write("100 % done")
    iris_core.set_logger_level(iris_core.DEBUG)
    ctx.debug("again")
    iris_core.set_logger_level(iris_core.INFO)
    iris_core.logger.removeHandler(handler)
    return found


def test_records_name_their_rank(ranks: Callable[[int], Ranks]) -> None:
    of_ranks = ranks(2).call(log_all)
    for rank, found in enumerate(of_ranks):
        messages = [f"WARNING {rank}/2 100 % done", f"ERROR {rank}/2 100 % done", f"DEBUG {rank}/2 again"]
        assert found == messages


def test_do_bench_calls_in_order_and_summarises() -> None:
    called: list[str] = []
    calls = {name: (lambda name=name: called.append(name)) for name in ("fn", "barrier", "preamble")}
    times = iris_core.do_bench(calls["fn"], calls["barrier"], calls["preamble"], 1, 2, return_mode="all")
    assert called == ["barrier", "preamble", "barrier", "fn"] * 3
    assert isinstance(times, list)
    assert len(times) == 2
    assert min(times) > 0
    quantiles = iris_core.do_bench(calls["fn"], n_warmup=0, n_repeat=3, quantiles=[0.0, 1.0])
    assert isinstance(quantiles, list)
    assert quantiles[0] <= quantiles[1]
    with pytest.raises(ValueError, match="'sum'; it takes 'min'"):
        iris_core.do_bench(calls["fn"], return_mode="sum")
