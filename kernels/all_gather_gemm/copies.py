"""What the variants share whose shards the copy engines push: all of it but the kernel that multiplies.

| queue | work |
|---|---|
| copy stream | for each peer and chunk of the shard: copy it · set its flag there |
| current stream | multiply shards as they come; zero the flags, and end the call with the peers |

The queue itself sets a flag, by a stream memory operation. That takes 7 µs less than a kernel that counts after the
copy, and no SM; but what it writes is a constant, as a captured graph must have, so flags are not numbered. From a
second queue, while the next copy is under way, they came hundreds of µs late where the call was launched as a graph.

A call ends when all ranks have multiplied all shards: *done* says that, so the next call's copies wait for no rank.
Flags are zeroed before. Where the caller reads the gathered A (`keep_gathered`), his reads come after: then the copy
stream begins with a barrier of all ranks. It is a single program, the peers wait for it, and the programs of a GEMM can
fill all the registers of an SM: so the GEMM leaves it one, as it does where copies are kernels: on AMD GPUs what sets a
flag is one, and between ranks that share a GPU the copy.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common.config import programs_beside_another
from ..common.handshake import begin_call, wait_ready
from ..common.operands import rows_lie_apart
from .operator import AllGatherGemm
from .schedule import k_chunks_of, row_chunks_of


@triton.jit
def all_gather_gemm_copy_engine_barrier(peers, WORLD_SIZE: tl.constexpr):
    """Wait for all ranks: what was gathered before has been read on every rank.

    The number of the call that it reads is the right one: the call ends when the peers have what is copied after it.
    """
    wait_ready(peers, begin_call(peers, WORLD_SIZE), WORLD_SIZE)


class Copy(NamedTuple):
    """Which rows and columns of the shard, where they go, and the flag to set there."""

    rows: slice
    columns: slice
    destination: torch.Tensor
    flag: torch.Tensor


class PushedByCopyEngines(AllGatherGemm):
    """An operator whose shards the copy engines push.

    Each is cut into row chunks. Or, where there are k chunks of each of these, the last shard to come is cut, and the
    others have one flag, their first.
    """

    def _open_buffers(self) -> None:
        super()._open_buffers()
        rank, world_size, config = self.rank, self.problem.world_size, self.config
        shard_rows, k = self.problem.a_shape(0)
        row_tiles, steps = -(-shard_rows // config.block_m), -(-k // config.block_k)
        chunk_row_tiles, self._row_chunks = row_chunks_of(row_tiles, config.group_m, self._most_row_chunks())
        self._chunk_rows = chunk_row_tiles * config.block_m
        self._chunk_steps, self._k_chunks = k_chunks_of(steps, self._most_k_chunks())
        self._chunk_flags = self._flags_by_source(self._row_chunks * self._k_chunks, "chunk", "shard", a_call=None)
        shards = self.ctx.peer_view(self.gathered)[:, self._own_rows]
        flags = self.ctx.peer_view(self._chunk_flags)[:, rank]
        self._copies = []  # the rank below needs this shard first
        for distance in range(1, world_size):
            peer = (rank - distance) % world_size
            is_cut = self._k_chunks == 1 or distance == world_size - 1
            for flag, (rows, columns) in enumerate(self._chunks() if is_cut else [(slice(None), slice(None))]):
                self._copies.append(Copy(rows, columns, shards[peer, rows, columns], flags[peer, flag]))
        self._copy_stream = self._side_stream()

    def _chunks(self) -> list[tuple[slice, slice]]:
        """Return the rows and columns of a shard's chunks, of one row chunk after the other."""
        height, width = self._chunk_rows, self._chunk_steps * self.config.block_k
        row_chunks = [slice(chunk * height, (chunk + 1) * height) for chunk in range(self._row_chunks)]
        k_chunks = [slice(chunk * width, (chunk + 1) * width) for chunk in range(self._k_chunks)]
        return list(product(row_chunks, k_chunks))

    def _most_row_chunks(self) -> int:
        """Return into how many row chunks a shard is cut at most."""
        return 1

    def _most_k_chunks(self) -> int:
        """Return into how many k chunks a row chunk is cut at most."""
        return 1

    @property
    def _has_barrier(self) -> bool:
        """Whether the copies begin with a barrier of all ranks."""
        return self.keep_gathered and self.problem.world_size > 1

    def _num_programs(self, num_sms: int) -> int:
        """Return how many programs multiply: one an SM, unless other kernels need one."""
        needs_one = self._has_barrier or self.ctx.ranks_on_device > 1 or self.ctx.backend.streams_need_a_unit
        return programs_beside_another(num_sms) if needs_one else num_sms

    def _overlap(self, a: torch.Tensor, b: torch.Tensor) -> None:
        kernel, multiply = self._multiplication(a, b)
        num_programs = self._num_programs(self.config.num_sms)
        handshake: dict[str, Any] = {"peers": self._peers(), "WORLD_SIZE": self.problem.world_size}
        source = a
        if not rows_lie_apart(a):  # as a copy engine needs them
            source = self.gathered[self._own_rows]
            if not self.keep_gathered:
                self._calls.copy(source, a)
        stream = self._copy_stream
        stream.wait_for_current()
        if self._has_barrier:
            with stream.as_current():
                self._run(all_gather_gemm_copy_engine_barrier, 1, num_warps=1, **handshake)
        for copy in self._copies:
            if len(copy.destination):
                stream.copy_2d(copy.destination, source[copy.rows, copy.columns])
            stream.write_value(copy.flag, 1)
        flags: dict[str, Any] = {"flags_ptr": self._chunk_flags, "ROW_CHUNKS": self._row_chunks}
        self._run(kernel, num_programs, **{**multiply, **handshake, **flags})
        stream.current_waits()

    @abstractmethod
    def _multiplication(self, a: torch.Tensor, b: torch.Tensor) -> tuple[Any, dict[str, Any]]:
        """Return the kernel that multiplies, and its arguments, but those that all these kernels share.

        It waits for the flags at `flags_ptr`, one a rank for each chunk of ROW_CHUNKS row chunks, and ends the call.
        """
