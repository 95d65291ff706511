"""What the variants share whose shards the copy engines push: all of it but the kernel that multiplies.

| queue | work |
|---|---|
| copy stream, or several in turn | for each peer and piece of the shard: copy it · set its flag there |
| current stream | multiply shards as they come; zero the flags, and end the call with the peers |

The queue itself sets a flag, by a stream memory operation. That takes 7 µs less than a kernel that counts behind the
copy, and no SM; but what it writes is a constant, as a captured graph must have, so flags are not numbered. From a
second queue, while the next copy is under way, they came hundreds of µs late where the call was launched as a graph.
With `queues` of two a copy is under way on one while the other sets a flag; on two GPUs that gained nothing.

A call ends when all ranks have multiplied all shards: *done* says that, so the next call's copies ask nobody. Flags are
zeroed before. Where the caller reads the gathered A (`keep_gathered`), his reads come after: then a kernel on the copy
stream first meets the peers'. It is a single program, the peers wait for it, and the programs of a GEMM can fill all
the registers of an SM: so the GEMM leaves it one, as it does where copies are kernels: on AMD GPUs what sets a flag
is one, and between ranks that share a GPU the copy.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import cycle, product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..common.config import programs_beside_another
from ..common.handshake import begin_call, wait_ready
from ..common.operands import rows_lie_apart
from .operator import AllGatherGemm
from .schedule import cut_into_chunks, cut_into_parts


@triton.jit
def meet_kernel(peers, WORLD_SIZE: tl.constexpr):
    """Meet the peers: what was gathered before has been read on every rank.

    The number of the call that it reads is the right one: the call ends when the peers have what is copied behind it.
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

    Each is cut into parts of rows. Or, where parts are cut into chunks of columns, the last one to come is, and the
    others have one flag, their first.
    """

    def _open_buffers(self) -> None:
        super()._open_buffers()
        rank, world_size, config = self.rank, self.problem.world_size, self.config
        shard_rows, k = self.problem.a_shape(0)
        row_tiles, steps = -(-shard_rows // config.block_m), -(-k // config.block_k)
        part_tiles, self._num_parts = cut_into_parts(row_tiles, config.group_m, self._most_parts())
        self._part_rows = part_tiles * config.block_m
        self._chunk_steps, self._num_chunks = cut_into_chunks(steps, self._most_chunks())
        what = "part" if self._num_chunks == 1 else "piece"
        self._came = self._flags_by_sender(self._num_parts * self._num_chunks, what, "shard", a_call=None)
        shards = self.ctx.peer_view(self.gathered)[:, self._own_rows]
        flags = self.ctx.peer_view(self._came)[:, rank]
        self._copies = []  # the rank below needs this shard first
        for distance in range(1, world_size):
            peer = (rank - distance) % world_size
            is_cut = self._num_chunks == 1 or distance == world_size - 1
            for flag, (rows, columns) in enumerate(self._pieces() if is_cut else [(slice(None), slice(None))]):
                self._copies.append(Copy(rows, columns, shards[peer, rows, columns], flags[peer, flag]))
        # One without copies could be late for all of a call, and meet the peers in the name of the next.
        self._copy_streams = [self._side_stream() for _ in range(min(config.queues, max(1, len(self._copies))))]

    def _pieces(self) -> list[tuple[slice, slice]]:
        """Return the rows and columns of a shard's chunks, of one part after the other."""
        chunk_columns = self._chunk_steps * self.config.block_k
        parts = (slice(part * self._part_rows, (part + 1) * self._part_rows) for part in range(self._num_parts))
        chunks = [slice(chunk * chunk_columns, (chunk + 1) * chunk_columns) for chunk in range(self._num_chunks)]
        return list(product(parts, chunks))

    def _most_parts(self) -> int:
        """Return into how many parts a shard is cut at most."""
        return 1

    def _most_chunks(self) -> int:
        """Return into how many chunks a part is cut at most."""
        return 1

    @property
    def _meets(self) -> bool:
        """Whether the ranks meet before they copy."""
        return self.keep_gathered and self.problem.world_size > 1

    def _num_programs(self, num_sms: int) -> int:
        """Return how many programs multiply: one an SM, unless other kernels need one."""
        needs_one = self._meets or self.ctx.ranks_on_device > 1 or self.ctx.backend.streams_need_a_unit
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
        for stream in self._copy_streams:
            stream.wait_for_current()
            if self._meets:
                with stream.as_current():
                    self._run(meet_kernel, 1, num_warps=1, **handshake)
        for stream, copy in zip(cycle(self._copy_streams), self._copies, strict=False):
            if len(copy.destination):
                stream.copy_2d(copy.destination, source[copy.rows, copy.columns])
            stream.write_value(copy.flag, 1)
        self._run(kernel, num_programs, **{**multiply, **handshake}, came_ptr=self._came, PARTS=self._num_parts)
        for stream in self._copy_streams:
            stream.current_waits()

    @abstractmethod
    def _multiplication(self, a: torch.Tensor, b: torch.Tensor) -> tuple[Any, dict[str, Any]]:
        """Return the kernel that multiplies, and its arguments, but those that all these kernels share.

        It waits for the flags at `came_ptr`, one for each of PARTS parts and their chunks a rank, and ends the call.
        """
