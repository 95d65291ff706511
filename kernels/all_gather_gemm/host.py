"""What the variants of all-gather + GEMM share on the host.

The output is this rank's columns of C. A is gathered on the heap; only with `keep_gathered` is it complete there, for
the caller to read: else the rows of this rank, which are read where the caller has them, are missing, and those of the
peers may change as soon as the call has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..common.call import Call, Device
from ..common.config import GemmConfig
from ..common.device.arguments import Block
from ..common.fp8.scales import scale_strides
from ..common.portable.operands import padded
from ..common.variants.implementation import Implementation, Outputs
from ..common.workspace import Buffer
from .portable.shards import Shard
from .problem import AllGatherGemmProblem

FAMILY = "all_gather_gemm"
OPTIONS = {"keep_gathered": False}
GatherCall = Call[AllGatherGemmProblem]


def keeps_gathered(call: GatherCall) -> bool:
    """Return whether the caller reads the gathered A."""
    return bool(call.options["keep_gathered"])


def gathered_buffer(call: GatherCall, rows: int) -> Buffer:
    """Return the buffer of gathered rows, so far apart that descriptors, if there are any, can name them."""
    problem = call.problem
    distance = padded(problem.k, problem.dtype) if call.config.descriptors else problem.k
    return Buffer((rows, distance), problem.dtype, is_symmetric=True)


def scale_buffer(call: GatherCall, rows: int, halves: int = 1) -> dict[str, Buffer]:
    """Return the buffer of the scales of so many rows of A, as peers store or read them; none without scales."""
    columns = call.problem.scale_columns
    return {"gathered_scale": Buffer((rows, columns), torch.float32, True, halves)} if columns else {}


def workspace(call: GatherCall) -> dict[str, Buffer]:
    """Return the buffers of the gathered A, of its scales, and of C."""
    m = call.problem.m
    return {"gathered": gathered_buffer(call, m), **scale_buffer(call, m), **output_buffer(call)}


def output_buffer(call: GatherCall) -> dict[str, Buffer]:
    """Return the buffer of C; a rank without columns computes nothing, into room for one."""
    m, n = call.problem.c_shape(call.rank)
    return {"output": Buffer((m, max(n, 1)), call.problem.out_dtype)}


def gathered(call: GatherCall) -> torch.Tensor:
    """Return the gathered A."""
    return call.memory["gathered"][: call.problem.m, : call.problem.k]


def gathered_scale(call: GatherCall) -> torch.Tensor | None:
    """Return the scales of the gathered A; None without scales."""
    scales = call.memory.get("gathered_scale")
    return None if scales is None else scales[: call.problem.m]


def own_rows(call: GatherCall) -> slice:
    """Return which rows of A are this rank's."""
    return slice(*call.problem.rows(call.rank))


def outputs(call: GatherCall) -> tuple[torch.Tensor, ...]:
    """Return C, and A if it is kept."""
    return with_gathered(call, call.memory["output"][:, : call.problem.c_shape(call.rank)[1]])


def with_gathered(call: GatherCall, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return C, and if A is kept, A and its scales."""
    if not keeps_gathered(call):
        return (output,)
    scales = gathered_scale(call)
    return (output, gathered(call)) if scales is None else (output, gathered(call), scales)


def block_of(call: GatherCall) -> Block:
    """Return where C is stored; its columns are those of the product."""
    room = call.memory["output"]
    return Block(room, call.problem.m, call.problem.b_shape(call.rank)[1], room.stride(0), call.epilogue())


def prepare(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queue what comes first: copies of A where it is kept, and of operands that descriptors cannot name.

    An A to quantise is quantised to its place in the gathered A.

    Returns:
        The operands as kernels read them.
    """
    own, has_descriptors = gathered(call)[own_rows(call)], call.config.descriptors
    a = quantised(call, a, gathered(call), gathered_scale(call), own_rows(call))
    if keeps_gathered(call):
        copy_scale(call)
        if not (has_descriptors and call.needs_copy("A", a)):
            call.copy(own, "A", a)
    return call.readable(a, b, room_of_a=own) if has_descriptors else (a, b)


def quantised(
    call: GatherCall, a: torch.Tensor, room: torch.Tensor, scales: torch.Tensor | None, rows: slice
) -> torch.Tensor:
    """Return this rank's A as it is multiplied: itself, or where the problem quantises it, `rows` of a room for that.

    Args:
        call, a: the call, and its A.
        room, scales: where rows of fp8 and their scales go, which the call queues.
        rows: which of these are the rank's.
    """
    if not call.problem.is_quantised:
        return a
    assert scales is not None
    return call.quantise(a, room[rows], scales[rows])


def copy_scale(call: GatherCall) -> None:
    """Queue the copy of this rank's scales of A, one a row or more, to those of the gathered A."""
    scales = gathered_scale(call)
    if scales is not None:
        call.copy(scales[own_rows(call)], "a_scale", call.operands["a_scale"])


def multiply_arguments(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    """Return what a kernel that multiplies takes."""
    problem, whole = call.problem, gathered(call)
    gathered_gemm = call.gemm(whole, b, gathered_scale(call))
    return {
        **call.main_loop(a if a.shape[0] else whole, b, whole),
        "gathered_gemm": gathered_gemm,
        "block": block_of(call),
        "shard_rows": problem.a_shape(0)[0],
        "peers": call.peers(),
    }


def push_arguments(call: GatherCall, a: torch.Tensor) -> dict[str, Any]:
    """Return what a kernel that pushes this rank's shard takes."""
    (rows, columns), whole = a.shape, gathered(call)
    source = a if a.numel() else whole
    destination = whole[own_rows(call)] if rows else whole
    shard = Shard(source, destination, rows, columns, a.stride(0), a.stride(1), whole.stride(0))
    if (scales := gathered_scale(call)) is not None:
        own = call.operands["a_scale"]
        strides = scale_strides(own, call.problem.scales[0])
        shard = shard._replace(
            scale_src_ptr=own if own.numel() else scales,
            scale_dst_ptr=scales[own_rows(call)] if rows else scales,
            scale_columns=scales.shape[1],
            stride_scale_m=strides[0],
            stride_scale_k=strides[1],
        )
    return {
        "shard": shard,
        "peers": call.peers(),
        "ROWS": call.config.comm_rows,
        "COLS": call.config.block_n,
    }


def implementation(
    pattern: str,
    plan: Callable[[AllGatherGemmProblem, Device], GemmConfig],
    workspace: Callable[[GatherCall], dict[str, Buffer]],
    launch: Callable[[GatherCall, torch.Tensor, torch.Tensor], None],
    outputs: Callable[[GatherCall], Outputs] = outputs,
    **more: Any,
) -> Implementation:
    """Return a variant of the family; arguments as an `Implementation`'s."""
    return Implementation(FAMILY, pattern, plan, workspace, launch, outputs, options=OPTIONS, gathered=gathered, **more)
