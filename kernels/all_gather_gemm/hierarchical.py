"""All-gather + GEMM over several hosts: shards arrive from the other hosts while those that are there are multiplied.

A rank sends its shard to the ranks at its place on the other hosts, host below first, and receives theirs: so each host
holds all of A, and each of its ranks one shard of every host. Inside the host, all-gather + GEMM multiplies a chunk of
the shards of one host at a time, those of this host first: one launch a chunk, behind its arrival in the stream.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from iris_core.rendezvous.topology import Topology

from ..common.hierarchical.call import PARTS, HierarchicalCall, Hierarchy, HostStep, cut, length, padded
from .host import FAMILY, OPTIONS
from .problem import AllGatherGemmProblem


def steps(problem: AllGatherGemmProblem, topology: Topology, chunks: int) -> list[HostStep]:
    """Return the products: of the shards of this host, and of chunks of the others'."""
    rows, row_bytes = problem.a_shape(0)[0], problem.k * problem.dtype.itemsize
    lengths = [length(chunk) for chunk in cut(rows, chunks)] * (topology.num_hosts - 1)
    arriving = [HostStep(_part(problem, topology, one), arrives_bytes=one * row_bytes) for one in lengths]
    return [HostStep(_part(problem, topology, rows)), *arriving]


@functools.lru_cache(PARTS)
def _part(problem: AllGatherGemmProblem, topology: Topology, rows: int) -> AllGatherGemmProblem:
    """Return the problem of so many rows of each shard of a host; all shards and blocks of columns are full."""
    size = topology.ranks_per_host
    return replace(problem, m=size * rows, n=size * problem.b_shape(0)[1], world_size=size)


def run(call: HierarchicalCall[AllGatherGemmProblem], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queue the transfers, then a product a chunk, each behind its transfer."""
    problem, topology, own = call.problem, call.topology, call.rail.host
    (rows, k), columns = problem.a_shape(0), problem.b_shape(0)[1]
    received = a.new_empty(topology.num_hosts, rows, k)
    shards = [*received]  # of the ranks at this one's place
    shards[own] = padded(a, rows, k).contiguous()
    b = padded(b, k, columns)
    chunks = cut(rows, call.chunks)
    transfers = {
        (above, chunk.start): call.rail.exchange(below, shards[own][chunk], above, shards[above][chunk])
        for above, below in call.distant()
        for chunk in chunks
    }
    by_shard = topology.num_hosts, topology.ranks_per_host, rows
    c = a.new_empty(*by_shard, columns // problem.narrowing, dtype=problem.out_dtype)
    keeps_gathered = call.options["keep_gathered"]
    gathered = a.new_empty(*by_shard, k) if keeps_gathered else None
    for host in (own, *(above for above, _ in call.distant())):
        for chunk in [slice(0, rows)] if host == own else chunks:
            if host != own:
                transfers[host, chunk.start].wait()
            part = _part(problem, topology, length(chunk))

            def take(whole: torch.Tensor, host: int = host, chunk: slice = chunk) -> torch.Tensor:
                taken = whole.view(*by_shard, *whole.shape[1:])[host, :, chunk]
                return taken.reshape(-1, *whole.shape[1:])

            operands = call.operands_of(problem.world_size * rows, columns, take)
            place = c[host, :, chunk]
            whole = place.view(part.m, -1) if place.is_contiguous() else place
            _, *others = call.multiply(part, shards[host][chunk], b, out=whole, operands=operands)
            if gathered is not None:
                gathered[host, :, chunk] = others[0].view(topology.ranks_per_host, -1, k)
    output = c.view(-1, c.shape[-1])[: problem.m, : problem.c_shape(call.rank)[1]]
    return (output,) if gathered is None else (output, gathered.view(-1, k)[: problem.m])


HIERARCHY = Hierarchy(FAMILY, steps, run, OPTIONS)
