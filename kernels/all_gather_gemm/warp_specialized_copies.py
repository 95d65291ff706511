"""All-gather + GEMM with the copy engines and the kernel of `warp_specialized` (Gluon, for Hopper).

The Hopper form of `copy_engine`, whose protocol this is (copies.py): the copy engines push this rank's shard, and no
program does. All SMs but one multiply, so where the multiplication is slower than the link, this is the quicker one;
where the link is slower, tiles wait for whole shards. Pattern: arXiv 2511.12500, section 4.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from overlap_taxonomy import Agent, Arrangement, Sync, Variant

from ..common.config import GemmConfig
from .copies import PushedByCopyEngines
from .operator import FAMILY
from .warp_specialized import MultipliesArriving, fewest_empty


class WarpSpecializedCopies(MultipliesArriving, PushedByCopyEngines):
    """See the module. The rows of its output may lie further apart than they are long."""

    variant = "warp_specialized_copies"

    def default_config(self) -> GemmConfig:
        return replace(super().default_config(), panels=1)

    def _open_buffers(self) -> None:
        super()._open_buffers()
        self._shard = self._consignment(self._state, chunk_columns=self.problem.k, senders=0)
        self._part_rows = self._shard.group_rows

    def _parts(self) -> int:
        tiles = -(-self.problem.a_shape(0)[0] // self.config.block_m)
        return fewest_empty(tiles, self.config.panels)

    def _multiply(self, a: torch.Tensor, b: torch.Tensor, num_programs: int, *, total_programs: int) -> None:
        self._run_kernel(a, b, num_programs, total_programs=total_programs)


VARIANT = Variant(
    family=FAMILY,
    name=WarpSpecializedCopies.variant,
    arrangement=Arrangement.KERNEL_AND_COPIES,
    agent=Agent.COPY_ENGINES,
    sync=Sync.SHARD_COUNTER,
    summary="the copy engines push the shard; a warp of each program loads what has come and stores tiles (Hopper)",
    build=WarpSpecializedCopies,
    unsupported_reason=WarpSpecializedCopies.unsupported_reason,
)
