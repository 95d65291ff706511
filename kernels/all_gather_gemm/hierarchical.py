"""All-gather + GEMM over several hosts: shards arrive from the other hosts while those that are there are multiplied.

A rank sends its shard to the ranks at its place on the other hosts, host below first, and receives theirs: so each host
holds all of A, and each of its ranks one shard of every host. Inside the host, all-gather + GEMM multiplies a chunk of
the shards of one host at a time, those of this host first: one launch per chunk, behind its arrival in the stream.

The scales of an fp8 shard go ahead of its chunks, a scale per row where the shard's tensor has one. What is to be
quantised is so first, and travels as fp8 between hosts, too.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from iris_core.rendezvous.topology import Topology

from ..common.fp8.scales import scale_shapes
from ..common.hierarchical.call import PARTS, HierarchicalCall, Hierarchy, HostStep, cut, length, padded
from ..common.portable.quantise import QUANTISE_WARPS, quantise_arguments, quantise_rows
from .host import FAMILY, OPTIONS
from .problem import AllGatherGemmProblem


def steps(problem: AllGatherGemmProblem, topology: Topology, chunks: int) -> list[HostStep]:
    """Return the products: of the shards of this host, and of chunks of the others'."""
    rows, row_bytes = problem.a_shape(0)[0], problem.k * problem.dtype.itemsize + 4 * problem.scale_columns
    lengths = [length(chunk) for chunk in cut(rows, chunks)] * (topology.num_hosts - 1)
    arriving = [HostStep(_part(problem, topology, one), arrives_bytes=one * row_bytes) for one in lengths]
    return [HostStep(_part(problem, topology, rows)), *arriving]


@functools.lru_cache(PARTS)
def _part(problem: AllGatherGemmProblem, topology: Topology, rows: int) -> AllGatherGemmProblem:
    """Return the problem of so many rows of each shard of a host; all shards and blocks of columns are full."""
    size, scales = topology.ranks_per_host, problem.scales
    if scales[:1] == ("tensor",):
        scales = ("row", scales[1])
    how: dict[str, Any] = {"scales": scales, "a_dtype": problem.dtype}
    return replace(problem, m=size * rows, n=size * problem.b_shape(0)[1], world_size=size, **how)


def _as_it_travels(
    call: HierarchicalCall[AllGatherGemmProblem], a: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return this rank's shard and its scales, of rows or blocks, contiguous and with as many rows as any rank's."""
    problem, shape = call.problem, call.problem.a_shape(0)
    if not problem.scales:
        return padded(a, *shape).contiguous(), None
    scale_shape = (shape[0], problem.scale_columns)
    if not problem.is_quantised:
        scales = call.operands["a_scale"].expand(len(a), -1)
        return padded(a, *shape).contiguous(), padded(scales, *scale_shape).contiguous()
    shard, scales = a.new_zeros(shape, dtype=problem.dtype), a.new_zeros(scale_shape, dtype=torch.float32)
    if len(a):
        arguments = quantise_arguments(a, shard[: len(a)], scales[: len(a)])
        quantise_rows[(len(a),)](**arguments, num_warps=QUANTISE_WARPS)
    return shard, scales


def run(call: HierarchicalCall[AllGatherGemmProblem], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queue the transfers, then a product a chunk, each behind its transfer."""
    problem, topology, own = call.problem, call.topology, call.rail.host
    (rows, k), columns = problem.a_shape(0), problem.b_shape(0)[1]
    shard, scale = _as_it_travels(call, a)
    shards = [*shard.new_empty(topology.num_hosts, rows, k)]  # of the ranks at this one's place
    shards[own] = shard
    b = padded(b, k, columns, is_b=True)
    scales: list[torch.Tensor] = []
    b_scale: dict[str, torch.Tensor] = {}
    if scale is not None:
        scales = [*scale.new_empty(topology.num_hosts, *scale.shape)]
        scales[own] = scale
        shape = scale_shapes(problem.scales, (rows, k), (k, columns))["b_scale"]
        b_scale = {"b_scale": padded(call.operands["b_scale"], *shape)}
    chunks = cut(rows, call.chunks)
    transfers, of_scales = {}, {}
    for above, below in call.distant():
        if scale is not None:
            of_scales[above] = call.rail.exchange(below, scale, above, scales[above])
        for chunk in chunks:
            transfers[above, chunk.start] = call.rail.exchange(below, shard[chunk], above, shards[above][chunk])
    by_shard = topology.num_hosts, topology.ranks_per_host, rows
    c = a.new_empty(*by_shard, columns // problem.narrowing, dtype=problem.out_dtype)
    keeps_gathered = call.options["keep_gathered"]
    gathered = shard.new_empty(*by_shard, k) if keeps_gathered else None
    gathered_scale = None if scale is None else scale.new_empty(*by_shard, scale.shape[1])
    for host in (own, *(above for above, _ in call.distant())):
        if host in of_scales:
            of_scales[host].wait()
        for chunk in [slice(0, rows)] if host == own else chunks:
            if host != own:
                transfers[host, chunk.start].wait()
            part = _part(problem, topology, length(chunk))

            def take(whole: torch.Tensor, host: int = host, chunk: slice = chunk) -> torch.Tensor:
                taken = whole.view(*by_shard, *whole.shape[1:])[host, :, chunk]
                return taken.reshape(-1, *whole.shape[1:])

            operands = call.operands_of(problem.world_size * rows, columns, take) | b_scale
            if scale is not None:
                operands["a_scale"] = scales[host][chunk]
            place = c[host, :, chunk]
            whole = place.view(part.m, -1) if place.is_contiguous() else place
            _, *others = call.multiply(part, shards[host][chunk], b, out=whole, operands=operands)
            if gathered is not None:
                gathered[host, :, chunk] = others[0].view(topology.ranks_per_host, -1, k)
                if gathered_scale is not None:
                    gathered_scale[host, :, chunk] = others[1].view(topology.ranks_per_host, -1, problem.scale_columns)
    output = c.view(-1, c.shape[-1])[: problem.m, : problem.c_shape(call.rank)[1]]
    kept = [one for one in (gathered, gathered_scale) if one is not None] if keeps_gathered else []
    return output, *(one.flatten(0, 2)[: problem.m] for one in kept)


HIERARCHY = Hierarchy(FAMILY, steps, run, OPTIONS)
