"""GEMM + reduce-scatter in one kernel whose warps have different roles (Gluon, for Hopper).

| warps of a program | do | wait for |
|---|---|---|
| 8, two warp groups | multiply, add the peers' partials to own tiles, stage tiles | operands; partials; a free store |
| 1 | loads operands, and meanwhile stores the tile before at its owner, by subtiles | empty stages; the staged tile |
| 1 | signals what has been stored (../common/hopper/pipeline.py) | its arrival |
| 1 | loads the peers' partials of own tiles | the peers' flags; empty stages |

Own tiles come among the peers', when their partials have had the time to arrive (tile_scheduler.py). So all the time
there is as much to send as there is to multiply; with all own tiles last, the link would limit the first part of the
call, and idle in the last. Sums start from the fp32 accumulators, add the peers' partials in a fixed order and are
rounded once. The main loop paces the stores (../common/hopper/epilogue_store.py). Sums are stored as any other tile, to
this rank's output, which no peer stores to; in all-reduce to every rank's. The kernel is launched early, by
programmatic dependent launch (../common/hopper/roles.py). Pattern: arXiv 2511.12500, section 4 ("wave specialization"),
with the reduction in the epilogue.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core import fence_before_descriptor_loads, gdc_launch_dependents, gdc_wait, wait
from iris_core.device.cache_key import in_cache_key
from overlap_taxonomy import Agent, Arrangement, Mainloop, Sync

from ...common.call import Device
from ...common.config import GemmConfig
from ...common.device.handshake import begin_call, finish_after_arrivals, finish_call, wait_ready
from ...common.device.trace import COLLECT, COLLECT_WAIT, SEND_WAIT, trace_span, trace_time
from ...common.hopper import host as hopper
from ...common.hopper.arguments import TileStaging
from ...common.hopper.epilogue_load import load_partials, make_epilogue_load
from ...common.hopper.epilogue_store import (
    load_and_send,
    load_prologue,
    make_epilogue_store,
    release_store,
    send_last,
    wait_stores_arrived,
)
from ...common.hopper.pipeline import (
    commit_signal,
    consumer_release,
    consumer_wait,
    load_steps,
    make_operand_pipeline,
    make_pipeline,
    pipeline_state,
    producer_commit,
)
from ...common.hopper.plan import Tiling, tile_alone_us, tile_sent_us
from ...common.hopper.roles import first_role, worker_registers, worker_warps
from ...common.hopper.tile_loop import load_tiles, multiply_second, multiply_tiles
from ...common.hopper.waves import make_waves, trace_number, whole_tile
from ...common.launch.launch_metadata import Arguments, launch_metadata, peers_of, size_of_shard
from ...common.portable.gemm import DESCRIPTORS_B_NK
from ...common.portable.operands import padded
from ...common.portable.partials import signal_partial
from ...common.variants.implementation import Implementation
from ...common.workspace import Buffer, flags_by_source
from .. import prediction
from ..host import FAMILY, KEPT, ReduceCall
from ..problem import GemmReduceScatterProblem
from .tile_scheduler import MixedShards, mixed, mixed_shards


def _product(args: Arguments) -> tuple[int, int, int]:
    n = args["b"].shape[0] if DESCRIPTORS_B_NK.value == args["TILE"].LOADS else args["b"].shape[1]
    return args["a"].shape[0], n, args["shards"].k


def _moved(args: Arguments) -> int:
    """Return how many elements are stored as partials to peers, read as peers' partials and stored as sums to peers."""
    (m, n, _), shards, rank = _product(args), args["shards"], args["peers"].rank
    by_columns = shards.rows_apart == 0
    own = m * size_of_shard(n, shards.n, rank) if by_columns else size_of_shard(m, shards.m, rank) * n
    return m * n - own + own * (peers_of(args) + int(args["TILE"].SUM_RANKS) - 1)


@in_cache_key
class SummingLoadWarp(NamedTuple):
    """As LoadWarp; sums go to `reduced`, a descriptor of `WarpTile.SUM_RANKS` ranks, and all other tiles to `out`.

    `load` is the epilogue load that takes turns with the store, `signals` the pipeline to the warp that signals.
    """

    pipeline: Any
    store: Any
    out: Any
    reduced: Any
    load: Any
    signals: Any


@in_cache_key
class SentPartials(NamedTuple):
    """What the load warp has sent: how many tiles are `signalled`.

    `is_owed`: a peer's tile was sent, and its signal is not committed; `is_held`: what was sent last is still in shared
    memory.
    """

    is_owed: Any
    is_held: Any
    signalled: Any


@gluon.jit(launch_metadata=launch_metadata(product=_product, moved=_moved))
def gemm_reduce_scatter_warp_specialized_sm90(
    a, b, out, reduced, partials, shards, epilogue, scales, peers, TILE: gl.constexpr
):
    """Send the partial tiles of the peers' shards, and sum this rank's into `reduced`, of one rank or of all."""
    pipeline = make_operand_pipeline(a, b, TILE)
    store = make_epilogue_store(out, TILE)
    load = make_epilogue_load(store, partials, TILE)
    signals = make_pipeline(1)
    gdc_wait()
    epoch = begin_call(peers, TILE.WORLD_SIZE)
    waves = make_waves(shards.tiles * TILE.WORLD_SIZE, gl.cdiv(shards.k, TILE.BLOCK_K), TILE)
    staging = TileStaging(store, load, epilogue, shards, scales, None)
    warp = SummingLoadWarp(pipeline, store, out, reduced, load, signals)
    gl.warp_specialize(
        [
            (multiply_second, (pipeline, staging, waves, peers, TILE)),
            (multiply_tiles, (pipeline, staging, waves, None, peers, epoch, TILE)),
            (_load_and_send_partials, (a, b, warp, waves, shards, peers, epoch, TILE)),
            (_collect, (partials, load, waves, shards, peers, epoch, TILE)),
            (_signal, (signals, waves, shards, peers, epoch, TILE)),
        ][first_role(TILE.PINGPONG) :],
        worker_warps(3, TILE.PINGPONG),
        worker_registers(3, TILE.PINGPONG),
    )


@gluon.jit
def _load_and_send_partials(a, b, warp, waves, shards, peers, epoch, TILE: gl.constexpr):
    sent = SentPartials(False, False, 0)
    last, sent = load_tiles(a, b, warp, waves, shards, sent, peers, epoch, send_partial_or_sum, TILE)
    gdc_launch_dependents()  # the last operands have been asked for
    if sent.is_held:
        release_store(warp.store)
    signalled = _commit_if_owed(warp.signals, sent.is_owed, sent.signalled)
    if last.owner == peers.rank:
        send_last(warp, warp.reduced, last, waves.whole, False, peers, TILE.SUM_RANKS, TILE.SUM_RANKS, TILE)
    else:
        send_last(warp, warp.out, last, waves.whole, False, peers, 1, TILE.WORLD_SIZE, TILE)
    began = trace_time(peers)
    wait_stores_arrived()
    trace_span(peers, SEND_WAIT, trace_number(waves.whole - 1), began)
    _commit_if_owed(warp.signals, (waves.whole > 0) & (last.owner != peers.rank), signalled)
    if TILE.SUM_RANKS == 1:
        finish_after_arrivals(peers, epoch, gl.num_programs(0), TILE.WORLD_SIZE)
    else:
        finish_call(peers, epoch, gl.num_programs(0), TILE.WORLD_SIZE)


@gluon.jit
def send_partial_or_sum(operands, warp, number, split, work, wave, pending, sent, peers, epoch, TILE: gl.constexpr):
    """Load a tile's operands while the tile before goes to its owner, a sum to `warp.reduced`: a SEND.

    A peer's tile is signalled when it has arrived. During an own tile the epilogue store's memory is given to the
    peers' partials of it.
    """
    number, start = load_prologue(operands, warp, number, split, sent.is_held, TILE)
    # With steps loaded ahead, and long after the last store, there is nothing to wait for any more.
    signalled = _commit_if_owed(warp.signals, sent.is_owed, sent.signalled)
    is_owed = pending.owner != peers.rank
    # Partials need the store's memory: what is there during an own tile leaves in half of its main loop.
    is_own = work.owner == peers.rank
    stop = gl.where(is_own, (start + split.stop) // 2, split.stop)
    if pending.owner == peers.rank:
        RANKS: gl.constexpr = TILE.SUM_RANKS
        number = load_and_send(
            operands, warp, warp.reduced, number, start, stop, pending, wave, peers, RANKS, RANKS, TILE
        )
    else:
        number = load_and_send(
            operands, warp, warp.out, number, start, stop, pending, wave, peers, 1, TILE.WORLD_SIZE, TILE
        )
    is_held = wave > 0
    if is_own:
        if wave > 0:
            release_store(warp.store)
        producer_commit(warp.load.memory, 0)
        number = load_steps(operands, warp.pipeline, number, stop, split.stop, TILE)
        signalled = _commit_if_owed(warp.signals, is_owed, signalled)
        is_owed = False
        is_held = False
    elif wave == 0:  # with an own tile first, what is sent later are sums of partials of this call: all peers are ready
        began = trace_time(peers)
        wait_ready(peers, epoch, TILE.WORLD_SIZE)
        trace_span(peers, SEND_WAIT, trace_number(wave), began)
    return number, SentPartials(is_owed, is_held, signalled)


@gluon.jit
def _commit_if_owed(signals, is_owed, signalled):
    """Commit the signal of a tile that was sent, if it is a peer's; return how many of them there were."""
    if is_owed:
        wait_stores_arrived()
        commit_signal(signals, signalled)
        signalled += 1
    return signalled


@gluon.jit
def _signal(signals, waves, shards, peers, epoch, TILE: gl.constexpr):
    """Signal to the owners of the tiles that were sent that this rank's partials of them are there."""
    signalled = 0
    for wave in range(waves.whole):
        sent = mixed(whole_tile(wave, waves), shards, peers.rank, TILE)
        if sent.owner != peers.rank:
            consumer_wait(signals, pipeline_state(signals, signalled))
            signal_partial(shards, peers, sent.turn * shards.tiles + sent.tile, shards.tiles, epoch, TILE.WORLD_SIZE)
            consumer_release(signals, 0)
            signalled += 1


@gluon.jit
def _collect(partials, load, waves, shards, peers, epoch, TILE: gl.constexpr):
    number = 0
    collected = 0
    # Alone there is nothing to collect, and so nothing that would hold the loader back: it could be two phases ahead.
    for wave in range(waves.whole if TILE.WORLD_SIZE > 1 else 0):
        work = mixed(whole_tile(wave, waves), shards, peers.rank, TILE)
        if work.owner == peers.rank:
            began = trace_time(peers)
            for distance in range(1, TILE.WORLD_SIZE):
                peer = (peers.rank + distance) % TILE.WORLD_SIZE
                wait(shards.flags_ptr + peer * shards.tiles + work.tile, epoch, peers.watchdog_ptr)
            fence_before_descriptor_loads()
            trace_span(peers, COLLECT_WAIT, trace_number(wave), began)
            consumer_wait(load.memory, pipeline_state(load.memory, collected))
            began = trace_time(peers)
            number = load_partials(load, partials, number, peers.rank, work.row, work.col, TILE)
            trace_span(peers, COLLECT, trace_number(wave), began)
            collected += 1


def plan(problem: GemmReduceScatterProblem, device: Device) -> GemmConfig:
    """Return the tiling that is predicted to be fastest."""
    return hopper.plan(problem, device, peers=0, shards=problem.world_size)


def room(call: ReduceCall, shard: tuple[int, int]) -> dict[str, Buffer]:
    """Return the buffers of partials, whose rows are on 16 bytes, and of flags.

    Args:
        call: the call.
        shard: the (m, n) of the largest shard.
    """
    m, n = shard
    world_size, dtype = call.world_size, call.problem.out_dtype
    return {
        "staging": Buffer((world_size, m, padded(n, dtype)), dtype, is_symmetric=True),
        "flags": flags_by_source(world_size, call.num_tiles(m, n), "tile", "partial sum"),
    }


def workspace(call: ReduceCall) -> dict[str, Buffer]:
    """Return these buffers, and that of C."""
    return {**room(call, call.problem.shard_shape(0)), **KEPT.workspace(call)}


def shards_of(call: ReduceCall, shard: tuple[int, int], *, by_columns: bool, sends_sums: bool) -> MixedShards:
    """Return the order of the tiles.

    Args:
        call: the call.
        shard: the (m, n) of the largest shard.
        by_columns: whether ranks sum columns of C; else rows.
        sends_sums: whether sums go to every rank.
    """
    problem, config = call.problem, call.config
    m, n = shard
    tiling = Tiling(config.block_n, config.splits, config.pingpong, hopper.promotion_of(problem))
    return mixed_shards(
        call.memory["flags"],
        m=m,
        n=n,
        k=problem.a_shape(call.rank)[1],
        by_columns=by_columns,
        tiles=call.num_tiles(m, n),
        tile_us=tile_alone_us(tiling, hopper.k_of_costs(problem)),
        wave_sent_us=config.num_sms * tile_sent_us(tiling, peers=1) * problem.out_dtype.itemsize / 2,
        sends_sums=sends_sums,
        num_programs=config.num_sms,
        world_size=problem.world_size,
    )


def queue(
    call: ReduceCall,
    a: torch.Tensor,
    b: torch.Tensor,
    n: int,
    shards: MixedShards,
    reduced: torch.Tensor,
    first_row: int = 0,
) -> None:
    """Queue the kernel.

    Args:
        call, a, b: the call.
        n: columns of the largest shard.
        shards: the order of the tiles.
        reduced: where sums are sent, (rank, row, column), of this rank alone or of all.
        first_row: of this rank's C, that row 0 of A would be; negative where A has other ranks' rows before its own.
    """
    staging = call.memory["staging"]
    hopper.run(
        call,
        gemm_reduce_scatter_warp_specialized_sm90,
        a,
        b,
        mixed,
        first_row=first_row,
        sum_ranks=len(reduced),
        out=hopper.subtiles_of(call, call.peer_view(staging)[:, call.rank, :, :n]),
        reduced=hopper.subtiles_of(call, reduced),
        partials=hopper.tile_columns_of(call, staging[:, :, :n]),
        shards=shards,
        scales=hopper.scales_of(call, a, b),
    )


def launch(call: ReduceCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel."""
    shard = call.problem.shard_shape(0)
    shards = call.kept("shards", lambda: shards_of(call, shard, by_columns=False, sends_sums=False))
    sums = call.memory["output"][None, :, : shard[1]]
    queue(call, a, b, shard[1], shards, sums, first_row=-call.rank * shard[0])


VARIANT = Implementation(
    FAMILY,
    "warp_specialized",
    plan,
    workspace,
    launch,
    KEPT.outputs,
    supports=partial(hopper.supports, can_split=False),
    can_describe=hopper.can_describe,
    mainloop=Mainloop.SM90,
    predict=prediction.warp_specialized_sm90,
    place=(Arrangement.FUSED_KERNEL, Agent.COMM_WARPS, Sync.SHARED_MEMORY_BARRIER),
    summary="one kernel; a warp of each program sends partial tiles, paced, another loads the peers' (Hopper)",
)
