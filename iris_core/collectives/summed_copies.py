"""All-reduce and reduce-scatter of large tensors by copy engines: they move the inputs, short kernels combine them.

Each member combines the chunks of its own part. Chunk c of a part goes through slot c % SLOTS of its owner's staging
memory, from each other member by a copy engine. All-reduce stores the results to every member's output, at the same
place on each heap, from the kernel that combines: a rank sends 2 (W - 1) / W inputs, reduce-scatter half of that. Sums
are fp32, in the order of the members, as of `ccl_exchange`.

Slot s has a side stream of its own, so that one slot's copy is under way while the other's is signalled:

| stream | for chunk c |
|---|---|
| side c % SLOTS | wait until c - SLOTS + 1 chunks are combined everywhere; copy to each member; signal `arrived` |
| current | signal that c chunks are combined; wait for all members' `arrived`; combine |

At last all members signal that all chunks are combined, and wait for each other: all results have come. A flag is a
member's, which it alone writes: one for each slot, and one for what it has combined. The stream orders a copy, and a
kernel that combines, before the kernel behind it that signals. Chunks are counted over all calls on the device, so a
captured graph can be replayed and no flag is reset.

The staging memory is the slots of `ccl_exchange`. A barrier before the first copy ends the use by calls before, the
last wait that by this one.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from ..device.rma import translate
from ..device.sync import wait_peers
from ..x.access import accumulator
from .exchange import combine, rank_of, signal_members, store_block

SLOTS = 2


@triton.jit(do_not_specialize=["signalled", "awaited", "done", "rank", "index"])
def ccl_count_chunks(
    count_ptr,
    signalled_ptr,
    awaited_ptr,
    signalled,
    awaited,
    done,
    rank,
    index,
    members_ptr,
    heap_bases,
    watchdog_ptr,
    GROUP_SIZE: tl.constexpr,
):
    """Signal a count to the other members, then wait for theirs. One program.

    Edge: what this stream did before a signal happens before what a member's stream does after a wait for that count.

    Args:
        count_ptr: chunks of all calls before, an int64 word.
        signalled_ptr, awaited_ptr: on the heap, GROUP_SIZE int64 flags each.
        signalled, awaited: chunks of this call; -1 not to signal, or not to wait.
        done: chunks to count on at last, when no kernel of the call reads the count any more; or 0.
        rank, index, members_ptr, heap_bases, watchdog_ptr: of `ccl_exchange`.
    """
    count = tl.load(count_ptr)
    if signalled >= 0:
        signal_members(signalled_ptr, count + signalled, rank, index, members_ptr, heap_bases, GROUP_SIZE)
    if awaited >= 0:
        wait_peers(awaited_ptr, count + awaited, index, GROUP_SIZE, watchdog_ptr)
    if done > 0:
        tl.store(count_ptr, count + done)


@triton.jit(do_not_specialize=["rank", "index"])
def ccl_combine_chunk(
    out_ptr,
    in_ptr,
    staging_ptr,
    size,
    slot,
    rank,
    index,
    members_ptr,
    heap_bases,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_ALL: tl.constexpr,
    OP: tl.constexpr,
):
    """Combine this member's input and what the others have sent, a chunk of `size` elements.

    Args:
        out_ptr: the chunk of the output; on the heap, if it goes to all.
        in_ptr: the chunk of this member's own input.
        staging_ptr: (GROUP_SIZE - 1, slot) elements: `place_of` each other member.
        rank, index, members_ptr, heap_bases: of `ccl_exchange`.
        TO_ALL: whether the result is stored to every member's output.
        OP: "sum", "max" or "min".
    """
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        total = accumulator(_load(in_ptr, staging_ptr, 0, block, size, slot, index, GROUP_SIZE, BLOCK))
        for source in tl.static_range(1, GROUP_SIZE):
            value = _load(in_ptr, staging_ptr, source, block, size, slot, index, GROUP_SIZE, BLOCK)
            total = combine(total, accumulator(value), OP)
        result = total.to(out_ptr.dtype.element_ty)
        if TO_ALL:
            for step in tl.static_range(1, GROUP_SIZE):
                peer = rank_of(members_ptr, (index + step) % GROUP_SIZE)
                store_block(translate(out_ptr, rank, peer, heap_bases), block, result, size, BLOCK)
        store_block(out_ptr, block, result, size, BLOCK)


@triton.jit
def _load(in_ptr, staging_ptr, source, block, size, slot, index, GROUP_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load a block of a member's chunk."""
    offsets = tl.arange(0, BLOCK)
    start = tl.cast(block, tl.int64) * BLOCK
    place = (source + GROUP_SIZE - index - 1) % GROUP_SIZE
    from_ptr = tl.where(source == index, in_ptr, staging_ptr + tl.cast(place, tl.int64) * slot) + start
    return tl.load(from_ptr + offsets, mask=offsets < size - start, other=0, cache_modifier=".cg")


@dataclass(frozen=True)
class Chunks:
    """How a tensor is cut into a part a member, and the parts into chunks; in elements.

    Args:
        size: of the tensor.
        part: of a part; the last ones may be short or empty.
        slot: of a chunk; the last one of a part may be short or empty.
    """

    size: int
    part: int
    slot: int

    @property
    def count(self) -> int:
        """Chunks of a part."""
        return triton.cdiv(self.part, self.slot)

    def span(self, owner: int, number: int) -> slice:
        """Return where a chunk of a member's part lies."""
        end = min((owner + 1) * self.part, self.size)
        start = owner * self.part + number * self.slot
        return slice(min(start, end), min(start + self.slot, end))


def place_of(source: int, owner: int, group_size: int) -> int:
    """Return at which place of a slot a member has what another one sends."""
    return (source - owner - 1) % group_size
