"""What a stress run does, all of it drawn from one seed: every rank draws the same, as operators are collective."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from iris_kernels.common.config import DTYPES, FP8_DTYPES, fp8_formats, is_fp8
from iris_kernels.common.fp8.scales import quantised_dtype
from overlap_taxonomy import get_variant

from ...measure.families import FAMILIES
from ...measure.sweep import select_families, select_variants
from ...records.record import OPERAND_DTYPES, SCALES

SETS = 4  # of operands a problem; a call never takes those of the operator's call before
WARM_UP_SET = 0  # of the first call of each operator, which is not drawn
_FLAGS_BYTES = 1 << 20  # of an operator: its flags, and rounding of its buffers
_CONTEXT_BYTES = 4 << 20
_ANY_FP8 = FP8_DTYPES[:2]  # kernels do others of as many bytes likewise


@dataclass(frozen=True)
class Size:
    """Sizes of the whole, and how often they are drawn relative to a variant's others."""

    m: int
    n: int
    k: int
    weight: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


# Kernels are compiled for the divisibility of the sizes, the tile and the dtype: 180 kernels per rank with these.
_GPU_SIZES = (
    Size(1, 3, 7, 4),  # one row and fewer columns than four ranks: some have nothing
    Size(37, 71, 42, 4),  # smaller than a tile; rows not on 16 bytes, so copied first, or read through pointers
    Size(250, 331, 187, 4),
    Size(601, 697, 517, 1),
    Size(1, 512, 256, 4),  # one row, as in decoding
    Size(256, 512, 256, 4),  # full tiles, read by descriptors
    Size(512, 768, 512, 2),
    Size(896, 512, 1024, 2),
    Size(2048, 2048, 512, 1),
)
_GPU_MORE_DTYPES = (Size(37, 71, 42, 1), Size(256, 512, 256, 2), Size(512, 768, 512, 1))
_CPU_SIZES = (Size(1, 3, 7, 2), Size(5, 9, 4, 2), Size(37, 41, 33, 1))
_CPU_MORE_DTYPES = (Size(5, 9, 300, 1),)  # of fp8 several blocks of k, also where ranks share it
# Rows off 16 bytes, and on them; neither fills its tiles.
_ONCE_SIZES = (Size(37, 71, 42, 1), Size(72, 160, 96, 1))


@dataclass(frozen=True)
class Scaled:
    """fp8 operands: A's and B's formats, and of what they have a scale each (`iris_kernels.common.fp8.scales`).

    `given` is the dtype that A is quantised from in the call, by rows; None for an A that is fp8 already.
    """

    a: torch.dtype
    b: torch.dtype
    scales: tuple[str, ...]
    given: torch.dtype | None = None

    def __str__(self) -> str:
        formats = "·".join(str(dtype).removeprefix("torch.float8_") for dtype in (self.a, self.b))
        quantised = f" from {str(self.given).removeprefix('torch.')}" if self.given else ""
        return f"{formats} {'/'.join(self.scales)}{quantised}"


_SCALES = (*SCALES.values(), ("tensor", "column"), ("row", "tensor"))
_OF_QUANTISED = tuple(scales for scales in _SCALES if scales[0] == "row")


def _all_scaled(formats: Sequence[torch.dtype]) -> list[Scaled]:
    """Return all that fp8 may stand for: operands that are fp8, and A that a call quantises."""
    quantised = itertools.product(formats, _OF_QUANTISED, DTYPES)
    return [
        *(Scaled(*one) for one in itertools.product(formats, formats, _SCALES)),
        *(Scaled(quantised_dtype(b), b, scales, given) for b, scales, given in quantised),
    ]


@dataclass(frozen=True)
class Subject:
    """An operator to call; `dtype` as the command line names it, and of fp8, once it is drawn, what that stands for."""

    family: str
    variant: str
    size: Size
    dtype: str
    world_size: int
    scaled: Scaled | None = None

    def __str__(self) -> str:
        drawn = f" {self.scaled}" if self.scaled else ""
        return f"{self.family}/{self.variant} {self.size} {self.dtype}{drawn}"

    @property
    def variant_key(self) -> tuple[str, str]:
        """Which variant this is of."""
        return self.family, self.variant

    @property
    def data_key(self) -> tuple[str, Size, str, Scaled | None]:
        """What the subjects that take the same operands have in common."""
        return self.family, self.size, self.dtype, self.scaled

    def problem(self) -> Any:
        """Return the family's problem."""
        size, how = self.size, {"dtype": getattr(torch, OPERAND_DTYPES[self.dtype])}
        if self.scaled:
            how = {"dtype": self.scaled.a, "b_dtype": self.scaled.b, "scales": self.scaled.scales}
            how["a_dtype"] = self.scaled.given
        return FAMILIES[self.family].problem(m=size.m, n=size.n, k=size.k, world_size=self.world_size, **how)

    @property
    def is_fp8(self) -> bool:
        """Whether its operands are fp8, whose formats and scales are drawn."""
        return is_fp8(getattr(torch, OPERAND_DTYPES[self.dtype]))

    def drawn_from(self, formats: Sequence[torch.dtype]) -> list[Self]:
        """Return what it can be drawn to be and its variant's kernels can do: of fp8 all formats and scales."""
        scaled = _all_scaled(formats) if self.is_fp8 else [None]
        return [one for one in (replace(self, scaled=drawn) for drawn in scaled) if one._is_fused_and_supported()]

    def _is_fused_and_supported(self) -> bool:
        variant = get_variant(self.family, self.variant)
        try:
            problem = self.problem()
        except ValueError:  # the family has none of this dtype
            return False
        return variant.has_kernels and variant.unsupported_reason(problem, None) is None


@dataclass(frozen=True)
class Plan:
    """A stress run that can be made.

    Args:
        subjects: the operators, all of them open at once.
        seed: of all that is drawn.
        heap_bytes: what they take of a rank's heap.
    """

    subjects: tuple[Subject, ...]
    device: str
    world_size: int
    seed: int
    heap_bytes: int

    def drawn(self, seed: int, arch: str) -> Self:
        """Return the plan of another seed, which says what fp8 stands for on a device, an operator at a time.

        Raises:
            ValueError: there is fp8 in the plan, and the device has none.
        """
        draw, formats = random.Random(seed), fp8_formats(arch)
        if not formats and any(subject.is_fp8 for subject in self.subjects):
            raise ValueError(f"{arch} does not multiply fp8; bf16, fp16 and fp32 work: --dtype bf16,fp16")
        subjects = tuple(draw.choice(subject.drawn_from(formats)) for subject in self.subjects)
        return replace(self, subjects=subjects, seed=seed)


def make_plan(
    *, families: str, variants: str, dtypes: str, device: str, world_size: int, seed: int, once: bool = False
) -> Plan:
    """Return the run that the command line asks for: all fused variants of what is selected, on a pool of sizes.

    Args:
        families, variants, dtypes: as given; names separated by commas, or "all" but for dtypes. The first dtype has
            all sizes, further ones a few.
        device: "cpu" or "cuda".
        once: on two small sizes instead.

    Raises:
        ValueError: something given is unknown, or selects nothing to call; names it, and what would work.
    """
    names = list(dict.fromkeys(name.strip() for name in dtypes.split(",")))
    for name in names:
        if name not in OPERAND_DTYPES:
            raise ValueError(f"unknown dtype {name!r}; known dtypes: {', '.join(OPERAND_DTYPES)}")
    sizes, more = _pool(device, once)
    subjects = []
    for family, found in select_variants(select_families(families), variants).items():
        for variant in found:
            for dtype in names:
                for size in sizes if dtype == names[0] else more:
                    subject = Subject(family, variant, size, dtype, world_size)
                    if subject.drawn_from(_ANY_FP8):
                        subjects.append(subject)
    if not subjects:
        raise ValueError(
            f"--variant {variants} of --family {families} names baselines or auto alone; only kernels are stressed"
        )
    heap_bytes = _CONTEXT_BYTES + sum(map(_heap_bytes, subjects))
    return Plan(tuple(subjects), device, world_size, seed, heap_bytes)


class Call(NamedTuple):
    """One operator call: of which subject, with which operands, and who is late for it.

    `late_rank` holds its device for `before_us` before the call and `after_us` between the call and the reading of its
    output, and its host for `host_us` before the call. Where nobody is late, these are 0.
    """

    subject: int
    operands: int
    late_rank: int
    before_us: float
    after_us: float
    host_us: float


class Renewal(NamedTuple):
    """What is made anew between calls: a set of operands, and a subject's operator, auxiliary outputs or not."""

    rebuilt: int
    auxiliary: bool
    data: int
    operands: int


class Decisions:
    """Draws what happens after the first call of each operator. Two of the same arguments draw the same.

    Args:
        seed: of the run.
        subjects: what to choose from.
        world_size: number of ranks.
    """

    def __init__(self, seed: int, subjects: Sequence[Subject], world_size: int) -> None:
        self._random = random.Random(seed)
        self._indices = range(len(subjects))
        # A variant that cannot do some sizes is called as often as the others.
        of_variant: Counter[tuple[str, str]] = Counter()
        for subject in subjects:
            of_variant[subject.variant_key] += subject.size.weight
        shares = (subject.size.weight / of_variant[subject.variant_key] for subject in subjects)
        self._cumulated = list(itertools.accumulate(shares))
        self._num_data = len({subject.data_key for subject in subjects})
        self._world_size = world_size
        self._last = dict.fromkeys(self._indices, WARM_UP_SET)  # the operands of a subject's call before

    def call(self) -> Call:
        """Return the next call."""
        draw = self._random
        (subject,) = draw.choices(self._indices, cum_weights=self._cumulated)
        operands = draw.randrange(SETS)
        if operands == self._last.get(subject):  # an output left from the call before would pass
            operands = (operands + 1) % SETS
        self._last[subject] = operands
        late_rank, kind = draw.randrange(self._world_size), draw.random()
        if kind < 0.25:  # as long as a call, or some
            delays = (draw.uniform(0, 200), draw.uniform(0, 200), 0.0)
        elif kind < 0.27:  # the peers' queues fill up meanwhile
            delays = (0.0, 0.0, draw.uniform(0, 2000))
        elif kind < 0.275:
            delays = (draw.uniform(0, 5000), draw.uniform(0, 5000), 0.0)
        else:
            delays = (0.0, 0.0, 0.0)
        return Call(subject, operands, late_rank, *delays)

    def renewal(self) -> Renewal:
        """Return what to renew next."""
        draw = self._random
        rebuilt = draw.choice(self._indices)
        self._last.pop(rebuilt, None)
        return Renewal(rebuilt, draw.random() < 0.5, draw.randrange(self._num_data), draw.randrange(SETS))


def _pool(device: str, once: bool) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """Return the sizes of the first dtype and of further ones."""
    if once:
        return _ONCE_SIZES, ()
    return (_CPU_SIZES, _CPU_MORE_DTYPES) if device == "cpu" else (_GPU_SIZES, _GPU_MORE_DTYPES)


def _heap_bytes(subject: Subject) -> int:
    """Return what an operator takes of a rank's heap, at most, whatever is drawn."""
    problems = [one.problem() for one in subject.drawn_from(_ANY_FP8)]
    return max(map(FAMILIES[subject.family].heap_bytes, problems)) + _FLAGS_BYTES
