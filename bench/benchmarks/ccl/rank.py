"""One rank's part: call each collective of both libraries, check what comes, time it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from iris_core import Context
from iris_core.collectives.config import AUTO, VARIANTS, Config
from iris_kernels.common.calibration import timing

from ...measure.job import attempt, context
from .record import Outcome

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
_WHOLE_OUTPUT = ("all_gather", "gather")
_WHOLE_INPUT = ("reduce_scatter", "scatter")
_IN_PLACE = ("all_reduce", "broadcast", "reduce")  # in torch.distributed
_ALIGNMENT = 16  # elements of a part
_LIMIT_S = 0.5  # of timing one collective of one size


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        sizes: bytes of the larger tensor of a rank.
        kinds: collectives.
        rounds: most samples of each; fewer where they take long.
        burst: calls of a sample.
        seed: of the inputs.
        variants: of iris, by name; those that a collective has.
        comm_sms: most programs of iris; None for its own choice.
    """

    sizes: tuple[int, ...]
    kinds: tuple[str, ...]
    rounds: int
    burst: int
    seed: int
    variants: tuple[str, ...] = (AUTO,)
    comm_sms: tuple[int | None, ...] = (None,)

    def variants_of(self, kind: str) -> list[str]:
        """Return those of the variants that a collective has."""
        return [name for name in self.variants if name in VARIANTS.get(kind, (AUTO,))]


class Key(NamedTuple):
    """One way of calling a collective: fields of `Outcome`."""

    library: str
    mode: str
    variant: str = ""
    comm_sms: int | None = None


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
        ways = [("iris", variant, comm_sms) for variant in plan.variants_of(kind) for comm_sms in plan.comm_sms]
        ways.append((library, "", None))
        keys = [Key(name, mode, variant, comm_sms) for name, variant, comm_sms in ways for mode in modes]
        for size in plan.sizes:
            found, error = attempt(ctx, _measure, ctx, kind, size, plan, keys)
            outcomes += found or [
                Outcome(kind, *key, size, None, None, None, "error", plan.rounds, error) for key in keys
            ]
    return outcomes


def bytes_of(size: int, world_size: int) -> int:
    """Return the bytes of the larger tensor of a rank that are measured where `size` is asked for."""
    return _part(size, world_size) * world_size * torch.bfloat16.itemsize


def _part(size: int, world_size: int) -> int:
    """Return the elements of a rank's part, which are aligned."""
    return max(1, size // (2 * world_size * _ALIGNMENT)) * _ALIGNMENT


def _measure(ctx: Context, kind: str, size: int, plan: Plan, keys: Sequence[Key]) -> list[Outcome]:
    """Measure one collective of one size, by each library in each mode."""
    rank, world_size = ctx.get_rank(), ctx.get_num_ranks()
    part = _part(size, world_size)
    whole = part * world_size
    output = ctx.empty(part if kind in _WHOLE_INPUT else whole, dtype=torch.bfloat16)
    try:
        inputs = [_drawn(ctx, kind, plan.seed * 1000 + peer, part, whole) for peer in range(world_size)]
        expected = _expected(kind, inputs, rank, part)
        given = inputs[rank]
        del inputs
        output_of_torch = torch.empty_like(output)  # as its users have it; on the heap it would be iris's memory
        of_torch = _of_torch(kind, output_of_torch, given, ctx.process_group())
        verdicts: dict[Key, tuple[str, str]] = {}
        subjects: list[timing.Subject] = []
        for key in keys:
            is_of_iris = key.library == "iris"
            call = _of_iris(ctx, kind, key, output, given) if is_of_iris else of_torch
            is_in_place = not is_of_iris and kind in _IN_PLACE and (kind != "broadcast" or rank == 0)
            eager = key._replace(mode="eager")
            if key.mode == "graph" and verdicts[eager][0] != "ok":
                verdicts[key] = verdicts[eager]
                continue
            queued, reason = attempt(ctx, captured, call) if key.mode == "graph" else (call, "")
            status = "error"
            if queued is not None:
                written = output if is_of_iris else output_of_torch
                status, reason = _judge(ctx, queued, written, given if is_in_place else None, expected)
            verdicts[key] = status, reason
            if queued is not None and status == "ok":
                subjects.append(timing.Subject(str(key), lambda *_, queued=queued: queued()))
        timing.measure(ctx, subjects, [(given, output)], rounds=plan.rounds, burst=plan.burst, limit_s=_LIMIT_S)
        times = timing.slowest_medians(ctx, subjects)
    finally:
        ctx.barrier()
        ctx.free(output)
    rounds = {subject.name: len(subject.samples) for subject in subjects}
    nbytes = whole * given.element_size()
    outcomes = []
    for key, (status, reason) in verdicts.items():
        outcome = Outcome(kind, *key, nbytes, None, None, None, status, rounds.get(str(key), plan.rounds), reason)
        if found := times.get(str(key)):
            outcome = replace(outcome, time_us=found.time_us, latency_us=found.latency_us, host_us=found.host_us)
            outcome = replace(outcome, reason=found.remark)
        outcomes.append(outcome)
    return outcomes


def _of_iris(ctx: Context, kind: str, key: Key, output: torch.Tensor, given: torch.Tensor) -> Callable[[], object]:
    """Return the call of iris."""
    chosen = {f"{kind}_variant": key.variant} if kind in VARIANTS else {}
    config = Config(comm_sms=key.comm_sms, **chosen)
    return lambda: getattr(ctx.ccl, kind)(output, given, config=config)


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


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """Return what replays a graph of one call."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay
