"""The fused functions of kraken that are compared with: one a family.

- all-gather, ``kraken.fused.all_gather_matmul``: copy engines beside a GEMM kernel. Copied in every call, and part of
  its time: A, into the symmetric buffer that peers read; B, unless it is the transpose of a contiguous matrix.
- reduce-scatter, ``kraken.fused.gemm_reduce_scatter_ce_persistent``, of kraken's two functions the one that its
  benchmark runs: a GEMM kernel, copy engines behind it, and a kernel that sums. Copied in every call, and part of its
  time: A and B, unless A and B's transpose are contiguous.
- all-reduce, ``kraken.fused.gemm_one_shot_all_reduce_fused``: one kernel, one-shot. Its output is fp32: the copy that
  rounds it to the operands' dtype is part of the time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from iris_core import Context
from iris_kernels import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from iris_kernels.all_gather_gemm.problem import AllGatherGemmProblem
from iris_kernels.common.call import Call
from iris_kernels.common.portable.operands import fill_rows, rows_on_16_bytes
from iris_kernels.gemm_all_reduce.problem import GemmAllReduceProblem
from iris_kernels.gemm_reduce_scatter.problem import GemmReduceScatterProblem

from .kraken import PROJECT, kraken_variant

_BLOCK_M, _GROUP_M = 128, 4  # of all-gather's kernel; a shard of fewer rows than both give is taken without groups
_TILE = 64  # rows and columns of a tile of all-reduce's kernel
_FLAG_BYTES = 4


def gather_size_reason(problem: AllGatherGemmProblem) -> str | None:
    """Return why kraken's function does not take a problem's sizes, or None."""
    grouped = _BLOCK_M * _GROUP_M
    return PROJECT.gather_size_reason(problem, grouped if problem.m // problem.world_size >= grouped else _BLOCK_M)


def gather_buffers(ctx: Context, problem: AllGatherGemmProblem, group: Any) -> tuple[torch.Tensor, ...]:
    """Return the symmetric buffer of this rank's shard, the peers' progress, and the gathered A."""
    import torch.distributed._symmetric_memory as symm_mem

    if group is not dist.group.WORLD:
        raise ValueError(
            f"{all_gather_gemm.FAMILY}/kraken: kraken's function runs on torch.distributed's default group alone"
        )
    device = ctx.get_device()
    shard = symm_mem.empty(problem.a_shape(ctx.get_rank()), dtype=problem.dtype, device=device)
    symm_mem.rendezvous(shard, ctx.process_group())
    progress = torch.zeros(problem.world_size, dtype=torch.uint32, device=device)
    return shard, progress, torch.empty(problem.m, problem.k, dtype=problem.dtype, device=device)


def gather(call: Call[AllGatherGemmProblem], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gather and multiply; the output is new memory."""
    kraken = call.channel.opened
    shard, progress, whole = kraken.buffers
    if a.shape != shard.shape:
        raise ValueError(f"kraken's function takes the {len(shard)} rows that it was made for, not {len(a)}")
    shard.copy_(a)
    b = rows_on_16_bytes(b.t().contiguous()).t()
    _, output = kraken.module.all_gather_matmul(shard, b, a_out=whole, progress=progress)
    kraken.forget_descriptors()
    return (output, whole) if call.options["keep_gathered"] else (output,)


def scatter_size_reason(problem: GemmReduceScatterProblem) -> str | None:
    """Return why kraken's function does not take a problem's sizes, or None."""
    if problem.m % problem.world_size:
        return f"kraken needs M ({problem.m}) to be a multiple of the ranks ({problem.world_size})"
    slices = {problem.a_shape(rank)[1] for rank in range(problem.world_size)}
    for name, sizes in (("K on each rank", slices), ("N", {problem.n})):
        if not all(fill_rows(size, problem.dtype) for size in sizes):
            return f"kraken's kernels read and write rows on 16 bytes; {name} is not so long"
    return None


def scatter_buffers(ctx: Context, problem: GemmReduceScatterProblem, group: Any) -> tuple[torch.Tensor, ...]:
    """Make the workspace that kraken uses."""
    import torch.distributed._symmetric_memory as symm_mem

    partial_bytes = problem.m * problem.n * problem.dtype.itemsize
    symm_mem.get_symm_mem_workspace(group.group_name, min_size=partial_bytes)
    return ()


def scatter(call: Call[GemmReduceScatterProblem], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Multiply, reduce and scatter; the output is new memory."""
    kraken = call.channel.opened
    a, b = rows_on_16_bytes(a.contiguous()), rows_on_16_bytes(b.t().contiguous()).t()
    _zero_flags_to_be(call.problem, a.device)
    output = kraken.module.gemm_reduce_scatter_ce_persistent(a, b, group=kraken.group)
    kraken.forget_descriptors()
    return (output,)


def _zero_flags_to_be(problem: GemmReduceScatterProblem, device: torch.device) -> None:
    """Zero the memory that kraken's flags are about to be allocated in.

    Its copies may look at their flags before it has zeroed them, and find those of the call before, all set: the
    allocator gives the same requests the same memory.
    """
    rows = problem.m // problem.world_size
    _ = (
        *(torch.empty(m, problem.n, dtype=problem.dtype, device=device) for m in (problem.m, rows)),
        *(torch.zeros(problem.world_size, dtype=torch.uint32, device=device) for _ in range(2)),
    )


def reduce_size_reason(problem: GemmAllReduceProblem) -> str | None:
    """Return why kraken's function does not take a problem's sizes, or None."""
    import torch.distributed._symmetric_memory as symm_mem

    if problem.world_size & (problem.world_size - 1):
        return f"kraken's kernel needs a power of two of ranks, not {problem.world_size}"
    tiles = -(-problem.m // _TILE) * -(-problem.n // _TILE)
    room = symm_mem.get_signal_pad_size() // (_FLAG_BYTES * problem.world_size)
    if tiles > room:
        return f"torch's signal pad has flags for {room} tiles of kraken's kernel; this would take {tiles}"
    return None


def reduce_buffers(ctx: Context, problem: GemmAllReduceProblem, group: Any) -> tuple[torch.Tensor, ...]:
    """Make the workspace that kraken uses."""
    import torch.distributed._symmetric_memory as symm_mem

    partial_bytes = problem.m * problem.n * torch.float32.itemsize
    symm_mem.get_symm_mem_workspace(group.group_name, min_size=partial_bytes)
    return ()


def reduce(call: Call[GemmAllReduceProblem], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Multiply and reduce; the output is new memory."""
    kraken = call.channel.opened
    return (kraken.module.gemm_one_shot_all_reduce(a, b, group=kraken.group).to(call.problem.dtype),)


VARIANTS = (
    kraken_variant(
        all_gather_gemm.FAMILY,
        "all_gather_matmul",
        gather,
        gather_buffers,
        gather_size_reason,
        capability=(9, 0),
        options={"keep_gathered": False},
        summary="meta-pytorch/kraken's all_gather_matmul, where it is installed",
    ),
    kraken_variant(
        gemm_reduce_scatter.FAMILY,
        "gemm_reduce_scatter_ce_persistent",
        scatter,
        scatter_buffers,
        scatter_size_reason,
        capability=(9, 0),
        summary="meta-pytorch/kraken's gemm_reduce_scatter_ce_persistent, where it is installed",
    ),
    kraken_variant(
        gemm_all_reduce.FAMILY,
        "gemm_one_shot_all_reduce_fused",
        reduce,
        reduce_buffers,
        reduce_size_reason,
        capability=(8, 0),
        dtypes=(torch.bfloat16, torch.float16),  # fp32 is multiplied as TF32
        summary="meta-pytorch/kraken's gemm_one_shot_all_reduce_fused, where it is installed",
    ),
)
