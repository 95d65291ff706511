"""All-reduce and reduce-scatter of large tensors by copy engines: they move the inputs, short kernels combine them.

Each member combines the chunks of its own part. A chunk goes through its owner's staging memory, from each other member
by a copy engine. All-reduce stores the results to every member's output, at the same place on each heap, from the
kernel that combines: a rank sends 2 (W - 1) / W inputs, reduce-scatter half of that. Sums are fp32, in the order of the
members, as of `ccl_exchange`.

Chunks take turns on `LANES` lanes, a side stream with a slot of staging memory each. A lane does for each chunk:

1. copy the chunk of each other member's part to that member's slot;
2. a barrier of the lane: all copies to this member's slot have arrived;
3. combine the chunk of the own part;
4. a barrier of the lane: all slots may be written, and all results have arrived.

One lane copies while the other one combines: the second starts behind the first copy of the first. Barriers count their
epochs on the device, so a captured graph can be replayed. Nothing waits on a device for what its host queues later.

The slots are those of `ccl_exchange`. A barrier before the first copy ends their use by calls before.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from ..device.rma import translate
from ..x.access import accumulator
from .exchange import combine, rank_of, store_block

LANES = 2


@triton.jit(do_not_specialize=["rank", "index"])
def ccl_combine_chunk(
    out_ptr,
    in_ptr,
    staging_ptr,
    size,
    chunk,
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
        staging_ptr: (GROUP_SIZE - 1, chunk) elements: `place_of` each other member.
        rank, index, members_ptr, heap_bases: of `ccl_exchange`.
        TO_ALL: whether the result is stored to every member's output.
        OP: "sum", "max" or "min".
    """
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        total = accumulator(_load(in_ptr, staging_ptr, 0, block, size, chunk, index, GROUP_SIZE, BLOCK))
        for source in tl.static_range(1, GROUP_SIZE):
            value = _load(in_ptr, staging_ptr, source, block, size, chunk, index, GROUP_SIZE, BLOCK)
            total = combine(total, accumulator(value), OP)
        result = total.to(out_ptr.dtype.element_ty)
        if TO_ALL:
            for step in tl.static_range(1, GROUP_SIZE):
                peer = rank_of(members_ptr, (index + step) % GROUP_SIZE)
                store_block(translate(out_ptr, rank, peer, heap_bases), block, result, size, BLOCK)
        store_block(out_ptr, block, result, size, BLOCK)


@triton.jit
def _load(in_ptr, staging_ptr, source, block, size, chunk, index, GROUP_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load a block of a member's chunk."""
    offsets = tl.arange(0, BLOCK)
    start = tl.cast(block, tl.int64) * BLOCK
    place = (source + GROUP_SIZE - index - 1) % GROUP_SIZE
    from_ptr = tl.where(source == index, in_ptr, staging_ptr + tl.cast(place, tl.int64) * chunk) + start
    return tl.load(from_ptr + offsets, mask=offsets < size - start, other=0, cache_modifier=".cg")


@dataclass(frozen=True)
class Chunks:
    """How a tensor is cut into a part a member, and the parts into chunks; in elements.

    Args:
        size: of the tensor.
        part: of a part; the last ones may be short or empty.
        chunk: of a chunk; the last one of a part may be short or empty.
    """

    size: int
    part: int
    chunk: int

    @property
    def count(self) -> int:
        """Chunks of a part."""
        return triton.cdiv(self.part, self.chunk)

    def span(self, owner: int, number: int) -> slice:
        """Return where a chunk of a member's part lies."""
        end = min((owner + 1) * self.part, self.size)
        start = owner * self.part + number * self.chunk
        return slice(min(start, end), min(start + self.chunk, end))


def place_of(source: int, owner: int, group_size: int) -> int:
    """Return at which place of a slot a member has what another one sends."""
    return (source - owner - 1) % group_size
