"""The time of a function that all ranks call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

_SUMMARIES = ("min", "max", "mean", "median")  # by functions of numpy's
_CACHE_BYTES = 256 << 20  # more than the caches of any GPU


def do_bench(
    fn: Callable[[], object],
    barrier_fn: Callable[[], object] = lambda: None,
    preamble_fn: Callable[[], object] = lambda: None,
    n_warmup: int = 25,
    n_repeat: int = 100,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> float | list[float]:
    """Time a function, with cold caches, as the Iris documentation's function of this name does.

    Args:
        fn: what is timed.
        barrier_fn: called before the caches are cleared and before each call, such as ``ctx.barrier``.
        preamble_fn: called before each call, not timed.
        n_warmup, n_repeat: how often it is called before it is timed, and timed.
        quantiles: which to return in place of a summary, in [0, 1].
        return_mode: "mean", "median", "min", "max", or "all" for all times.

    Returns:
        Milliseconds; without a GPU by the host's clock. One quantile is a number, several are a list.

    Raises:
        ValueError: there is no such summary or quantile, or nothing to summarise.
    """
    if return_mode not in ("all", *_SUMMARIES):
        raise ValueError(f"return_mode is {return_mode!r}; it takes {', '.join(map(repr, _SUMMARIES))} or 'all'")
    if n_repeat < 1 or not all(0 <= one <= 1 for one in quantiles or ()):
        raise ValueError(f"n_repeat is {n_repeat} and quantiles {quantiles}; at least 1, and numbers in [0, 1]")
    has_gpu = torch.cuda.is_available()
    cache = torch.empty(_CACHE_BYTES if has_gpu else 0, dtype=torch.int8, device="cuda" if has_gpu else "cpu")
    times: list[float] = []
    for _ in range(n_warmup + n_repeat):
        barrier_fn()
        preamble_fn()
        cache.zero_()
        barrier_fn()
        times.append(_time_ms(fn, has_gpu))
    times = times[n_warmup:]
    if quantiles is not None:
        found = np.quantile(times, quantiles).tolist()
        return found[0] if len(quantiles) == 1 else found
    return times if return_mode == "all" else float(getattr(np, return_mode)(times))


def _time_ms(fn: Callable[[], object], has_gpu: bool) -> float:
    if not has_gpu:
        start = time.perf_counter()
        fn()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
