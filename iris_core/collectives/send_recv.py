"""Messages from one rank to another, through slots on the receiver's heap.

For each peer a program has a row of four int64 words, zeroed once:

| word | written by | holds |
|---|---|---|
| arrived | the peer, as a sender | its last block that is in its slot here |
| received | this rank | the blocks that it has taken from the peer |
| free | the peer, as a receiver | the last block of this rank that it has taken |
| sent | this rank | the blocks that it has sent to the peer |

Block n goes to slot n % DEPTH once block n - DEPTH has been taken: so many blocks a program are sent before the
receiver is there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device.intrinsics import gdc_wait
from ..device.rma import translate
from ..device.sync import signal, wait
from .exchange import DEPTH, load_block, rank_of, store_block

MESSAGE_WORDS = tl.constexpr(4)
_ARRIVED = tl.constexpr(0)  # written by the peer as a sender
_RECEIVED = tl.constexpr(1)
_FREE = tl.constexpr(2)  # written by the peer as a receiver
_SENT = tl.constexpr(3)


@triton.jit(do_not_specialize=["rank", "index", "peer"])
def ccl_send(
    in_ptr,
    staging_ptr,
    words_ptr,
    size,
    rank,
    index,
    peer,
    members_ptr,
    heap_bases,
    watchdog_ptr,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
):
    """Send `size` elements to a peer that receives as many.

    Edge: what this rank's stream did before happens before what the peer's does after its receipt.

    Args:
        in_ptr: in memory of this rank.
        staging_ptr: on the heap, (programs, DEPTH, GROUP_SIZE, SLOT) elements.
        words_ptr: on the heap, (programs, GROUP_SIZE, MESSAGE_WORDS) int64 words, zeroed once; a row per peer.
        peer: its index in the group.
    """
    gdc_wait()
    pid = tl.program_id(0)
    to_rank = rank_of(members_ptr, peer)
    own_row_ptr = words_ptr + (pid * GROUP_SIZE + peer) * MESSAGE_WORDS
    arrived_ptr = words_ptr + (pid * GROUP_SIZE + index) * MESSAGE_WORDS + _ARRIVED
    own_staging_ptr = staging_ptr + tl.cast(pid, tl.int64) * (DEPTH * GROUP_SIZE * SLOT)
    number = tl.load(own_row_ptr + _SENT)
    offsets = tl.arange(0, BLOCK)
    for block in range(pid, tl.cdiv(size, BLOCK), tl.num_programs(0)):
        number += 1
        wait(own_row_ptr + _FREE, number - DEPTH, watchdog_ptr)
        value = load_block(in_ptr, block, size, BLOCK)
        slot_ptr = own_staging_ptr + ((number % DEPTH) * GROUP_SIZE + index) * SLOT
        peer_ptr = translate(slot_ptr, rank, to_rank, heap_bases)
        tl.store(peer_ptr + offsets, value, mask=offsets < size - tl.cast(block, tl.int64) * BLOCK)
        signal(translate(arrived_ptr, rank, to_rank, heap_bases), number)
    tl.store(own_row_ptr + _SENT, number)


@triton.jit(do_not_specialize=["rank", "index", "peer"])
def ccl_recv(
    out_ptr,
    staging_ptr,
    words_ptr,
    size,
    rank,
    index,
    peer,
    members_ptr,
    heap_bases,
    watchdog_ptr,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
):
    """Receive `size` elements from a peer that sends as many. Edge and arguments: those of `ccl_send`."""
    gdc_wait()
    pid = tl.program_id(0)
    from_rank = rank_of(members_ptr, peer)
    own_row_ptr = words_ptr + (pid * GROUP_SIZE + peer) * MESSAGE_WORDS
    free_ptr = words_ptr + (pid * GROUP_SIZE + index) * MESSAGE_WORDS + _FREE
    own_staging_ptr = staging_ptr + tl.cast(pid, tl.int64) * (DEPTH * GROUP_SIZE * SLOT)
    number = tl.load(own_row_ptr + _RECEIVED)
    offsets = tl.arange(0, BLOCK)
    for block in range(pid, tl.cdiv(size, BLOCK), tl.num_programs(0)):
        number += 1
        wait(own_row_ptr + _ARRIVED, number, watchdog_ptr)
        slot_ptr = own_staging_ptr + ((number % DEPTH) * GROUP_SIZE + peer) * SLOT
        mask = offsets < size - tl.cast(block, tl.int64) * BLOCK
        # .cg: L1 may hold what a slot held DEPTH blocks earlier.
        value = tl.load(slot_ptr + offsets, mask=mask, other=0, cache_modifier=".cg")
        store_block(out_ptr, block, value, size, BLOCK)
        signal(translate(free_ptr, rank, from_rank, heap_bases), number)
    tl.store(own_row_ptr + _RECEIVED, number)
