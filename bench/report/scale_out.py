"""The table of what the cost model predicts for tensor parallelism over several hosts. Nothing in it was measured.

Times are the GPUs', as in a CUDA graph: the host queues a transfer and a product for each chunk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from iris_core.context.hierarchical.context import NCCL_SMS
from iris_core.rendezvous.topology import Topology
from iris_kernels.common.hierarchical.call import Hierarchy, hierarchy_of
from iris_kernels.common.hierarchical.prediction import best_chunks, inside_us, predict_flat_us
from iris_kernels.common.problem import Problem
from overlap_taxonomy import HOST_LINKS, MACHINES, Work, list_variants, predict_ideal_us

from ..measure.families import FAMILIES
from .markdown import table

HOST = MACHINES["h200x8"]
LINK = HOST_LINKS["ndr"]
# Of Llama-3-70B: `gate`, `down`; an NVLink domain of 72 GPUs is taken as 64, which divide the sizes.
LAYERS = (
    ("all_gather_gemm", "gate", 8192, 28672, 8192),
    ("gemm_reduce_scatter", "down", 8192, 8192, 28672),
    ("gemm_all_reduce", "down", 8192, 8192, 28672),
    ("gemm_all_scatter", "gate", 8192, 28672, 8192),
    ("gemm_all_reduce", "down", 64, 8192, 28672),
)
TOPOLOGIES = (Topology(1, 8), Topology(2, 8), Topology(4, 8), Topology(16, 8), Topology(1, 64))


class Prediction(NamedTuple):
    """What is predicted of a layer on some hosts: times in µs, and the bytes that a rank sends on each link."""

    gemm_us: float
    library_us: float
    fused_us: float
    chunks: int
    inside_bytes: int
    between_bytes: int


def predict(family: str, m: int, n: int, k: int, topology: Topology) -> Prediction:
    """Return what is predicted of a problem in bf16."""
    world_size = topology.world_size
    problem = FAMILIES[family].problem(m=m, n=n, k=k, world_size=world_size, dtype=torch.bfloat16)
    hierarchy = hierarchy_of(family)
    host = replace(HOST, world_size=topology.ranks_per_host)
    work = Work(family, m, n, k, world_size)
    gemm_us = predict_ideal_us(replace(HOST, world_size=world_size), work, 0)
    if topology.num_hosts == 1:
        names = [one.name for one in list_variants(family) if one.predict is not None]
        fused_us, library_us = (inside_us(host, family, problem, of) for of in (names, [hierarchy.baseline]))
        return Prediction(gemm_us, library_us, fused_us, 1, problem.wire_bytes, 0)
    library_us = predict_flat_us(host, LINK, family, problem, topology, hierarchy.baseline)
    beside = host.with_sms(host.num_sms - NCCL_SMS)
    chunks, fused_us = best_chunks(beside, LINK, hierarchy, problem, topology, host_us=0.0)
    return Prediction(gemm_us, library_us, fused_us, chunks, *_bytes(hierarchy, problem, topology, chunks))


def _bytes(hierarchy: Hierarchy, problem: Problem, topology: Topology, chunks: int) -> tuple[int, int]:
    """Return what a rank sends inside its host, and to others."""
    steps = hierarchy.steps(problem, topology, chunks)
    inside = sum((step.inside.wire_bytes if step.inside else 0) + step.gathered_bytes for step in steps)
    return inside, sum(step.arrives_bytes + step.leaves_bytes for step in steps)


def scale_out() -> str:
    """Return a row per layer and number of hosts."""
    rows = []
    for family, layer, m, n, k in LAYERS:
        one_host_us = 0.0
        for topology in TOPOLOGIES:
            found = predict(family, m, n, k, topology)
            one_host_us = one_host_us or found.fused_us
            is_domain = topology.ranks_per_host > HOST.world_size
            where = f"{topology.num_hosts} × {topology.ranks_per_host}{', one NVLink domain' if is_domain else ''}"
            rows.append(
                [
                    f"`{family}`",
                    f"{layer}, {m} × {n} × {k}",
                    where,
                    f"{found.gemm_us:,.0f}",
                    f"{found.library_us:,.0f}",
                    f"{found.fused_us:,.0f}",
                    f"{found.library_us / found.fused_us:.2f}×",
                    f"{one_host_us / found.fused_us:.2f}×",
                    f"{found.inside_bytes / 1e6:.1f}",
                    f"{found.between_bytes / 1e6:.1f}",
                ]
            )
    return table(HEADER, rows)


HEADER = (
    *(
        "family",
        "layer, M × N × K",
        "hosts × GPUs",
        "GEMM alone",
        "NCCL + cuBLAS",
        "iris-overlap",
        "over NCCL + cuBLAS",
    ),
    *("over one host", "MB on NVLink", "MB between hosts"),
)
