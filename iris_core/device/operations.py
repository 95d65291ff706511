"""The device API as methods of a context object: each compiles to the same code as the loose function of its name."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from . import rma, sync

_SYS = tl.constexpr("sys")


class Operations:
    """The methods, on what a context object holds.

    They lack three arguments of the loose functions: the rank that runs them, which is this one, `heap_bases` and
    `watchdog_ptr`. What remains means the same, except in `get`.
    """

    rank: Any
    world_size: Any
    heap_bases: Any
    watchdog_ptr: Any

    @triton.jit
    def translate(self, pointer, to_rank):
        """Return where `pointer`, into this rank's heap, lies in `to_rank`'s heap; see `translate`."""
        return rma.translate(pointer, self.rank, to_rank, self.heap_bases)

    @triton.jit
    def load(
        self, pointer, from_rank, mask=None, other=None, cache_modifier=None, volatile: tl.constexpr = False, hint=None
    ):
        """Load from `from_rank`'s heap; see `load`."""
        return rma.load(pointer, self.rank, from_rank, self.heap_bases, mask, other, cache_modifier, volatile, hint)

    @triton.jit
    def store(self, pointer, value, to_rank, mask=None, cache_modifier=None, hint=None):
        """Store `value` into `to_rank`'s heap; see `store`."""
        rma.store(pointer, value, self.rank, to_rank, self.heap_bases, mask, hint, cache_modifier)

    @triton.jit
    def get(
        self,
        from_ptr,
        to_ptr,
        from_rank,
        mask=None,
        other=None,
        load_cache_modifier=None,
        store_cache_modifier=None,
        hint=None,
    ):
        """Copy from `from_rank`'s heap to local memory.

        Args:
            from_ptr: into the heap, as it is on this rank; a pointer, or a block.
            to_ptr: local memory, on the heap or not; of the shape of `from_ptr`.
            from_rank: the rank whose heap is read.
            mask, other, load_cache_modifier, store_cache_modifier, hint: as of the loose `get`.
        """
        value = self.load(from_ptr, from_rank, mask, other, load_cache_modifier, hint=hint)
        tl.store(to_ptr, value, mask=mask, cache_modifier=store_cache_modifier)

    @triton.jit
    def put(
        self,
        from_ptr,
        to_ptr,
        to_rank,
        mask=None,
        other=None,
        load_cache_modifier=None,
        store_cache_modifier=None,
        hint=None,
    ):
        """Copy from local memory to `to_rank`'s heap; see `put`."""
        value = tl.load(from_ptr, mask=mask, other=other, cache_modifier=load_cache_modifier)
        self.store(to_ptr, value, to_rank, mask, store_cache_modifier, hint)

    @triton.jit
    def copy(
        self,
        src_ptr,
        dst_ptr,
        from_rank,
        to_rank,
        mask=None,
        other=None,
        load_cache_modifier=None,
        store_cache_modifier=None,
        hint=None,
    ):
        """Copy from `from_rank`'s heap to `to_rank`'s heap; see `copy`."""
        value = self.load(src_ptr, from_rank, mask, other, load_cache_modifier, hint=hint)
        self.store(dst_ptr, value, to_rank, mask, store_cache_modifier, hint)

    @triton.jit
    def atomic_add(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint=None):
        """Add atomically on `to_rank`'s heap; return the old value; see `atomic_add`."""
        return rma.atomic_add(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_sub(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint=None):
        """Subtract atomically on `to_rank`'s heap; return the old value; see `atomic_sub`."""
        return rma.atomic_sub(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_cas(self, pointer, cmp, val, to_rank, sem=None, scope=None, hint=None):
        """Replace atomically on `to_rank`'s heap what equals `cmp`; return the old value; see `atomic_cas`."""
        return rma.atomic_cas(pointer, cmp, val, self.rank, to_rank, self.heap_bases, sem, scope, hint)

    @triton.jit
    def atomic_xchg(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint=None):
        """Exchange atomically on `to_rank`'s heap; return the old value; see `atomic_xchg`."""
        return rma.atomic_xchg(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_and(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint=None):
        """Bitwise-and atomically on `to_rank`'s heap; return the old value; see `atomic_and`."""
        return rma.atomic_and(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_or(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint=None):
        """Bitwise-or atomically on `to_rank`'s heap; return the old value; see `atomic_or`."""
        return rma.atomic_or(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_xor(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint=None):
        """Bitwise-xor atomically on `to_rank`'s heap; return the old value; see `atomic_xor`."""
        return rma.atomic_xor(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_min(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint=None):
        """Take the minimum atomically on `to_rank`'s heap; return the old value; see `atomic_min`."""
        return rma.atomic_min(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def atomic_max(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint=None):
        """Take the maximum atomically on `to_rank`'s heap; return the old value; see `atomic_max`."""
        return rma.atomic_max(pointer, val, self.rank, to_rank, self.heap_bases, mask, sem, scope, hint)

    @triton.jit
    def signal(self, flag_ptr, value, to_rank, scope: tl.constexpr = _SYS):
        """Write `value` to the flag on `to_rank`'s heap with release; see `signal`.

        Args:
            flag_ptr: to an int64 word on the heap, as it is on this rank.
            to_rank: the rank that waits for it.
            value, scope: as of the loose `signal`.
        """
        sync.signal(rma.translate(flag_ptr, self.rank, to_rank, self.heap_bases), value, scope)

    @triton.jit
    def wait(self, flag_ptr, expected, scope: tl.constexpr = _SYS):
        """Wait until this rank's flag is at least `expected`, with acquire; see `wait`."""
        sync.wait(flag_ptr, expected, self.watchdog_ptr, scope)

    @triton.jit
    def barrier(self, state_ptr):
        """Meet the same program of every rank; see `barrier`."""
        sync.barrier(state_ptr, self.rank, self.world_size, self.heap_bases, self.watchdog_ptr)
