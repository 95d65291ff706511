"""GEMM + all-scatter over several hosts: a rank's columns of C leave in chunks of rows, and are spread on arrival.

Inside the host, GEMM + all-scatter gives the host's columns of a chunk of rows. Each rank sends its own columns of them
to the ranks at its place on the other hosts while the next chunk is multiplied; what it receives, it gathers with the
other ranks of its host.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import replace

import torch

from iris_core.rendezvous.topology import Topology

from ..common.hierarchical.call import PARTS, HierarchicalCall, Hierarchy, HostStep, cut, length, padded, rows_of
from .host import FAMILY
from .problem import GemmAllScatterProblem


def steps(problem: GemmAllScatterProblem, topology: Topology, chunks: int) -> list[HostStep]:
    """Return the products of chunks of rows, and what it takes to spread what has come."""
    row_bytes, others = problem.b_shape(0)[1] * problem.out_dtype.itemsize, topology.num_hosts - 1
    products = [
        HostStep(
            _part(problem, topology, length(chunk)),
            leaves_bytes=others * length(chunk) * row_bytes,
            moved_bytes=2 * length(chunk) * topology.ranks_per_host * row_bytes,
        )
        for chunk in cut(problem.m, chunks)
    ]
    block_bytes = others * problem.m * row_bytes
    spread_bytes = 2 * topology.ranks_per_host * block_bytes
    gathered_bytes = (topology.ranks_per_host - 1) * block_bytes
    return [*products, HostStep(None, is_last=True, moved_bytes=spread_bytes, gathered_bytes=gathered_bytes)]


@functools.lru_cache(PARTS)
def _part(problem: GemmAllScatterProblem, topology: Topology, rows: int) -> GemmAllScatterProblem:
    size = topology.ranks_per_host
    return replace(problem, m=rows, n=size * problem.b_shape(0)[1], world_size=size)


def run(call: HierarchicalCall[GemmAllScatterProblem], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    """Queue a product a chunk, and its transfers behind it; then spread what has come."""
    problem, topology, own, place = call.problem, call.topology, call.rail.host, call.rail.place
    size, (k, columns), chunks = topology.ranks_per_host, problem.b_shape(0), cut(problem.m, call.chunks)
    b, scales = padded(b, k, columns, is_b=True), call.scales((problem.m, k), (k, columns))
    c = a.new_empty(problem.m, topology.num_hosts, size, columns, dtype=problem.out_dtype)
    blocks = [c.new_empty(topology.num_hosts, length(one), columns) for one in chunks]
    transfers = {}
    for chunk, received in zip(chunks, blocks, strict=True):
        part = _part(problem, topology, length(chunk))
        operands = call.operands_of(problem.m, columns, operator.itemgetter(chunk)) | scales
        if scales:
            operands["a_scale"] = rows_of(scales["a_scale"], problem.scales[0], chunk)
        call.multiply(part, a[chunk], b, out=c[chunk, own], operands=operands)
        received[own] = c[chunk, own, place]
        for above, below in call.distant():
            transfers[above, chunk.start] = call.rail.exchange(above, received[own], below, received[below])
    for chunk, received in zip(chunks, blocks, strict=True):
        for above, below in call.distant():
            transfers[above, chunk.start].wait()
            c[chunk, below] = _spread(call, received[below]).transpose(0, 1)
    return (c.view(problem.m, -1)[:, : problem.n],)


def _spread(call: HierarchicalCall[GemmAllScatterProblem], block: torch.Tensor) -> torch.Tensor:
    """Return the blocks of all ranks of this host, by rank."""
    if call.topology.ranks_per_host == 1:
        return block[None]
    gathered = block.new_empty(call.topology.ranks_per_host, *block.shape)
    call.ctx.local.ccl.all_gather(gathered, block)
    return gathered


HIERARCHY = Hierarchy(FAMILY, steps, run, baseline="library_layout", gathers_inside=True)
