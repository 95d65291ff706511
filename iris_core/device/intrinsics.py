"""What a kernel must ask of its surroundings: is it interpreted, what time is it, may others run meanwhile.

Also what only some GPUs can do; elsewhere these are nothing.

Triton gives a builtin its ``_semantic``; the interpreter calls ours without one. That is how each of these tells the
two apart, with no flag for a caller to get wrong.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon.language import BlockedLayout
from triton.experimental.gluon.language._semantic import GluonSemantic
from triton.language.core import _unwrap_if_constexpr, inline_asm_elementwise

from . import interpretation
from .cache_key import in_cache_key


def _builtin(fn: Any) -> Any:
    """Make a function a Triton builtin, in the cache key of what calls it, that the interpreter, too, may call.

    Triton's own decorator insists on ``_semantic``, which the interpreter does not give.
    """
    fn.__triton_builtin__ = True
    return in_cache_key(fn)


@_builtin
def interpreted(_semantic: Any = None) -> tl.constexpr:
    """Return whether this kernel runs in Triton's interpreter, as a compile-time constant."""
    return tl.constexpr(_semantic is None)


def _assembly(code: str, constraints: str, operands: list[Any], semantic: Any, dtype: tl.dtype = tl.int64) -> Any:
    """Place assembly that is neither moved nor left out; it is one of each element of the operands."""
    return inline_asm_elementwise(code, constraints, operands, dtype=dtype, is_pure=False, pack=1, _semantic=semantic)


@_builtin
def clock_ns(_semantic: Any = None) -> Any:
    """Return a clock of this device in nanoseconds, int64. Its zero differs from device to device."""
    if _semantic is None:
        from triton.runtime.interpreter import TensorHandle

        interpretation.hooks.clock_read()
        return tl.tensor(TensorHandle(np.array([time.monotonic_ns()], dtype=np.int64), tl.int64), tl.int64)
    if _semantic.builder.options.backend_name == "hip":
        # A constant 100 MHz clock (gfx942 ISA, section "S_MEMREALTIME"): one tick is ten nanoseconds.
        ticks = _assembly("s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], _semantic)
        return ticks.__mul__(10, _semantic=_semantic)
    return _assembly("mov.u64 $0, %globaltimer;", "=l", [], _semantic)


def _place_from_hopper_on(assembly: str, semantic: Any) -> None:
    """Place PTX without operands where the target has it; interpreted, nothing."""
    if semantic is None:
        return
    options = semantic.builder.options
    if options.backend_name == "cuda" and int(options.arch.removeprefix("sm")) >= 90:
        _assembly(f"{assembly} mov.u32 $0, 0;", "=r", [], semantic, tl.int32)


@_builtin
def fence_before_descriptor_loads(_semantic: Any = None) -> None:
    """Let later loads by tensor descriptor see what this program has acquired.

    They go through the async proxy, which an acquire does not order (PTX ISA, "Async proxy"). Where there is no such
    proxy, nothing.
    """
    _place_from_hopper_on("fence.proxy.async.global;", _semantic)


@_builtin
def gdc_wait(_semantic: Any = None) -> None:
    """Wait until what is before this kernel in its stream is done, and seen, if the kernel was launched early.

    A kernel is launched early by Triton's option ``launch_pdl`` (programmatic dependent launch, from sm_90 on): when
    all programs of the one before have ended or called `gdc_launch_dependents`. Up to this call it may only do what
    does not depend on anything earlier.
    """
    _place_from_hopper_on("griddepcontrol.wait;", _semantic)


@_builtin
def gdc_launch_dependents(_semantic: Any = None) -> None:
    """Let programs of the next kernel in this stream, if it may be launched early, take SMs that this one leaves.

    All of this kernel's programs are resident by then: it takes effect once each has called it, or has ended.
    """
    _place_from_hopper_on("griddepcontrol.launch_dependents;", _semantic)


@_builtin
def in_gluon(_semantic: Any = None) -> tl.constexpr:
    """Return whether this is part of a kernel in Gluon, as a compile-time constant."""
    return tl.constexpr(isinstance(_semantic, GluonSemantic))


@_builtin
def lanes(count: Any, _semantic: Any = None, _generator: Any = None) -> Any:
    """Return 0, 1, … up to a power of two, int32: Triton's ``arange``, also for the warps of a role in Gluon."""
    count = _unwrap_if_constexpr(count)
    if _semantic is None:
        return tl.arange(0, count)
    if isinstance(_semantic, GluonSemantic):
        warps = _semantic.num_warps(_generator)
        lanes_of_a_warp = _semantic.builder.options.warp_size
        return _semantic.arange(0, count, BlockedLayout([1], [lanes_of_a_warp], [warps], [0]))
    return _semantic.arange(0, count)


@_builtin
def check_on_heap(
    pointers: Any, from_rank: Any, to_rank: Any, heap_bases: Any, mask: Any, _semantic: Any = None
) -> None:
    """Raise, in the interpreter, unless pointers to be moved to `to_rank`'s heap point to `from_rank`'s.

    `mask` is that of the access, or None for all lanes, or "unknown".
    """
    if _semantic is None:
        interpretation.hooks.check_on_heap(pointers, from_rank, to_rank, heap_bases, _unwrap_if_constexpr(mask))


@_builtin
def hinted(pointers: Any, hint: Any, _semantic: Any = None) -> Any:
    """Return pointers of which so many in a row are contiguous, from a multiple of so many bytes on; None: who knows.

    `hint` is a number, or a tuple with one for each dimension; also one that a kernel takes as a ``tl.constexpr``. In
    the interpreter it is an error if they are not.
    """
    hint = _unwrap_if_constexpr(hint)
    if hint is None:
        return pointers
    values = [_unwrap_if_constexpr(value) for value in (hint if isinstance(hint, (tuple, tl.tuple)) else (hint,))]
    if _semantic is None:
        interpretation.hooks.check_hint(pointers, values)
        return pointers
    pointers = _semantic.multiple_of(pointers, values)
    return _semantic.max_contiguous(pointers, values) if pointers.type.is_block() else pointers


@_builtin
def check_flags(flag_ptrs: Any, _semantic: Any = None) -> None:
    """Raise, as the kernel is compiled, unless these point to int64 words, the only ones that `load_acquire` loads."""
    element = getattr(flag_ptrs.dtype.scalar, "element_ty", None)
    if element != tl.int64:
        raise ValueError(
            f"a flag is an int64 word; this one is given as {flag_ptrs.dtype}: make flags with dtype=torch.int64, and "
            "give signal and wait a pointer to them"
        )


@_builtin
def loads_acquire(_semantic: Any = None) -> tl.constexpr:
    """Return whether `load_acquire` is there, as a compile-time constant: in code for NVIDIA GPUs."""
    return tl.constexpr(_semantic is not None and _semantic.builder.options.backend_name == "cuda")


@_builtin
def load_acquire(pointer: Any, scope: tl.constexpr, mask: Any = None, _semantic: Any = None) -> Any:
    """Load an int64 word, or where `mask` is set those of a block, with acquire: one trip where an atomic takes two.

    Every thread that gets a word acquires by itself. What `mask` leaves out is undefined.
    """
    mask = _unwrap_if_constexpr(mask)
    address = pointer.to(tl.int64, bitcast=True, _semantic=_semantic)
    load = f"ld.acquire.{scope.value}.global.b64 $0, [$1];"
    operands = [address]
    constraints = "=l,l"
    if mask is not None:
        load = f"{{ .reg .pred %chosen; setp.ne.b32 %chosen, $2, 0; @%chosen {load} }}"
        operands.append(mask.to(tl.int32, _semantic=_semantic))
        constraints += ",r"
    return _assembly(load, constraints, operands, _semantic)


@_builtin
def store_by_each_thread(pointer: Any, value: Any, _semantic: Any = None) -> None:
    """Store an int64 word, relaxed, by every thread that comes here, where Triton's store is the first thread's alone.

    On NVIDIA GPUs.
    """
    address = pointer.to(tl.int64, bitcast=True, _semantic=_semantic)
    _assembly("st.relaxed.sys.global.b64 [$1], $2; mov.u32 $0, 0;", "=r,l,l", [address, value], _semantic, tl.int32)


@_builtin
def pause(_semantic: Any = None) -> None:
    """Let others run while this program polls. Compiled, it is nothing: the poll's own latency paces the loop."""
    if _semantic is None:
        interpretation.hooks.pause()
