"""Litmus tests: small programs of which an ordering forbids one outcome, again and again at close quarters.

Two programs, a *pair*, take part in each round: side 0 and side 1. Over the system they are programs of the same number
on two neighbouring ranks, in the scope of a GPU two programs of one rank. Sides take turns and answer each other, so
that who waits already polls when the other side begins. Each flag has a cache line of its own, data are a block of
several lines, and who begins is late by a random number of steps.

| kernel | round | forbidden |
|---|---|---|
| `message_passing` | move data, signal; wait, load | the data are not those of this round |
| `read_first` | load, signal; wait, overwrite | the load sees what overwrote it |
| `chain` | move data, signal; a third program waits and signals; wait, load | the data are not those of this round |
| `store_and_barrier` | both sides: store, barrier; one of them: load | it misses the other's store |
| `store_buffering` | both sides: change the other's word, then look at the own one | both miss the other's change |
| `write_words`, `count_missing` | a kernel stores, device barrier, a kernel loads | a word is missing |

`WEAKENED` names what is left out, for the counterpart that may show the outcome; "" keeps the promise.

| left out | in its place |
|---|---|
| release | a relaxed exchange, behind the same thread barrier |
| acquire | relaxed polls |
| fence | nothing between the wait and a load by descriptor |
| rmw | a store, and a volatile load |

All waits are bounded, like `iris_core.wait`.
"""

from __future__ import annotations

import triton
import triton.language as tl

import iris_core
from iris_core.device.intrinsics import fence_before_descriptor_loads
from iris_core.device.sync import WATCHDOG_TIMEOUT_NS, has_aborted, load_anew, record_failure

LINE_WORDS = tl.constexpr(16)  # int64 words of a cache line
LINE_ELEMENTS = tl.constexpr(32)  # int32, likewise
SLOTS = tl.constexpr(4)  # that rounds take in turn; even, so that each slot's messages have one direction
TILE_COLUMNS = tl.constexpr(32)  # of a block, where it is loaded by descriptor


@triton.jit
def _placed(rank, number, SCOPE: tl.constexpr):
    """Return the pair of program `number`, its side, and the rank of the other side."""
    if SCOPE == "sys":
        return number, rank % 2, rank ^ 1
    else:
        return number // 2, number % 2, rank


@triton.jit
def _slot(pair, side, number):
    """Return which of all blocks is that of a side in round `number`."""
    return (pair * 2 + side) * SLOTS + tl.cast(number, tl.int32) % SLOTS


@triton.jit
def _block(data_ptr, pair, side, number, BLOCK: tl.constexpr):
    """Return where the elements of a side's block of round `number` lie."""
    return data_ptr + _slot(pair, side, number) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _late(state, DELAY: tl.constexpr):
    """Return the next of a row of random numbers, after up to DELAY - 1 steps of computing."""
    state = (state * 1103515245 + 12345) & 0x7FFFFFFF
    for _ in range((state >> 16) % DELAY):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
    return state


@triton.jit
def _seeded(seed, rank):
    return tl.cast(seed, tl.int64) * 65537 + rank * 8191 + tl.program_id(0)


@triton.jit
def _signal(flag_ptr, value, SCOPE: tl.constexpr, WEAKENED: tl.constexpr):
    if WEAKENED == "release":
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr, value, sem="relaxed", scope=SCOPE)
    else:
        iris_core.signal(flag_ptr, value, scope=SCOPE)


@triton.jit
def _wait(flag_ptr, expected, rank, heap_bases, watchdog_ptr, SCOPE: tl.constexpr, WEAKENED: tl.constexpr):
    if WEAKENED == "acquire":
        _poll(flag_ptr, expected, rank, heap_bases, watchdog_ptr, SCOPE, "relaxed")
    else:
        iris_core.wait(flag_ptr, expected, watchdog_ptr, scope=SCOPE)


@triton.jit
def _poll(flag_ptr, expected, rank, heap_bases, watchdog_ptr, SCOPE: tl.constexpr, SEM: tl.constexpr):
    """Wait until an own flag is at least `expected` by atomics of one kind; limit as of `iris_core.wait`."""
    start, limit = iris_core.clock_ns(), tl.load(watchdog_ptr + WATCHDOG_TIMEOUT_NS)
    seen = iris_core.atomic_add(flag_ptr, 0, rank, rank, heap_bases, sem=SEM, scope=SCOPE)
    waiting = seen < expected
    while waiting:
        iris_core.pause()
        expired = (limit > 0) & (iris_core.clock_ns() - start > limit)
        has_time = (has_aborted(watchdog_ptr) | expired) == 0
        seen = iris_core.atomic_add(flag_ptr, 0, rank, rank, heap_bases, sem=SEM, scope=SCOPE)
        waiting = (seen < expected) & has_time
    if seen < expected:
        record_failure(flag_ptr, seen, expected, watchdog_ptr)


@triton.jit
def _flags(flags_ptr, pair, side, rank, peer, heap_bases):
    """Return where a side's flag is, and where the other side's."""
    there = flags_ptr + (pair * 2 + 1 - side) * LINE_WORDS
    return flags_ptr + (pair * 2 + side) * LINE_WORDS, iris_core.translate(there, rank, peer, heap_bases)


@triton.jit
def _differ(values, expected):
    """Return 1 if any of a block's elements is another number, else 0."""
    return tl.max((tl.ravel(values) != expected).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["rounds", "seed", "rank"])
def message_passing(
    data_ptr,
    tiles,
    flags_ptr,
    forbidden_ptr,
    rounds,
    seed,
    rank,
    heap_bases,
    watchdog_ptr,
    MOVE: tl.constexpr,
    ATOMICS: tl.constexpr,
    SCOPE: tl.constexpr,
    WEAKENED: tl.constexpr,
    BLOCK: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Send a block to the other side and signal; wait, load it.

    Args:
        data_ptr: on the heap, (pairs, 2, SLOTS, BLOCK) int32: the blocks of each side.
        tiles: a descriptor of the same memory in rows of TILE_COLUMNS, for blocks, where MOVE is "descriptor".
        flags_ptr: on the heap, (pairs, 2, LINE_WORDS) int64, zero: the first word of each line is a side's flag.
        forbidden_ptr: a program's count of forbidden outcomes, (programs,) int64.
        rounds: of a pair.
        seed: of the delays.
        rank, heap_bases, watchdog_ptr: of the context.
        MOVE: "store", "put", "copy", "get" (by who has waited) or "descriptor" (a store, loaded by descriptor).
        ATOMICS: whether `atomic_add` with release, and with acquire, stand for `signal` and `wait`.
        SCOPE: "sys" or "gpu".
        DELAY: see `_late`.
    """
    pair, side, peer = _placed(rank, tl.program_id(0), SCOPE)
    own_flag = flags_ptr + (pair * 2 + side) * LINE_WORDS
    flag_there = flags_ptr + (pair * 2 + 1 - side) * LINE_WORDS
    state = _seeded(seed, rank)
    forbidden = tl.zeros((), tl.int64)
    for number in range(1, rounds + 1):
        count = (number + 1) // 2  # of messages in this direction
        own = _block(data_ptr, pair, side, number, BLOCK)
        there = _block(data_ptr, pair, 1 - side, number, BLOCK)
        if number % 2 == side:
            state = _late(state, DELAY)
            values = tl.full((BLOCK,), 0, tl.int32) + number
            if MOVE == "store" or MOVE == "descriptor":
                iris_core.store(there, values, rank, peer, heap_bases)
            else:
                tl.store(own, values)
            if MOVE == "put":
                iris_core.put(own, there, rank, peer, heap_bases)
            elif MOVE == "copy":
                iris_core.copy(own, there, rank, peer, rank, heap_bases)
            if ATOMICS:
                tl.debug_barrier()  # the release is one thread's
                if WEAKENED == "release":
                    iris_core.atomic_add(flag_there, 1, rank, peer, heap_bases, sem="relaxed", scope=SCOPE)
                else:
                    iris_core.atomic_add(flag_there, 1, rank, peer, heap_bases, sem="release", scope=SCOPE)
            else:
                _signal(iris_core.translate(flag_there, rank, peer, heap_bases), count, SCOPE, WEAKENED)
        else:
            if ATOMICS and WEAKENED != "acquire":
                _poll(own_flag, count, rank, heap_bases, watchdog_ptr, SCOPE, "acquire")
            else:
                _wait(own_flag, count, rank, heap_bases, watchdog_ptr, SCOPE, WEAKENED)
            if MOVE == "descriptor":
                if WEAKENED != "fence":
                    fence_before_descriptor_loads()
                first_row = _slot(pair, side, number) * (BLOCK // TILE_COLUMNS)
                forbidden += _differ(tiles.load([first_row, 0]), number)
            else:
                if MOVE == "get":
                    iris_core.get(there, own, rank, peer, heap_bases)
                forbidden += _differ(tl.load(own), number)
    tl.store(forbidden_ptr + tl.program_id(0), forbidden)


@triton.jit(do_not_specialize=["rounds", "seed", "rank"])
def read_first(
    data_ptr,
    flags_ptr,
    forbidden_ptr,
    rounds,
    seed,
    rank,
    heap_bases,
    watchdog_ptr,
    SCOPE: tl.constexpr,
    WEAKENED: tl.constexpr,
    BLOCK: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Load a block of the other side and signal; it waits, and overwrites the block. Arguments of `message_passing`."""
    pair, side, peer = _placed(rank, tl.program_id(0), SCOPE)
    own_flag, flag_there = _flags(flags_ptr, pair, side, rank, peer, heap_bases)
    state = _seeded(seed, rank)
    forbidden = tl.zeros((), tl.int64)
    for number in range(1, rounds + 1):
        own = _block(data_ptr, pair, side, number, BLOCK)
        there = _block(data_ptr, pair, 1 - side, number, BLOCK)
        if number % 2 == side:
            state = _late(state, DELAY)
            values = iris_core.load(there, rank, peer, heap_bases)
            _signal(flag_there, number, SCOPE, WEAKENED)
            iris_core.wait(own_flag, number, watchdog_ptr, scope=SCOPE)  # the block is overwritten
            forbidden += _differ(values, tl.maximum(tl.cast(number, tl.int32) - SLOTS, 0))
        else:
            _wait(own_flag, number, rank, heap_bases, watchdog_ptr, SCOPE, WEAKENED)
            tl.store(own, tl.full((BLOCK,), 0, tl.int32) + number)
            iris_core.signal(flag_there, number, scope=SCOPE)
    tl.store(forbidden_ptr + tl.program_id(0), forbidden)


@triton.jit(do_not_specialize=["rounds", "seed", "rank"])
def chain(
    data_ptr,
    flags_ptr,
    forbidden_ptr,
    rounds,
    seed,
    rank,
    heap_bases,
    watchdog_ptr,
    SCOPE: tl.constexpr,
    WEAKENED: tl.constexpr,
    BLOCK: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Store a block to the other side and signal to a program beside this one, which waits and signals to that side.

    Programs with even numbers are ends of a chain, those with odd numbers pass signals on. Arguments of
    `message_passing`, except the flags, (pairs, 2, 2, LINE_WORDS): a side's end has the first, the program beside it
    the second.
    """
    pair, side, peer = _placed(rank, tl.program_id(0) // 2, SCOPE)
    is_end = tl.program_id(0) % 2 == 0
    end_flag = flags_ptr + (pair * 2 + side) * 2 * LINE_WORDS
    middle_flag = end_flag + LINE_WORDS
    flag_there = iris_core.translate(flags_ptr + (pair * 2 + 1 - side) * 2 * LINE_WORDS, rank, peer, heap_bases)
    state = _seeded(seed, rank)
    forbidden = tl.zeros((), tl.int64)
    for number in range(1, rounds + 1):
        own = _block(data_ptr, pair, side, number, BLOCK)
        there = _block(data_ptr, pair, 1 - side, number, BLOCK)
        if number % 2 == side:
            if is_end:
                state = _late(state, DELAY)
                iris_core.store(there, tl.full((BLOCK,), 0, tl.int32) + number, rank, peer, heap_bases)
                _signal(middle_flag, number, SCOPE, WEAKENED)
            else:
                _wait(middle_flag, number, rank, heap_bases, watchdog_ptr, SCOPE, WEAKENED)
                _signal(flag_there, number, SCOPE, WEAKENED)
        elif is_end:
            _wait(end_flag, number, rank, heap_bases, watchdog_ptr, SCOPE, WEAKENED)
            forbidden += _differ(tl.load(own), number)
    tl.store(forbidden_ptr + tl.program_id(0), forbidden)


@triton.jit(do_not_specialize=["rounds", "seed", "rank", "world_size"])
def store_and_barrier(
    data_ptr,
    flags_ptr,
    states_ptr,
    forbidden_ptr,
    rounds,
    seed,
    rank,
    world_size,
    heap_bases,
    watchdog_ptr,
    SCOPE: tl.constexpr,
    WEAKENED: tl.constexpr,
    BLOCK: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Store a block to the other side, meet all ranks at a barrier; in turn, load what the other side has stored.

    Weakened, only the two sides meet. Arguments of `message_passing`, and states_ptr: on the heap, (programs,
    LINE_WORDS * lines) int64, zero, for `iris_core.barrier`.
    """
    pair, side, peer = _placed(rank, tl.program_id(0), SCOPE)
    own_flag, flag_there = _flags(flags_ptr, pair, side, rank, peer, heap_bases)
    state_ptr = states_ptr + tl.program_id(0) * tl.cdiv(world_size + 1, LINE_WORDS) * LINE_WORDS
    state = _seeded(seed, rank)
    forbidden = tl.zeros((), tl.int64)
    for number in range(1, rounds + 1):
        own = _block(data_ptr, pair, side, number, BLOCK)
        there = _block(data_ptr, pair, 1 - side, number, BLOCK)
        state = _late(state, DELAY)
        iris_core.store(there, tl.full((BLOCK,), 0, tl.int32) + number, rank, peer, heap_bases)
        if WEAKENED == "":
            iris_core.barrier(state_ptr, rank, world_size, heap_bases, watchdog_ptr)
        else:
            _signal(flag_there, number, SCOPE, WEAKENED)
            _wait(own_flag, number, rank, heap_bases, watchdog_ptr, SCOPE, WEAKENED)
        if number % 2 == side:
            forbidden += _differ(tl.load(own), number)
    tl.store(forbidden_ptr + tl.program_id(0), forbidden)


@triton.jit(do_not_specialize=["rounds", "seed", "rank"])
def store_buffering(
    words_ptr,
    flags_ptr,
    forbidden_ptr,
    rounds,
    seed,
    rank,
    heap_bases,
    watchdog_ptr,
    SCOPE: tl.constexpr,
    WEAKENED: tl.constexpr,
    DELAY: tl.constexpr,
):
    """Change the other side's word, look at the own one, and compare what both have seen; side 0 counts.

    Arguments of `message_passing`, and words_ptr: on the heap, (pairs, 2, 2, LINE_ELEMENTS) int32, zero: of each side
    its word, and then whether the other side has missed a change, in odd and in even rounds.
    """
    pair, side, peer = _placed(rank, tl.program_id(0), SCOPE)
    own_flag, flag_there = _flags(flags_ptr, pair, side, rank, peer, heap_bases)
    own_word = words_ptr + (pair * 2 + side) * 2 * LINE_ELEMENTS
    word_there = words_ptr + (pair * 2 + 1 - side) * 2 * LINE_ELEMENTS
    state = _seeded(seed, rank)
    forbidden = tl.zeros((), tl.int64)
    for number in range(1, rounds + 1):
        state = _late(state, DELAY)
        if WEAKENED == "rmw":
            iris_core.store(word_there, number, rank, peer, heap_bases)
            seen = load_anew(own_word)
            is_lost = 0
        else:
            # Its result is used: without, its acquire, which orders the two, would be left out.
            old = iris_core.atomic_xchg(word_there, number, rank, peer, heap_bases, scope=SCOPE)
            seen = iris_core.atomic_add(own_word, 0, rank, rank, heap_bases, scope=SCOPE)
            is_lost = (old != number - 1).to(tl.int32)
        has_missed = (seen != number).to(tl.int32)
        answer = LINE_ELEMENTS + number % 2
        iris_core.store(word_there + answer, has_missed, rank, peer, heap_bases)
        iris_core.signal(flag_there, number, scope=SCOPE)
        iris_core.wait(own_flag, number, watchdog_ptr, scope=SCOPE)
        has_missed_too = tl.load(own_word + answer)
        forbidden += ((has_missed & has_missed_too) | is_lost) * (1 - side)
    tl.store(forbidden_ptr + tl.program_id(0), forbidden)


@triton.jit(do_not_specialize=["number", "rank"])
def write_words(words_ptr, number, rank, heap_bases, BLOCK: tl.constexpr):
    """Store a number to a block of words on the neighbouring rank, each in a cache line of its own."""
    words = words_ptr + (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) * LINE_ELEMENTS
    iris_core.store(words, tl.full((BLOCK,), 0, tl.int32) + number, rank, rank ^ 1, heap_bases)


@triton.jit(do_not_specialize=["number"])
def count_missing(words_ptr, forbidden_ptr, number, BLOCK: tl.constexpr):
    """Add to a program's count how many of its words are not the number."""
    words = words_ptr + (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) * LINE_ELEMENTS
    missing = tl.sum((tl.load(words) != number).to(tl.int32), axis=0)
    count_ptr = forbidden_ptr + tl.program_id(0)
    tl.store(count_ptr, tl.load(count_ptr) + missing)
