"""GEMM + reduce-scatter with the copy engines: they send each shard of partial tiles to its owner when it is complete.

| queue | work |
|---|---|
| current stream | compute the peers' shards, counting tiles · compute the own shard and add the peers' partials |
| copy stream | for each peer's shard: wait for the full count · copy it · count it at its owner, clear the tile count |

The GEMM counts a program's first tile only when all peers are ready, so no copy starts early. Tile counts are this
rank's alone and cleared behind the copy: the stream's waits compare with constants, as a captured graph must. The sum
leaves one SM to the kernels on the copy stream, which its peers wait for: its own programs can fill a whole SM's
registers (seen: every rank's sum waiting for announcements that had no SM to run on).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from overlap_taxonomy import Agent, Arrangement, Sync, Variant

from ..common.handshake import announce_part, begin_call, current_call, finish_after_arrivals
from .operator import FAMILY, GemmReduceScatter
from .partials import ANNOUNCE_SHARD, AWAIT_SHARDS, compute_partial_tiles, sum_own_tiles


@triton.jit
def gemm_kernel(a, b, gemm, staging, peers, counts_ptr, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Compute the partial tiles of the peers' shards and count them."""
    epoch = begin_call(peers, WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    compute_partial_tiles(pid, step, epoch, a, b, gemm, staging, peers, counts_ptr, ANNOUNCE_SHARD, WORLD_SIZE, TILE)


@triton.jit
def announce_kernel(peers, owner, count_ptr, WORLD_SIZE: tl.constexpr):
    """Behind a copy: count the shard at its owner and clear its tile count."""
    tl.store(count_ptr, 0)
    announce_part(peers, owner, WORLD_SIZE)


@triton.jit
def sum_kernel(a, b, gemm, out, staging, peers, WORLD_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Compute the own shard and add the peers' partials."""
    epoch = current_call(peers, WORLD_SIZE)
    pid, step = tl.program_id(0), tl.num_programs(0)
    sum_own_tiles(pid, step, epoch, a, b, gemm, out, staging, peers, AWAIT_SHARDS, WORLD_SIZE, TILE)
    finish_after_arrivals(peers, epoch, tl.num_programs(0), WORLD_SIZE)


class CopyEngine(GemmReduceScatter):
    """See the module."""

    variant = "copy_engine"

    def _open_buffers(self) -> None:
        super()._open_buffers()
        world_size = self.problem.world_size
        everywhere = self.ctx.peer_view(self._slots)
        self._shards = []  # (owner, this rank's partial, its slot there), in the order they are computed
        for distance in range(1, world_size):
            owner = (self.rank + distance) % world_size
            rows = self.problem.c_shape(owner)[0]
            self._shards.append((owner, self._partials[owner, :rows], everywhere[owner, self.rank, :rows]))
        self._counts = self._local_flags(world_size - 1, "shard", dtype=torch.int32)
        self._copy_stream = self.ctx.make_stream()

    def _launch(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        multiply = self._multiply_arguments(a, b)
        self._copy_stream.wait_for_current()
        self._run(gemm_kernel, self.config.num_sms, **multiply, counts_ptr=self._counts)
        with self._copy_stream.as_current():
            for position, (owner, source, destination) in enumerate(self._shards):
                self._copy_stream.wait_value(self._counts[position], self._flags.shape[1])
                if len(source):
                    self._copy_stream.copy_2d(destination, source)
                self._run(
                    announce_kernel,
                    1,
                    num_warps=1,
                    peers=self._peers(),
                    owner=owner,
                    count_ptr=self._counts[position],
                    WORLD_SIZE=self.problem.world_size,
                )
        self._run(sum_kernel, max(1, self.config.num_sms - 1), **multiply, out=self._out)
        self._copy_stream.current_waits()
        return self.output


VARIANT = Variant(
    family=FAMILY,
    name=CopyEngine.variant,
    arrangement=Arrangement.KERNEL_AND_COPIES,
    agent=Agent.COPY_ENGINES,
    sync=Sync.PANEL_COUNTER,
    summary="GEMM kernels; the copy engines send each shard of partials; own tiles last add the peers'",
    build=CopyEngine,
    unsupported_reason=CopyEngine.unsupported_reason,
)
