"""The fused functions of kraken that are compared with: one a family.

- all-gather, ``kraken.fused.all_gather_matmul``: copy engines beside a GEMM kernel. Copied in every call, and part of
  its time: A, into the symmetric buffer that peers read; B, unless it is the transpose of a contiguous matrix.
- reduce-scatter, ``kraken.fused.gemm_reduce_scatter_ce_persistent``, of kraken's two functions the one that its
  benchmark runs: a GEMM kernel, copy engines after it, and a kernel that sums. Copied in every call, and part of its
  time: A and B, unless A and B's transpose are contiguous.
- all-reduce, ``kraken.fused.gemm_one_shot_all_reduce_fused``: one kernel, one-shot. Its output is fp32: the copy that
  rounds it to the operands' dtype is part of the time.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from iris_core import Context
from iris_kernels import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from iris_kernels.all_gather_gemm.operator import Gathers
from iris_kernels.all_gather_gemm.problem import AllGatherGemmProblem
from iris_kernels.common.operands import fill_rows
from iris_kernels.gemm_all_reduce.problem import GemmAllReduceProblem
from iris_kernels.gemm_reduce_scatter.problem import GemmReduceScatterProblem

from .kraken import KrakenOperator, rows_on_16_bytes

_BLOCK_M, _GROUP_M = 128, 4  # of all-gather's kernel; a shard of fewer rows than both give is taken without groups
_TILE = 64  # rows and columns of a tile of all-reduce's kernel
_FLAG_BYTES = 4


class KrakenAllGather(Gathers, KrakenOperator[AllGatherGemmProblem]):
    """All-gather by copy engines beside a GEMM kernel; `gathered` is the whole A after every call."""

    family = all_gather_gemm.FAMILY
    module = "all_gather_matmul"
    capability = (9, 0)

    def __init__(
        self, ctx: Context, problem: AllGatherGemmProblem, config: None = None, *, keep_gathered: bool = False
    ) -> None:
        super().__init__(ctx, problem, config)

    @classmethod
    def size_reason(cls, problem: AllGatherGemmProblem) -> str | None:
        rows, left_over = divmod(problem.m, problem.world_size)
        step = _BLOCK_M * _GROUP_M if rows >= _BLOCK_M * _GROUP_M else _BLOCK_M
        if left_over or rows % step:
            return f"kraken's kernel needs {step} rows of A or a multiple on each rank; M is {problem.m}"
        columns, left_over = divmod(problem.n, problem.world_size)
        for name, size in (("K", problem.k), ("N on each rank", columns)):
            if left_over or not fill_rows(size, problem.dtype):
                return f"kraken's kernel reads and writes rows on 16 bytes; {name} is not so long"
        return None

    def _open(self) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        super()._open()
        is_default = self._group is dist.group.WORLD
        if not is_default:
            raise ValueError(f"{self}: kraken's function runs on torch.distributed's default group alone")
        problem, device = self.problem, self.ctx.get_device()
        self._shard = symm_mem.empty(problem.a_shape(self.rank), dtype=problem.dtype, device=device)
        symm_mem.rendezvous(self._shard, self._group)
        self._progress = torch.zeros(problem.world_size, dtype=torch.uint32, device=device)
        self.gathered = torch.empty(problem.m, problem.k, dtype=problem.dtype, device=device)

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self._shard.copy_(a)
        b = rows_on_16_bytes(b.t()).t()
        _, output = self._kraken.all_gather_matmul(self._shard, b, a_out=self.gathered, progress=self._progress)
        self._forget_descriptors()
        return output


class KrakenReduceScatter(KrakenOperator[GemmReduceScatterProblem]):
    """Reduce-scatter by a GEMM kernel, copy engines after it, and a kernel that sums."""

    family = gemm_reduce_scatter.FAMILY
    module = "gemm_reduce_scatter_ce_persistent"
    capability = (9, 0)

    @classmethod
    def size_reason(cls, problem: GemmReduceScatterProblem) -> str | None:
        if problem.m % problem.world_size:
            return f"kraken needs M ({problem.m}) to be a multiple of the ranks ({problem.world_size})"
        slices = {problem.a_shape(rank)[1] for rank in range(problem.world_size)}
        for name, sizes in (("K on each rank", slices), ("N", {problem.n})):
            if not all(fill_rows(size, problem.dtype) for size in sizes):
                return f"kraken's kernels read and write rows on 16 bytes; {name} is not so long"
        return None

    def _open(self) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        super()._open()
        partial_bytes = self.problem.m * self.problem.n * self.problem.dtype.itemsize
        symm_mem.get_symm_mem_workspace(self._group.group_name, min_size=partial_bytes)  # that kraken uses

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = rows_on_16_bytes(a), rows_on_16_bytes(b.t()).t()
        self._zero_flags_to_be()
        output = self._kraken.gemm_reduce_scatter_ce_persistent(a, b, group=self._group)
        self._forget_descriptors()
        return output

    def _zero_flags_to_be(self) -> None:
        """Zero the memory that kraken's flags are about to be allocated in.

        Its copies may look at their flags before it has zeroed them, and find those of the call before, all set: the
        allocator gives the same requests the same memory.
        """
        problem, device = self.problem, self.ctx.get_device()
        rows = problem.m // problem.world_size
        _ = (
            *(torch.empty(m, problem.n, dtype=problem.dtype, device=device) for m in (problem.m, rows)),
            *(torch.zeros(problem.world_size, dtype=torch.uint32, device=device) for _ in range(2)),
        )


class KrakenAllReduce(KrakenOperator[GemmAllReduceProblem]):
    """All-reduce, one-shot, in one kernel; a copy rounds its fp32 output."""

    family = gemm_all_reduce.FAMILY
    module = "gemm_one_shot_all_reduce_fused"
    capability = (8, 0)
    dtypes = (torch.bfloat16, torch.float16)  # fp32 is multiplied as TF32

    @classmethod
    def size_reason(cls, problem: GemmAllReduceProblem) -> str | None:
        import torch.distributed._symmetric_memory as symm_mem

        if problem.world_size & (problem.world_size - 1):
            return f"kraken's kernel needs a power of two of ranks, not {problem.world_size}"
        tiles = -(-problem.m // _TILE) * -(-problem.n // _TILE)
        room = symm_mem.get_signal_pad_size() // (_FLAG_BYTES * problem.world_size)
        if tiles > room:
            return f"torch's signal pad has flags for {room} tiles of kraken's kernel; this would take {tiles}"
        return None

    def _open(self) -> None:
        import torch.distributed._symmetric_memory as symm_mem

        super()._open()
        partial_bytes = self.problem.m * self.problem.n * torch.float32.itemsize
        symm_mem.get_symm_mem_workspace(self._group.group_name, min_size=partial_bytes)  # that kraken uses

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self._kraken.gemm_one_shot_all_reduce(a, b, group=self._group).to(self.problem.dtype)


VARIANTS = (
    KrakenAllGather.as_variant("meta-pytorch/kraken's all_gather_matmul, where it is installed"),
    KrakenReduceScatter.as_variant("meta-pytorch/kraken's gemm_reduce_scatter_ce_persistent, where it is installed"),
    KrakenAllReduce.as_variant("meta-pytorch/kraken's gemm_one_shot_all_reduce_fused, where it is installed"),
)
