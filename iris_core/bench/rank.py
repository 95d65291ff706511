"""One rank's part of a benchmark: a context for each combination of values, and the slowest rank's time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..context import Context
from ..context.opening import iris
from .benchmark import Skipped, State
from .do_bench import do_bench

_CALLS = {True: (1, 3), False: (25, 100)}  # before, and timed; interpreted, or on a GPU


@dataclass(frozen=True)
class Row:
    """What came of one combination of values.

    Args:
        benchmark: the function's name.
        world_size: number of ranks.
        params: the value of each axis.
        time_ms: mean of the timed calls, of the slowest rank; None where it was skipped.
        gbps, tflops: from what the benchmark says of a call; None where it says nothing.
        counters: columns of its own.
        skipped: why it was left out; None where it was not.
    """

    benchmark: str
    world_size: int
    params: dict[str, Any]
    time_ms: float | None = None
    gbps: float | None = None
    tflops: float | None = None
    counters: dict[str, float] = field(default_factory=dict)
    skipped: str | None = None


def measure(
    rank: int,
    world_size: int,
    fn: Callable[[State, Context], None],
    params: dict[str, Any],
    heap_size: int,
    n_warmup: int | None,
    n_repeat: int | None,
) -> Row:
    """Time one combination; collective. The row is the same on all ranks.

    Raises:
        RuntimeError: the benchmark has handed over nothing to time.
    """
    with iris(heap_size) as ctx:
        warmup, repeat = _CALLS[ctx.is_interpreted()]
        state = State(params, warmup if n_warmup is None else n_warmup, repeat if n_repeat is None else n_repeat)
        try:
            fn(state, ctx)
        except Skipped as skipped:
            return Row(fn.__name__, world_size, params, skipped=str(skipped))
        if state.fn is None:
            raise RuntimeError(f"{fn.__name__} with {params} has handed over nothing to time: it calls state.exec(fn)")
        times = do_bench(state.fn, ctx.barrier, state.preamble_fn, state.n_warmup, state.n_repeat, return_mode="all")
        assert isinstance(times, list)
        time_ms = max(ctx.control_plane.all_gather(statistics.mean(times)))
    gbps = None if state.num_bytes is None else state.num_bytes / time_ms / 1e6
    tflops = None if state.flops is None else state.flops / time_ms / 1e9
    return Row(fn.__name__, world_size, params, time_ms, gbps, tflops, state.counters)
