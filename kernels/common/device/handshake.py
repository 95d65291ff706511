"""The handshake of every operator: a call is numbered, ready before push, done means arrived.

Where all-gather copies, and the gathered A is not kept, there is no ready: a call ends when all ranks have
(all_gather_gemm/copies.py).

An operator keeps 2 * WORLD_SIZE + 2 int64 words on the heap, zero when it is made and, but for arrivals, never reset:

| words | written by | meaning |
|---|---|---|
| ready[peer] | `peer`, as its call starts | the last call in which `peer`'s output may be overwritten |
| done[peer] | `peer`, after all it stores in a call | the last call that `peer` has ended: its data has arrived here¹ |
| epoch | the last program of a call | calls completed |
| arrivals | every program that takes part in `finish` | programs finished in this call; the last one zeroes it |

¹ Or, where data comes in chunks, a count: `COUNTS_OF_A_CALL` for each call before, and one for each chunk of this one
that has arrived, but that one of them, the first or the last, counts for all that is missing to `COUNTS_OF_A_CALL`. So
calls may have any number of chunks.

The call's number is read from the device, so a captured graph can be replayed. A rank that finishes call e has seen
every peer's done[e], or data of call e from every peer: no rank is ever two calls ahead.

Where the programs of one kernel are all of a call, and each awaits what it needs, no program has to end it: they
count calls by themselves (`begin_own_call`), and epoch and arrivals stay zero.

Peers are signalled one after the other, or all at once, a thread a peer: one trip in place of one per peer. Kernels in
Gluon do that, which signal before the roles begin or by a warp that holds no tile, and kernels of few rows, where every
trip counts; others, whose tiles fill the registers, would spill.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from iris_core import signal, signal_each, translate, wait, wait_each
from iris_core.device.intrinsics import in_gluon, lanes

COUNTS_OF_A_CALL = tl.constexpr(1 << 20)  # more than a call has chunks


def state_words(world_size: int) -> int:
    """Return the number of int64 words of an operator's state."""
    return 2 * world_size + 2


def describe_state(world_size: int, word: int) -> str:
    """Describe a word of an operator's state, for reports."""
    if word < world_size:
        return f"rank {word} to be ready (its call has not started), flag ready[{word}]"
    if word < 2 * world_size:
        peer = word - world_size
        return f"rank {peer} to be done (its data has not arrived, or its call has not ended), flag done[{peer}]"
    return "the number of calls completed" if word == 2 * world_size else "the count of programs that are through"


def call_of_state(world_size: int, word: int, expected: int, counts_chunks: bool) -> int:
    """Return the call in which a word of an operator's state is expected to be that; `counts_chunks`: ¹ above."""
    return -(-expected // COUNTS_OF_A_CALL.value) if counts_chunks and word >= world_size else expected


def number_of_call(word: int, expected: int) -> int:
    """Return the same for flags that hold call numbers."""
    return expected


@triton.jit
def begin_call(peers, WORLD_SIZE: tl.constexpr):
    """Return this call's number; program 0 signals to all peers that this rank's output may be overwritten.

    Edge: what earlier work on this stream read from the output happens before any peer's stores of this call, if the
    peer calls `wait_ready` first. Called by every program of the call's first kernel.
    """
    epoch = tl.load(peers.state_ptr + 2 * WORLD_SIZE) + 1
    if tl.program_id(0) == 0:
        _signal_peers(peers.state_ptr, peers, epoch, WORLD_SIZE)
    return epoch


@triton.jit
def current_call(peers, WORLD_SIZE: tl.constexpr):
    """Return the number of the call under way, in a kernel that does not signal it."""
    return tl.load(peers.state_ptr + 2 * WORLD_SIZE) + 1


@triton.jit
def wait_ready(peers, epoch, WORLD_SIZE: tl.constexpr):
    """Wait until every peer's output may be overwritten. Before a program's first store to a peer."""
    for distance in tl.static_range(1, WORLD_SIZE):
        wait_ready_of(peers, (peers.rank + distance) % WORLD_SIZE, epoch)


@triton.jit
def wait_ready_of(peers, peer, epoch):
    """Wait until one peer is ready."""
    wait(peers.state_ptr + peer, epoch, peers.watchdog_ptr)


@triton.jit
def count_of_chunk(is_one, chunks):
    """Return for how much a chunk counts: for one, or if it `is_one` of all `chunks` for what the others leave."""
    return tl.where(is_one, COUNTS_OF_A_CALL - chunks + 1, 1).to(tl.int64)


@triton.jit
def signal_chunk(peers, peer, count, WORLD_SIZE: tl.constexpr):
    """Add a chunk's `count` to those of this rank's data at `peer`.

    Edge: this program's stores to the peer happen before what follows the peer's `wait_chunks`.
    """
    tl.debug_barrier()  # the release is one thread's
    counter_ptr = translate(peers.state_ptr + WORLD_SIZE, peers.rank, peer, peers.heap_bases) + peers.rank
    tl.atomic_add(counter_ptr, count, sem="release", scope="sys")


@triton.jit
def wait_chunks(peers, peer, count, WORLD_SIZE: tl.constexpr):
    """Wait until what `peer` has signalled counts for `count`, over all calls."""
    wait(peers.state_ptr + WORLD_SIZE + peer, count, peers.watchdog_ptr)


@triton.jit
def finish_call(peers, epoch, num_programs, WORLD_SIZE: tl.constexpr):
    """End the call for a program; the last of `num_programs` ends the call when every peer's data has arrived.

    Every program's stores are released to the last one, which releases them to the peers and waits for theirs: when it
    is through, this rank's output is complete. `num_programs` counts every program that calls this in one call, over
    all kernels.
    """
    if _is_last(peers, num_programs, "sys", WORLD_SIZE):
        _end_with_peers(peers, epoch, WORLD_SIZE)


@triton.jit
def finish_and_clear(peers, epoch, num_programs, flags_ptr, num_flags, WORLD_SIZE: tl.constexpr):
    """As `finish_call`, for operators whose queues set flags at their peers; it zeroes those that were set here.

    Precondition: all of them have been set in this call, and whoever needs them has awaited them.
    Edge: all peers' programs' accesses in this call, and the zeroes there, happen before what follows it in the stream.
    """
    if _is_last(peers, num_programs, "sys", WORLD_SIZE):
        for flag in range(num_flags):
            tl.store(flags_ptr + flag, 0)
        _end_with_peers(peers, epoch, WORLD_SIZE)


@triton.jit
def _end_with_peers(peers, epoch, WORLD_SIZE: tl.constexpr):
    done_ptr = peers.state_ptr + WORLD_SIZE
    _signal_peers(done_ptr, peers, epoch, WORLD_SIZE)
    if in_gluon():
        _wait_for_all(done_ptr, peers, epoch, WORLD_SIZE)
    else:
        for distance in tl.static_range(1, WORLD_SIZE):
            wait(done_ptr + (peers.rank + distance) % WORLD_SIZE, epoch, peers.watchdog_ptr)
    tl.store(peers.state_ptr + 2 * WORLD_SIZE, epoch)


@triton.jit
def _signal_peers(flags_ptr, peers, epoch, WORLD_SIZE: tl.constexpr):
    """Write `epoch` to this rank's flag at every peer, of a flag per rank; with release, as `signal`."""
    if in_gluon():
        _signal_all(flags_ptr, peers, epoch, WORLD_SIZE)
    else:
        for distance in tl.static_range(1, WORLD_SIZE):
            peer = (peers.rank + distance) % WORLD_SIZE
            signal(translate(flags_ptr, peers.rank, peer, peers.heap_bases) + peers.rank, epoch)


@triton.jit
def finish_after_arrivals(peers, epoch, num_programs, WORLD_SIZE: tl.constexpr):
    """As `finish_call`, for operators whose programs have awaited the peers' data, and signalled theirs, themselves.

    Nothing is left to be released to the peers: the last program only counts the call.
    """
    if _is_last(peers, num_programs, "gpu", WORLD_SIZE):
        tl.store(peers.state_ptr + 2 * WORLD_SIZE, epoch)


@triton.jit
def finish_after_counts(peers, epoch, num_programs, counts_ptr, num_counts, WORLD_SIZE: tl.constexpr):
    """As `finish_after_arrivals`, for operators whose peers count within a call; it zeroes what they counted here.

    Precondition: some program has awaited each count in full. The next call's come when this rank is ready for it.
    """
    if _is_last(peers, num_programs, "gpu", WORLD_SIZE):
        for count in range(num_counts):
            tl.store(counts_ptr + count, 0)
        tl.store(peers.state_ptr + 2 * WORLD_SIZE, epoch)


@triton.jit
def _is_last(peers, num_programs, SCOPE: tl.constexpr, WORLD_SIZE: tl.constexpr):
    tl.debug_barrier()  # the atomic is one thread's: every thread's stores must come before it
    arrivals_ptr = peers.state_ptr + 2 * WORLD_SIZE + 1
    # Over the system it collects the other programs' stores to peers, for the last one to release.
    is_last = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope=SCOPE) + 1 == num_programs
    if is_last:
        tl.store(arrivals_ptr, 0)  # those of the next call come after this kernel
    return is_last


# All peers at once.


@triton.jit
def on_every_rank(word_ptr, peers, WORLD_SIZE: tl.constexpr):
    """Return where a word of the heap lies on every rank, and the ranks: two blocks; past the last the rank is -1."""
    indices = lanes(triton.next_power_of_2(WORLD_SIZE))
    pointers = translate(word_ptr, peers.rank, tl.minimum(indices, WORLD_SIZE - 1), peers.heap_bases)
    return pointers, tl.where(indices < WORLD_SIZE, indices, -1)


@triton.jit
def _signal_all(flags_ptr, peers, epoch, WORLD_SIZE: tl.constexpr):
    """Write `epoch` to this rank's flag at every peer, of a flag per rank; with release, as `signal_each`."""
    pointers, ranks = on_every_rank(flags_ptr + peers.rank, peers, WORLD_SIZE)
    signal_each(pointers, epoch, (ranks >= 0) & (ranks != peers.rank))


@triton.jit
def _wait_for_all(flags_ptr, peers, epoch, WORLD_SIZE: tl.constexpr):
    """Wait until every peer's flag here, of a flag per rank, is at least `epoch`; with acquire, as `wait_each`."""
    ranks = lanes(triton.next_power_of_2(WORLD_SIZE))
    wait_each(flags_ptr + ranks, epoch, (ranks < WORLD_SIZE) & (ranks != peers.rank), peers.watchdog_ptr)


@triton.jit
def signal_all_ready(peers, epoch, WORLD_SIZE: tl.constexpr):
    """Signal to all peers that this rank's output may be overwritten; by program 0, in a call's first kernel.

    Edge: that of `begin_call`.
    """
    if tl.program_id(0) == 0:
        _signal_all(peers.state_ptr, peers, epoch, WORLD_SIZE)


@triton.jit
def wait_all_ready(peers, epoch, WORLD_SIZE: tl.constexpr):
    """Wait until every peer's output may be overwritten."""
    _wait_for_all(peers.state_ptr, peers, epoch, WORLD_SIZE)


@triton.jit
def signal_chunk_to_all(peers, count, WORLD_SIZE: tl.constexpr):
    """Add a chunk's `count` to those of this rank's data on every rank, this one too.

    Edge: this program's stores happen before what follows a rank's `wait_all_chunks`.
    """
    pointers, ranks = on_every_rank(peers.state_ptr + WORLD_SIZE + peers.rank, peers, WORLD_SIZE)
    tl.debug_barrier()  # each release is one thread's: every thread's stores must come before it
    tl.atomic_add(pointers, count, mask=ranks >= 0, sem="release", scope="sys")


@triton.jit
def wait_all_chunks(peers, count, WORLD_SIZE: tl.constexpr):
    """Wait until what every rank, this one too, has signalled here counts for `count`, over all calls."""
    ranks = lanes(triton.next_power_of_2(WORLD_SIZE))
    wait_each(peers.state_ptr + WORLD_SIZE + ranks, count, ranks < WORLD_SIZE, peers.watchdog_ptr)


# For calls that no program has to end. The kernel is complete when all its programs are, and the next one begins then.


class OwnCalls(NamedTuple):
    """`calls_ptr` points at how many calls each program has ended, of as many as a call may have: `programs`."""

    calls_ptr: Any
    programs: int


@triton.jit
def begin_own_call(own):
    """Return this call's number."""
    return tl.load(own.calls_ptr + tl.program_id(0)) + 1


@triton.jit
def end_own_call(own, epoch):
    """Count the call as ended by this program, and by those whose numbers a larger call's programs have."""
    tl.debug_barrier()  # every thread has its number
    for program in range(tl.program_id(0), own.programs, tl.num_programs(0)):
        tl.store(own.calls_ptr + program, epoch)
