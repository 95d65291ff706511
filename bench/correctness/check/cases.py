"""Our kernels under the race checker: what each variant is put through, and on which problem."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

from iris_core import Context, iris
from iris_core.checker import Report, check
from iris_kernels.common.config import GemmConfig
from iris_kernels.common.fp8.scales import dequantised
from iris_kernels.common.portable.row_norm import RmsNorm
from overlap_taxonomy import Variant, get_variant

from ...measure.correctness import Expectation
from ...measure.families import FAMILIES
from ...measure.inputs import Draw
from ...measure.job import scaling
from ...measure.shapes import Shape, parse_shapes
from ...measure.sweep import how_scaled, select_families, select_variants
from ...records.record import OPERAND_DTYPES, SCALES
from . import CALLS

_HEAP_BYTES = 1 << 20  # beside what the problem takes
_FLAG_BYTES = 8
_FP8 = torch.float8_e4m3fn
_SCALED: dict[str, Any] = {"dtype": _FP8, "b_dtype": _FP8, "scales": SCALES["row"]}  # in a problem of another dtype
_EPS = 1e-6  # of a norm
# Small tiles, four programs, two row chunks and two splits: several tiles per program, and some that programs split.
_CONFIG = GemmConfig(
    16,
    16,
    16,
    group_m=1,
    num_warps=4,
    num_stages=1,
    num_sms=4,
    comm_sms=1,
    comm_rows=8,
    row_chunks=2,
    splits=2,
)


@dataclass(frozen=True)
class Case:
    """One variant on one problem; with `descriptors`, operands that these cannot name are copied first."""

    variant: Variant
    shape: Shape
    world_size: int
    dtype: str  # as torch names it
    descriptors: bool = False
    scales: str = ""  # as `Record.scales` has them

    def config(self) -> GemmConfig:
        """Return the configuration to check with."""
        return replace(_CONFIG, descriptors=self.descriptors)

    def problem(self) -> Any:
        """Return the family's problem; ValueError where the sizes make none."""
        shape = self.shape
        return FAMILIES[self.variant.family].problem(
            m=shape.m,
            n=shape.n,
            k=shape.k,
            world_size=self.world_size,
            dtype=getattr(torch, self.dtype),
            **scaling(self.scales),
        )

    def operators(self) -> list[tuple[Any, dict[str, Any]]]:
        """Return what operators are made with, a problem and options each: what adds buffers, stores or copies.

        A variant with auxiliary outputs is checked with and without them. Where A travels, a call also quantises it and
        sends its scales. Where sums travel, they are also normed; and of fp8 operands in fp32, normed to fp8.
        """
        problem = self.problem()
        problems, scaled = [problem], {} if problem.scales else _SCALED
        if problem.allows_norm:
            normed = {"partial_dtype": torch.float32, "norm": RmsNorm(_EPS, _FP8)}
            problems += [replace(problem, norm=RmsNorm(_EPS)), replace(problem, **scaled, a_dtype=None, **normed)]
        if problem.allows_quantizing and not problem.scales:
            problems.append(replace(problem, **scaled, a_dtype=problem.dtype))
        more = FAMILIES[self.variant.family].auxiliary_options(self.variant.name)
        return list(itertools.product(problems, ({}, more) if more else ({},)))

    def heap_bytes(self) -> int:
        """Return how large a rank's heap must be."""
        problem, config, family = self.problem(), self.config(), FAMILIES[self.variant.family]
        # Tiles are smaller here than `Family.heap_bytes` reckons with: two sets of a flag per tile and rank.
        tiles = -(-problem.m // config.block_m) * -(-problem.n // config.block_n)
        flags = 2 * self.world_size * tiles * _FLAG_BYTES
        return _HEAP_BYTES + max(family.heap_bytes(one) for one, _ in self.operators()) + flags

    def unsupported_reason(self) -> str | None:
        """Return why the variant cannot be checked, or None."""
        return self.variant.unsupported_reason(self.problem(), self.config())


def make_cases(
    families: str,
    variants: str,
    *,
    world_size: int,
    dtype: str,
    shapes: str = "",
    descriptors: bool = False,
    scales: str = "",
) -> list[Case]:
    """Return what the command line asks for; what has no kernels of its own is left out.

    Args:
        families, variants, dtype: as given; the first two are "all" or names separated by commas.
        shapes: shape sets and MxNxK, separated by commas; nothing for small ones.
        scales: of fp8 operands, tensor, row or block; "" for row, or for other dtypes.

    Raises:
        ValueError: a name, a dtype, scales or a size that is unknown or makes no sense.
    """
    if dtype not in OPERAND_DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known dtypes: {', '.join(OPERAND_DTYPES)}")
    if world_size < 1:
        raise ValueError(f"--world-size {world_size} makes no sense; it takes a positive number")
    scaled = how_scaled(dtype, scales, use_fast_accum=False)
    chosen = [
        get_variant(family, name)
        for family, names in select_variants(select_families(families), variants).items()
        for name in names
    ]
    ours = [variant for variant in chosen if variant.has_kernels]
    if not ours:
        raise ValueError(f"--variant {variants}: only our kernels can be checked, and those are behind other names")
    return [
        Case(variant, shape, world_size, OPERAND_DTYPES[dtype], descriptors, scaled)
        for variant in ours
        for shape in _shapes_of(variant.family, shapes, world_size)
    ]


def _shapes_of(family: str, shapes: str, world_size: int) -> list[Shape]:
    """Return what the command line names, or small problems."""
    collective = FAMILIES[family].collective
    # Uneven shards, tiles that reach past the end, several of them a program, of two steps of k or more.
    ragged = f"{20 * world_size + 5}x{20 * world_size + 2}x{17 * world_size}"
    # Fewer than ranks of what is sharded; a tile per program at most, which a call then begins and ends with. Where
    # rows and columns are, one at a time: a rank without columns still sends its rows.
    few, k = max(world_size - 1, 1), 8 * world_size
    small = [ragged]
    if family != "gemm_all_scatter":
        small.append(f"{few}x20x{k}")
    if collective == "all_gather":
        small.append(f"20x{few}x{k}")
    return parse_shapes(shapes or ",".join(small), collective=collective, world_size=world_size)


def run_case(case: Case, *, schedules: int, seed: int, calls: int = CALLS) -> Report:
    """Check one variant."""
    return check(exercise, case.world_size, args=(case, calls, seed), schedules=schedules, seed=seed)


def exercise(rank: int, world_size: int, case: Case, calls: int, seed: int) -> None:
    """Call operators several times on fresh data over poisoned outputs, with nothing between the calls.

    Raises:
        AssertionError: an output is wrong.
    """
    ctx = iris(case.heap_bytes(), "cpu")
    for problem, options in case.operators():
        _call_and_compare(ctx, case, problem, options, calls, seed)
    ctx.close()


def _call_and_compare(ctx: Context, case: Case, problem: Any, options: dict[str, Any], calls: int, seed: int) -> None:
    family, rank = FAMILIES[case.variant.family], ctx.get_rank()
    operator = case.variant.build(ctx, problem, case.config(), **options)
    outputs = []
    for call in range(calls):
        for output in operator.outputs() if problem.norm else [operator.output]:
            output.fill_(float("nan"))
        draw = Draw(seed, problem, call, ctx.get_device())
        operands, read = family.operands(problem, rank, draw), family.read(problem, rank, draw)
        outputs.append([output.clone() for output in operator.call(*operands, **read)])
    for call, (output, *auxiliary) in enumerate(outputs):
        draw = Draw(seed, problem, call, ctx.get_device())
        blocks = family.blocks(problem, rank, draw)
        expectation = Expectation(blocks, shape=problem.c_shape(rank), dtype=problem.out_dtype)
        verdict = expectation.judge(output)
        assert verdict.correct, f"{operator}, call {call + 1}, rank {rank}: {verdict.reason}"
        if problem.norm:
            weight = family.read(problem, rank, draw)["norm_weight"].double()
            normed = torch.nn.functional.rms_norm(output.double(), (problem.n,), weight, _EPS)
            assert _stand_for(normed, *auxiliary), f"{operator}, call {call + 1}, rank {rank}: normed rows are wrong"
            continue
        for one, expected in zip(auxiliary, family.auxiliary(problem, draw) if options else (), strict=True):
            wrong = int((one.float() != expected.float()).sum())
            assert not wrong, (
                f"{operator}, call {call + 1}, rank {rank}: {wrong} elements of an auxiliary output are wrong"
            )
    operator.close()


def _stand_for(expected: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor | None = None) -> bool:
    """Return whether normed rows, and of fp8 their scales, are what was expected, within twice the rounding."""
    if scales is None:
        return torch.allclose(rows.double(), expected, rtol=1e-2, atol=1e-6)
    info, largest = torch.finfo(rows.dtype), expected.abs().amax(1, keepdim=True)
    bound = info.eps * expected.abs() + info.smallest_normal * info.eps * scales
    are_close = (dequantised(rows, scales) - expected).abs() <= bound
    return bool(are_close.all()) and torch.allclose(scales * info.max, largest.float(), rtol=1e-4, atol=0.0)
