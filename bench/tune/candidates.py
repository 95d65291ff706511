"""What a rank does to tune one problem: every variant as it comes, then other configurations of the fastest two."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from iris_core import Context
from iris_kernels.all_gather_gemm.gather_plan import k_chunks_of
from iris_kernels.common.config import GemmConfig, warps_of
from iris_kernels.common.hopper.host import STAGES
from iris_kernels.common.portable.stream_k_host import LEAST_STAGES, stages_within
from iris_kernels.common.problem import Problem
from overlap_taxonomy import Agent, Mainloop, Schedule, Variant, get_variant

from ..measure import job as measure
from ..measure.job import Job, Outcome
from ..records.record import LIBRARY, YARDSTICKS
from .measured import CLOCKS_DIFFER

TUNED = 2  # variants whose configurations are varied
# Tiles with their warps and stages; what a variant or the device cannot do of them is left out.
_TILES = ((128, 256, 8, 3), (128, 128, 8, 4), (128, 64, 8, 6), (64, 128, 4, 4))


@dataclass
class Tuned:
    """What came out for one problem.

    Args:
        times_us: the best time of each variant that is right.
        configs: the configuration it had, as a dictionary, where that is not the default.
        tried: how many operators were measured.
        failed: why a variant, with its default configuration, has no time.
    """

    times_us: dict[str, float] = field(default_factory=dict)
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    tried: int = 0
    failed: dict[str, str] = field(default_factory=dict)

    def keep(self, variant: str, outcome: Outcome, config: GemmConfig | None = None, *, scale: float = 1.0) -> None:
        """Keep a time, so many times what was measured, if it is the variant's best so far."""
        self.tried += 1
        if outcome.status != "ok" or outcome.time_us is None:
            if config is None:
                self.failed[variant] = f"{outcome.status}: {outcome.reason}"
        elif outcome.time_us * scale < self.times_us.get(variant, float("inf")):
            self.times_us[variant] = outcome.time_us * scale
            if config is not None:
                self.configs[variant] = asdict(config)


def tune(rank: int, world_size: int, job: Job) -> Tuned:
    """Measure a problem's candidates; the same result on every rank; collective.

    Raises:
        TimeoutError, PeerError: as `measure.measure`.
    """
    tuned = Tuned()
    outcomes = measure.measure(rank, world_size, job)
    first = {outcome.variant: outcome.time_us for outcome in outcomes if outcome.time_us}
    for outcome in outcomes:
        if outcome.variant not in YARDSTICKS:
            tuned.keep(outcome.variant, outcome)
    ours = [get_variant(job.family, name) for name in job.variants]
    ours = [variant for variant in ours if variant.has_kernels]
    timed = [one for one in ours if one.name in tuned.times_us and one.mainloop is not Mainloop.LIBRARY]
    best = sorted(timed, key=lambda variant: tuned.times_us[variant.name])  # of tiles that are ours
    for variant in best[:TUNED]:
        default = _default_config(measure.context(), variant, job.problem())
        others = list(neighbours(variant, job.problem(), default))
        for some in _batched(others, len(ours)):
            named = {f"{variant.name} {index}": config for index, config in enumerate(some)}
            varied = replace(
                job,
                variants=(LIBRARY, *named),
                configured=tuple((label, variant.name, config) for label, config in named.items()),
            )
            outcomes = measure.measure(rank, world_size, varied)
            scale = _scale(first, outcomes)
            for outcome in outcomes:
                if outcome.variant in named:
                    tuned.keep(variant.name, outcome, named[outcome.variant], scale=scale)
    return tuned


def _scale(first: Mapping[str, float], outcomes: Sequence[Outcome]) -> float:
    """Return what brings times of a later run to those of the first, of which that of `library` is kept.

    Runs differ by more than the margin by which `auto` chooses; the best of many would be faster by luck. What is in
    every run says by how much: the median of the library's GEMM, its collective, and both. The host is late with the
    library's calls now and then, and then the collective is in two of the three: a ratio that no clock explains is
    left out, and without any other nothing is scaled.

    Args:
        first: times of the first run.
        outcomes: of the later one.
    """
    common = [outcome for outcome in outcomes if outcome.variant in (LIBRARY, *YARDSTICKS)]
    ratios = [first[one.variant] / one.time_us for one in common if one.time_us and one.variant in first]
    plausible = [ratio for ratio in ratios if 1 / CLOCKS_DIFFER <= ratio <= CLOCKS_DIFFER]
    return statistics.median(plausible) if plausible else 1.0


def neighbours(variant: Variant, problem: Problem, config: GemmConfig) -> Iterator[GemmConfig]:
    """Yield configurations that differ from a variant's default in one respect, and that it can do."""
    tried = {config}
    for change in _changes(variant, config, problem):
        other = replace(config, **change)
        if other not in tried and not variant.unsupported_reason(problem, other):
            tried.add(other)
            yield other


def _changes(variant: Variant, config: GemmConfig, problem: Problem) -> Iterator[dict[str, Any]]:
    if variant.schedule is Schedule.STREAM_K:
        yield from _other_tilings(config)
        return
    for block_m, block_n, num_warps, num_stages in _TILES:
        if (block_m, block_n) != (config.block_m, config.block_n):
            rows = min(config.comm_rows, block_m)
            yield {
                "block_m": block_m,
                "block_n": block_n,
                "num_warps": num_warps,
                "num_stages": num_stages,
                "comm_rows": rows,
                "pingpong": False,
            }
    if variant.mainloop is Mainloop.SM90:
        yield {"pingpong": not config.pingpong, "block_n": 128, "num_stages": STAGES[128], "splits": 1}
        for splits in (1, 2, 4):
            yield {"splits": splits, "pingpong": False}
    if variant.agent in (Agent.COMM_KERNEL, Agent.COMM_PROGRAMS) and problem.world_size > 1:
        yield {"comm_sms": max(1, config.comm_sms * 2 // 3)}
        yield {"comm_sms": config.comm_sms * 3 // 2}
    if variant.agent is Agent.COPY_ENGINES:
        # A row chunk is whole groups of rows of tiles, at least.
        yield {"row_chunks": config.row_chunks * 2, "group_m": max(1, config.group_m // 2)}
        yield {"row_chunks": max(1, config.row_chunks // 2)}
        yield {"row_chunks": max(1, config.row_chunks // 2), "group_m": config.group_m * 2}  # B passes half as often
        if variant.mainloop is Mainloop.SM90 and k_chunks_of(-(-problem.a_shape(0)[1] // config.block_k), 2)[1] > 1:
            yield {"k_chunks": 1 if config.k_chunks > 1 else 2}
    else:
        yield {"group_m": config.group_m * 2}


def _other_tilings(config: GemmConfig) -> Iterator[dict[str, Any]]:
    """More and fewer programs for the same tiles; less on its way; other widths, and about as many programs."""
    for splits in (config.splits + 1, config.splits - 1, 2 * config.splits):
        if splits > 0:
            yield {"splits": splits}
    for stages in (config.num_stages - 1, config.num_stages - 2):
        if stages >= LEAST_STAGES:
            yield {"num_stages": stages}
    for block_n in (64, 128):
        if block_n != config.block_n:
            warps = warps_of(config.block_m, block_n)
            splits = max(1, config.splits * block_n // config.block_n)
            in_flight = config.num_stages * (config.block_m + config.block_n)
            stages = stages_within(in_flight, config.block_m + block_n)
            shape = {"block_n": block_n, "num_warps": warps, "num_stages": stages, "epilogue_subtiles": 1}
            yield {**shape, "splits": splits}


def _default_config(ctx: Context, variant: Variant, problem: Problem) -> GemmConfig:
    operator = variant.build(ctx, problem)
    config: GemmConfig = operator.config
    operator.close()
    return config


def _batched(configs: list[GemmConfig], size: int) -> Iterator[list[GemmConfig]]:
    for start in range(0, len(configs), size):
        yield configs[start : start + size]
