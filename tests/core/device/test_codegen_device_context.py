"""Context objects in kernels: compiled to the same code as the loose functions."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from compiled_kernel import Compiled
from compiling import TARGETS, Case, StubContext, compile_kernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris_core
import iris_core.gluon


@triton.jit
def use_object(ctx, data_ptr, words_ptr, state_ptr, lanes, mask, peer):
    """Call every method, with arguments other than their defaults."""
    offsets = tl.program_id(0) * peer + lanes  # which are not known to be aligned
    value = ctx.load(data_ptr + offsets, peer, mask, 0.0, ".cg", False, 16)
    ctx.store(data_ptr + offsets, value + 1, peer, mask, ".wt", 16)
    ctx.get(data_ptr + offsets, data_ptr + 1024 + offsets, peer, mask, 0.0, ".cg", ".wt", 16)
    ctx.put(data_ptr + offsets, data_ptr + 1024 + offsets, peer, mask, 0.0, ".cg", ".wt", 16)
    ctx.copy(data_ptr + offsets, data_ptr + 1024 + offsets, peer, peer + 1, mask, 0.0, ".cg", ".wt", 16)
    old = ctx.atomic_add(words_ptr, 1, peer, sem="relaxed", scope="gpu")
    old += ctx.atomic_sub(words_ptr, 1, peer)
    old += ctx.atomic_xchg(words_ptr, 1, peer, sem="acquire")
    old += ctx.atomic_and(words_ptr, 1, peer, sem="release")
    old += ctx.atomic_or(words_ptr, 1, peer, scope="cta")
    old += ctx.atomic_xor(words_ptr, 1, peer)
    old += ctx.atomic_min(words_ptr, 1, peer)
    old += ctx.atomic_max(words_ptr, 1, peer)
    old += ctx.atomic_cas(words_ptr, 1, 2, peer, sem="relaxed", scope="gpu")
    tl.store(ctx.translate(words_ptr + 1, peer), old)
    ctx.signal(words_ptr + 2, 1, peer)
    ctx.signal(words_ptr + 3, 1, peer, "gpu")
    ctx.wait(words_ptr + 2, 1)
    ctx.wait(words_ptr + 3, 1, "gpu")
    ctx.barrier(state_ptr)


@triton.jit
def use_functions(rank, world_size, bases, watchdog, data_ptr, words_ptr, state_ptr, lanes, mask, peer):
    """The same by the loose functions."""
    offsets = tl.program_id(0) * peer + lanes
    value = iris_core.load(data_ptr + offsets, rank, peer, bases, mask, 0.0, ".cg", False, 16)
    iris_core.store(data_ptr + offsets, value + 1, rank, peer, bases, mask, 16, ".wt")
    other_ptr = data_ptr + 1024 + offsets
    iris_core.get(data_ptr + offsets, other_ptr, rank, peer, bases, mask, 0.0, ".cg", ".wt", 16)
    iris_core.put(data_ptr + offsets, other_ptr, rank, peer, bases, mask, 0.0, ".cg", ".wt", 16)
    iris_core.copy(data_ptr + offsets, other_ptr, peer, peer + 1, rank, bases, mask, 0.0, ".cg", ".wt", 16)
    old = iris_core.atomic_add(words_ptr, 1, rank, peer, bases, sem="relaxed", scope="gpu")
    old += iris_core.atomic_sub(words_ptr, 1, rank, peer, bases)
    old += iris_core.atomic_xchg(words_ptr, 1, rank, peer, bases, sem="acquire")
    old += iris_core.atomic_and(words_ptr, 1, rank, peer, bases, sem="release")
    old += iris_core.atomic_or(words_ptr, 1, rank, peer, bases, scope="cta")
    old += iris_core.atomic_xor(words_ptr, 1, rank, peer, bases)
    old += iris_core.atomic_min(words_ptr, 1, rank, peer, bases)
    old += iris_core.atomic_max(words_ptr, 1, rank, peer, bases)
    old += iris_core.atomic_cas(words_ptr, 1, 2, rank, peer, bases, sem="relaxed", scope="gpu")
    tl.store(iris_core.translate(words_ptr + 1, rank, peer, bases), old)
    iris_core.signal(iris_core.translate(words_ptr + 2, rank, peer, bases), 1)
    iris_core.signal(iris_core.translate(words_ptr + 3, rank, peer, bases), 1, "gpu")
    iris_core.wait(words_ptr + 2, 1, watchdog)
    iris_core.wait(words_ptr + 3, 1, watchdog, "gpu")
    iris_core.barrier(state_ptr, rank, world_size, bases, watchdog)


@triton.jit
def object_kernel(context_tensor, data_ptr, words_ptr, state_ptr, size, peer, rank, world_size):
    ctx = iris_core.DeviceContext.initialize(context_tensor, rank, world_size)
    lanes = tl.arange(0, 1024)
    use_object(ctx, data_ptr, words_ptr, state_ptr, lanes, lanes < size, peer)


@triton.jit
def loose_kernel(context_tensor, data_ptr, words_ptr, state_ptr, size, peer, rank, world_size):
    watchdog = tl.load(context_tensor + 2 + world_size).to(tl.pointer_type(tl.int64))
    lanes = tl.arange(0, 1024)
    bases = context_tensor + 2
    use_functions(rank, world_size, bases, watchdog, data_ptr, words_ptr, state_ptr, lanes, lanes < size, peer)


@triton.jit
def constant_object_kernel(
    context_tensor, data_ptr, words_ptr, state_ptr, size, peer, rank: tl.constexpr, world_size: tl.constexpr
):
    ctx = iris_core.DeviceContext.initialize(context_tensor, rank, world_size)
    lanes = tl.arange(0, 1024)
    use_object(ctx, data_ptr, words_ptr, state_ptr, lanes, lanes < size, peer)


@triton.jit
def constant_loose_kernel(
    context_tensor, data_ptr, words_ptr, state_ptr, size, peer, rank: tl.constexpr, world_size: tl.constexpr
):
    watchdog = tl.load(context_tensor + 2 + world_size).to(tl.pointer_type(tl.int64))
    lanes = tl.arange(0, 1024)
    bases = context_tensor + 2
    use_functions(rank, world_size, bases, watchdog, data_ptr, words_ptr, state_ptr, lanes, lanes < size, peer)


@gluon.jit
def gluon_object_kernel(
    context_tensor, data_ptr, words_ptr, state_ptr, size, peer, LAYOUT: gl.constexpr, IrisDeviceCtx: gl.constexpr
):
    ctx = IrisDeviceCtx.initialize(context_tensor)
    lanes = gl.arange(0, 1024, LAYOUT)
    use_object(ctx, data_ptr, words_ptr, state_ptr, lanes, lanes < size, peer)


@gluon.jit
def gluon_loose_kernel(context_tensor, data_ptr, words_ptr, state_ptr, size, peer, LAYOUT: gl.constexpr):
    rank = gl.load(context_tensor).to(gl.int32)
    world_size = gl.load(context_tensor + 1).to(gl.int32)
    watchdog = gl.load(context_tensor + 2 + world_size).to(gl.pointer_type(gl.int64))
    lanes = gl.arange(0, 1024, LAYOUT)
    bases = context_tensor + 2
    use_functions(rank, world_size, bases, watchdog, data_ptr, words_ptr, state_ptr, lanes, lanes < size, peer)


PAIRS = {
    "triton": (object_kernel, loose_kernel),
    "triton, constants": (constant_object_kernel, constant_loose_kernel),
    "gluon": (gluon_object_kernel, gluon_loose_kernel),
}


COMPILED = [(target, "triton") for target in ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")]
COMPILED += [(target, "gluon") for target in ("sm_90", "sm_100", "gfx942", "gfx950")]
COMPILED += [(target, "triton, constants") for target in ("sm_90", "gfx942")]


@pytest.mark.parametrize(("target", "kernels"), COMPILED)
def test_an_object_is_compiled_to_the_code_of_the_loose_functions(target: str, kernels: str) -> None:
    by_object, by_functions = (instructions(compiled(kernel, target)) for kernel in PAIRS[kernels])
    assert len(by_object) > 300
    assert by_object == by_functions


@triton.jit
def traced_kernel(context_tensor, data_ptr, words_ptr, state_ptr, size, peer, rank, world_size, TRACING: tl.constexpr):
    ctx = iris_core.DeviceContext.initialize(context_tensor, rank, world_size, TRACING)
    lanes = tl.arange(0, 1024)
    event = ctx.tracing.record_event_start(
        iris_core.TraceEvent().put, peer, data_ptr + lanes, tl.program_id(0), 1, lanes < size
    )
    use_object(ctx, data_ptr, words_ptr, state_ptr, lanes, lanes < size, peer)
    ctx.tracing.record_event_end(event)


@gluon.jit
def traced_gluon_kernel(
    context_tensor, data_ptr, words_ptr, state_ptr, size, peer, LAYOUT: gl.constexpr, IrisDeviceCtx: gl.constexpr,
    TRACING: gl.constexpr,
):  # fmt: skip
    ctx = IrisDeviceCtx.initialize(context_tensor, tracing=TRACING)
    lanes = gl.arange(0, 1024, LAYOUT)
    event = ctx.tracing.record_event_start(
        iris_core.TraceEvent().put, peer, data_ptr + lanes, gl.program_id(0), 1, lanes < size
    )
    use_object(ctx, data_ptr, words_ptr, state_ptr, lanes, lanes < size, peer)
    ctx.tracing.record_event_end(event)


TRACED = {"triton": (object_kernel, traced_kernel), "gluon": (gluon_object_kernel, traced_gluon_kernel)}


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("kernels", TRACED)
def test_only_with_tracing_is_an_event_compiled(kernels: str, target: str) -> None:
    kernel, traced_kernel = TRACED[kernels]
    plain = compiled(kernel, target)
    assert instructions(compiled(traced_kernel, target, TRACING=False)) == instructions(plain)
    clock = "globaltimer" if TARGETS[target].is_nvidia else "s_memrealtime"
    assert compiled(traced_kernel, target, TRACING=True).count(clock) == plain.count(clock) + 2


@gluon.jit
def first_steps_kernel(IrisDeviceCtx: gl.constexpr, context_tensor, data_ptr, size, peer, LAYOUT: gl.constexpr):
    """Store to a peer, as the first program in Iris's documentation does."""
    ctx = IrisDeviceCtx.initialize(context_tensor)
    offsets = gl.program_id(0) * 1024 + gl.arange(0, 1024, LAYOUT)
    ctx.store(data_ptr + offsets, 1, peer, mask=offsets < size)
    gl.store(data_ptr + offsets + size, ctx.cur_rank + ctx.num_ranks)


@pytest.mark.parametrize("target", TARGETS)
def test_a_kernel_in_gluon_stores_to_a_peer_by_wide_accesses(target: str) -> None:
    assert set(compiled(first_steps_kernel, target).stores_by_file()["rma.py"]) == {16}


def compiled(kernel: Any, target: str, **constants: Any) -> Compiled:
    ctx = StubContext(Case("none", target, rank=2))
    known = {
        "context_tensor": ctx.get_device_context(),
        "data_ptr": ctx.zeros(1 << 20, dtype=torch.float32),
        "words_ptr": ctx.zeros(8, dtype=torch.int64),
        "state_ptr": ctx.zeros(8, dtype=torch.int64),
        "size": 1008,
        "peer": 3,
        "rank": 2,
        "world_size": 4,
        "LAYOUT": gl.BlockedLayout([4], [TARGETS[target].gpu.warp_size], [4], [0]),
        "IrisDeviceCtx": iris_core.gluon.IrisDeviceCtx,
        **constants,
    }
    return compile_kernel(kernel, {name: known[name] for name in kernel.arg_names}, target)


def instructions(kernel: Compiled) -> list[str]:
    """Return the assembly without comments, the kernel's name, and what is for debuggers."""
    code = kernel.code.replace(kernel.name, "kernel")
    body = code[code.index("\nkernel:") if "\nkernel:" in code else code.index(".entry kernel") :]
    body = re.split(r"\n\t\.section|\n}", body)[0]
    lines = [re.split("//|;", line)[0].strip() for line in body.splitlines()]
    return [line for line in lines if line and not re.match(r"\.(loc|file)\b|\$L__(tmp|func)|\.L(tmp|func)", line)]
