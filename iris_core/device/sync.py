"""Device-side synchronisation: `signal`, `wait`, `barrier`. Each says which ordering edge it makes.

`signal_each` and `wait_each` do for a block of flags at once, a thread a flag, what takes a trip a flag one by one.

A flag is an int64 word on the heap. It only grows, or is zeroed while nobody can write it. A waiter compares with ≥,
never ==, since a fast peer may already have written the next number. Where a load can acquire (NVIDIA), a poll is such
a load, so what ends the wait needs no second trip. Elsewhere polls are relaxed, and one atomic after the loop acquires:
a read-modify-write poll would take the cache line from the writer at every turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .intrinsics import check_flags, clock_ns, lanes, load_acquire, loads_acquire, pause, store_by_each_thread
from .rma import translate

# Layout of a watchdog block (int64 words on the device); watchdog/watchdog.py has the host's half.
WATCHDOG_TIMEOUT_NS = tl.constexpr(0)  # 0: no limit
WATCHDOG_ABORT = tl.constexpr(1)  # nonzero: a wait has failed here or on a peer, stop waiting
WATCHDOG_FAULTS_ADDRESS = tl.constexpr(2)  # host memory that receives this rank's failed waits
WATCHDOG_NOTICE_ADDRESS = tl.constexpr(3)  # the word there that says, to all ranks, that there is any
WATCHDOG_WORDS = tl.constexpr(4)

# The fault board: a row per program, modulo FAULT_ROWS. Where two share one and their waits fail at the same time,
# their words may mix: each is then true of one of the two. watchdog/fault_board.py has the host's half.
FAULT_WORDS = tl.constexpr(6)
FAULT_ROWS = tl.constexpr(64)
EXPIRED = tl.constexpr(1)
ABORTED = tl.constexpr(2)

# How a wait for a block of flags goes; of what its threads find the largest counts. Of one flag 1 is to wait, too.
_DONE, _FAILED, _WAITING = tl.constexpr(-1), tl.constexpr(0), tl.constexpr(1)

_PEERS_AT_ONCE = tl.constexpr(32)


@triton.jit
def signal(flag_ptr, value, scope: tl.constexpr = tl.constexpr("sys")):
    """Write `value` to the flag with release.

    Edge: all memory operations of this program before the call, local and remote, happen before everything after a
    `wait` that sees `value`. Precondition: this program is the flag's only writer. It does not wait for anyone.

    Args:
        flag_ptr: to the waiter's int64 word on the heap; of a peer's flag, what `translate` gives.
        value: an integer, larger than what the flag holds.
        scope: "sys", or "gpu" where the waiter is on this GPU.

    Raises:
        ValueError: the flag is no int64 word; where the kernel is compiled, as the cause of Triton's CompilationError.
    """
    check_flags(flag_ptr)
    tl.debug_barrier()  # the release is one thread's: every thread's accesses must come before it
    tl.atomic_xchg(flag_ptr, value, sem="release", scope=scope)


@triton.jit
def wait(flag_ptr, expected, watchdog_ptr, scope: tl.constexpr = tl.constexpr("sys")):
    """Wait until the flag is at least `expected`, with acquire; at most for the watchdog's limit.

    Edge: everything before the `signal` that wrote the value seen happens before everything after this call, in every
    thread of this program. When the limit passes, or another wait of this heap has failed, it records that and returns:
    the kernel ends with wrong data and the host raises.

    Args:
        flag_ptr: to this rank's own int64 word on the heap.
        expected: the least value that ends the wait.
        watchdog_ptr: ``Context.get_watchdog()``, int64 words on the device; the limit is in the first, in ns.
        scope: "sys", or "gpu" where the writer is on this GPU.

    Raises:
        ValueError: as of `signal`.
    """
    check_flags(flag_ptr)
    if loads_acquire():  # every thread polls, and acquires, by itself
        if load_acquire(flag_ptr, scope) < expected:
            seen, has_failed = _poll(flag_ptr, expected, watchdog_ptr, scope)
            if has_failed:
                record_failure(flag_ptr, seen, expected, watchdog_ptr)
        tl.debug_barrier()  # what follows, a plain store to the flag perhaps, comes after every thread's polls
    else:
        if load_anew(flag_ptr) < expected:
            _poll(flag_ptr, expected, watchdog_ptr, scope)
        # The acquire is one thread's; Triton hands its result to the others through a barrier, so none reads ahead of
        # it. The result must be used: an atomic whose result is not is deleted, with its acquire (Triton 3.6).
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope=scope)
        if seen < expected:
            record_failure(flag_ptr, seen, expected, watchdog_ptr)


@triton.jit
def signal_each(flag_ptrs, value, mask):
    """Write `value` to a block of flags with release, all at once: releases in a row wait for one another.

    Edge and precondition: those of `signal` over the system, for every flag that `mask` selects.

    Args:
        flag_ptrs: a block of pointers (flags,), each as of `signal`.
        value: for all of them, or a block with one for each; larger than what they hold.
        mask: which flags are written, of the block's shape.

    Raises:
        ValueError: as of `signal`.
    """
    check_flags(flag_ptrs)
    tl.debug_barrier()  # each release is one thread's: every thread's accesses must come before it
    values = tl.where(mask, value, 0)  # a block, too: Gluon makes none of a scalar
    tl.atomic_xchg(flag_ptrs, values, mask=mask, sem="release", scope="sys")


@triton.jit
def wait_each(flag_ptrs, expected, mask, watchdog_ptr):
    """Wait until every flag of a block that `mask` selects is at least `expected`, with acquire.

    Edge and limit: those of `wait` over the system, for each of them; of several that fail one is recorded.

    Args:
        flag_ptrs: a block of pointers (flags,), each as of `wait`.
        expected: the least value of each, one for all.
        mask: which flags are waited for, of the block's shape.
        watchdog_ptr: as of `wait`.

    Raises:
        ValueError: as of `signal`.
    """
    check_flags(flag_ptrs)
    if loads_acquire():
        if _progress(load_acquire(flag_ptrs, "sys", mask), expected, mask, True) != _DONE:
            seen, has_failed = _poll(flag_ptrs, expected, watchdog_ptr, "sys", mask)
            if has_failed:
                _record_failed(flag_ptrs, seen, expected, mask, watchdog_ptr)
        tl.debug_barrier()  # each acquire is one thread's: every thread's accesses must come after it
    else:
        if _progress(load_anew(flag_ptrs, mask), expected, mask, True) != _DONE:
            _poll(flag_ptrs, expected, watchdog_ptr, "sys", mask)
        # The result must be used, as in `wait`; and Gluon takes a block of zeros alone.
        seen = tl.atomic_add(flag_ptrs, tl.where(mask, 0, 0), mask=mask, sem="acquire", scope="sys")
        tl.debug_barrier()
        _record_failed(flag_ptrs, seen, expected, mask, watchdog_ptr)


@triton.jit
def _record_failed(flag_ptrs, seen, expected, mask, watchdog_ptr):
    """Record one of the flags that were seen to be below `expected`, if any."""
    addresses = tl.where(mask & (seen < expected), tl.cast(flag_ptrs, tl.int64), 0)
    failed = tl.max(addresses, axis=0)
    if failed != 0:
        record_failure(failed, tl.max(tl.where(addresses == failed, seen, 0), axis=0), expected, watchdog_ptr)


@triton.jit
def _poll(flag_ptrs, expected, watchdog_ptr, scope: tl.constexpr, mask=None):
    """Poll a flag, or those of a block that `mask` selects, until each is at least `expected`, or time is up.

    Return what they were seen to be, and whether time was up.
    """
    start = clock_ns()
    limit = tl.load(watchdog_ptr + WATCHDOG_TIMEOUT_NS)
    seen = _seen(flag_ptrs, scope, mask)
    progress = _progress(seen, expected, mask, True)
    while progress == _WAITING:
        pause()
        aborted = has_aborted(watchdog_ptr)
        expired = (limit > 0) & (clock_ns() - start > limit)
        seen = _seen(flag_ptrs, scope, mask)
        progress = _progress(seen, expected, mask, (aborted | expired) == 0)
    return seen, (seen < expected if mask is None else progress == _FAILED)


@triton.jit
def _seen(flag_ptrs, scope: tl.constexpr, mask):
    """Return a flag, or those of a block, with acquire where loads can."""
    return load_acquire(flag_ptrs, scope, mask) if loads_acquire() else load_anew(flag_ptrs, mask)


@triton.jit
def load_anew(pointers, mask=None):
    """Load words that others write meanwhile.

    For AMD Triton makes of volatile alone a load from the caches; for NVIDIA, from 3.8 on, it takes none but that.
    """
    return tl.load(pointers, mask=mask, volatile=True, cache_modifier="" if loads_acquire() else ".cv")


@triton.jit
def _progress(seen, expected, mask, has_time):
    """Return how a wait goes: of one flag whether it is below `expected`, and there is time; of a block a word for all.

    A block of more flags than a warp has threads is reduced by all warps. Several threads have each flag, load it by
    themselves, and may see it at different times: of what they saw one counts, by chance (Triton 3.8). So the word says
    whether a wait has failed, too, and not what a thread saw at last.
    """
    if mask is None:
        return (seen < expected) & has_time
    else:
        below = tl.where(has_time, _WAITING, _FAILED)
        return tl.max(tl.where(mask & (seen < expected), below, _DONE), axis=0)


@triton.jit
def has_aborted(watchdog_ptr):
    """Return whether another wait of this heap has failed."""
    return load_anew(watchdog_ptr + WATCHDOG_ABORT) != 0


@triton.jit
def record_failure(flag_ptr, seen, expected, watchdog_ptr):
    """Record on the fault board that a wait of this program has failed, and let all others of the heap end."""
    pid = tl.program_id(0)
    aborted = has_aborted(watchdog_ptr)
    rows = tl.load(watchdog_ptr + WATCHDOG_FAULTS_ADDRESS).to(tl.pointer_type(tl.int64))
    notice = tl.load(watchdog_ptr + WATCHDOG_NOTICE_ADDRESS).to(tl.pointer_type(tl.int64))
    row = rows + (pid % FAULT_ROWS) * FAULT_WORDS
    if load_anew(row) == 0:  # a program's first failure says why, its later ones only follow
        tl.store(row + 1, tl.cast(flag_ptr, tl.int64))
        tl.store(row + 2, tl.cast(expected, tl.int64))
        tl.store(row + 3, tl.cast(seen, tl.int64))
        tl.store(row + 4, tl.cast(pid, tl.int64))
        tl.store(row + 5, clock_ns())
        tl.store(row, tl.where(aborted, ABORTED, EXPIRED).to(tl.int64))
    if loads_acquire():  # where a thread may fail whose program's first, which writes the row, does not
        store_by_each_thread(notice, tl.cast(1, tl.int64))
        store_by_each_thread(watchdog_ptr + WATCHDOG_ABORT, tl.cast(1, tl.int64))
    else:
        tl.store(notice, tl.cast(1, tl.int64))
        tl.store(watchdog_ptr + WATCHDOG_ABORT, tl.cast(1, tl.int64))


@triton.jit
def barrier(state_ptr, rank, world_size, heap_bases, watchdog_ptr):
    """Meet the same program of every rank; run by one program per rank.

    Edge: all memory operations of every rank's program before its call happen before everything after it on any rank.

    Args:
        state_ptr: ``world_size + 1`` int64 words on the heap, zero before the first use (``Context.device_barrier`` has
            its own): a flag per peer, and the number of barriers passed, so that a captured graph can repeat it.
        rank: the rank that runs this.
        world_size: number of ranks.
        heap_bases: ``Context.get_heap_bases()``.
        watchdog_ptr: as of `wait`, whose limit holds.
    """
    epoch = tl.load(state_ptr + world_size) + 1
    tl.debug_barrier()  # every thread has loaded it; the signals are a barrier before the next call does
    tl.store(state_ptr + world_size, epoch)
    signal_peers(state_ptr, epoch, rank, world_size, heap_bases)
    wait_peers(state_ptr, epoch, rank, world_size, watchdog_ptr)


@triton.jit
def signal_peers(flags_ptr, value, rank, world_size, heap_bases):
    """Write `value` to this rank's flag on every peer: `flags_ptr` is of world_size words on the heap, one per rank.

    Edge and precondition: those of `signal`, for each.
    """
    for first in range(0, world_size, _PEERS_AT_ONCE):
        peers = first + lanes(_PEERS_AT_ONCE)
        is_peer = (peers < world_size) & (peers != rank)
        flag_ptrs = translate(flags_ptr, rank, tl.minimum(peers, world_size - 1), heap_bases) + rank
        signal_each(flag_ptrs, value, is_peer)


@triton.jit
def wait_peers(flags_ptr, expected, rank, world_size, watchdog_ptr):
    """Wait until every peer's flag on this rank is at least `expected`. Edge and limit: those of `wait`, for each."""
    for first in range(0, world_size, _PEERS_AT_ONCE):
        peers = first + lanes(_PEERS_AT_ONCE)
        wait_each(flags_ptr + peers, expected, (peers < world_size) & (peers != rank), watchdog_ptr)
