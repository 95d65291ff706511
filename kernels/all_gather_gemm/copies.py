"""What the variants share whose shards the copy engines push: all of it but what multiplies.

| queue | work |
|---|---|
| copy stream¹ | for each peer and chunk of the shard: copy it · set its flag there |
| current stream | multiply shards as they come; zero the flags, and end the call with the peers |

¹ one per peer where each is behind a link of its own: all shards then come at the same time

The queue itself sets a flag, by a stream memory operation. That takes 7 µs less than a kernel that counts after the
copy, and no SM; but what it writes is a constant, as a captured graph must have, so flags are not numbered. From a
second queue, while the next copy is under way, they came hundreds of µs late where the call was launched as a graph.

A call ends when all ranks have multiplied all shards: *done* says that, so the next call's copies wait for no rank.
Flags are zeroed before. Where the caller reads the gathered A (`keep_gathered`), his reads come after: then the copy
stream begins with a barrier of all ranks. It is a single program, the peers wait for it, and the programs of a GEMM can
fill all the registers of an SM: so the GEMM leaves it one, as it does where copies are kernels: on AMD GPUs what sets a
flag is one, and between ranks that share a GPU the copy. The library's GEMM leaves it none: there the barrier is in the
current stream.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from iris_core.backends.base import Stream

from ..common.call import Device
from ..common.config import programs_beside_another
from ..common.device.handshake import begin_call, wait_ready
from ..common.portable.operands import rows_lie_apart
from ..common.workspace import Buffer, flags_by_source
from . import host
from .gather_plan import k_chunks_of, row_chunks_of
from .host import GatherCall


@triton.jit
def all_gather_gemm_copy_engine_barrier(peers, WORLD_SIZE: tl.constexpr):
    """Wait for all ranks: what was gathered before has been read on every rank.

    The number of the call that it reads is the right one: the call ends when the peers have what is copied after it.
    """
    wait_ready(peers, begin_call(peers, WORLD_SIZE), WORLD_SIZE)


class Copy(NamedTuple):
    """Which rows and columns of the shard, to the rank how far below, where they go, and the flag to set there.

    Before a peer's first, all scales of the shard go to `scales`, one behind the other: its flags are theirs, too.
    """

    rows: slice
    columns: slice
    distance: int
    destination: torch.Tensor
    flag: torch.Tensor
    scales: torch.Tensor | None = None


class ShardChunks(NamedTuple):
    """How a shard is cut: `row_chunks` of `chunk_rows` rows, and each of these into `k_chunks` of `chunk_steps` steps.

    Where there are k chunks, it is the last shard to come that is cut, and the others have one flag, their first.
    """

    chunk_rows: int
    row_chunks: int
    chunk_steps: int
    k_chunks: int


def shard_chunks(call: GatherCall, most_row_chunks: int = 1, most_k_chunks: int = 1) -> ShardChunks:
    """Return how a shard is cut into so many chunks at most; the same on all ranks."""
    config, (shard_rows, k) = call.config, call.problem.a_shape(0)
    row_tiles, steps = -(-shard_rows // config.block_m), -(-k // config.block_k)
    chunk_row_tiles, row_chunks = row_chunks_of(row_tiles, config.group_m, most_row_chunks)
    chunk_steps, k_chunks = k_chunks_of(steps, most_k_chunks)
    return ShardChunks(chunk_row_tiles * config.block_m, row_chunks, chunk_steps, k_chunks)


def flags_buffer(call: GatherCall, chunks: ShardChunks) -> dict[str, Buffer]:
    """Return the buffer of the chunks' flags."""
    count = chunks.row_chunks * chunks.k_chunks
    return {"flags": flags_by_source(call.world_size, count, "chunk", "shard", are_numbered=False)}


def copies_of(call: GatherCall, chunks: ShardChunks) -> list[Copy]:
    """Return the copies in their order: the rank below needs this shard first."""
    rank, world_size = call.rank, call.world_size
    shards = call.peer_view(host.gathered(call))[:, host.own_rows(call)]
    flags = call.peer_view(call.memory["flags"])[:, rank]
    height, width = chunks.chunk_rows, chunks.chunk_steps * call.config.block_k
    row_chunks = [slice(chunk * height, (chunk + 1) * height) for chunk in range(chunks.row_chunks)]
    k_chunks = [slice(chunk * width, (chunk + 1) * width) for chunk in range(chunks.k_chunks)]
    own_scales, all_scales = host.gathered_scale(call), None
    if own_scales is not None and shards.shape[1]:
        all_scales = call.peer_view(own_scales)[:, host.own_rows(call)].flatten(1)[:, None]
    copies = []
    for distance in range(1, world_size):
        peer = (rank - distance) % world_size
        is_cut = chunks.k_chunks == 1 or distance == world_size - 1
        found = product(row_chunks, k_chunks) if is_cut else [(slice(None), slice(None))]
        for flag, (rows, columns) in enumerate(found):
            scales = None if all_scales is None or flag else all_scales[peer]
            copies.append(Copy(rows, columns, distance, shards[peer, rows, columns], flags[peer, flag], scales))
    return copies


def prepare(call: GatherCall, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queue what comes first, as `host.prepare`, and a copy of A's scales where they are not one row."""
    scales = call.operands.get("a_scale")
    if scales is not None and not host.keeps_gathered(call) and not _are_one_row(call, scales):
        host.copy_scale(call)
    return host.prepare(call, a, b)


def _are_one_row(call: GatherCall, scales: torch.Tensor) -> bool:
    """Return whether scales lie one behind the other, one a row of A or more."""
    gathered = host.gathered_scale(call)
    assert gathered is not None
    return scales.shape == gathered[host.own_rows(call)].shape and scales.is_contiguous()


def _scales_as_row(call: GatherCall) -> torch.Tensor | None:
    """Return this rank's scales of A as one row, where `prepare` left them; None without scales."""
    gathered = host.gathered_scale(call)
    if gathered is None:
        return None
    scales = call.operands["a_scale"]
    return (scales if _are_one_row(call, scales) else gathered[host.own_rows(call)]).view(1, -1)


def begins_with_barrier(call: GatherCall) -> bool:
    """Return whether the copies begin with a barrier of all ranks."""
    return host.keeps_gathered(call) and call.world_size > 1


def num_programs(num_sms: int, device: Device, *, has_barrier: bool) -> int:
    """Return how many programs multiply: one an SM, unless other kernels need one."""
    needs_one = has_barrier or device.ranks > 1 or device.streams_need_a_unit
    return programs_beside_another(num_sms) if needs_one else num_sms


def queue_copies(call: GatherCall, a: torch.Tensor, chunks: ShardChunks, *, has_barrier_beside: bool) -> list[Stream]:
    """Queue the copies, beside the current stream, and return the streams that they are in.

    Args:
        call: the call.
        a: this rank's shard, as `prepare` returned it.
        chunks: how it is cut.
        has_barrier_beside: whether a barrier, where there is one, is beside the current stream, too, and not in it.
    """
    source = a
    if not rows_lie_apart(a):  # as a copy engine needs them
        source = host.gathered(call)[host.own_rows(call)]
        if not host.keeps_gathered(call):
            call.copy(source, "A", a)
    scales = _scales_as_row(call)
    has_barrier, streams = begins_with_barrier(call), call.copy_streams()
    if has_barrier and not has_barrier_beside:
        _queue_barrier(call)
    streams[0].wait_for_current()
    if has_barrier and has_barrier_beside:
        with streams[0].as_current():
            _queue_barrier(call)
    for other in streams[1:]:
        with streams[0].as_current():
            other.wait_for_current()  # and so for the barrier
    for copy in call.kept("copies", lambda: copies_of(call, chunks)):
        copies = streams[(copy.distance - 1) % len(streams)]
        if scales is not None and copy.scales is not None:
            copies.copy_2d(copy.scales, scales)
        if copy.destination.shape[0]:
            copies.copy_2d(copy.destination, source[copy.rows, copy.columns])
        copies.write_value(copy.flag, 1)
    return streams


def _queue_barrier(call: GatherCall) -> None:
    kernel = all_gather_gemm_copy_engine_barrier
    call.run(kernel, 1, num_warps=1, peers=call.peers(), WORLD_SIZE=call.world_size)


def queue(
    call: GatherCall,
    a: torch.Tensor,
    chunks: ShardChunks,
    kernel: Any,
    arguments: dict[str, Any],
    num_warps: int | None = None,
) -> None:
    """Queue the copies, and beside them the kernel that multiplies.

    Args:
        call, a, chunks: as `queue_copies` takes them.
        kernel: waits for the flags at `flags_ptr`, one per rank for each chunk of ROW_CHUNKS row chunks, and ends the
            call.
        arguments: what it takes, but what all these kernels share.
        num_warps: it is launched with; None for the configuration's.
    """
    streams = queue_copies(call, a, chunks, has_barrier_beside=True)
    shared = {"peers": call.peers(), "flags_ptr": call.memory["flags"], "ROW_CHUNKS": chunks.row_chunks}
    programs = num_programs(call.config.num_sms, call.device, has_barrier=begins_with_barrier(call))
    call.run(kernel, programs, num_warps=num_warps, **{**arguments, **shared})
    for copies in streams:
        copies.current_waits()
