"""A symmetric heap for Triton: the same buffer on every rank, every rank's memory addressable from every kernel.

Host side: `iris` makes a rank's `Context`, `launch` starts ranks. Device side: remote memory access by rank (`load`,
`store`, `get`, `put`, `copy`, atomics) and synchronisation (`signal`, `wait`, `barrier`), to be called from kernels.
"""

from typing import TYPE_CHECKING, Any

from .context import Context
from .context.opening import iris
from .device.context import DeviceContext
from .device.intrinsics import (
    clock_ns,
    fence_before_descriptor_loads,
    gdc_launch_dependents,
    gdc_wait,
    interpreted,
    pause,
)
from .device.rma import (
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_sub,
    atomic_xchg,
    atomic_xor,
    copy,
    get,
    load,
    put,
    store,
    translate,
)
from .device.sync import barrier, signal, signal_each, wait, wait_each
from .device.tracing import TraceEvent
from .errors import AllocationMismatch, HeapExhausted, PeerError
from .rendezvous.rank_info import RankInfo
from .utils.rank_logging import DEBUG, ERROR, INFO, WARNING, logger, set_logger_level

if TYPE_CHECKING:
    from .bench.do_bench import do_bench
    from .launcher.pool import RankError, RankPool, launch

__all__ = [
    "DEBUG",
    "ERROR",
    "INFO",
    "WARNING",
    "AllocationMismatch",
    "Context",
    "DeviceContext",
    "HeapExhausted",
    "PeerError",
    "RankError",
    "RankInfo",
    "RankPool",
    "TensorView",
    "Tile",
    "TileView",
    "TraceEvent",
    "atomic_add",
    "atomic_and",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "atomic_or",
    "atomic_sub",
    "atomic_xchg",
    "atomic_xor",
    "barrier",
    "clock_ns",
    "copy",
    "do_bench",
    "fence_before_descriptor_loads",
    "gdc_launch_dependents",
    "gdc_wait",
    "get",
    "interpreted",
    "iris",
    "launch",
    "load",
    "logger",
    "make_tensor_view",
    "pause",
    "put",
    "set_logger_level",
    "signal",
    "signal_each",
    "store",
    "translate",
    "wait",
    "wait_each",
]


def __getattr__(name: str) -> Any:
    """Return what is imported once it is asked for: launcher and benchmark, and what Iris has here of `iris_core.x`."""
    if name == "do_bench":
        from .bench.do_bench import do_bench

        return do_bench
    if name in ("RankError", "RankPool", "launch"):
        from .launcher import pool

        return getattr(pool, name)
    if name in ("TensorView", "Tile", "TileView", "make_tensor_view"):
        from . import x

        return getattr(x, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
