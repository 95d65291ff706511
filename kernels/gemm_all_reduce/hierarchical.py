"""GEMM + all-reduce over several hosts: as reduce-scatter, then the sums are gathered."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from iris_core.rendezvous.topology import Topology

from ..common.device.epilogue import finish_with_torch
from ..common.hierarchical.call import HierarchicalCall, Hierarchy, HostStep, padded
from ..gemm_reduce_scatter import hierarchical as reduce_scatter
from ..gemm_reduce_scatter.host import FAMILY as SUMMING_FAMILY
from .problem import GemmAllReduceProblem


def steps(problem: GemmAllReduceProblem, topology: Topology, chunks: int) -> list[HostStep]:
    """Return those of reduce-scatter, and the gathers."""
    shard_bytes = math.prod(problem.shard_shape(0)) * problem.out_dtype.itemsize
    gathered_bytes = (topology.ranks_per_host - 1) * shard_bytes
    *before, sums = reduce_scatter.steps(problem, topology, chunks)
    others = topology.num_hosts - 1
    sends = replace(sums, leaves_bytes=others * shard_bytes, gathered_bytes=gathered_bytes)
    return [*before, sends, HostStep(None, is_last=True, gathered_bytes=others * gathered_bytes)]


def run(call: HierarchicalCall[GemmAllReduceProblem], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queue the sum of this rank's rows, finish it, gather all ranks', and norm them."""
    problem, topology, own = call.problem, call.topology, call.rail.host
    rows, n = problem.shard_shape(0)
    total = reduce_scatter.sum_rows(call, a, b)
    own_rows = slice(*problem.rows(call.rank))
    operands = call.operands_of(problem.m, n, lambda whole: whole[own_rows])
    finished = finish_with_torch(total, problem.epilogue, operands).to(problem.out_dtype)
    c = finished.new_empty(topology.num_hosts, topology.ranks_per_host, rows, n)
    of_place = c[:, 0] if topology.ranks_per_host == 1 else finished.new_empty(topology.num_hosts, rows, n)
    of_place[own] = padded(finished, rows, n)
    transfers = {
        above: call.rail.exchange(below, of_place[own], above, of_place[above]) for above, below in call.distant()
    }
    for host in (own, *transfers):
        if host != own:
            transfers[host].wait()
        if topology.ranks_per_host > 1:
            call.ctx.local.ccl.all_gather(c[host], of_place[host])
    whole = c.view(-1, n)[: problem.m]
    return whole, *call.normed(whole)


HIERARCHY = Hierarchy(SUMMING_FAMILY, steps, run, gathers_inside=True)
