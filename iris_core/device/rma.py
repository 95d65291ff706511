"""The device API: remote memory access by rank, callable from any Triton kernel.

Every operation is one address translation and one Triton operation. Names, meaning and the order of arguments up to
`mask`, `sem` and `scope` are those of the Iris documentation ("Device API"); of its later arguments `other`, the cache
modifiers, `volatile` and `hint` are missing. A kernel that does without them ports by changing the import. A pointer is
given as it is on the rank that runs the kernel, for memory on the symmetric heap; `heap_bases` is
``Context.get_heap_bases()``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .intrinsics import check_on_heap

_UNKNOWN = tl.constexpr("unknown")  # a mask that the caller of `translate` has, and does not give


@triton.jit
def translate(pointer, from_rank, to_rank, heap_bases):
    """Return where `pointer`, a pointer (or block of pointers) into `from_rank`'s heap, lies in `to_rank`'s heap.

    The heaps are one window with a constant stride, so the distance is one number for a whole block of pointers and
    contiguity survives. In the interpreter a pointer that is not on `from_rank`'s heap is an error; of a block, whose
    lanes may be masked where it is used, one must be.
    """
    return _moved(pointer, from_rank, to_rank, heap_bases, _UNKNOWN)


@triton.jit
def _moved(pointer, from_rank, to_rank, heap_bases, mask):
    """Translate for an access under `mask`, which is None where all lanes are used.

    The hint says that alignment survives. It must stand here: applied by a caller to this function's result it is lost
    when the call is inlined (Triton 3.6).
    """
    check_on_heap(pointer, from_rank, to_rank, heap_bases, mask)
    from_base = tl.load(heap_bases + from_rank)
    to_base = tl.load(heap_bases + to_rank)
    itemsize: tl.constexpr = (pointer.dtype.scalar.element_ty.primitive_bitwidth + 7) // 8  # a bool has a bit
    distance = tl.cast(to_base - from_base, tl.int64) // itemsize
    # backends.base.STRIDE_ALIGNMENT: heaps are a multiple of 2 MiB apart.
    return pointer + tl.multiple_of(distance, 4096)


@triton.jit
def load(pointer, to_rank, from_rank, heap_bases, mask=None):
    """Load from `from_rank`'s heap, on rank `to_rank`. Unordered: see `wait` for reading what a peer has signalled."""
    return tl.load(_moved(pointer, to_rank, from_rank, heap_bases, mask), mask=mask)


@triton.jit
def store(pointer, value, from_rank, to_rank, heap_bases, mask=None):
    """Store `value` into `to_rank`'s heap, from rank `from_rank`. Unordered: see `signal` for announcing it."""
    tl.store(_moved(pointer, from_rank, to_rank, heap_bases, mask), value, mask=mask)


@triton.jit
def get(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None):
    """Copy from `from_rank`'s heap at `from_ptr` to local memory of `to_rank` at `to_ptr`."""
    value = tl.load(_moved(from_ptr, to_rank, from_rank, heap_bases, mask), mask=mask)
    tl.store(to_ptr, value, mask=mask)


@triton.jit
def put(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask=None):
    """Copy from local memory of `from_rank` at `from_ptr` to `to_rank`'s heap at `to_ptr`."""
    value = tl.load(from_ptr, mask=mask)
    tl.store(_moved(to_ptr, from_rank, to_rank, heap_bases, mask), value, mask=mask)


@triton.jit
def copy(src_ptr, dst_ptr, from_rank, to_rank, cur_rank, heap_bases, mask=None):
    """Copy from `from_rank`'s heap to `to_rank`'s heap; `cur_rank`, which runs this, may be either or neither."""
    value = tl.load(_moved(src_ptr, cur_rank, from_rank, heap_bases, mask), mask=mask)
    tl.store(_moved(dst_ptr, cur_rank, to_rank, heap_bases, mask), value, mask=mask)


# Atomics on `to_rank`'s heap from rank `from_rank`; each returns the old value. `sem` and `scope` default to the
# strongest edge, acquire-release over the whole system.


@triton.jit
def atomic_add(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = tl.constexpr("acq_rel"),
    scope: tl.constexpr = tl.constexpr("sys"),
):
    """Add atomically on `to_rank`'s heap; return the old value."""
    return tl.atomic_add(_moved(pointer, from_rank, to_rank, heap_bases, mask), val, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_sub(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = tl.constexpr("acq_rel"),
    scope: tl.constexpr = tl.constexpr("sys"),
):
    """Subtract atomically on `to_rank`'s heap; return the old value."""
    less = -tl.cast(val, pointer.dtype.scalar.element_ty)  # which may be wider, or signed
    return tl.atomic_add(_moved(pointer, from_rank, to_rank, heap_bases, mask), less, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_cas(
    pointer,
    cmp,
    val,
    from_rank,
    to_rank,
    heap_bases,
    sem: tl.constexpr = tl.constexpr("acq_rel"),
    scope: tl.constexpr = tl.constexpr("sys"),
):
    """Replace by `val` on `to_rank`'s heap where it equals `cmp`; return the old value."""
    cmp = tl.cast(cmp, pointer.dtype.scalar.element_ty)  # Triton casts neither
    val = tl.cast(val, pointer.dtype.scalar.element_ty)
    return tl.atomic_cas(_moved(pointer, from_rank, to_rank, heap_bases, None), cmp, val, sem=sem, scope=scope)


@triton.jit
def atomic_xchg(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = tl.constexpr("acq_rel"),
    scope: tl.constexpr = tl.constexpr("sys"),
):
    """Exchange on `to_rank`'s heap; return the old value."""
    return tl.atomic_xchg(_moved(pointer, from_rank, to_rank, heap_bases, mask), val, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_and(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = tl.constexpr("acq_rel"),
    scope: tl.constexpr = tl.constexpr("sys"),
):
    """Bitwise-and atomically on `to_rank`'s heap; return the old value."""
    return tl.atomic_and(_moved(pointer, from_rank, to_rank, heap_bases, mask), val, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_or(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = tl.constexpr("acq_rel"),
    scope: tl.constexpr = tl.constexpr("sys"),
):
    """Bitwise-or atomically on `to_rank`'s heap; return the old value."""
    return tl.atomic_or(_moved(pointer, from_rank, to_rank, heap_bases, mask), val, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_xor(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = tl.constexpr("acq_rel"),
    scope: tl.constexpr = tl.constexpr("sys"),
):
    """Bitwise-xor atomically on `to_rank`'s heap; return the old value."""
    return tl.atomic_xor(_moved(pointer, from_rank, to_rank, heap_bases, mask), val, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_min(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = tl.constexpr("acq_rel"),
    scope: tl.constexpr = tl.constexpr("sys"),
):
    """Take the minimum atomically on `to_rank`'s heap; return the old value."""
    return tl.atomic_min(_moved(pointer, from_rank, to_rank, heap_bases, mask), val, mask=mask, sem=sem, scope=scope)


@triton.jit
def atomic_max(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = tl.constexpr("acq_rel"),
    scope: tl.constexpr = tl.constexpr("sys"),
):
    """Take the maximum atomically on `to_rank`'s heap; return the old value."""
    return tl.atomic_max(_moved(pointer, from_rank, to_rank, heap_bases, mask), val, mask=mask, sem=sem, scope=scope)
