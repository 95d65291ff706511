"""Tiles between ranks, as methods of a `DeviceContext`: what a program has computed goes out, or others' come in.

A `Tile` has its values in registers, a `TileView` has none; both and `TensorView` are of `iris_core.x`. Names and
arguments are those of Iris, where the caller orders: by barriers before and after, or by `ready`, a word per tile on
the heap, int32 or int64, zeroed before. A program that has stored its tile to `src_view` sets its own word to 1 by a
release over the system, and the methods that take `ready` wait, bounded, for the peers' words. Zero them behind a
barrier before the next use. The functions of `iris_core.x` need neither: they order themselves, call after call.

Sums are in the order of the ranks: fp32 for floats of at most 32 bits, other values as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .intrinsics import clock_ns, pause
from .operations import Operations
from .sync import WATCHDOG_TIMEOUT_NS, has_aborted, record_failure


class TileOperations(Operations):
    """The methods, and those of all context objects."""

    @triton.jit
    def gather(self, tile, src_view, source_rank):
        """Return a rank's tile, zero outside the matrix.

        Args:
            tile: a `TileView`.
            src_view: the matrix, on the heap.
            source_rank: the rank whose heap is read.
        """
        pointers, mask = src_view.tile_ptr(tile)
        return self.load(pointers, source_rank, mask=mask, other=0, cache_modifier=".cg")

    @triton.jit
    def all_gather(self, tile, dst_view, dim: tl.constexpr):
        """Store this rank's tile to all outputs.

        Args:
            tile: a `Tile` of this rank's shard.
            dst_view: the output, on the heap: all shards along `dim` in the order of the ranks.
            dim: 0 or 1.
        """
        rows, columns = tile.indices()
        if dim == 0:
            shard = dst_view.M // self.world_size
            pointers, mask = dst_view.offset_tile_ptr(tile, self.rank * shard, 0, (rows < shard)[:, None])
        else:
            shard = dst_view.N // self.world_size
            pointers, mask = dst_view.offset_tile_ptr(tile, 0, self.rank * shard, (columns < shard)[None, :])
        _store_to_all(self, pointers, tile.data, mask)

    @triton.jit
    def all_to_all(self, tile, src_view, dst_view, N_per_rank: tl.constexpr):
        """Load a tile of this rank's output: its block p of columns is rank p's block of this rank's number.

        Args:
            tile: a `TileView`, of `dst_view`; it may reach over several blocks.
            src_view: the inputs, (M, world_size * N_per_rank), on the heap.
            dst_view: the output, of the same size; not `src_view`.
            N_per_rank: columns of a block.
        """
        rows, columns = tile.indices()
        first = tile.pid_n * tile.block_n
        to_pointers, to_mask = dst_view.tile_ptr(tile)
        for step in range(self.world_size):
            peer = (self.rank + step) % self.world_size
            begin = peer * N_per_rank
            if (begin < first + tile.block_n) & (begin + N_per_rank > first):
                view = src_view.offset(0, (self.rank - peer) * N_per_rank)
                from_pointers, _ = view.tile_ptr_from_indices(rows, columns, tile.block_m, tile.block_n)
                mask = to_mask & ((columns >= begin) & (columns < begin + N_per_rank))[None, :]
                tl.store(to_pointers, self.load(from_pointers, peer, mask=mask, cache_modifier=".cg"), mask=mask)

    @triton.jit
    def all_reduce_atomic(self, tile, dst_view):
        """Add this rank's tile to all outputs, zeroed before, by atomics: in any order, rounded at each addition.

        Args:
            tile: a `Tile`.
            dst_view: the output, on the heap, of a dtype that has atomic addition.
        """
        pointers, mask = dst_view.tile_ptr(tile)
        value = tile.data.to(dst_view.ptr.dtype.element_ty)
        for step in range(self.world_size):
            # Relaxed: it is the caller's barrier that publishes the sum.
            self.atomic_add(pointers, value, (self.rank + step) % self.world_size, mask, "relaxed", "sys")

    @triton.jit
    def all_reduce_spinlock(self, tile, dst_view, locks):
        """Add this rank's tile to all outputs, zeroed before, each under a lock.

        Args:
            tile: a `Tile`.
            dst_view: the output, on the heap.
            locks: a word per tile on the heap, int32 or int64, zero while it is free.
        """
        pointers, mask = dst_view.tile_ptr(tile)
        lock = locks + dst_view.tile_id(tile)
        for step in range(self.world_size):
            peer = (self.rank + step) % self.world_size
            # Edge: what was done under the lock before is seen under it now.
            _take(self.translate(lock, peer), self.watchdog_ptr)
            total = accumulator(self.load(pointers, peer, mask=mask, cache_modifier=".cg")) + accumulator(tile.data)
            self.store(pointers, total.to(dst_view.ptr.dtype.element_ty), peer, mask)
            tl.debug_barrier()  # the release is one thread's: every thread's store must come before it
            self.atomic_xchg(lock, 0, peer, sem="release", scope="sys")

    @triton.jit
    def all_reduce_one_shot(self, tile, src_view, dst_view, ready):
        """Store the sum of all ranks' tiles to this rank's output.

        Args:
            tile: a `Tile`, this rank's summand.
            src_view: the ranks' summands, on the heap.
            dst_view: the output; not `src_view`.
            ready: a word per tile, see above.
        """
        pointers, mask = dst_view.tile_ptr(tile)
        tl.store(pointers, _sum(self, tile, src_view, ready).to(dst_view.ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def all_reduce_ring(self, tile, src_view, dst_view):
        """Store the sum of all ranks' tiles, all of them loaded, to this rank's output; barriers order it.

        Iris calls this so, and passes no flags by which neighbours could wait; `iris_core.x.all_reduce_ring` is a ring.

        Args:
            tile: a `TileView`.
            src_view: the ranks' summands, on the heap.
            dst_view: the output; not `src_view`.
        """
        pointers, mask = dst_view.tile_ptr(tile)
        total = accumulator(self.gather(tile, src_view, 0))
        for peer in range(1, self.world_size):
            total += accumulator(self.gather(tile, src_view, peer))
        tl.store(pointers, total.to(dst_view.ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def all_reduce_two_shot(self, tile, src_view, dst_view, ready):
        """On the rank whose turn it is, of ranks in turn, store the sum of all ranks' tiles to all outputs.

        Args:
            tile, src_view, ready: as of `all_reduce_one_shot`.
            dst_view: the output, on the heap; not `src_view`.
        """
        if dst_view.tile_id(tile) % self.world_size == self.rank:
            pointers, mask = dst_view.tile_ptr(tile)
            _store_to_all(self, pointers, _sum(self, tile, src_view, ready), mask)

    @triton.jit
    def reduce_scatter(self, tile, src_view, dst_view, ready):
        """On the rank that owns this tile, store the sum of all ranks' tiles to the same place of its output.

        Of T tiles rank r owns the T // world_size from r * (T // world_size) on, the last rank the rest, too.

        Args:
            tile, src_view, dst_view, ready: as of `all_reduce_one_shot`.
        """
        share = dst_view.number_of_tiles(tile.block_m, tile.block_n) // self.world_size
        tile_id = dst_view.tile_id(tile)
        is_last = self.rank == self.world_size - 1
        if (tile_id >= self.rank * share) & ((tile_id < (self.rank + 1) * share) | is_last):
            self.all_reduce_one_shot(tile, src_view, dst_view, ready)


@triton.jit
def _store_to_all(ctx, pointers, value, mask):
    """Store to all ranks, first this one: ranks that begin with different peers do not crowd one link."""
    value = value.to(pointers.dtype.element_ty)
    for step in range(ctx.world_size):
        ctx.store(pointers, value, (ctx.rank + step) % ctx.world_size, mask)


@triton.jit
def _sum(ctx, tile, src_view, ready):
    """Return the sum of this rank's registers and the peers' tiles, each once its word is 1."""
    word = ready + src_view.tile_id(tile)
    own = accumulator(tile.data)
    total = tl.zeros_like(own)
    for peer in range(ctx.world_size):
        if peer == ctx.rank:
            total += own
        else:
            # Edge: what the peer stored before it set its word is seen by the load.
            _await(ctx.translate(word, peer), ctx.watchdog_ptr)
            total += accumulator(ctx.gather(tile, src_view, peer))
    return total


@triton.jit
def accumulator(value):
    """Return values in the dtype in which they are summed."""
    if value.dtype.is_floating() and value.dtype.primitive_bitwidth < 32:
        return value.to(tl.float32)
    else:
        return value


@triton.jit
def _await(word_ptr, watchdog_ptr):
    """Wait until a word is at least 1, with acquire; limit as of `wait`. For words of any width, unlike that."""
    start, limit = clock_ns(), tl.load(watchdog_ptr + WATCHDOG_TIMEOUT_NS)
    seen = tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys")
    waiting = seen < 1
    while waiting:
        pause()
        has_time = _has_time(start, limit, watchdog_ptr)
        seen = tl.atomic_add(word_ptr, 0, sem="acquire", scope="sys")
        waiting = (seen < 1) & has_time
    if seen < 1:
        record_failure(word_ptr, seen, 1, watchdog_ptr)


@triton.jit
def _take(lock_ptr, watchdog_ptr):
    """Wait until a lock is 0 and set it to 1, with acquire; limit as of `wait`.

    By exchanges: Triton 3.6 compiles a compare-and-swap for AMD with the scope of one device.
    """
    start, limit = clock_ns(), tl.load(watchdog_ptr + WATCHDOG_TIMEOUT_NS)
    seen = tl.atomic_xchg(lock_ptr, 1, sem="acquire", scope="sys")
    waiting = seen != 0
    while waiting:
        pause()
        has_time = _has_time(start, limit, watchdog_ptr)
        seen = tl.atomic_xchg(lock_ptr, 1, sem="acquire", scope="sys")
        waiting = (seen != 0) & has_time
    if seen != 0:
        record_failure(lock_ptr, seen, 0, watchdog_ptr)


@triton.jit
def _has_time(start, limit, watchdog_ptr):
    expired = (limit > 0) & (clock_ns() - start > limit)
    return (has_aborted(watchdog_ptr) | expired) == 0
