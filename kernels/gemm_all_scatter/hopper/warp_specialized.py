"""GEMM + all-scatter in one kernel whose warps have different roles (Gluon, for Hopper).

| warps of a program | do | wait for |
|---|---|---|
| 8, two warp groups | multiply tiles, and stage each in shared memory | full stages; the epilogue store to be empty |
| 1 | loads operands, and meanwhile stores the tile before to every rank, by subtiles | empty stages; the staged tile |

The main loop paces the stores (../common/hopper/epilogue_store.py). What is finished at the end is sent after the last
multiplication, so the last tiles can be split over programs, which end them earlier (../common/hopper/fixup.py). Before
its first store a program waits once for the peers to be ready, and it takes part in ending the call when all its stores
have arrived. The kernel is launched early (../common/hopper/roles.py). Pattern: arXiv 2511.12500, section 4, which
names "wave specialization" and leaves it unbuilt.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris_core import gdc_launch_dependents, gdc_wait
from overlap_taxonomy import Agent, Arrangement, Mainloop, Sync

from ...common.call import Call, Device
from ...common.config import GemmConfig
from ...common.device.handshake import begin_call, finish_call, wait_ready
from ...common.device.tile_scheduler import num_tiles, row_grouped
from ...common.device.trace import SEND_WAIT, trace_span, trace_time
from ...common.hopper import host as hopper
from ...common.hopper.arguments import LoadWarp, Sizes, TileStaging
from ...common.hopper.epilogue_store import make_epilogue_store, send_last, wait_stores_arrived
from ...common.hopper.pipeline import make_operand_pipeline
from ...common.hopper.roles import first_role, worker_registers, worker_warps
from ...common.hopper.tile_loop import load_and_send_tile, load_tiles, multiply_second, multiply_tiles
from ...common.hopper.waves import make_waves, trace_number
from ...common.launch.launch_metadata import Arguments, launch_metadata, peers_of
from ...common.portable.operands import ROW_BYTES, padded
from ...common.variants.implementation import Implementation
from ...common.workspace import Buffer
from .. import prediction
from ..host import FAMILY
from ..problem import GemmAllScatterProblem


def _sent(args: Arguments) -> int:
    return args["sizes"].m * args["sizes"].n * peers_of(args)


@gluon.jit(launch_metadata=launch_metadata(product=lambda args: args["sizes"], moved=_sent))
def gemm_all_scatter_warp_specialized_sm90(a, b, out, workspace, sizes, epilogue, scales, peers, TILE: gl.constexpr):
    """Compute this rank's block of C into every rank's C."""
    pipeline = make_operand_pipeline(a, b, TILE)
    store = make_epilogue_store(out, TILE)
    gdc_wait()
    epoch = begin_call(peers, TILE.WORLD_SIZE)
    waves = make_waves(num_tiles(sizes, TILE), gl.cdiv(sizes.k, TILE.BLOCK_K), TILE)
    staging = TileStaging(store, None, epilogue, sizes, scales, None)
    warp = LoadWarp(pipeline, store, out)
    gl.warp_specialize(
        [
            (multiply_second, (pipeline, staging, waves, peers, TILE)),
            (multiply_tiles, (pipeline, staging, waves, workspace, peers, epoch, TILE)),
            (_load_and_scatter, (a, b, warp, waves, sizes, peers, epoch, TILE)),
        ][first_role(TILE.PINGPONG) :],
        worker_warps(1, TILE.PINGPONG),
        worker_registers(1, TILE.PINGPONG),
    )


@gluon.jit
def _load_and_scatter(a, b, warp, waves, sizes, peers, epoch, TILE: gl.constexpr):
    last, _ = load_tiles(a, b, warp, waves, sizes, (), peers, epoch, send_to_all, TILE)
    gdc_launch_dependents()  # the last operands have been asked for
    num_waves = waves.whole + waves.split
    send_last(warp, warp.out, last, num_waves, num_waves > 1, peers, TILE.WORLD_SIZE, TILE.WORLD_SIZE, TILE)
    began = trace_time(peers)
    wait_stores_arrived()
    began = trace_span(peers, SEND_WAIT, trace_number(num_waves - 1), began)
    finish_call(peers, epoch, gl.num_programs(0), TILE.WORLD_SIZE)
    trace_span(peers, SEND_WAIT, trace_number(num_waves - 1), began)


@gluon.jit
def send_to_all(operands, warp, number, split, work, wave, pending, sent, peers, epoch, TILE: gl.constexpr):
    """Load a tile's operands while the tile before is sent to every rank, once the peers are ready: a SEND."""
    number = load_and_send_tile(operands, warp, number, split, wave, pending, peers, TILE.WORLD_SIZE, TILE)
    if wave == 0:
        began = trace_time(peers)
        wait_ready(peers, epoch, TILE.WORLD_SIZE)
        trace_span(peers, SEND_WAIT, trace_number(wave), began)
    return number, sent


def supports(problem: GemmAllScatterProblem, config: GemmConfig | None) -> str | None:
    """Return why this variant cannot do a problem here, or None."""
    if reason := hopper.supports(problem, config):
        return reason
    for rank in range(problem.world_size):
        start, stop = problem.columns(rank)
        if stop > start and start * problem.out_dtype.itemsize % ROW_BYTES:
            return f"rank {rank}'s columns of C start at {start}; TMA stores on a multiple of {ROW_BYTES} bytes"
    return None


def plan(problem: GemmAllScatterProblem, device: Device) -> GemmConfig:
    """Return the tiling that is predicted to be fastest, for the largest block of columns."""
    return hopper.plan(problem, device, peers=problem.world_size - 1, splits=(1, 2), pingpong=True)


def workspace(call: Call[GemmAllScatterProblem]) -> dict[str, Buffer]:
    """Return the buffers of C, whose rows are on 16 bytes, and of split tiles."""
    problem = call.problem
    output = Buffer((problem.m, padded(problem.n, problem.out_dtype)), problem.out_dtype, is_symmetric=True)
    return {"output": output, **hopper.split_buffers(call, call.config.num_sms, _sizes(call))}


def outputs(call: Call[GemmAllScatterProblem]) -> tuple[torch.Tensor]:
    """Return C."""
    return (call.memory["output"][:, : call.problem.n],)


def _sizes(call: Call[GemmAllScatterProblem]) -> Sizes:
    start, stop = call.problem.columns(call.rank)
    return Sizes(call.problem.m, stop - start, call.problem.k)


def _everywhere(call: Call[GemmAllScatterProblem]) -> TensorDescriptor:
    """Return this rank's columns of every rank's C."""
    start, stop = call.problem.columns(call.rank)
    # Where it has none, nothing is stored, but a descriptor needs some.
    columns = slice(start, stop) if stop > start else slice(0, 1)
    return hopper.subtiles_of(call, call.peer_view(call.memory["output"])[:, :, columns])


def launch(call: Call[GemmAllScatterProblem], a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel."""
    kernel = gemm_all_scatter_warp_specialized_sm90
    beside = {"out": _everywhere(call), "workspace": hopper.split_workspace(call), "sizes": _sizes(call)}
    hopper.run(call, kernel, a, b, row_grouped, scales=hopper.scales_of(call, a, b), **beside)


VARIANT = Implementation(
    FAMILY,
    "warp_specialized",
    plan,
    workspace,
    launch,
    outputs,
    supports=supports,
    can_describe=hopper.can_describe,
    mainloop=Mainloop.SM90,
    predict=prediction.warp_specialized_sm90,
    place=(Arrangement.FUSED_KERNEL, Agent.COMM_WARPS, Sync.SHARED_MEMORY_BARRIER),
    summary="one kernel; a warp of each program loads operands and sends the tile before, paced (Hopper)",
)
