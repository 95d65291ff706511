"""GEMM + all-reduce in one kernel for small M: every SM reads a part of the weights, whatever the number of tiles.

Programs split tiles (../common/portable/stream_k.py). The one that fixes a tile up stores its sum, a partial one, to
every rank's workspace, signals all of them at once, waits for theirs, and adds all ranks', its own too, in the order of
the ranks: every rank has the same bits, in every run. Where rows are normed it goes on after the signal, and programs
end with rows: each waits for all ranks' tiles of its own, adds and norms them (../../common/portable/row_norm.py).

The workspace is doubled, and calls use its halves alternately: every rank has seen all peers' flags in a call that it
has ended, so they are done with the half of the call before, and no rank waits for the peers to be ready. Flags hold
call numbers and are never reset.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from iris_core import gdc_wait, signal_each, wait_each
from overlap_taxonomy import Agent, Arrangement, Schedule, Sync

from ...common.device.arguments import Block
from ...common.device.handshake import begin_own_call, end_own_call, on_every_rank
from ...common.device.trace import STORE, SUM, WAIT, trace_span, trace_time
from ...common.launch.launch_metadata import Arguments, launch_metadata, peers_of
from ...common.portable import stream_k_host
from ...common.portable.gemm import store_subtile, store_tile, subtile_offsets, unfinished_block
from ...common.portable.row_norm import sum_and_norm_rows
from ...common.portable.stream_k import Halves, buffer_of_call, compute_stream_k
from ...common.variants.implementation import Implementation
from ...common.workspace import Buffer, flags_by_source
from ...gemm_reduce_scatter.host import ReduceCall
from .. import prediction
from ..problem import FAMILY


def _moved(args: Arguments) -> int:
    """Return how many elements are stored as partials to peers, and read as all ranks' partials."""
    return args["out"].m * args["out"].n * (2 * peers_of(args) + 1)


_METADATA = launch_metadata(product=lambda args: (args["out"].m, args["out"].n, args["gemm"].k), moved=_moved)


@triton.jit
def send_to_every_rank(acc, target, peers, row, col, tile, tiles, epoch, TILE: tl.constexpr):
    """Send a partial tile to all ranks."""
    out, workspace_ptr, flags_ptr = target
    partial_size = tl.cast(out.m, tl.int64) * out.n
    mine = unfinished_block(workspace_ptr + peers.rank * partial_size, out.m, out.n, out.n)
    began = trace_time(peers)
    store_tile(acc, mine, row, col, peers, TILE.WORLD_SIZE, TILE)
    flag_ptrs, all_ranks = on_every_rank(flags_ptr + peers.rank * tiles + tile, peers, TILE.WORLD_SIZE)
    # Edge: this tile's stores happen before what follows any rank's wait for the flag.
    signal_each(flag_ptrs, epoch, all_ranks >= 0)
    trace_span(peers, STORE, tile, began)


@triton.jit
def sum_on_every_rank(acc, target, peers, row, col, tile, tiles, epoch, TILE: tl.constexpr):
    """Send a partial tile to all ranks, and sum all ranks'."""
    out, workspace_ptr, flags_ptr = target
    send_to_every_rank(acc, target, peers, row, col, tile, tiles, epoch, TILE)
    ranks = tl.arange(0, triton.next_power_of_2(TILE.WORLD_SIZE))
    began = trace_time(peers)
    wait_each(flags_ptr + ranks * tiles + tile, epoch, ranks < TILE.WORLD_SIZE, peers.watchdog_ptr)
    began = trace_span(peers, WAIT, tile, began)
    # Halves of a wide tile, one after the other: both in registers would be too many.
    COLS: tl.constexpr = TILE.BLOCK_N // TILE.SUBTILES
    for index in range(TILE.SUBTILES):
        sum_subtile(out, workspace_ptr, peers, row, col + index * COLS, TILE.BLOCK_M, COLS, TILE)
    trace_span(peers, SUM, tile, began)


@triton.jit
def sum_subtile(out, workspace_ptr, peers, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr):
    """Add all ranks' partials of a subtile, in the order of the ranks, and store the sum."""
    partial_size = tl.cast(out.m, tl.int64) * out.n
    offsets, mask = subtile_offsets(out, row, col, ROWS, COLS)
    # .cg: the peers wrote it past this SM's L1, which may hold an older call's.
    total = tl.load(workspace_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    # Not unrolled: one rank's partial in registers at a time.
    for rank in range(1, TILE.WORLD_SIZE):
        partial_ptr = workspace_ptr + rank * partial_size
        total += tl.load(partial_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    store_subtile(total, out, row, col, peers, 1, ROWS, COLS, TILE)


@triton.jit(launch_metadata=_METADATA)
def gemm_all_reduce_fused_sequential_stream_k(
    a,
    b,
    gemm,
    out,
    workspace_ptr,
    flags_ptr,
    halves,
    stream_k,
    own,
    peers,
    norm,
    HAS_WHOLE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Send this rank's partial tiles to all ranks, and sum all ranks': tiles, or whole rows that are normed."""
    gdc_wait()
    epoch = begin_own_call(own)
    half = buffer_of_call(epoch, 2)
    target = (out, workspace_ptr + half * halves.data, flags_ptr + half * halves.flags)
    FINISH: tl.constexpr = sum_on_every_rank if NORM is None else send_to_every_rank
    compute_stream_k(
        a, gemm.a_scale_ptr, b, gemm, out, out, 0, stream_k, target, peers, epoch, FINISH, HAS_WHOLE, SPLITS, TILE
    )
    if NORM is not None:
        partial_size = tl.cast(out.m, tl.int64) * out.n
        _, partials_ptr, arrived_ptr = target
        sum_and_norm_rows(out, 0, partials_ptr, partial_size, arrived_ptr, out, norm, peers, epoch, NORM, TILE)
    end_own_call(own, epoch)


def workspace(call: ReduceCall) -> dict[str, Buffer]:
    """Return the buffers of all ranks' partials and of flags, each in two halves, and those of C and of split tiles."""
    problem, width, tiles = call.problem, call.width(call.problem.n), stream_k_host.all_tiles(call)
    partials = (call.world_size, problem.m, width)
    return {
        "output": Buffer((problem.m, width), problem.out_dtype),
        "staging": Buffer(partials, problem.dtype_of_partials, is_symmetric=True, halves=2),
        **stream_k_host.workspace(call),
        "flags": flags_by_source(call.world_size, tiles, "tile", "partial sum", halves=2),
    }


def outputs(call: ReduceCall) -> tuple[torch.Tensor]:
    """Return C."""
    return (call.memory["output"][:, : call.problem.n],)


def launch(call: ReduceCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel."""
    room = call.memory["output"]
    m, width = room.shape
    stream_k_host.run(
        call,
        gemm_all_reduce_fused_sequential_stream_k,
        a,
        b,
        out=Block(room, m, width, width, call.epilogue()),
        workspace_ptr=call.memory["staging"],
        flags_ptr=call.memory["flags"],
        halves=Halves(call.half_size("staging"), call.half_size("flags")),
        **call.norm(),
    )


VARIANT = Implementation(
    FAMILY,
    "fused_sequential",
    stream_k_host.plan,
    workspace,
    launch,
    outputs,
    schedule=Schedule.STREAM_K,
    norms_rows=True,
    predict=prediction.fused_sequential_stream_k,
    place=(Arrangement.FUSED_KERNEL, Agent.COMPUTING_PROGRAM, Sync.SPLIT_FLAG),
    summary="one kernel for small M; programs split a tile (stream-K), one sends it to every rank and adds all ranks'",
    former_name="one_shot",
    retired={"fused_sequential:portable": "fused_sequential"},
)
