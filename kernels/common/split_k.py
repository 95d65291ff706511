"""What the `one_shot` variants share on the host: their configuration, and where programs that share tiles meet."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from .config import GemmConfig, is_hopper_or_later, operand_room, warps_of, widest_tile
from .cuts import GROUP_M, LOW_ROWS, Cut, Plan, best_cut, cut_us, known_parts, plan_of_cut
from .fused_operator import FusedOperator
from .shared_tiles import Sharing

# Weights on their way to all SMs, at most: 12288 x 12288 takes one row 73 us with 13 MB of them, 79 with 19 MB (H200).
_FLIGHT_BYTES = 15e6
LEAST_STAGES = 4
_SHORT_US = 45.0  # worth an early launch


def default_split_config(arch: str, num_sms: int, *, m: int, n: int, k: int, dtype: torch.dtype) -> GemmConfig:
    """Return what to start from for an (m, n) output over k of one rank's GEMM; arguments as `default_config`'s."""
    if arch == "cpu":
        return GemmConfig(
            32, 32, 32, group_m=2, num_warps=4, num_sms=num_sms, comm_sms=1, panels=1, splits=2, descriptors=False
        )
    is_amd = arch.startswith("gfx")
    is_exact = dtype == torch.float32
    block_k = 16 if is_exact else 64
    # Exact products run on the ordinary cores: small tiles, in registers.
    largest = 64 if is_exact else widest_tile(arch)
    low_block_k = block_k if is_amd or is_exact else 128
    cut = best_cut(
        m,
        n,
        k,
        num_sms=num_sms,
        block_k=block_k,
        low_block_k=low_block_k,
        element_bytes=dtype.itemsize,
        largest=largest,
        widest_shared=256 if arch == "sm_90" else 128,  # on sm_100 two sums of 256 columns do not fit the registers
    )
    if cut.block_m <= LOW_ROWS:
        block_k = low_block_k
    if is_amd:
        stages = 2
    elif is_exact:
        stages = 4
    else:  # as much on its way as shared memory takes, and the memory takes well: it is what hides the latency
        stages = stages_within(operand_room(arch), (cut.block_m + cut.block_n) * block_k * dtype.itemsize)
        plan = plan_of_cut(cut, m, n, k, num_sms=num_sms, block_k=block_k, element_bytes=dtype.itemsize)
        in_flight = int(_FLIGHT_BYTES // (max(1, plan.programs) * cut.block_n * block_k * dtype.itemsize))
        stages = min(stages, max(LEAST_STAGES, in_flight))
    return GemmConfig(
        cut.block_m,
        cut.block_n,
        block_k,
        group_m=GROUP_M,
        num_warps=warps_of(cut.block_m, cut.block_n),
        num_stages=stages,
        epilogue_subtiles=2 if cut.block_n == 256 else 1,
        num_sms=num_sms,
        comm_rows=4 if m > 16 else 1,  # a piece of A is 8 KB, or the part of a row that a program loads at once
        panels=1,
        splits=cut.splits,
        descriptors=not is_exact and is_hopper_or_later(arch),
    )


def stages_within(room: int, stage: int) -> int:
    """Return how many stages of a size to have within some room, in whatever unit: at least two, no more than help."""
    return max(2, min(6, room // stage))


class Splitting(FusedOperator[Any]):
    """Mixed into an operator whose kernel runs `compute_tiles`: its configuration, and where parts of a tile meet."""

    def _config_for(self, m: int, n: int) -> GemmConfig:
        ctx, k = self.ctx, self.problem.a_shape(0)[1]
        return default_split_config(ctx.get_arch(), ctx.get_cu_count(), m=m, n=n, k=k, dtype=self.problem.dtype)

    def _open_sharing(self) -> None:
        """Allocate what the parts of all shared tiles need."""
        config, sharers = self.config, self._plan.sharers
        size = max(1, sharers * config.block_m * config.block_n)
        self._sums = torch.empty(size, dtype=torch.float32, device=self.ctx.get_device())
        self._left = self._local_flags(sharers, "the part of a shared tile by program")
        self._calls_ended = self._local_flags(self._num_programs, "the number of calls ended by program")

    @property
    def _columns(self) -> int:
        """Columns of the rank with the most."""
        return int(self.problem.b_shape(0)[1])

    @property
    def _all_tiles(self) -> int:
        return -(-int(self.problem.m) // self.config.block_m) * -(-self._columns // self.config.block_n)

    @cached_property
    def _plan(self) -> Plan:
        """How this rank's programs take its tiles; it may have fewer steps of k than others."""
        return plan_of_cut(self._cut, **self._sizes)

    @cached_property
    def _is_short(self) -> bool:
        """Whether the kernel is worth an early launch: it saves 3 µs, and costs a long kernel up to 10.

        Programs that come early get SMs as they fall free, not evenly. That slows what is bound by memory (measured;
        the reason is a guess).
        """
        return cut_us(self._cut, **self._sizes) < _SHORT_US

    @property
    def _cut(self) -> Cut:
        return Cut(self.config.block_m, self.config.block_n, self.config.splits)

    @property
    def _sizes(self) -> dict[str, int]:
        """This rank's GEMM, and what else `cut_us` takes."""
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
            "sharing": Sharing(self._sums, self._left, plan.sharers, plan.height, plan.head),
            "calls_ptr": self._calls_ended,
            "peers": self._peers(),
            "HAS_WHOLE": plan.whole > 0,
            "PARTS": known_parts(plan, self.config.block_m, self.config.block_n),
            "WORLD_SIZE": self.problem.world_size,
        }
