"""Kernels that the host half launches itself."""

from __future__ import annotations

import triton

from ..device.sync import barrier


@triton.jit(do_not_specialize=["rank"])
def barrier_kernel(state_ptr, rank, world_size, heap_bases, watchdog_ptr):
    """One program a rank meets its peers: `sync.barrier` on a stream."""
    barrier(state_ptr, rank, world_size, heap_bases, watchdog_ptr)
