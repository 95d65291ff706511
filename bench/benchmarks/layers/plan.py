"""What ``iris-bench layers`` is to measure, what of it is there already, and the rows that come of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from ...measure import environment
from ...measure.families import FAMILIES
from ...measure.shapes import parse_sizes
from ...records.frames import latest_records
from ...records.record import DTYPES
from ...records.resume import is_finished
from . import rank
from .record import LayersRecord
from .subjects import SUBJECTS

_SHORT = {long: short for short, long in DTYPES.items()}
_HEAP_BYTES = 64 << 20  # for the context, flags, and what is rounded


def plan(
    *,
    blocks: str,
    subjects: Sequence[str],
    layouts: Sequence[str],
    phases: Sequence[str],
    dtype: str,
    rounds: int,
    burst: int,
    seed: int,
    world_size: int,
) -> list[rank.Job]:
    """Return what is to be measured.

    Raises:
        ValueError: something given is unknown or makes no sense; names it, and what would work.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known dtypes: {', '.join(DTYPES)}")
    for name, value in (("--rounds", rounds), ("--burst", burst)):
        if value < 1:
            raise ValueError(f"{name} {value} makes no sense; it takes a positive number")
    jobs = []
    names = dict.fromkeys(block.strip() for block in blocks.split(","))
    for block, layout in itertools.product(names, layouts):
        sizes = parse_sizes(block)
        if sizes is None:
            raise ValueError(
                f"unknown block {block!r}; it takes TOKENSxWIDTHxFEATURES, three positive integers, "
                "e.g. 8192x8192x28672"
            )
        tokens, width, features = sizes
        cut = {"width": width, "features": features} | ({"tokens": tokens} if layout == "sequence" else {})
        for name, size in cut.items():
            if size % world_size:
                raise ValueError(f"block {block}: its {name}, {size}, must be a multiple of the {world_size} ranks")
        job = rank.Job(
            tokens=tokens,
            width=width,
            features=features,
            layout=layout,
            phases=tuple(phases),
            subjects=tuple(subjects),
            dtype=DTYPES[dtype],
            rounds=rounds,
            burst=burst,
            seed=seed,
        )
        jobs.append(job)
    return jobs


def still_to_do(jobs: Sequence[rank.Job], done: Sequence[LayersRecord], setting: dict[str, Any]) -> list[rank.Job]:
    """Return what of the jobs is missing, failed or was wrong.

    A phase of a pair is measured whole, beside each other, with the subjects that it has rows of: its speedups are of
    one run. What was unsupported stays so with the same versions of torch and Triton.

    Args:
        jobs: what is asked for.
        done: the rows that are there.
        setting: "world_size" and "device" of those to come.
    """
    rows = {one.key: one for one in latest_records(done)}
    now = environment.versions()
    finished = {key for key, one in rows.items() if is_finished(one, now)}
    to_do = []
    for job in jobs:
        setup = (setting["world_size"], _SHORT[job.dtype], setting["device"])
        pair = (job.layout, job.tokens, job.width, job.features, *setup)
        asked = {phase: {(subject, phase, *pair) for subject in job.subjects} for phase in job.phases}
        phases = tuple(phase for phase in job.phases if not finished >= asked[phase])
        if phases:
            there = {subject for subject, phase, *of in rows if phase in phases and tuple(of) == pair}
            subjects = tuple(subject for subject in SUBJECTS if subject in there.union(job.subjects))
            to_do.append(replace(job, phases=phases, subjects=subjects))
    return to_do


def heap_bytes(job: rank.Job, world_size: int) -> int:
    """Return what the operators of a job hold of a rank's heap, at most; all subjects share them."""
    sizes = {"m": job.tokens, "world_size": world_size, "dtype": getattr(torch, job.dtype)}
    out_of = {"n": job.width, "k": job.features} | sizes
    if job.layout == "replicated":
        needed = FAMILIES["gemm_all_reduce"].heap_bytes(FAMILIES["gemm_all_reduce"].problem(**out_of))
    else:
        into = FAMILIES["all_gather_gemm"].problem(n=job.features, k=job.width, **sizes)
        scattered = FAMILIES["gemm_reduce_scatter"].problem(**out_of)
        # Forwards without what was gathered, and with it; backwards the same.
        needed = 2 * FAMILIES["all_gather_gemm"].heap_bytes(into)
        needed += FAMILIES["gemm_reduce_scatter"].heap_bytes(scattered)
    return needed + _HEAP_BYTES


def to_records(job: rank.Job, outcomes: Sequence[rank.Outcome], columns: dict[str, Any]) -> list[LayersRecord]:
    """Return a job's rows. Interpreted times are compared with nothing."""
    is_cpu = columns["device"] == "cpu"
    by_torch = {one.phase: one.time_us for one in outcomes if one.subject == "torch" and not is_cpu}
    common = {key: getattr(job, key) for key in ("tokens", "width", "features", "layout", "rounds", "burst", "seed")}
    common |= columns | {"dtype": _SHORT[job.dtype], "timestamp": environment.timestamp()}
    records = []
    for one in outcomes:
        torch_us = by_torch.get(one.phase)
        speedup = torch_us / one.time_us if torch_us and one.time_us else None
        values = asdict(one) | ({"host_us": None} if is_cpu else {})
        records.append(LayersRecord(**values, **common, speedup_vs_torch=speedup))
    return records
