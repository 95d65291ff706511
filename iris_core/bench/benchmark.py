"""What a benchmark is made of: a function, its axes, and what it says of itself in one combination of their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from ..context import Context

Function = TypeVar("Function", bound=Callable[["State", Context], None])
NUM_RANKS = "num_ranks"  # the axis whose values are numbers of ranks


@dataclass(frozen=True)
class Benchmark:
    """A function that was registered, and its axes.

    Args:
        fn: the function, of a `State` and a `Context`.
        axes: the values of each axis, by its name; the slowest axis first.
    """

    fn: Callable[[State, Context], None]
    axes: dict[str, list[Any]]


class Skipped(Exception):
    """A combination is left out; says why."""


@dataclass
class State:
    """One combination of values, and what the benchmark says of it.

    Args:
        params: the value of each axis; ``state["M"]`` and ``state.get("M")`` return one.
        n_warmup, n_repeat: how often what is timed is called before, and timed.
    """

    params: dict[str, Any]
    n_warmup: int
    n_repeat: int
    num_bytes: float | None = None
    flops: float | None = None
    counters: dict[str, float] = field(default_factory=dict)
    fn: Callable[[], object] | None = None
    preamble_fn: Callable[[], object] = lambda: None

    def __getitem__(self, name: str) -> Any:
        return self.params[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an axis's value, or the default where there is no such axis."""
        return self.params.get(name, default)

    def set_bytes(self, n: float) -> None:
        """Say how many bytes a call moves; there is a column GB/s then."""
        self.num_bytes = n

    def set_flops(self, n: float) -> None:
        """Say how many operations a call does; there is a column TFLOP/s then."""
        self.flops = n

    def add_counter(self, name: str, value: float) -> None:
        """Add a column of your own."""
        self.counters[name] = value

    def set_warmup(self, n: int) -> None:
        """Set how often it is called before it is timed."""
        self.n_warmup = n

    def set_repeat(self, n: int) -> None:
        """Set how often it is timed."""
        self.n_repeat = n

    def skip(self, reason: str = "") -> NoReturn:
        """Leave this combination out, on all ranks; the table says so."""
        raise Skipped(reason)

    def exec(self, fn: Callable[[], object], *, preamble_fn: Callable[[], object] | None = None) -> None:
        """Hand over what is to be timed; it is called when the benchmark has returned.

        Args:
            fn: what is timed.
            preamble_fn: called before each call of it, not timed.
        """
        self.fn = fn
        if preamble_fn is not None:
            self.preamble_fn = preamble_fn


_registered: list[Benchmark] = []


def registered() -> list[Benchmark]:
    """Return the benchmarks of this process, in their order."""
    return _registered


def register(fn: Function) -> Function:
    """Register a benchmark: the outermost decorator of a function of a script's top level."""
    _registered.append(Benchmark(fn, getattr(fn, "bench_axes", {})))
    return fn


def axis(name: str, values: Iterable[Any]) -> Callable[[Function], Function]:
    """Give a benchmark an axis; the outermost is the slowest.

    Args:
        name: how `State` and the table call it; "num_ranks" is how many ranks there are.
        values: what it takes in turn.
    """

    def add(fn: Function) -> Function:
        fn.bench_axes = {name: list(values), **getattr(fn, "bench_axes", {})}  # type: ignore[attr-defined]
        return fn

    return add


def power_of_two(start_exp: int, end_exp: int) -> list[int]:
    """Return powers of two for an axis.

    Args:
        start_exp, end_exp: the exponents of the first and of the last, which is among them.

    >>> power_of_two(3, 6)
    [8, 16, 32, 64]
    """
    return [1 << exponent for exponent in range(start_exp, end_exp + 1)]


def linear_range(start: int, end: int, step: int) -> list[int]:
    """Return numbers at equal distances for an axis.

    Args:
        start: the first.
        end: which none is above; it is among them if steps lead there.
        step: the distance.

    >>> linear_range(100, 250, 50)
    [100, 150, 200, 250]
    """
    return list(range(start, end + 1, step))
