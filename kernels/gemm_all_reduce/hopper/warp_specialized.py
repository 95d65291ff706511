"""GEMM + all-reduce in one kernel whose warps have different roles (Gluon, for Hopper), two-shot, for large M.

As GEMM + reduce-scatter (../gemm_reduce_scatter/hopper/warp_specialized.py), and every sum is sent to all ranks, by
subtiles, while the next tile is multiplied. A rank ends the call with the peers: their sums have arrived then. As C is
whole on every rank, it does not matter who sums what: rows are cut among the ranks, or columns where that makes fewer
tiles.
"""

from __future__ import annotations

from functools import partial

import torch

from overlap_taxonomy import Agent, Arrangement, Mainloop, Sync
from overlap_taxonomy.gemm_cost import tiles_of

from ...common.call import Device
from ...common.config import GemmConfig
from ...common.fp8.scales import SCALE_BLOCK
from ...common.hopper import host as hopper
from ...common.hopper.plan import BLOCK_M, Tiling, possible_tilings, predicted_us
from ...common.portable.operands import padded
from ...common.variants.implementation import Implementation
from ...common.workspace import Buffer
from ...gemm_reduce_scatter.hopper import warp_specialized as reduce_scatter
from ...gemm_reduce_scatter.hopper.tile_scheduler import MixedShards
from ...gemm_reduce_scatter.host import ReduceCall
from ...gemm_reduce_scatter.problem import GemmReduceScatterProblem
from .. import prediction
from ..problem import FAMILY, GemmAllReduceProblem


def plan(problem: GemmAllReduceProblem, device: Device) -> GemmConfig:
    """Return the tiling that is predicted to be fastest."""
    num_programs, k, world_size = device.num_sms, hopper.k_of_costs(problem), problem.world_size
    # As if every tile were sent to one peer: what that chooses is 0.5 % over the best width (results/notebook.md).
    peers = min(1, world_size - 1)

    def us(tiling: Tiling) -> float:
        rows = BLOCK_M * world_size * min(_tiles_of_shard(problem, tiling.block_n))
        return round(predicted_us(tiling, rows, tiling.block_n, k, num_programs=num_programs, peers=peers), 1)

    widest, promotion = hopper.widest(problem), hopper.promotion_of(problem)
    tilings = possible_tilings(k, num_programs=num_programs, splits=(1,), widest=widest, promotion=promotion)
    return hopper.config_of(problem, min(tilings, key=us), device)


def _tiles_of_shard(problem: GemmReduceScatterProblem, block_n: int) -> tuple[int, int]:
    """Return how many tiles of so many columns a shard has, of rows and of columns of C."""
    tile = BLOCK_M, block_n
    return tiles_of(*problem.shard_shape(0), tile), tiles_of(*_shard_of_columns(problem), tile)


def _shard_of_columns(problem: GemmReduceScatterProblem) -> tuple[int, int]:
    columns = -(-problem.n // problem.world_size)
    if "block" in problem.scales:
        return problem.m, -(-columns // SCALE_BLOCK) * SCALE_BLOCK  # so each begins with a block
    return problem.m, padded(columns, problem.out_dtype)  # so each begins on 16 bytes


def is_cut_by_columns(call: ReduceCall) -> bool:
    """Return whether ranks sum columns of C; else rows."""
    by_rows, by_columns = _tiles_of_shard(call.problem, call.config.block_n)
    return by_columns < by_rows


def shard_shape(call: ReduceCall) -> tuple[int, int]:
    """Return the (m, n) of the largest shard."""
    return _shard_of_columns(call.problem) if is_cut_by_columns(call) else call.problem.shard_shape(0)


def workspace(call: ReduceCall) -> dict[str, Buffer]:
    """Return the buffers of partials and flags, and of C, with a row behind it for the sums of a rank without any."""
    problem = call.problem
    output = Buffer((problem.m + 1, padded(problem.n, problem.out_dtype)), problem.out_dtype, is_symmetric=True)
    return {**reduce_scatter.room(call, shard_shape(call)), "output": output}


def outputs(call: ReduceCall) -> tuple[torch.Tensor]:
    """Return C."""
    return (call.memory["output"][: call.problem.m, : call.problem.n],)


def reduced(call: ReduceCall) -> torch.Tensor:
    """Return where this rank's sums go, in every rank's C."""
    whole, problem = call.memory["output"], call.problem
    _, m, width = call.memory["staging"].shape
    row, column = (0, call.rank * width) if is_cut_by_columns(call) else (call.rank * m, 0)
    mine = call.peer_view(whole)[:, row : min(row + m, problem.m), column : column + width]
    return mine if mine.numel() else call.peer_view(whole)[:, problem.m :]


def launch(call: ReduceCall, a: torch.Tensor, b: torch.Tensor) -> None:
    """Queue the kernel."""
    shard = shard_shape(call)

    def shards() -> MixedShards:
        return reduce_scatter.shards_of(call, shard, by_columns=is_cut_by_columns(call), sends_sums=True)

    reduce_scatter.queue(call, a, b, shard[1], call.kept("shards", shards), reduced(call))


VARIANT = Implementation(
    FAMILY,
    "warp_specialized",
    plan,
    workspace,
    launch,
    outputs,
    supports=partial(hopper.supports, can_split=False),
    can_describe=hopper.can_describe,
    mainloop=Mainloop.SM90,
    predict=prediction.warp_specialized_sm90,
    place=(Arrangement.FUSED_KERNEL, Agent.COMM_WARPS, Sync.SHARED_MEMORY_BARRIER),
    summary="one kernel; a warp of each program sends partials, paced, and sums to every rank (Hopper)",
)
