"""All-reduce of large tensors, for groups in which one shot sends too much. Flags and slots are `ccl_exchange`'s.

| kernel | sent, a rank | steps between ranks | sum |
|---|---|---|---|
| `ccl_exchange` (one-shot) | W - 1 inputs | 1 | fp32, in the order of the members |
| `ccl_all_reduce_two_shot` | 2 (W - 1) / W inputs | 2 | fp32, in the order of the members |
| `ccl_all_reduce_ring` | 2 (W - 1) / W inputs, to one neighbour | 2 (W - 1) | in ring order, rounded at each rank |

W is the group size. "fp32" is for floats of at most 32 bits; wider floats and integers are combined as they are. Every
element is combined on one rank and sent from there (two-shot, ring), or everywhere in the same order (one-shot): the
bits are the same on all ranks and in all runs.

Each member combines the blocks of its own part, `part` elements of the input; the last parts may be short or empty.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.intrinsics import gdc_wait
from ..device.sync import wait_peers
from ..x.access import accumulator
from .exchange import DEPTH, combine, load_block, load_sent, signal_members, store_block, store_to_slot


@triton.jit(do_not_specialize=["rank", "index"])
def ccl_all_reduce_two_shot(
    out_ptr,
    in_ptr,
    staging_ptr,
    flags_ptr,
    size,
    part,
    rank,
    index,
    members_ptr,
    heap_bases,
    watchdog_ptr,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    OP: tl.constexpr,
):
    """Send each member its block, combine the own one, send that to all. Edge and arguments: `ccl_exchange`'s.

    Args:
        size, part: elements of the input, and of a member's part in it.
    """
    gdc_wait()
    pid = tl.program_id(0)
    row_ptr = flags_ptr + pid * (GROUP_SIZE + 1)
    own_staging_ptr = staging_ptr + tl.cast(pid, tl.int64) * (DEPTH * GROUP_SIZE * SLOT)
    number = tl.load(row_ptr + GROUP_SIZE)
    own_start = index * tl.cast(part, tl.int64)
    own_size = _length(size, part, index)
    for block in range(pid, tl.cdiv(part, BLOCK), tl.num_programs(0)):
        number += 1
        for step in tl.static_range(1, GROUP_SIZE):
            peer = (index + step) % GROUP_SIZE
            length = _length(size, part, peer)
            value = load_block(in_ptr + peer * tl.cast(part, tl.int64), block, length, BLOCK)
            store_to_slot(
                own_staging_ptr, number, block, value, length, rank, index, peer, members_ptr, heap_bases, GROUP_SIZE,
                BLOCK, SLOT,
            )  # fmt: skip
        signal_members(row_ptr, number, rank, index, members_ptr, heap_bases, GROUP_SIZE)
        wait_peers(row_ptr, number, index, GROUP_SIZE, watchdog_ptr)
        own_ptr = in_ptr + own_start
        total = accumulator(
            load_sent(own_staging_ptr, own_ptr, number, block, own_size, index, 0, GROUP_SIZE, BLOCK, SLOT)
        )
        for source in tl.static_range(1, GROUP_SIZE):
            value = load_sent(own_staging_ptr, own_ptr, number, block, own_size, index, source, GROUP_SIZE, BLOCK, SLOT)
            total = combine(total, accumulator(value), OP)
        result = total.to(in_ptr.dtype.element_ty)
        store_block(out_ptr + own_start, block, result, own_size, BLOCK)
        number += 1
        for step in tl.static_range(1, GROUP_SIZE):
            store_to_slot(
                own_staging_ptr, number, block, result, own_size, rank, index, (index + step) % GROUP_SIZE, members_ptr,
                heap_bases, GROUP_SIZE, BLOCK, SLOT,
            )  # fmt: skip
        signal_members(row_ptr, number, rank, index, members_ptr, heap_bases, GROUP_SIZE)
        wait_peers(row_ptr, number, index, GROUP_SIZE, watchdog_ptr)
        for step in tl.static_range(1, GROUP_SIZE):
            source = (index + step) % GROUP_SIZE
            length = _length(size, part, source)
            value = load_sent(own_staging_ptr, own_ptr, number, block, length, index, source, GROUP_SIZE, BLOCK, SLOT)
            store_block(out_ptr + source * tl.cast(part, tl.int64), block, value, length, BLOCK)
    tl.store(row_ptr + GROUP_SIZE, number)


@triton.jit(do_not_specialize=["rank", "index"])
def ccl_all_reduce_ring(
    out_ptr,
    in_ptr,
    staging_ptr,
    flags_ptr,
    size,
    part,
    rank,
    index,
    members_ptr,
    heap_bases,
    watchdog_ptr,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    OP: tl.constexpr,
):
    """Pass partial results to the next member, W - 1 steps, then the results. As of `ccl_all_reduce_two_shot`.

    All members take each step together: it ends when each has signalled.
    """
    gdc_wait()
    pid = tl.program_id(0)
    row_ptr = flags_ptr + pid * (GROUP_SIZE + 1)
    own_staging_ptr = staging_ptr + tl.cast(pid, tl.int64) * (DEPTH * GROUP_SIZE * SLOT)
    number = tl.load(row_ptr + GROUP_SIZE)
    following = (index + 1) % GROUP_SIZE
    previous = (index + GROUP_SIZE - 1) % GROUP_SIZE
    for block in range(pid, tl.cdiv(part, BLOCK), tl.num_programs(0)):
        # Step 0 sends this member's own part; what comes in step s is the part of `previous`' step.
        value = load_block(in_ptr + index * tl.cast(part, tl.int64), block, _length(size, part, index), BLOCK)
        for step in range(2 * (GROUP_SIZE - 1)):
            sent = (index + 2 * GROUP_SIZE - step) % GROUP_SIZE
            number += 1
            store_to_slot(
                own_staging_ptr, number, block, value, _length(size, part, sent), rank, index, following, members_ptr,
                heap_bases, GROUP_SIZE, BLOCK, SLOT,
            )  # fmt: skip
            signal_members(row_ptr, number, rank, index, members_ptr, heap_bases, GROUP_SIZE)
            wait_peers(row_ptr, number, index, GROUP_SIZE, watchdog_ptr)
            came = (sent + GROUP_SIZE - 1) % GROUP_SIZE
            length = _length(size, part, came)
            start = came * tl.cast(part, tl.int64)
            value = load_sent(own_staging_ptr, in_ptr, number, block, length, index, previous, GROUP_SIZE, BLOCK, SLOT)
            if step < GROUP_SIZE - 1:
                own = load_block(in_ptr + start, block, length, BLOCK)
                value = combine(accumulator(value), accumulator(own), OP).to(in_ptr.dtype.element_ty)
            if step >= GROUP_SIZE - 2:
                store_block(out_ptr + start, block, value, length, BLOCK)
    tl.store(row_ptr + GROUP_SIZE, number)


@triton.jit
def _length(size, part, index):
    """Return how many elements a member's part has."""
    start = index * tl.cast(part, tl.int64)
    return tl.minimum(tl.maximum(size - start, 0), part)
