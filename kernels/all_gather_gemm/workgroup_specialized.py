"""All-gather + GEMM in one kernel with two roles: some programs push this rank's shard, the others multiply.

| program | does | waits for |
|---|---|---|
| 0 … comm_sms - 1 | pushes chunks of this rank's shard to every peer | the peers' readiness |
| the rest | multiplies its own shard, then each peer's | all chunks of a peer's shard |

Pushing programs have the lower numbers, so they are scheduled first: the peers wait for them. Pattern: arXiv
2511.12500, section 4 ("workgroup specialization").
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync

from ..common.config import GemmConfig
from ..common.handshake import begin_call, finish_after_arrivals, wait_ready
from .operator import AllGatherGemm
from .shards import PUSHES_AND_MULTIPLIES, Arrivals, multiply_shards, push_shard


@triton.jit(launch_metadata=PUSHES_AND_MULTIPLIES)
def all_gather_gemm_workgroup_specialized(
    a,
    b,
    gemm,
    gathered,
    gathered_gemm,
    block,
    shard_rows,
    shard,
    peers,
    COMM_PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Push this rank's shard and multiply all shards, each in its own programs."""
    epoch = begin_call(peers, WORLD_SIZE)
    pid = tl.program_id(0)
    if pid < COMM_PROGRAMS:
        wait_ready(peers, epoch, WORLD_SIZE)
        push_shard(pid, COMM_PROGRAMS, shard, peers, True, ROWS, COLS, WORLD_SIZE)
    else:
        first, step = pid - COMM_PROGRAMS, tl.num_programs(0) - COMM_PROGRAMS
        arrivals = Arrivals(peers.state_ptr + WORLD_SIZE, epoch * COMM_PROGRAMS)
        multiply_shards(
            first, step, a, b, gemm, gathered, gathered_gemm, block, shard_rows, peers, arrivals, WORLD_SIZE, TILE
        )
    finish_after_arrivals(peers, epoch, tl.num_programs(0), WORLD_SIZE)


class WorkgroupSpecialized(AllGatherGemm):
    """See the module."""

    variant = "workgroup_specialized"
    comm_share = 16 / 132

    def default_config(self) -> GemmConfig:
        # 0.493 ms for 8192x8192x8192 over 4 H200s, with 128x256 tiles 0.520.
        config = super().default_config()
        if config.block_n == 256:
            config = replace(config, block_n=128, num_stages=4)
        return config if config.block_m < 64 else replace(config, comm_rows=64)

    def _chunks_a_call(self) -> int:
        return self.config.comm_sms

    def _overlap(self, a: torch.Tensor, b: torch.Tensor) -> None:
        arguments = {**self._multiply_arguments(a, b), **self._push_arguments(a)}
        self._run(
            all_gather_gemm_workgroup_specialized, self.config.num_sms, **arguments, COMM_PROGRAMS=self.config.comm_sms
        )


VARIANT = WorkgroupSpecialized.as_variant(
    arrangement=Arrangement.FUSED_KERNEL,
    agent=Agent.COMM_PROGRAMS,
    sync=Sync.SHARD_COUNTER,
    summary="one kernel; some programs push the shard, the others multiply each shard when it has come",
)
