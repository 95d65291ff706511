"""Bugs that the race checker must find: our kernels with one thing wrong each.

A bug takes the place of a device function of ours, or of a stream's method, wherever that is used, and an operator is
put through what `check` does to sound ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

from iris_core import signal, translate, wait
from iris_core.checker import Report
from iris_core.checker.device import CheckedStream
from iris_core.checker.replacing import replaced
from iris_core.device import sync
from iris_kernels.all_gather_gemm.portable import copy_engine, shards
from iris_kernels.common.device import handshake
from iris_kernels.common.portable import gemm, row_norm, stream_k, tile_loop
from iris_kernels.common.portable.gemm import store_tile
from overlap_taxonomy import get_variant

from ...measure.shapes import Shape
from .cases import Case, run_case

WORLD_SIZE = 2
_RAGGED = Shape(45, 42, 34)
# What bugs call though they take its place: `replaced` looks through imported modules alone, and this is none.
_ours = ModuleType("ours")
vars(_ours).update(
    multiply_shards=shards.multiply_shards,
    subtile_offsets=gemm.subtile_offsets,
    norm_row=row_norm.norm_row,
    wait_for_row_of_tiles=row_norm.wait_for_row_of_tiles,
)


@triton.jit
def relaxed_signal(flag_ptr, value, scope: tl.constexpr = tl.constexpr("sys")):
    """`signal` without its release."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, value, sem="relaxed", scope=scope)


@triton.jit
def stored_signal(flag_ptr, value, scope: tl.constexpr = tl.constexpr("sys")):
    """`signal` by an ordinary store."""
    tl.debug_barrier()
    tl.store(flag_ptr, tl.cast(value, tl.int64))


@triton.jit
def one_threads_signal(flag_ptr, value, scope: tl.constexpr = tl.constexpr("sys")):
    """`signal` without the barrier before it."""
    tl.atomic_xchg(flag_ptr, value, sem="release", scope=scope)


@triton.jit
def signal_in_gpu(flag_ptr, value, scope: tl.constexpr = tl.constexpr("sys")):
    """`signal` whatever the scope, within its GPU."""
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, value, sem="release", scope="gpu")


@triton.jit
def relaxed_wait(flag_ptr, expected, watchdog_ptr, scope: tl.constexpr = tl.constexpr("sys")):
    """`wait` without its acquire."""
    if tl.load(flag_ptr, volatile=True) < expected:
        sync._poll(flag_ptr, expected, watchdog_ptr, "sys")
    tl.atomic_add(flag_ptr, 0, sem="relaxed", scope=scope)


@triton.jit
def wait_in_gpu(flag_ptr, expected, watchdog_ptr, scope: tl.constexpr = tl.constexpr("sys")):
    """`wait` whatever the scope, within its GPU."""
    if tl.load(flag_ptr, volatile=True) < expected:
        sync._poll(flag_ptr, expected, watchdog_ptr, "sys")
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="gpu")
    if seen < expected:
        sync.record_failure(flag_ptr, seen, expected, watchdog_ptr)


@triton.jit
def wait_by_unused(flag_ptr, expected, watchdog_ptr, scope: tl.constexpr = tl.constexpr("sys")):
    """`wait` by an acquire whose result nothing uses."""
    if tl.load(flag_ptr, volatile=True) < expected:
        sync._poll(flag_ptr, expected, watchdog_ptr, "sys")
    tl.atomic_add(flag_ptr, 0, sem="acquire", scope=scope)


@triton.jit
def flag_before_data(acc, target, work, peers, epoch, began, TILE: tl.constexpr):
    """`keep_and_signal` that signals a tile and then stores it."""
    block, flags_ptr = target
    signal(flags_ptr + work.index, epoch, scope="gpu")
    store_tile(acc, block, work.row, work.col, peers, 1, TILE)


@triton.jit
def no_wait_ready(peers, epoch, WORLD_SIZE: tl.constexpr):
    """`wait_ready` that does not wait."""


@triton.jit
def _signal_ready(peers, epoch, WORLD_SIZE: tl.constexpr):
    if tl.program_id(0) == 0:
        for distance in tl.static_range(1, WORLD_SIZE):
            peer = (peers.rank + distance) % WORLD_SIZE
            signal(translate(peers.state_ptr, peers.rank, peer, peers.heap_bases) + peers.rank, epoch)


@triton.jit
def begin_last_call(peers, WORLD_SIZE: tl.constexpr):
    """`begin_call` that gives the number of the call before."""
    epoch = tl.maximum(tl.load(peers.state_ptr + 2 * WORLD_SIZE), 1)
    _signal_ready(peers, epoch, WORLD_SIZE)
    return epoch


@triton.jit
def begin_after_peers(peers, WORLD_SIZE: tl.constexpr):
    """`begin_call` that is ready when all peers are."""
    epoch = tl.load(peers.state_ptr + 2 * WORLD_SIZE) + 1
    for distance in tl.static_range(1, WORLD_SIZE):
        wait(peers.state_ptr + (peers.rank + distance) % WORLD_SIZE, epoch, peers.watchdog_ptr)
    _signal_ready(peers, epoch, WORLD_SIZE)
    return epoch


@triton.jit
def finish_unawaited(peers, epoch, num_programs, WORLD_SIZE: tl.constexpr):
    """`finish_call` that does not wait for the peers' data."""
    if handshake._is_last(peers, num_programs, "sys", WORLD_SIZE):
        done_ptr = peers.state_ptr + WORLD_SIZE
        for distance in tl.static_range(1, WORLD_SIZE):
            peer = (peers.rank + distance) % WORLD_SIZE
            signal(translate(done_ptr, peers.rank, peer, peers.heap_bases) + peers.rank, epoch)
        tl.store(peers.state_ptr + 2 * WORLD_SIZE, epoch)


@triton.jit
def finish_uncleared(peers, epoch, num_programs, flags_ptr, num_flags, WORLD_SIZE: tl.constexpr):
    """`finish_and_clear` that leaves the flags as they are."""
    if handshake._is_last(peers, num_programs, "sys", WORLD_SIZE):
        handshake._end_with_peers(peers, epoch, WORLD_SIZE)


@triton.jit
def relaxed_arrival(peers, num_programs, SCOPE: tl.constexpr, WORLD_SIZE: tl.constexpr):
    """`_is_last` without its edges."""
    tl.debug_barrier()
    arrived = tl.atomic_add(peers.state_ptr + 2 * WORLD_SIZE + 1, 1, sem="relaxed", scope="sys") + 1
    if arrived == num_programs:
        tl.store(peers.state_ptr + 2 * WORLD_SIZE + 1, 0)
    return arrived == num_programs


@triton.jit
def all_chunks_unawaited(peers, count, WORLD_SIZE: tl.constexpr):
    """`wait_all_chunks` that waits for no rank."""


@triton.jit
def store_unordered(acc, stream, work, peers, epoch, TILE: tl.constexpr):
    """`store_partial` without its edge."""
    program = tl.program_id(0)
    tl.store(stream.workspace_ptr + stream_k._partial_offsets(program, TILE.BLOCK_N, TILE), acc)
    tl.debug_barrier()
    tl.atomic_xchg(stream.flags_ptr + program, epoch, sem="relaxed", scope="gpu")


@triton.jit
def store_by_atomics(acc, stream, work, peers, epoch, TILE: tl.constexpr):
    """`store_partial` by a block of atomics, which all threads do, without the barrier before the flag."""
    program = tl.program_id(0)
    partial_ptrs = stream.workspace_ptr + stream_k._partial_offsets(program, TILE.BLOCK_N, TILE)
    tl.atomic_xchg(partial_ptrs.to(tl.pointer_type(tl.int32)), acc.to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_xchg(stream.flags_ptr + program, epoch, sem="release", scope="gpu")


@triton.jit
def overlapping_offsets(block, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """`subtile_offsets` that puts two columns in one place."""
    offsets, mask = _ours.subtile_offsets(block, row, col, ROWS, COLS)
    return offsets - tl.arange(0, COLS)[None, :] % 2, mask


@triton.jit
def multiply_if_any(
    first,
    step,
    a,
    b,
    gemm,
    gathered,
    gathered_gemm,
    block,
    shard_rows,
    peers,
    arrivals,
    TILE: tl.constexpr,
):
    """`multiply_shards` that on a rank without columns does not wait for the shards."""
    if block.n > 0:
        _ours.multiply_shards(
            first, step, a, b, gemm, gathered, gathered_gemm, block, shard_rows, peers, arrivals, TILE
        )


@triton.jit
def end_unawaited(flags_ptr, peers, WORLD_SIZE: tl.constexpr):
    """`all_gather_gemm_copy_engine_end` that does not wait for the flags of shards without rows."""
    epoch = handshake.current_call(peers, WORLD_SIZE)
    handshake.finish_and_clear(peers, epoch, 1, flags_ptr, WORLD_SIZE, WORLD_SIZE)


@triton.jit
def every_other_call(epoch, BUFFERS: tl.constexpr):
    """`buffer_of_call` that gives two calls in a row one buffer."""
    return epoch // 2 % BUFFERS


@triton.jit
def always_the_first(epoch, BUFFERS: tl.constexpr):
    """`buffer_of_call` that knows one buffer."""
    return epoch * 0


@triton.jit
def wait_for_the_first(row, tiled, flags_ptr, peers, epoch, TILE: tl.constexpr):
    """`wait_for_row_of_tiles` that waits for the first row of tiles, whichever is needed."""
    _ours.wait_for_row_of_tiles(row * 0, tiled, flags_ptr, peers, epoch, TILE)


@triton.jit
def norm_to_one_scale(
    row,
    weight,
    partials_ptr,
    partial_size,
    out,
    norm,
    PARTIALS: tl.constexpr,
    NORM: tl.constexpr,
    TILE: tl.constexpr,
):
    """`norm_row` that stores a scale of each row in the first one's place, too."""
    _ours.norm_row(row, weight, partials_ptr, partial_size, out, norm, PARTIALS, NORM, TILE)
    if NORM.LARGEST > 0.0:
        tl.store(norm.scales_ptr + tl.arange(0, 1), tl.full((1,), 1.0, tl.float32))


def _store(stream: CheckedStream, flag: torch.Tensor, value: int) -> None:
    """A stream that writes a flag as it would write anything."""
    stream._queue.put(lambda: flag.fill_(value))


def _forget(stream: CheckedStream, *_: Any) -> None:
    """A stream that does not wait."""


@dataclass(frozen=True)
class Planted:
    """A bug.

    Args:
        name: what is wrong.
        original, bug: what is replaced, by what; a function of ours, or a method's name on `CheckedStream`.
        family, variant: the operator that is run with it,
        shape: on this problem.
    """

    name: str
    original: Any
    bug: Any
    family: str = "gemm_all_scatter"
    variant: str = "fused_sequential"
    shape: Shape = _RAGGED

    def run(self, *, schedules: int, seed: int) -> Report:
        """Return what the checker says of the operator with the bug."""
        case = Case(get_variant(self.family, self.variant), self.shape, WORLD_SIZE, "bfloat16")
        with _planted(self.original, self.bug):
            return run_case(case, schedules=schedules, seed=seed)


_STREAM_K = "fused_sequential:portable:stream_k"
_COPIES = ("all_gather_gemm", "copy_engine:portable")
_ONE_SHOT_REDUCE = ("gemm_all_reduce", _STREAM_K, Shape(1, 20, 16))  # a tile per program
_RANK_WITHOUT_COLUMNS, _RANK_WITHOUT_ROWS = Shape(20, 1, 16), Shape(1, 20, 16)

PLANTED = (
    Planted("a missing release: the flag is relaxed", sync.signal, relaxed_signal),
    Planted("a missing release: the flag is a plain store", sync.signal, stored_signal),
    Planted("a release of one thread's stores alone", sync.signal, one_threads_signal, variant="producer_consumer"),
    Planted("a relaxed acquire", sync.wait, relaxed_wait),
    Planted("an acquire whose result is unused", sync.wait, wait_by_unused),
    Planted("a flag before the data", tile_loop.keep_and_signal, flag_before_data, variant="producer_consumer"),
    Planted("no ready signal: peers push when they like", handshake.wait_ready, no_wait_ready),
    Planted("an epoch reused", handshake.begin_call, begin_last_call),
    Planted("a wrong scope: a release that peers are not in", sync.signal, signal_in_gpu),
    Planted("a wrong scope: an acquire that peers are not in", sync.wait, wait_in_gpu, "gemm_reduce_scatter"),
    Planted("a cyclic wait: every rank is ready when the others are", handshake.begin_call, begin_after_peers),
    Planted("a call that ends before the peers' data are there", handshake.finish_call, finish_unawaited),
    Planted("a relaxed count of the programs that are through", handshake._is_last, relaxed_arrival),
    Planted("a call that waits for no chunk", handshake.wait_all_chunks, all_chunks_unawaited, variant=_STREAM_K),
    Planted("a relaxed flag of a split of a tile", stream_k.store_partial, store_unordered, variant=_STREAM_K),
    Planted("a release of one thread's atomics alone", stream_k.store_partial, store_by_atomics, variant=_STREAM_K),
    Planted("two elements of a tile in one place", gemm.subtile_offsets, overlapping_offsets),
    Planted("one buffer for two calls", stream_k.buffer_of_call, always_the_first, "all_gather_gemm", _STREAM_K),
    Planted("one buffer for sums of two calls", stream_k.buffer_of_call, always_the_first, *_ONE_SHOT_REDUCE),
    Planted("buffers that change at every other call", stream_k.buffer_of_call, every_other_call, *_ONE_SHOT_REDUCE),
    Planted(
        "rows that are added when tiles of others are there",
        row_norm.wait_for_row_of_tiles,
        wait_for_the_first,
        "gemm_all_reduce",
        _STREAM_K,
    ),
    Planted(
        "scales of rows in one place",
        row_norm.norm_row,
        norm_to_one_scale,
        "gemm_reduce_scatter",
        "bulk_synchronous",
    ),
    Planted(
        "a gathered A that a rank without columns does not wait for",
        shards.multiply_shards,
        multiply_if_any,
        "all_gather_gemm",
        "producer_consumer",
        _RANK_WITHOUT_COLUMNS,
    ),
    Planted(
        "flags of shards without rows that are zeroed before they are set",
        copy_engine.all_gather_gemm_copy_engine_end,
        end_unawaited,
        "all_gather_gemm",
        "copy_engine:library",
        _RANK_WITHOUT_ROWS,
    ),
    Planted("copies that do not wait for what they copy", "wait_value", _forget, variant="copy_engine"),
    Planted("flags of copies that nothing zeroes", handshake.finish_and_clear, finish_uncleared, *_COPIES),
    Planted("a flag of a copy without a release", "write_value", _store, *_COPIES),
    Planted("a stream that nothing waits for", "current_waits", _forget, variant="producer_consumer"),
    Planted("a stream that does not wait for the call before", "wait_for_current", _forget, *_COPIES),
)


@contextlib.contextmanager
def _planted(original: Any, bug: Any) -> Iterator[None]:
    """Put a bug in the place of what it replaces."""
    if isinstance(original, str):
        with mock.patch.object(CheckedStream, original, bug):
            yield
    else:
        with replaced(original, bug):
            yield
