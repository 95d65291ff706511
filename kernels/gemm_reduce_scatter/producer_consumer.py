"""GEMM + reduce-scatter in kernels on two streams: GEMM kernels compute partial tiles, another pushes them, SMs split.

| kernel | stream | does | waits for |
|---|---|---|---|
| producer | current | computes the peers' shards, a flag a tile | nothing |
| consumer | side | pushes partial tiles to their owners, a flag each there | the peers' readiness, each tile's flag |
| sum | current, after the producer | computes the own shard and adds the peers' partials | the peers' flags |

The own shard has a kernel of its own, so no kernel waits for one that a rank queues later. All three kernels' programs
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
from ..common.handshake import begin_call, current_call, finish_after_arrivals
from ..common.partials import (
    COMPUTES_FOR_PEERS,
    PUSHES,
    SIGNAL_TILE,
    SUMS,
    WAIT_TILES,
    compute_partial_tiles,
    push_partial_tiles,
    sum_own_tiles,
)
from .operator import GemmReduceScatter


@triton.jit(launch_metadata=COMPUTES_FOR_PEERS)
def gemm_reduce_scatter_producer_consumer(
    a, b, gemm, staging, peers, flags_ptr, total_programs, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Compute the partial tiles of the peers' shards."""
    epoch = begin_call(peers, WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    compute_partial_tiles(pid, step, epoch, a, b, gemm, staging, peers, flags_ptr, SIGNAL_TILE, WORLD_SIZE, TILE)
    finish_after_arrivals(peers, epoch, total_programs, WORLD_SIZE)


@triton.jit(launch_metadata=PUSHES)
def gemm_reduce_scatter_producer_consumer_push(
    staging, peers, flags_ptr, total_programs, ROWS: tl.constexpr, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Push partial tiles as their flags are set."""
    epoch = current_call(peers, WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    push_partial_tiles(pid, step, epoch, staging, peers, flags_ptr, ROWS, WORLD_SIZE, TILE)
    finish_after_arrivals(peers, epoch, total_programs, WORLD_SIZE)


@triton.jit(launch_metadata=SUMS)
def gemm_reduce_scatter_producer_consumer_sum(
    a, b, gemm, out, staging, peers, total_programs, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Compute the own shard and add the peers' partials."""
    epoch = current_call(peers, WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    sum_own_tiles(pid, step, epoch, a, b, gemm, out, staging, peers, WAIT_TILES, 1, WORLD_SIZE, TILE)
    finish_after_arrivals(peers, epoch, total_programs, WORLD_SIZE)


class ProducerConsumer(GemmReduceScatter):
    """See the module."""

    variant = "producer_consumer"
    comm_share = 16 / 132

    def default_config(self) -> GemmConfig:
        # 0.533 ms for 8192x8192x8192 over 4 H200s, with 32 rows 0.592.
        config = super().default_config()
        return config if config.block_m < 64 else replace(config, comm_rows=64)

    def _open_buffers(self) -> None:
        super()._open_buffers()
        self._computed = self._local_flags(self._num_sent, "partial tile")
        self._push_stream = self._side_stream()

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        config = self.config
        compute_sms = config.num_sms - config.comm_sms
        total: dict[str, Any] = {"total_programs": 2 * compute_sms + config.comm_sms}
        multiply = self._multiply_arguments(a, b)
        self._push_stream.wait_for_current()
        self._run(gemm_reduce_scatter_producer_consumer, compute_sms, **multiply, **total, flags_ptr=self._computed)
        with self._push_stream.as_current():
            self._run(
                gemm_reduce_scatter_producer_consumer_push,
                config.comm_sms,
                num_warps=config.comm_warps,
                **self._push_arguments(),
                **total,
                flags_ptr=self._computed,
            )
        self._run(gemm_reduce_scatter_producer_consumer_sum, compute_sms, **multiply, **total, out=self._out)
        self._push_stream.current_waits()
        return self.output


VARIANT = ProducerConsumer.as_variant(
    arrangement=Arrangement.CONCURRENT_KERNELS,
    agent=Agent.COMM_KERNEL,
    sync=Sync.TILE_FLAG,
    summary="GEMM kernels and a push kernel side by side, a flag a tile; own tiles last add the peers'",
)
