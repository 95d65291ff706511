"""All-gather + GEMM with the copy engines: they push this rank's shard while a GEMM kernel multiplies.

| queue | work |
|---|---|
| current stream | tell the peers this rank is ready · multiply shards as they come |
| copy stream | wait for the peers to be ready · for each peer: copy the shard, then count it there |

The kernels that wait or count are single programs, and the peers wait for them: the GEMM leaves them one SM, since its
own programs can fill all the registers of one. The call's number is read by the waiting program too, so that program
takes part in ending the call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync, Variant

from ..common.config import GemmConfig
from ..common.handshake import announce_part, begin_call, current_call, finish_after_arrivals, wait_ready
from .operator import FAMILY, AllGatherGemm
from .shards import multiply_shards


@triton.jit
def begin_kernel(peers, WORLD_SIZE: tl.constexpr):
    """Tell the peers that this rank is ready."""
    begin_call(peers, WORLD_SIZE)


@triton.jit
def gate_kernel(peers, total_programs, WORLD_SIZE: tl.constexpr):
    """Hold the copies until all peers are ready."""
    epoch = current_call(peers, WORLD_SIZE)
    wait_ready(peers, epoch, WORLD_SIZE)
    finish_after_arrivals(peers, epoch, total_programs, WORLD_SIZE)


@triton.jit
def announce_kernel(peers, peer, WORLD_SIZE: tl.constexpr):
    """Behind a copy: count it at the peer."""
    announce_part(peers, peer, WORLD_SIZE)


@triton.jit
def gemm_kernel(
    a,
    b,
    gemm,
    gathered,
    gathered_gemm,
    block,
    shard_rows,
    peers,
    total_programs,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Multiply each shard when it has come."""
    epoch = current_call(peers, WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    multiply_shards(
        pid, step, epoch, a, b, gemm, gathered, gathered_gemm, block, shard_rows, peers, 1, WORLD_SIZE, TILE
    )
    finish_after_arrivals(peers, epoch, total_programs, WORLD_SIZE)


class CopyEngine(AllGatherGemm):
    """See the module."""

    variant = "copy_engine"

    def default_config(self) -> GemmConfig:
        # Four stages with the epilogue in halves: 0.425 ms for 8192x8192x8192 over 4 H200s, with three 0.435.
        config = super().default_config()
        return replace(config, num_stages=4, epilogue_subtiles=2) if config.block_n == 256 else config

    def _open_buffers(self) -> None:
        super()._open_buffers()
        everywhere = self.ctx.peer_view(self.gathered)[:, self._own_rows]
        world_size = self.problem.world_size
        order = [(self.rank - distance) % world_size for distance in range(1, world_size)]
        self._destinations = [(peer, everywhere[peer]) for peer in order]  # the rank below needs this shard first
        self._copy_stream = self.ctx.make_stream()

    def _overlap(self, a: torch.Tensor, b: torch.Tensor) -> None:
        handshake: dict[str, Any] = {"peers": self._peers(), "WORLD_SIZE": self.problem.world_size}
        num_programs = max(1, self.config.num_sms - 1)
        total: dict[str, Any] = {"total_programs": num_programs + 1}
        source = a if a.stride(1) == 1 else a.contiguous()  # a copy engine copies rows
        self._run(begin_kernel, 1, num_warps=1, **handshake)
        self._copy_stream.wait_for_current()
        with self._copy_stream.as_current():
            self._run(gate_kernel, 1, num_warps=1, **handshake, **total)
            for peer, destination in self._destinations:
                if len(source):
                    self._copy_stream.copy_2d(destination, source)
                self._run(announce_kernel, 1, num_warps=1, **handshake, peer=peer)
        self._run(gemm_kernel, num_programs, **self._multiply_arguments(a, b), **total)
        self._copy_stream.current_waits()


VARIANT = Variant(
    family=FAMILY,
    name=CopyEngine.variant,
    arrangement=Arrangement.KERNEL_AND_COPIES,
    agent=Agent.COPY_ENGINES,
    sync=Sync.SHARD_COUNTER,
    summary="the copy engines push the shard; a GEMM kernel multiplies each shard when it has come",
    build=CopyEngine,
    unsupported_reason=CopyEngine.unsupported_reason,
)
