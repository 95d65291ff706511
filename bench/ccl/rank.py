"""One rank's part: call each collective of both libraries, check what comes, time it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from iris_core import Context
from iris_kernels.common.calibration import timing

from ..measure.job import attempt, context
from .record import Outcome

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
_WHOLE_OUTPUT = ("all_gather", "gather")
_WHOLE_INPUT = ("reduce_scatter", "scatter")
_IN_PLACE = ("all_reduce", "broadcast", "reduce")  # in torch.distributed
_ALIGNMENT = 16  # elements of a part
_LIMIT_S = 0.5  # of timing one collective of one size


@dataclass(frozen=True)
class Plan:
    """What to measure: sizes are bytes of the larger tensor of a rank; there are fewer rounds where they take long."""

    sizes: tuple[int, ...]
    kinds: tuple[str, ...]
    rounds: int
    burst: int
    seed: int


def measure(rank: int, world_size: int, plan: Plan) -> list[Outcome]:
    """Return all measurements, the same on every rank; collective. What fails on all ranks alike is an "error".

    Raises:
        TimeoutError: a rank timed out in a wait for another.
        PeerError: a rank failed alone.
    """
    ctx = context()
    ctx.ccl.prepare()
    library = dist.get_backend(ctx.process_group())
    modes = ("eager",) if ctx.is_interpreted() else ("eager", "graph")
    outcomes = []
    for kind in plan.kinds:
        for size in plan.sizes:
            keys = [(name, mode) for name in ("iris", library) for mode in modes]
            found, error = attempt(ctx, _measure, ctx, kind, size, plan, keys)
            outcomes += found or [
                Outcome(kind, *key, size, None, None, None, "error", plan.rounds, error) for key in keys
            ]
    return outcomes


def _measure(ctx: Context, kind: str, size: int, plan: Plan, keys: Sequence[tuple[str, str]]) -> list[Outcome]:
    """Measure one collective of one size, by each library in each mode."""
    rank, world_size = ctx.get_rank(), ctx.get_num_ranks()
    part = max(1, size // (2 * world_size * _ALIGNMENT)) * _ALIGNMENT
    whole = part * world_size
    output = ctx.empty(part if kind in _WHOLE_INPUT else whole, dtype=torch.bfloat16)
    try:
        inputs = [_drawn(ctx, kind, plan.seed * 1000 + peer, part, whole) for peer in range(world_size)]
        expected = _expected(kind, inputs, rank, part)
        given = inputs[rank]
        del inputs
        of_torch = _of_torch(kind, output, given, ctx.process_group())
        verdicts: dict[tuple[str, str], tuple[str, str]] = {}
        subjects: list[timing.Subject] = []
        for name, mode in keys:
            call = of_torch if name != "iris" else lambda: getattr(ctx.ccl, kind)(output, given)
            is_in_place = name != "iris" and kind in _IN_PLACE and (kind != "broadcast" or rank == 0)
            if mode == "graph" and verdicts[name, "eager"][0] != "ok":
                verdicts[name, mode] = verdicts[name, "eager"]
                continue
            queued, reason = attempt(ctx, _captured, call) if mode == "graph" else (call, "")
            status = "error"
            if queued is not None:
                status, reason = _judge(ctx, queued, output, given if is_in_place else None, expected)
            verdicts[name, mode] = status, reason
            if queued is not None and status == "ok":
                subjects.append(timing.Subject(f"{name} {mode}", lambda *_, queued=queued: queued()))
        timing.measure(ctx, subjects, [(given, output)], rounds=plan.rounds, burst=plan.burst, limit_s=_LIMIT_S)
        times = timing.slowest_medians(ctx, subjects)
    finally:
        ctx.barrier()
        ctx.free(output)
    rounds = {subject.name: len(subject.samples) for subject in subjects}
    outcomes = []
    for (name, mode), (status, reason) in verdicts.items():
        key = f"{name} {mode}"
        outcome = Outcome(
            kind,
            name,
            mode,
            whole * given.element_size(),
            None,
            None,
            None,
            status,
            rounds.get(key, plan.rounds),
            reason,
        )
        if key in times:
            found = times[key]
            outcome = replace(outcome, time_us=found.time_us, latency_us=found.latency_us, host_us=found.host_us)
        outcomes.append(outcome)
    return outcomes


def _drawn(ctx: Context, kind: str, seed: int, part: int, whole: int) -> torch.Tensor:
    """Return a rank's input: small integers, so that sums are exact in any order."""
    generator = torch.Generator(ctx.get_device()).manual_seed(seed)
    size = part if kind in _WHOLE_OUTPUT else whole
    values = torch.randint(-8, 9, (size,), generator=generator, device=ctx.get_device(), dtype=torch.int8)
    return values.to(torch.bfloat16)


def _expected(kind: str, inputs: list[torch.Tensor], rank: int, part: int) -> torch.Tensor | None:
    """Return what a rank must get; None, if nothing."""
    own = slice(rank * part, (rank + 1) * part)
    if kind in ("reduce", "gather") and rank:
        return None
    if kind in ("all_reduce", "reduce"):
        return torch.stack(inputs).sum(0)
    if kind in _WHOLE_OUTPUT:
        return torch.cat(inputs)
    if kind == "reduce_scatter":
        return torch.stack([one[own] for one in inputs]).sum(0)
    if kind == "all_to_all":
        return torch.cat([one[own] for one in inputs])
    return inputs[0][own] if kind == "scatter" else inputs[0]


def _of_torch(kind: str, output: torch.Tensor, given: torch.Tensor, group: Any) -> Callable[[], object]:
    """Return the call of torch.distributed, of which `_IN_PLACE` take the input in the output."""
    root = dist.get_global_rank(group, 0)
    is_root = dist.get_rank(group) == 0
    parts = (given if kind == "scatter" else output).chunk(dist.get_world_size(group)) if is_root else None
    return {
        "all_reduce": lambda: dist.all_reduce(output, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(output, given, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(output, given, group=group),
        "all_to_all": lambda: dist.all_to_all_single(output, given, group=group),
        "broadcast": lambda: dist.broadcast(output, root, group=group),
        "reduce": lambda: dist.reduce(output, root, group=group),
        "gather": lambda: dist.gather(given, list(parts) if parts else None, root, group=group),
        "scatter": lambda: dist.scatter(output, list(parts) if parts else None, root, group=group),
    }[kind]


def _judge(
    ctx: Context,
    call: Callable[[], object],
    output: torch.Tensor,
    first: torch.Tensor | None,
    expected: torch.Tensor | None,
) -> tuple[str, str]:
    """Call it once on an output that holds `first`, or is poisoned; return a status and a reason, of all ranks."""
    output.fill_(77) if first is None else output.copy_(first)
    ctx.barrier()
    _, error = attempt(ctx, call)
    if error:
        return "unsupported" if "not support" in error.lower() else "error", error
    ctx.barrier()
    is_right = expected is None or torch.equal(output, expected)
    wrong = [rank for rank, right in enumerate(ctx.control_plane.all_gather(is_right)) if not right]
    return ("wrong", f"on ranks {', '.join(map(str, wrong))}") if wrong else ("ok", "")


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """Return what replays a graph of one call."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay
