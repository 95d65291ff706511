"""One kernel for the collectives that send every part once: all-reduce in one shot, all-gather, reduce-scatter, …

For each block of a part, a rank stores the block to a slot of its own on each peer, signals, waits for all members'
flags, and combines or copies what has come to its own slots. Operands are read and written by their own rank alone:
they lie anywhere, and need not be in the same place on all ranks.

| collective | sent to a peer | what has come is |
|---|---|---|
| all-reduce (one-shot), reduce | the whole input | combined in the order of the members |
| reduce-scatter | the peer's part | combined in the order of the members |
| all-gather, gather, broadcast | the whole input | put together |
| all-to-all, scatter | the peer's part | put together |

With a `sender` that member alone sends, with a `receiver` that one alone receives; all signal and wait all the same.

A program has a row of group_size + 1 int64 words on the heap, zeroed once: a flag a member, which that member alone
writes, and the number of blocks that this program has exchanged over all calls. Blocks are numbered from 1, on the
device and the same on all ranks, so a captured graph can be replayed; no flag is reset. Each program has slots of its
own, `DEPTH` a sender; block n goes to slot n % DEPTH.

Ready before push, without a flag for it: block n + 1 is sent after flag n - 1 of every member has been seen. A member
signals n - 1 after it has read n - 3, which is what the slot of n + 1 held.

Pipelined, a program signals a block not as soon as it is stored, but once it has combined the block before. A signal
waits until the stores before it have arrived; meanwhile the program combines. Each peer's flag comes later by that, and
is awaited a block later all the same.

Where a program has one block, the kernel is launched early (programmatic dependent launch), and so may be the one
behind it once all is sent.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.intrinsics import gdc_launch_dependents, gdc_wait, lanes
from ..device.rma import translate
from ..device.sync import signal_each, wait_peers
from ..x.access import accumulator

DEPTH = tl.constexpr(4)
_MEMBERS_AT_ONCE = tl.constexpr(32)


@triton.jit(do_not_specialize=["rank", "index", "sender", "receiver"])
def ccl_exchange(
    out_ptr,
    in_ptr,
    staging_ptr,
    flags_ptr,
    size,
    rank,
    index,
    sender,
    receiver,
    members_ptr,
    heap_bases,
    watchdog_ptr,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    SCATTERED: tl.constexpr,
    OP: tl.constexpr,
    PIPELINED: tl.constexpr,
):
    """Exchange parts of `size` elements: block p, p + programs, … of each part is program p's.

    Edge: what each rank's stream did before its call happens before what any rank's stream does after its call, as far
    as data is passed on; on return this rank's output is complete, and its input may be overwritten.

    Args:
        out_ptr: the output, in memory of this rank; may be the input, or its own part in it.
        in_ptr: the input, in memory of this rank.
        staging_ptr: on the heap, (programs, DEPTH, GROUP_SIZE, SLOT) elements.
        flags_ptr: on the heap, (programs, GROUP_SIZE + 1) int64 words, zeroed once.
        size: elements of a part, the same on all ranks.
        rank, index: of this rank in the context, and in the group.
        sender, receiver: index of the only member that sends or receives; -1 for all.
        members_ptr: the ranks of the group, int32; None where they are 0 to GROUP_SIZE - 1.
        heap_bases, watchdog_ptr: of the context.
        BLOCK: elements of a block, at most SLOT.
        SCATTERED: whether each member has a part of its own in the input, rather than all of it.
        OP: "sum", "max", "min", or "none" to put together.
        PIPELINED: whether a block is signalled after the block before has been combined.
    """
    gdc_wait()
    pid = tl.program_id(0)
    row_ptr = flags_ptr + pid * (GROUP_SIZE + 1)
    own_staging_ptr = staging_ptr + tl.cast(pid, tl.int64) * (DEPTH * GROUP_SIZE * SLOT)
    first = tl.load(row_ptr + GROUP_SIZE) + 1
    rounds = tl.cdiv(tl.cdiv(size, BLOCK) - pid, tl.num_programs(0))
    _send(
        in_ptr, own_staging_ptr, first, pid, size, rank, index, sender, receiver, members_ptr, heap_bases,
        GROUP_SIZE, BLOCK, SLOT, SCATTERED,
    )  # fmt: skip
    signal_members(row_ptr, first, rank, index, members_ptr, heap_bases, GROUP_SIZE)
    for turn in range(rounds):
        if turn + 1 < rounds:
            _send(
                in_ptr, own_staging_ptr, first + turn + 1, pid + (turn + 1) * tl.num_programs(0), size, rank, index,
                sender, receiver, members_ptr, heap_bases, GROUP_SIZE, BLOCK, SLOT, SCATTERED,
            )  # fmt: skip
            if not PIPELINED:
                signal_members(row_ptr, first + turn + 1, rank, index, members_ptr, heap_bases, GROUP_SIZE)
        else:
            gdc_launch_dependents()  # all is sent
        wait_peers(row_ptr, first + turn, index, GROUP_SIZE, watchdog_ptr)
        if (receiver < 0) | (receiver == index):
            _receive(
                out_ptr, in_ptr, own_staging_ptr, first + turn, pid + turn * tl.num_programs(0), size, index, sender,
                GROUP_SIZE, BLOCK, SLOT, SCATTERED, OP,
            )  # fmt: skip
        if PIPELINED:
            if turn + 1 < rounds:
                signal_members(row_ptr, first + turn + 1, rank, index, members_ptr, heap_bases, GROUP_SIZE)
    tl.store(row_ptr + GROUP_SIZE, first + rounds - 1)


@triton.jit(do_not_specialize=["rank", "index"])
def ccl_barrier(state_ptr, rank, index, members_ptr, heap_bases, watchdog_ptr, GROUP_SIZE: tl.constexpr):
    """Meet the other members; `state_ptr`: GROUP_SIZE + 1 int64 words on the heap, zeroed once. One program.

    Edge: what each member's stream did before happens before what any member's does after.
    """
    epoch = tl.load(state_ptr + GROUP_SIZE) + 1
    signal_members(state_ptr, epoch, rank, index, members_ptr, heap_bases, GROUP_SIZE)
    wait_peers(state_ptr, epoch, index, GROUP_SIZE, watchdog_ptr)
    tl.store(state_ptr + GROUP_SIZE, epoch)


@triton.jit
def _send(
    in_ptr, own_staging_ptr, number, block, size, rank, index, sender, receiver, members_ptr, heap_bases,
    GROUP_SIZE: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr, SCATTERED: tl.constexpr,
):  # fmt: skip
    """Store a block to this member's slot on each receiver."""
    if (sender < 0) | (sender == index):
        for step in tl.static_range(1, GROUP_SIZE):
            peer = (index + step) % GROUP_SIZE
            if (receiver < 0) | (receiver == peer):
                value = load_block(in_ptr + peer * tl.cast(size, tl.int64) * SCATTERED, block, size, BLOCK)
                store_to_slot(
                    own_staging_ptr, number, block, value, size, rank, index, peer, members_ptr, heap_bases, GROUP_SIZE,
                    BLOCK, SLOT,
                )  # fmt: skip


@triton.jit
def _receive(
    out_ptr, in_ptr, own_staging_ptr, number, block, size, index, sender,
    GROUP_SIZE: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr, SCATTERED: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """Combine or copy the blocks of all senders, this member's own from its input."""
    part = tl.cast(size, tl.int64)
    own_ptr = in_ptr + index * part * SCATTERED
    if OP == "none":
        for source in tl.static_range(GROUP_SIZE):
            if (sender < 0) | (sender == source):
                value = load_sent(own_staging_ptr, own_ptr, number, block, size, index, source, GROUP_SIZE, BLOCK, SLOT)
                store_block(out_ptr + tl.where(sender < 0, source, 0) * part, block, value, size, BLOCK)
    else:
        total = accumulator(load_sent(own_staging_ptr, own_ptr, number, block, size, index, 0, GROUP_SIZE, BLOCK, SLOT))
        for source in tl.static_range(1, GROUP_SIZE):
            value = load_sent(own_staging_ptr, own_ptr, number, block, size, index, source, GROUP_SIZE, BLOCK, SLOT)
            total = combine(total, accumulator(value), OP)
        store_block(out_ptr, block, total, size, BLOCK)


@triton.jit
def combine(total, value, OP: tl.constexpr):
    """Return two blocks combined, element by element; NaN wins, as in torch."""
    if OP == "sum":
        return total + value
    elif OP == "max":
        return tl.maximum(total, value, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(OP == "min", 'an operation is "sum", "max" or "min"')
        return tl.minimum(total, value, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_block(ptr, block, size, BLOCK: tl.constexpr):
    """Load a block of a part; zero beyond it."""
    offsets = tl.arange(0, BLOCK)
    start = tl.cast(block, tl.int64) * BLOCK
    return tl.load(ptr + start + offsets, mask=offsets < size - start, other=0)


@triton.jit
def store_block(ptr, block, value, size, BLOCK: tl.constexpr):
    """Store a block of a part, cast to its dtype."""
    offsets = tl.arange(0, BLOCK)
    start = tl.cast(block, tl.int64) * BLOCK
    tl.store(ptr + start + offsets, value.to(ptr.dtype.element_ty), mask=offsets < size - start)


@triton.jit
def load_sent(
    own_staging_ptr, own_ptr, number, block, size, index, source,
    GROUP_SIZE: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """Load what a member has sent; of this member itself, its own part at `own_ptr`."""
    offsets = tl.arange(0, BLOCK)
    start = tl.cast(block, tl.int64) * BLOCK
    slot_ptr = own_staging_ptr + ((number % DEPTH) * GROUP_SIZE + source) * SLOT
    # .cg: L1 may hold what a slot held DEPTH blocks earlier.
    from_ptr = tl.where(source == index, own_ptr + start, slot_ptr)
    return tl.load(from_ptr + offsets, mask=offsets < size - start, other=0, cache_modifier=".cg")


@triton.jit
def store_to_slot(
    own_staging_ptr, number, block, value, size, rank, index, peer, members_ptr, heap_bases,
    GROUP_SIZE: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """Store a block to this member's slot on a peer."""
    offsets = tl.arange(0, BLOCK)
    start = tl.cast(block, tl.int64) * BLOCK
    slot_ptr = own_staging_ptr + ((number % DEPTH) * GROUP_SIZE + index) * SLOT
    peer_ptr = translate(slot_ptr, rank, rank_of(members_ptr, peer), heap_bases)
    tl.store(peer_ptr + offsets, value, mask=offsets < size - start)


@triton.jit
def signal_members(flags_ptr, value, rank, index, members_ptr, heap_bases, GROUP_SIZE: tl.constexpr):
    """Write `value` to this member's flag on every other member: `signal_peers`, for a group."""
    for first in tl.static_range(0, GROUP_SIZE, _MEMBERS_AT_ONCE):
        peers = first + lanes(_MEMBERS_AT_ONCE)
        ranks = rank_of(members_ptr, tl.minimum(peers, GROUP_SIZE - 1))
        flag_ptrs = translate(flags_ptr, rank, ranks, heap_bases) + index
        signal_each(flag_ptrs, value, (peers < GROUP_SIZE) & (peers != index))


@triton.jit
def rank_of(members_ptr, index):
    """Return the rank in the context of members of the group."""
    if members_ptr is None:
        return index
    else:
        return tl.load(members_ptr + index)
