"""GEMM + reduce-scatter over several hosts: a host sums its partials, and sends the sum to the host that owns the rows.

Inside the host, GEMM + reduce-scatter sums the rows of one other host at a time, the next one first, in chunks of
columns: each rank has the sum for the rank at its place there, and sends it while the next chunk is multiplied. The
host's own rows come last, when the sums of other hosts are on their way. They are added in fp32, in the order of hosts.
Rows are finished, and normed, when they are whole.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch

from iris_core.rendezvous.topology import Topology

from ..common.device.epilogue import finish_with_torch
from ..common.hierarchical.call import (
    COLUMNS_OF_A_CHUNK,
    PARTS,
    HierarchicalCall,
    Hierarchy,
    HostStep,
    Transfer,
    columns_of,
    cut,
    length,
    padded,
    rows_of,
)
from .host import FAMILY
from .problem import GemmReduceScatterProblem

P = TypeVar("P", bound=GemmReduceScatterProblem)


def steps(problem: GemmReduceScatterProblem, topology: Topology, chunks: int) -> list[HostStep]:
    """Return the products of chunks of the other hosts' rows, those of this host's, and the sum."""
    rows, others, itemsize = problem.shard_shape(0)[0], topology.num_hosts - 1, problem.dtype_of_partials.itemsize
    widths = [length(chunk) for chunk in _chunks(problem, chunks)]
    leaving = [HostStep(_part(problem, topology, one), leaves_bytes=rows * one * itemsize) for one in widths * others]
    own = [HostStep(_part(problem, topology, width)) for width in widths]
    sums = HostStep(None, is_last=True, moved_bytes=(others + 2) * rows * problem.n * itemsize)
    return [*leaving, *own, sums]


def _chunks(problem: GemmReduceScatterProblem, chunks: int) -> list[slice]:
    return cut(problem.n, chunks, COLUMNS_OF_A_CHUNK)


@functools.lru_cache(PARTS)
def _part(problem: GemmReduceScatterProblem, topology: Topology, width: int) -> GemmReduceScatterProblem:
    """Return the problem of so many columns of one host's rows; all shards, and slices of k, are full."""
    size = topology.ranks_per_host
    m, k = size * problem.shard_shape(0)[0], size * problem.a_shape(0)[1]
    how: Any = {"b_dtype": problem.b_dtype, "scales": problem.scales, "use_fast_accum": problem.use_fast_accum}
    return GemmReduceScatterProblem(m, width, k, size, problem.dtype, (), problem.dtype_of_partials, **how)


def sum_rows(call: HierarchicalCall[P], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Queue the products, transfers and sums; return this rank's rows of the whole sum: fp32 if the problem has an
    epilogue, or partials of another dtype than C.
    """
    problem, topology, own = call.problem, call.topology, call.rail.host
    (rows, n), k = problem.shard_shape(0), problem.a_shape(0)[1]
    of_host, chunks = topology.ranks_per_host * rows, _chunks(problem, call.chunks)
    b, scales = padded(b, k, n, is_b=True), call.scales((topology.num_hosts * of_host, k), (k, n))
    dtype = problem.dtype_of_partials
    sums = [a.new_empty(topology.num_hosts, rows, length(one), dtype=dtype) for one in chunks]

    def multiply(host: int, chunk: slice, out: torch.Tensor | None = None) -> torch.Tensor:
        part, rows = _part(problem, topology, length(chunk)), slice(host * of_host, (host + 1) * of_host)
        operands = {}
        if scales:
            operands["a_scale"] = rows_of(scales["a_scale"], problem.scales[0], rows)
            operands["b_scale"] = columns_of(scales["b_scale"], problem.scales[1], chunk)
        return call.multiply(part, padded(a[rows], of_host, k), b[:, chunk], out=out, operands=operands)[0]

    transfers: list[Transfer] = []
    for above, below in call.distant():
        for chunk, received in zip(chunks, sums, strict=True):
            transfers.append(call.rail.exchange(above, multiply(above, chunk), below, received[below]))
    for chunk, received in zip(chunks, sums, strict=True):
        multiply(own, chunk, received[own])
    for transfer in transfers:
        transfer.wait()
    is_final = not problem.epilogue and dtype == problem.out_dtype
    total = a.new_empty(rows, n, dtype=dtype if is_final else torch.float32)
    for chunk, received in zip(chunks, sums, strict=True):
        _add(received, total[:, chunk])
    start, stop = problem.rows(call.rank)
    return total[: stop - start]


def _add(sums: torch.Tensor, out: torch.Tensor) -> None:
    """Add the sums of all hosts in fp32, in their order."""
    if len(sums) == 2 and out.dtype == sums.dtype:  # element by element, which is faster than a reduction
        torch.add(sums[0], sums[1], out=out)
    else:
        torch.sum(sums, 0, dtype=out.dtype, out=out)


def run(call: HierarchicalCall[GemmReduceScatterProblem], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queue the sum of this rank's rows, finish and norm it."""
    total = sum_rows(call, a, b)
    c = finish_with_torch(total, call.problem.epilogue, dict(call.operands)).to(call.problem.out_dtype)
    return c, *call.normed(c)


HIERARCHY = Hierarchy(FAMILY, steps, run)
