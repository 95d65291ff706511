"""GEMM + all-reduce over several hosts: as reduce-scatter, then the sums are gathered, between hosts and inside them."""

from __future__ import annotations

import torch

from ..common.device.epilogue import finish_with_torch
from ..common.hierarchical.call import HierarchicalCall, Hierarchy, padded
from ..gemm_reduce_scatter import hierarchical as reduce_scatter
from ..gemm_reduce_scatter.host import FAMILY as SUMMING_FAMILY
from .problem import GemmAllReduceProblem


def run(call: HierarchicalCall[GemmAllReduceProblem], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    """Queue the sum of this rank's rows, finish it, and gather all ranks'."""
    problem, topology, own = call.problem, call.topology, call.rail.host
    rows, n = problem.shard_shape(0)
    total = reduce_scatter.sum_rows(call, a, b)
    own_rows = slice(*problem.rows(call.rank))
    operands = call.operands_of(problem.m, n, lambda whole: whole[own_rows])
    finished = finish_with_torch(total, problem.epilogue, operands).to(problem.out_dtype)
    c = finished.new_empty(topology.num_hosts, topology.ranks_per_host, rows, n)
    of_place = c[:, 0] if topology.ranks_per_host == 1 else finished.new_empty(topology.num_hosts, rows, n)
    of_place[own] = padded(finished, rows, n)
    transfers = {above: call.rail.exchange(below, of_place[own], above, of_place[above]) for above, below in call.distant()}
    for host in (own, *transfers):
        if host != own:
            transfers[host].wait()
        if topology.ranks_per_host > 1:
            call.ctx.local.ccl.all_gather(c[host], of_place[host])
    return (c.view(-1, n)[: problem.m],)


HIERARCHY = Hierarchy(SUMMING_FAMILY, reduce_scatter.inside, run, gathers_inside=True)
