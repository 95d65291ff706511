"""What ``iris-bench decoder`` is to measure, what of it is there already, and the rows that come of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

from ...measure import environment
from ...records.frames import latest_records
from ...records.record import OPERAND_DTYPES
from ...records.resume import is_finished
from . import rank
from .models import MODELS
from .record import DecoderRecord
from .systems import LIMIT, MODES, SYSTEMS, TORCH, why_not

_SHORT = {long: short for short, long in OPERAND_DTYPES.items()}
_HEAP_BYTES = 64 << 20  # for the context, flags, and what is rounded
_SIZES_OF_LAYERS = 7  # operators of ours at most: of query, key and value, of gate and up, alone and shared; of rows


def plan(
    *,
    model: str,
    layers: int,
    steps: dict[str, str],
    systems: Sequence[str],
    modes: Sequence[str],
    dtype: str,
    rounds: int,
    burst: int,
    seed: int,
    world_size: int,
    device: str,
) -> list[rank.Job]:
    """Return what is to be measured; on a CPU it is only checked.

    Args:
        model, layers: whose sizes, and how many.
        steps: by phase BATCHxTOKENS, by commas; in decoding the tokens of the past.
        systems, modes: names.
        dtype, rounds, burst, seed, world_size, device: as the columns.

    Raises:
        ValueError: something given is unknown or makes no sense; names it, and what would work.
    """
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}; known models: {', '.join(MODELS)}")
    if dtype not in OPERAND_DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known dtypes: {', '.join(OPERAND_DTYPES)}")
    for name, value in (("--layers", layers), ("--rounds", rounds), ("--burst", burst)):
        if value < 1:
            raise ValueError(f"{name} {value} makes no sense; it takes a positive number")
    pairs = tuple(itertools.product(systems, modes))
    jobs = []
    for phase, given in steps.items():
        for text in dict.fromkeys(part.strip() for part in given.split(",")):
            batch, sequence = _sizes(text, phase)
            job = rank.Job(
                model=model,
                layers=layers,
                phase=phase,
                batch=batch,
                sequence=sequence,
                pairs=pairs,
                unsupported=(),
                dtype=OPERAND_DTYPES[dtype],
                rounds=rounds,
                burst=burst,
                seed=seed,
                timed=device != "cpu",
            )
            jobs.append(_with(job, pairs, world_size, device))
    return jobs


def _with(job: rank.Job, pairs: rank.Pairs, world_size: int, device: str) -> rank.Job:
    """Return a job of these systems and modes, and why some of them cannot be measured."""
    setting = (MODELS[job.model], job.phase, job.sequence, world_size, device, job.dtype)
    reasons = ((system, mode, why_not(system, mode, *setting)) for system, mode in pairs)
    return replace(job, pairs=pairs, unsupported=tuple(one for one in reasons if one[2]))


def _sizes(text: str, phase: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"unknown --{phase} {text!r}; it takes BATCHxTOKENS, two positive integers, e.g. 4x512")
    return int(parts[0]), int(parts[1])


def still_to_do(jobs: Sequence[rank.Job], done: Sequence[DecoderRecord], setting: dict[str, Any]) -> list[rank.Job]:
    """Return what of the jobs is missing, failed or was wrong; a step whole, with
    the systems and modes that it has rows of, as its speedups are of one run.

    Args:
        jobs: what is asked for.
        done: the rows that are there.
        setting: "world_size" and "device" of those to come.
    """
    now, timed = environment.versions(), setting["device"] != "cpu"
    rows = latest_records(done)
    finished = {one.key for one in rows if is_finished(one, now, timed=timed)}
    to_do = []
    for job in jobs:
        setup = (setting["world_size"], _SHORT[job.dtype], setting["device"])
        step = (job.model, job.layers, job.phase, job.batch, job.sequence, *setup)
        if not finished >= {(system, mode, *step) for system, mode in job.pairs}:
            asked = {(one.system, one.mode) for one in rows if one.step_key == step}.union(job.pairs)
            pairs = tuple(pair for pair in itertools.product(SYSTEMS, MODES) if pair in asked)
            to_do.append(_with(job, pairs, **setting))
    return to_do


def heap_bytes(job: rank.Job, world_size: int) -> int:
    """Return what the layers of a job hold of a rank's heap, at most; those of one size share it."""
    sizes = MODELS[job.model]
    of_tokens = job.batch * job.tokens * sizes.width * job.dtype_of_x.itemsize
    gradients = 2 if job.phase == "train" else 1
    return _SIZES_OF_LAYERS * gradients * (2 + 2 * world_size) * of_tokens + _HEAP_BYTES


def to_records(job: rank.Job, outcomes: Sequence[rank.Outcome], columns: dict[str, Any]) -> list[DecoderRecord]:
    """Return a job's rows."""
    names = ("model", "layers", "phase", "batch", "sequence", "rounds", "burst", "seed")
    common = {name: getattr(job, name) for name in names}
    common |= columns | {"dtype": _SHORT[job.dtype], "timestamp": environment.timestamp()}
    common["transformers"] = metadata.version("transformers")
    by_torch, limit = shortest(outcomes, TORCH), shortest(outcomes, (LIMIT,))
    records = []
    for one in outcomes:
        ratios = {"speedup_vs_torch": by_torch, "limit_over_time": limit}
        of_it: dict[str, Any] = {name: us / one.time_us if us and one.time_us else None for name, us in ratios.items()}
        records.append(DecoderRecord(**asdict(one), **of_it, **common))
    return records


def shortest(rows: Sequence[rank.Outcome] | Sequence[DecoderRecord], systems: Sequence[str]) -> float | None:
    """Return the shortest time of some systems in any mode; None where there is none."""
    return min((one.time_us for one in rows if one.system in systems and one.time_us), default=None)
