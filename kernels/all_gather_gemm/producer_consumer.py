"""All-gather + GEMM in two kernels on two streams: one pushes this rank's shard, the other multiplies what has come.

| kernel | SMs | waits for |
|---|---|---|
| push | comm_sms | the peers' readiness |
| GEMM | the rest | its own shard: nothing; a peer's: all chunks of it |

The push kernel is queued first: the peers' GEMMs wait for it, it waits for no GEMM of this call. Both kernels' programs
take part in ending the call. Pattern: arXiv 2511.12500, section 4 ("producer-consumer").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync

from ..common.config import GemmConfig
from ..common.handshake import begin_call, current_call, finish_after_arrivals, wait_ready
from .operator import AllGatherGemm
from .shards import MULTIPLIES, PUSHES, Arrivals, multiply_shards, push_shard


@triton.jit(launch_metadata=PUSHES)
def all_gather_gemm_producer_consumer_push(
    shard, peers, total_programs, ROWS: tl.constexpr, COLS: tl.constexpr, WORLD_SIZE: tl.constexpr
):
    """Push this rank's shard to every peer."""
    epoch = begin_call(peers, WORLD_SIZE)
    wait_ready(peers, epoch, WORLD_SIZE)
    push_shard(tl.program_id(0), tl.num_programs(0), shard, peers, True, ROWS, COLS, WORLD_SIZE)
    finish_after_arrivals(peers, epoch, total_programs, WORLD_SIZE)


@triton.jit(launch_metadata=MULTIPLIES)
def all_gather_gemm_producer_consumer(
    a,
    b,
    gemm,
    gathered,
    gathered_gemm,
    block,
    shard_rows,
    peers,
    total_programs,
    COMM_PROGRAMS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Multiply each shard when it has come."""
    epoch = current_call(peers, WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    arrivals = Arrivals(peers.state_ptr + WORLD_SIZE, epoch * COMM_PROGRAMS)
    multiply_shards(
        pid, step, a, b, gemm, gathered, gathered_gemm, block, shard_rows, peers, arrivals, WORLD_SIZE, TILE
    )
    finish_after_arrivals(peers, epoch, total_programs, WORLD_SIZE)


class ProducerConsumer(AllGatherGemm):
    """See the module."""

    variant = "producer_consumer"
    comm_share = 12 / 132

    def default_config(self) -> GemmConfig:
        # 0.510 ms for 8192x8192x8192 over 4 H200s, with 32 rows 0.523.
        config = super().default_config()
        return config if config.block_m < 64 else replace(config, comm_rows=64)

    def _chunks_a_call(self) -> int:
        return self.config.comm_sms

    def _open_buffers(self) -> None:
        super()._open_buffers()
        self._push_stream = self._side_stream()

    def _overlap(self, a: torch.Tensor, b: torch.Tensor) -> None:
        config = self.config
        shared: dict[str, Any] = {"total_programs": config.num_sms}
        self._push_stream.wait_for_current()
        with self._push_stream.as_current():
            self._run(
                all_gather_gemm_producer_consumer_push,
                config.comm_sms,
                num_warps=config.comm_warps,
                **self._push_arguments(a),
                **shared,
            )
        arguments = self._multiply_arguments(a, b)
        self._run(
            all_gather_gemm_producer_consumer,
            config.num_sms - config.comm_sms,
            **arguments,
            **shared,
            COMM_PROGRAMS=config.comm_sms,
        )
        self._push_stream.current_waits()


VARIANT = ProducerConsumer.as_variant(
    arrangement=Arrangement.CONCURRENT_KERNELS,
    agent=Agent.COMM_KERNEL,
    sync=Sync.SHARD_COUNTER,
    summary="a push kernel and a GEMM kernel side by side, a counter a shard between them",
)
