"""What the `one_shot` variants share on the host: their configuration, and the workspace of split tiles."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from .config import GemmConfig, is_hopper_or_later, operand_room, warps_of, widest_tile
from .fused_operator import FusedOperator
from .stream_k import StreamK
from .stream_k_plan import (
    GROUP_M,
    LOW_ROWS,
    StreamKPlan,
    Tiling,
    fastest_tiling,
    known_splits,
    plan_of_tiling,
    tiling_us,
)

# Weights on their way to all SMs, at most: 12288 x 12288 takes one row 73 us with 13 MB of them, 79 with 19 MB (H200).
_FLIGHT_BYTES = 15e6
LEAST_STAGES = 4
_SHORT_US = 45.0  # worth an early launch


def default_stream_k_config(arch: str, num_sms: int, *, m: int, n: int, k: int, dtype: torch.dtype) -> GemmConfig:
    """Return what to start from for an (m, n) output over k of one rank's GEMM; arguments as `default_config`'s."""
    if arch == "cpu":
        return GemmConfig(
            32, 32, 32, group_m=2, num_warps=4, num_sms=num_sms, comm_sms=1, row_chunks=1, splits=2, descriptors=False
        )
    is_amd = arch.startswith("gfx")
    is_exact = dtype == torch.float32
    block_k = 16 if is_exact else 64
    # Exact products run on the ordinary cores: small tiles, in registers.
    largest = 64 if is_exact else widest_tile(arch)
    low_block_k = block_k if is_amd or is_exact else 128
    tiling = fastest_tiling(
        m,
        n,
        k,
        num_sms=num_sms,
        block_k=block_k,
        low_block_k=low_block_k,
        element_bytes=dtype.itemsize,
        largest=largest,
        widest_split=256 if arch == "sm_90" else 128,  # on sm_100 two sums of 256 columns do not fit the registers
    )
    if tiling.block_m <= LOW_ROWS:
        block_k = low_block_k
    if is_amd:
        stages = 2
    elif is_exact:
        stages = 4
    else:  # as much on its way as shared memory takes, and the memory takes well: it is what hides the latency
        stages = stages_within(operand_room(arch), (tiling.block_m + tiling.block_n) * block_k * dtype.itemsize)
        plan = plan_of_tiling(tiling, m, n, k, num_sms=num_sms, block_k=block_k, element_bytes=dtype.itemsize)
        in_flight = int(_FLIGHT_BYTES // (max(1, plan.programs) * tiling.block_n * block_k * dtype.itemsize))
        stages = min(stages, max(LEAST_STAGES, in_flight))
    return GemmConfig(
        tiling.block_m,
        tiling.block_n,
        block_k,
        group_m=GROUP_M,
        num_warps=warps_of(tiling.block_m, tiling.block_n),
        num_stages=stages,
        epilogue_subtiles=2 if tiling.block_n == 256 else 1,
        num_sms=num_sms,
        comm_rows=4 if m > 16 else 1,  # a chunk of A is 8 KB, or what a program loads at once of a row
        row_chunks=1,
        splits=tiling.splits,
        descriptors=not is_exact and is_hopper_or_later(arch),
    )


def stages_within(room: int, stage: int) -> int:
    """Return how many stages of a size to have within some room, in whatever unit: at least two, no more than help."""
    return max(2, min(6, room // stage))


class StreamKOperator(FusedOperator[Any]):
    """Mixed into an operator whose kernel runs `compute_tiles`: its configuration, and the workspace."""

    def _config_for(self, m: int, n: int) -> GemmConfig:
        ctx, k = self.ctx, self.problem.a_shape(0)[1]
        return default_stream_k_config(ctx.get_arch(), ctx.get_cu_count(), m=m, n=n, k=k, dtype=self.problem.dtype)

    def _open_stream_k(self) -> None:
        """Allocate the workspace of the split tiles."""
        config, split_programs = self.config, self._plan.split_programs
        size = max(1, split_programs * config.block_m * config.block_n)
        self._partial_tiles = torch.empty(size, dtype=torch.float32, device=self.ctx.get_device())
        self._partial_flags = self._local_flags(split_programs, "the partial of a split tile by program")
        self._calls_ended = self._local_flags(self._num_programs, "the number of calls ended by program")

    @property
    def _columns(self) -> int:
        """Columns of the rank with the most."""
        return int(self.problem.b_shape(0)[1])

    @property
    def _all_tiles(self) -> int:
        return -(-int(self.problem.m) // self.config.block_m) * -(-self._columns // self.config.block_n)

    @cached_property
    def _plan(self) -> StreamKPlan:
        """How this rank's programs take its tiles; it may have fewer steps of k than others."""
        return plan_of_tiling(self._tiling, **self._sizes)

    @cached_property
    def _is_short(self) -> bool:
        """Whether the kernel is worth an early launch: it saves 3 µs, and costs a long kernel up to 10.

        Programs that come early get SMs as they fall free, not evenly. That slows what is bound by memory (measured;
        the reason is a guess).
        """
        return tiling_us(self._tiling, **self._sizes) < _SHORT_US

    @property
    def _tiling(self) -> Tiling:
        return Tiling(self.config.block_m, self.config.block_n, self.config.splits)

    @property
    def _sizes(self) -> dict[str, int]:
        """This rank's GEMM, and what else `tiling_us` takes."""
        return {
            "m": self.problem.m,
            "n": self._columns,
            "k": self.problem.a_shape(self.rank)[1],
            "num_sms": self.config.num_sms,
            "block_k": self.config.block_k,
            "element_bytes": self.problem.dtype.itemsize,
            "group_m": self.config.group_m,
        }

    @property
    def _num_programs(self) -> int:
        return self._plan.programs

    def _tiles_arguments(self) -> dict[str, Any]:
        """Return what a kernel of `compute_tiles` takes beside its operands."""
        plan = self._plan
        return {
            "stream_k": StreamK(self._partial_tiles, self._partial_flags, plan.split_programs, plan.height, plan.head),
            "calls_ptr": self._calls_ended,
            "peers": self._peers(),
            "HAS_WHOLE": plan.whole > 0,
            "SPLITS": known_splits(plan, self.config.block_m, self.config.block_n),
            "WORLD_SIZE": self.problem.world_size,
        }
