"""Kernels that do nothing but use the link between two ranks."""

from __future__ import annotations

import triton
import triton.language as tl

import iris_core

MOVES = ("store", "load", "atomic_add")
BLOCK = 8192  # elements that a program moves at once
_STORE, _LOAD = (tl.constexpr(MOVES.index(kind)) for kind in ("store", "load"))


@triton.jit
def move_kernel(
    own_ptr,
    peer_ptr,
    elements,
    rank,
    peer,
    heap_bases,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PEERS: tl.constexpr,
):
    """Move elements between this rank's memory at `own_ptr` and a peer's, which here lies at `peer_ptr`.

    With several `PEERS`, which are all other ranks, with each of them at once, from `peer`, the next rank, on; as many
    programs for each.
    """
    if PEERS > 1:
        peer = (peer + tl.program_id(0) % PEERS) % (PEERS + 1)
    step = tl.num_programs(0) // PEERS * BLOCK
    for start in tl.range(tl.program_id(0) // PEERS * BLOCK, elements, step):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < elements
        if KIND == _STORE:
            iris_core.put(own_ptr + offsets, peer_ptr + offsets, rank, peer, heap_bases, mask)
        elif KIND == _LOAD:
            iris_core.get(peer_ptr + offsets, own_ptr + offsets, rank, peer, heap_bases, mask)
        else:
            value = tl.load(own_ptr + offsets, mask=mask)
            iris_core.atomic_add(peer_ptr + offsets, value, rank, peer, heap_bases, mask, sem="relaxed")


@triton.jit
def round_trip_kernel(flag_ptr, first, trips, is_first, rank, peer, heap_bases, watchdog_ptr):
    """Signal a peer and wait for its answer, `trips` times; who is not first answers. Flags count from `first`."""
    peer_ptr = iris_core.translate(flag_ptr, rank, peer, heap_bases)
    for trip in range(trips):
        if is_first:
            iris_core.signal(peer_ptr, first + trip)
        iris_core.wait(flag_ptr, first + trip, watchdog_ptr)
        if is_first == 0:
            iris_core.signal(peer_ptr, first + trip)
