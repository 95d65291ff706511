"""GEMM + reduce-scatter by kraken (``kraken.fused.gemm_reduce_scatter_ce_persistent``), for comparison.

Of kraken's two functions this is the one that its benchmark runs: a GEMM kernel, copy engines behind it, and a kernel
that sums. Copied in every call, and part of its time: A and B, unless A and B's transpose are contiguous.
"""

from __future__ import annotations

import torch

from ..common.kraken import KrakenOperator, rows_on_16_bytes
from ..common.operands import fill_rows
from .operator import FAMILY
from .problem import GemmReduceScatterProblem


class Kraken(KrakenOperator[GemmReduceScatterProblem]):
    """See the module."""

    family = FAMILY
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


VARIANT = Kraken.as_variant("meta-pytorch/kraken's gemm_reduce_scatter_ce_persistent, where it is installed")
