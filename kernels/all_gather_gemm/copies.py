"""What the variants share whose shards the copy engines push: all of it but the kernel that multiplies.

| queue | work |
|---|---|
| current stream | tell the peers this rank is ready · multiply shards as they come |
| copy stream | wait for the peers to be ready · for each peer and part of the shard: copy it |
| counting stream | behind each copy: count the part at the peer, while the next one is copied |

The kernels that wait or count are single programs, and the peers wait for them: the GEMM leaves them one SM, since its
own programs can fill all the registers of one. The call's number is read by the waiting program too, so that program
takes part in ending the call.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import triton
import triton.language as tl

from ..common.config import programs_beside_another
from ..common.handshake import announce_part, begin_call, current_call, finish_after_arrivals, wait_ready
from .operator import AllGatherGemm


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


class PushedByCopyEngines(AllGatherGemm):
    """An operator whose shards the copy engines push."""

    def _open_buffers(self) -> None:
        super()._open_buffers()
        everywhere = self.ctx.peer_view(self.gathered)[:, self._own_rows]
        world_size = self.problem.world_size
        order = [(self.rank - distance) % world_size for distance in range(1, world_size)]
        self._destinations = [(peer, everywhere[peer]) for peer in order]  # the rank below needs this shard first
        self._part_rows = self._rows_of_part()
        self._copy_stream = self._side_stream()
        self._counting_stream = self._side_stream()

    def _parts(self) -> int:
        return 1

    def _rows_of_part(self) -> int:
        """Return the rows of a part of the largest shard: whole tiles."""
        tiles = -(-self.problem.a_shape(0)[0] // self.config.block_m)
        return -(-tiles // self._parts()) * self.config.block_m

    def _overlap(self, a: torch.Tensor, b: torch.Tensor) -> None:
        kernel, multiply = self._multiplication(a, b)  # first: operands that it refuses leave nothing half done
        handshake: dict[str, Any] = {"peers": self._peers(), "WORLD_SIZE": self.problem.world_size}
        num_programs = programs_beside_another(self.config.num_sms)
        source = a
        if a.stride(1) != 1:  # a copy engine copies rows
            source = self.gathered[self._own_rows]
            if not self.keep_gathered:
                self._calls.copy(source, a)
        self._run(begin_kernel, 1, num_warps=1, **handshake)
        self._copy_stream.wait_for_current()
        with self._copy_stream.as_current():
            self._run(gate_kernel, 1, num_warps=1, **handshake, total_programs=num_programs + 1)
        for peer, destination in self._destinations:
            for part in range(self._parts()):
                rows = slice(part * self._part_rows, (part + 1) * self._part_rows)
                if len(source[rows]):
                    self._copy_stream.copy_2d(destination[rows], source[rows])
                self._counting_stream.wait_for(self._copy_stream)
                with self._counting_stream.as_current():
                    self._run(announce_kernel, 1, num_warps=1, **handshake, peer=peer)
        self._run(kernel, num_programs, **multiply, total_programs=num_programs + 1)
        self._copy_stream.current_waits()
        if self._destinations:  # else nothing was queued there
            self._counting_stream.current_waits()

    @abstractmethod
    def _multiplication(self, a: torch.Tensor, b: torch.Tensor) -> tuple[Any, dict[str, Any]]:
        """Return the kernel that multiplies, and its arguments but `total_programs`, those that end the call.

        Its programs wait for shards and take part in ending the call. Nothing is queued.

        Raises:
            ValueError: operands that it cannot read.
        """
