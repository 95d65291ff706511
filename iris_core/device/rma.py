"""The device API: remote memory access by rank, callable from any Triton kernel.

Every operation is one address translation and one Triton operation. Names, meaning and the order of arguments are
those of the Iris documentation ("Device API"): a kernel ports by changing the import. A pointer to memory on the
symmetric heap is given as it is on the rank that runs the kernel: into its own heap. Ranks are integers, or scalars.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .intrinsics import check_on_heap, hinted, loads_acquire

_UNKNOWN = tl.constexpr("unknown")  # a mask that the caller of `translate` has, and does not give


@triton.jit
def translate(pointer, from_rank, to_rank, heap_bases):
    """Return where `pointer`, a pointer (or block of pointers) into `from_rank`'s heap, lies in `to_rank`'s heap.

    The heaps are one window with a constant stride, so the distance is one number for a whole block of pointers and
    contiguity survives. In the interpreter a pointer that is not on `from_rank`'s heap is an error; of a block, whose
    lanes may be masked where it is used, one must be.

    Args:
        pointer: a pointer, or a block of any shape.
        from_rank: the rank that runs this.
        to_rank: the rank whose heap is meant.
        heap_bases: ``Context.get_heap_bases()``, uint64 of (world_size,) on the device.
    """
    return _moved(pointer, from_rank, to_rank, heap_bases, _UNKNOWN)


@triton.jit
def _moved(pointer, from_rank, to_rank, heap_bases, mask, hint: tl.constexpr = None):
    """Translate for an access under `mask`, which is None where all lanes are used.

    The first hint says that alignment survives, the second is the caller's. Both must stand here: applied by a caller
    to this function's result they are lost when the call is inlined (Triton 3.6).
    """
    check_on_heap(pointer, from_rank, to_rank, heap_bases, mask)
    from_base = tl.load(heap_bases + from_rank)
    to_base = tl.load(heap_bases + to_rank)
    itemsize: tl.constexpr = (pointer.dtype.scalar.element_ty.primitive_bitwidth + 7) // 8  # a bool has a bit
    distance = tl.cast(to_base - from_base, tl.int64) // itemsize
    # backends.base.STRIDE_ALIGNMENT: heaps are a multiple of 2 MiB apart.
    return hinted(pointer + tl.multiple_of(distance, 4096), hint)


@triton.jit
def load(
    pointer,
    to_rank,
    from_rank,
    heap_bases,
    mask=None,
    other=None,
    cache_modifier=None,
    volatile: tl.constexpr = False,
    hint=None,
):
    """Load from `from_rank`'s heap, on rank `to_rank`. Unordered: see `wait` for reading what a peer has signalled.

    Args:
        pointer: into the heap, as it is on `to_rank`; a pointer, or a block.
        to_rank: the rank that runs this.
        from_rank: the rank whose heap is read.
        heap_bases: ``Context.get_heap_bases()``.
        mask: which elements are accessed, of the pointer's shape; None for all.
        other: what the others give; None leaves them undefined.
        cache_modifier: as of `tl.load`; ignored on NVIDIA GPUs by a volatile load, for which PTX has none.
        volatile: as of `tl.load`.
        hint: for wide accesses where the compiler cannot see that they are possible: a number, or a tuple with one for
            each dimension, for `tl.max_contiguous` and `tl.multiple_of` of the translated pointer. So many elements are
            contiguous, and the address of the first is a multiple of the number, in bytes. A wrong hint gives wrong
            data; in the interpreter it is an error.
    """
    moved = _moved(pointer, to_rank, from_rank, heap_bases, mask, hint)
    if volatile and loads_acquire():  # NVIDIA
        return tl.load(moved, mask=mask, other=other, volatile=True)
    else:
        return tl.load(moved, mask=mask, other=other, cache_modifier=cache_modifier, volatile=volatile)


@triton.jit
def store(pointer, value, from_rank, to_rank, heap_bases, mask=None, hint=None, cache_modifier=None):
    """Store into `to_rank`'s heap, from rank `from_rank`. Unordered: see `signal` for announcing it.

    Args:
        pointer: into the heap, as it is on `from_rank`; a pointer, or a block.
        value: a scalar, or a block of the pointer's shape; cast to its dtype.
        from_rank: the rank that runs this.
        to_rank: the rank whose heap is written.
        heap_bases, mask, hint: as of `load`.
        cache_modifier: as of `tl.store`.
    """
    moved = _moved(pointer, from_rank, to_rank, heap_bases, mask, hint)
    tl.store(moved, value, mask=mask, cache_modifier=cache_modifier)


@triton.jit
def get(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier=None,
    store_cache_modifier=None,
    hint=None,
):
    """Copy from `to_rank`'s heap to local memory of `from_rank`. Unordered, as `load`.

    Ranks are as in Iris's code and tests; its documentation exchanges them.

    Args:
        from_ptr: into the heap, as it is on `from_rank`; a pointer, or a block.
        to_ptr: local memory, on the heap or not; of the shape of `from_ptr`.
        from_rank: the rank that runs this.
        to_rank: the rank whose heap is read.
        heap_bases, hint: as of `load`.
        mask: which elements are loaded and stored; None for all.
        other: as of `load`; without effect, as what is not loaded is not stored.
        load_cache_modifier, store_cache_modifier: as of `tl.load` and `tl.store`.
    """
    value = load(from_ptr, from_rank, to_rank, heap_bases, mask, other, load_cache_modifier, hint=hint)
    tl.store(to_ptr, value, mask=mask, cache_modifier=store_cache_modifier)


@triton.jit
def put(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier=None,
    store_cache_modifier=None,
    hint=None,
):
    """Copy from local memory of `from_rank` to `to_rank`'s heap. Unordered, as `store`.

    Args:
        from_ptr: local memory, on the heap or not; a pointer, or a block.
        to_ptr: into the heap, as it is on `from_rank`; of the shape of `from_ptr`.
        from_rank: the rank that runs this.
        to_rank: the rank whose heap is written.
        heap_bases, mask, other, load_cache_modifier, store_cache_modifier: as of `get`.
        hint: as of `load`, for `to_ptr`.
    """
    value = tl.load(from_ptr, mask=mask, other=other, cache_modifier=load_cache_modifier)
    store(to_ptr, value, from_rank, to_rank, heap_bases, mask, hint, store_cache_modifier)


@triton.jit
def copy(
    src_ptr,
    dst_ptr,
    from_rank,
    to_rank,
    cur_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier=None,
    store_cache_modifier=None,
    hint=None,
):
    """Copy from `from_rank`'s heap to `to_rank`'s heap. Unordered, as `load` and `store`.

    Args:
        src_ptr, dst_ptr: into the heap, as they are on `cur_rank`; pointers, or blocks of one shape.
        from_rank: the rank whose heap is read.
        to_rank: the rank whose heap is written.
        cur_rank: the rank that runs this: either, or another one.
        heap_bases, mask, other, load_cache_modifier, store_cache_modifier: as of `get`.
        hint: as of `load`, for both pointers.
    """
    value = load(src_ptr, cur_rank, from_rank, heap_bases, mask, other, load_cache_modifier, hint=hint)
    store(dst_ptr, value, cur_rank, to_rank, heap_bases, mask, hint, store_cache_modifier)


@triton.constexpr_function
def _or(given, default):
    """Return what a caller gives, or the default where that is None."""
    return default if given is None else given


@triton.jit
def atomic_add(pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None, hint=None):
    """Add atomically on `to_rank`'s heap; return the old value.

    Args:
        pointer: into the heap, as it is on `from_rank`; a pointer, or a block.
        val: what is added, a scalar or a block of the pointer's shape; cast to its dtype.
        from_rank: the rank that runs this.
        to_rank: the rank whose heap is changed.
        heap_bases, mask, hint: as of `load`.
        sem: as of `tl.atomic_add`; None for "acq_rel".
        scope: as of `tl.atomic_add`; None for "sys".
    """
    moved = _moved(pointer, from_rank, to_rank, heap_bases, mask, hint)
    return tl.atomic_add(moved, val, mask=mask, sem=_or(sem, "acq_rel"), scope=_or(scope, "sys"))


@triton.jit
def atomic_sub(pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None, hint=None):
    """Subtract atomically on `to_rank`'s heap; return the old value.

    Args:
        val: what is subtracted; cast to the pointer's dtype first.
        pointer, from_rank, to_rank, heap_bases, mask, sem, scope, hint: as of `atomic_add`.
    """
    less = -tl.cast(val, pointer.dtype.scalar.element_ty)  # which may be wider, or signed
    moved = _moved(pointer, from_rank, to_rank, heap_bases, mask, hint)
    return tl.atomic_add(moved, less, mask=mask, sem=_or(sem, "acq_rel"), scope=_or(scope, "sys"))


@triton.jit
def atomic_cas(pointer, cmp, val, from_rank, to_rank, heap_bases, sem=None, scope=None, hint=None):
    """Replace atomically by `val` on `to_rank`'s heap where it equals `cmp`; return the old value.

    Args:
        cmp: what is compared with, a scalar or a block of the pointer's shape; cast to its dtype.
        val: what is stored where they are equal.
        pointer, from_rank, to_rank, heap_bases, sem, scope, hint: as of `atomic_add`.
    """
    cmp = tl.cast(cmp, pointer.dtype.scalar.element_ty)  # Triton casts neither
    val = tl.cast(val, pointer.dtype.scalar.element_ty)
    moved = _moved(pointer, from_rank, to_rank, heap_bases, None, hint)
    return tl.atomic_cas(moved, cmp, val, sem=_or(sem, "acq_rel"), scope=_or(scope, "sys"))


@triton.jit
def atomic_xchg(pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None, hint=None):
    """Exchange atomically on `to_rank`'s heap; return the old value.

    Args:
        val: what is stored.
        pointer, from_rank, to_rank, heap_bases, mask, sem, scope, hint: as of `atomic_add`.
    """
    moved = _moved(pointer, from_rank, to_rank, heap_bases, mask, hint)
    return tl.atomic_xchg(moved, val, mask=mask, sem=_or(sem, "acq_rel"), scope=_or(scope, "sys"))


@triton.jit
def atomic_and(pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None, hint=None):
    """Bitwise-and atomically on `to_rank`'s heap; return the old value.

    Args:
        val: the other operand, of integers.
        pointer, from_rank, to_rank, heap_bases, mask, sem, scope, hint: as of `atomic_add`.
    """
    moved = _moved(pointer, from_rank, to_rank, heap_bases, mask, hint)
    return tl.atomic_and(moved, val, mask=mask, sem=_or(sem, "acq_rel"), scope=_or(scope, "sys"))


@triton.jit
def atomic_or(pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None, hint=None):
    """Bitwise-or atomically on `to_rank`'s heap; return the old value.

    Args:
        val: the other operand, of integers.
        pointer, from_rank, to_rank, heap_bases, mask, sem, scope, hint: as of `atomic_add`.
    """
    moved = _moved(pointer, from_rank, to_rank, heap_bases, mask, hint)
    return tl.atomic_or(moved, val, mask=mask, sem=_or(sem, "acq_rel"), scope=_or(scope, "sys"))


@triton.jit
def atomic_xor(pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None, hint=None):
    """Bitwise-xor atomically on `to_rank`'s heap; return the old value.

    Args:
        val: the other operand, of integers.
        pointer, from_rank, to_rank, heap_bases, mask, sem, scope, hint: as of `atomic_add`.
    """
    moved = _moved(pointer, from_rank, to_rank, heap_bases, mask, hint)
    return tl.atomic_xor(moved, val, mask=mask, sem=_or(sem, "acq_rel"), scope=_or(scope, "sys"))


@triton.jit
def atomic_min(pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None, hint=None):
    """Take the minimum atomically on `to_rank`'s heap; return the old value.

    Args:
        val: what is compared with.
        pointer, from_rank, to_rank, heap_bases, mask, sem, scope, hint: as of `atomic_add`.
    """
    moved = _moved(pointer, from_rank, to_rank, heap_bases, mask, hint)
    return tl.atomic_min(moved, val, mask=mask, sem=_or(sem, "acq_rel"), scope=_or(scope, "sys"))


@triton.jit
def atomic_max(pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None, hint=None):
    """Take the maximum atomically on `to_rank`'s heap; return the old value.

    Args:
        val: what is compared with.
        pointer, from_rank, to_rank, heap_bases, mask, sem, scope, hint: as of `atomic_add`.
    """
    moved = _moved(pointer, from_rank, to_rank, heap_bases, mask, hint)
    return tl.atomic_max(moved, val, mask=mask, sem=_or(sem, "acq_rel"), scope=_or(scope, "sys"))
