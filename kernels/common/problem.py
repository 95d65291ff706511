"""What every family's problem has: sizes, a dtype, a number of ranks, how a dimension is cut into shards, a result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from typing_extensions import Self

from iris_core.utils.settings import is_whole

from .config import DTYPES, OPERAND_DTYPES, is_fp8
from .device.epilogue import epilogue_ops
from .fp8.scales import SCALE_BLOCK, check_formats, check_scales, scale_shapes
from .portable.row_norm import RmsNorm

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Problem(ABC):
    """A GEMM over all ranks: C (m, n) = A (m, k) @ B (k, n), sizes of the whole.

    Args:
        m, n, k: rows of C, columns of C, and the length of the sums, each over all ranks.
        world_size: number of ranks.
        dtype: A's.
        epilogue: names of ops that are applied to C in fp32, in order, before it is rounded (device/epilogue.py).
        out_dtype: to which C is rounded then; None for the operands', or for bf16 where these are fp8.
        b_dtype: B's; None for A's. Only fp8 formats are multiplied by others.
        scales: of what A and B have a scale each, ("tensor" or "row", "tensor" or "column") or ("block", "block"), by
            which fp8 operands are multiplied (fp8/scales.py); () for no scales.
        partial_dtype: to which partial sums are rounded on their way to other ranks; None for C's.
        use_fast_accum: leave sums of fp8 products in the tensor cores' own, narrower accumulators, and do not promote
            them to fp32 every 128 of k; means something on sm_90 alone.
        norm: what is made of rows of C, beside C; None for nothing.
        a_dtype: that A is given in; None for `dtype`. From a wider one its rows are quantised to `dtype`, an fp8
            format, as they are gathered, with a scale each.

    Raises:
        ValueError: a size below one, a dtype that is not supported, formats that are not multiplied together, scales
            that do not go together, an op that there is not, a norm where ranks do not have whole rows of C, or an A
            to quantise where it is not gathered.
    """

    m: int
    n: int
    k: int
    world_size: int
    dtype: torch.dtype
    epilogue: tuple[str, ...] = ()
    out_dtype: torch.dtype = None  # type: ignore[assignment]  # `__post_init__` puts what it stands for there
    b_dtype: torch.dtype = None  # type: ignore[assignment]
    scales: tuple[str, ...] = ()
    partial_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    norm: RmsNorm | None = None
    a_dtype: torch.dtype = None  # type: ignore[assignment]

    allows_narrowing: ClassVar[bool] = False  # whether an epilogue may make C narrower than the product
    allows_norm: ClassVar[bool] = False  # whether ranks add up whole rows of C
    allows_quantizing: ClassVar[bool] = False  # whether A travels, and may be quantised before

    def __post_init__(self) -> None:
        given = self.a_dtype or self.dtype
        default_out = torch.bfloat16 if is_fp8(given) else given
        for name, default in (("out_dtype", default_out), ("b_dtype", self.dtype), ("a_dtype", self.dtype)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name in ("m", "n", "k", "world_size"):
            check_size(name, getattr(self, name))
        for name in ("dtype", "b_dtype", "out_dtype", "partial_dtype"):
            supported = OPERAND_DTYPES if name in ("dtype", "b_dtype") else DTYPES
            if (dtype := getattr(self, name)) not in supported and dtype is not None:
                raise ValueError(f"{name} {dtype} is not supported; supported: {', '.join(map(str, supported))}")
        check_formats(self.dtype, self.b_dtype)
        check_scales(self.scales, self.dtype)
        if self.is_quantised:
            self._check_quantised()
        if self.norm and not self.allows_norm:
            raise ValueError(
                "a norm takes whole rows of sums over ranks, which GEMM + reduce-scatter and GEMM + all-reduce give; a "
                f"{type(self).__name__} does not"
            )
        if self.narrowing > 1 and not self.allows_narrowing:
            raise ValueError(
                f"{self.epilogue[-1]} makes C narrower than A @ B; all-gather + GEMM can do that, a "
                f"{type(self).__name__} cannot"
            )

    def _check_quantised(self) -> None:
        if not self.allows_quantizing:
            raise ValueError(
                f"quantize is 'row', and a {type(self).__name__} gathers no A; all-gather + GEMM does, and quantises it"
            )
        if self.a_dtype not in DTYPES or not is_fp8(self.dtype) or self.scales[:1] != ("row",):
            raise ValueError(
                f"A is quantised by rows, from {', '.join(map(str, DTYPES))} to an fp8 format, with scales of rows; "
                f"this is from {self.a_dtype} to {self.dtype}, with scales {self.scales}"
            )

    @property
    def is_quantised(self) -> bool:
        """Whether A is given in a wider dtype than it is gathered and multiplied in."""
        return self.a_dtype != self.dtype

    @property
    def narrowing(self) -> int:
        """How many columns of A @ B the epilogue makes one column of C."""
        ops = epilogue_ops(self.epilogue)
        return ops[-1].narrowing if ops else 1

    @property
    def scale_kind(self) -> str:
        """The name of what operands have a scale each: that of A's; "row" where only B has one of each column."""
        return "row" if self.scales[1:] == ("column",) else "".join(self.scales[:1])

    @property
    def is_promoted(self) -> bool:
        """Whether sums over blocks of k are added in fp32, beside the accumulator of the block: of fp8 products."""
        return is_fp8(self.dtype) and (not self.use_fast_accum or "block" in self.scales)

    @property
    def dtype_of_partials(self) -> torch.dtype:
        """That of partial sums on their way to other ranks."""
        return self.partial_dtype or self.out_dtype

    @property
    def scale_columns(self) -> int:
        """How many scales a row of A has, where each has its own; 0 without scales."""
        if not self.scales:
            return 0
        return -(-self.a_shape(0)[1] // SCALE_BLOCK) if "block" in self.scales else 1

    def with_rows(self, m: int) -> Self:
        """Return the same problem of another m."""
        if m == self.m:
            return self
        check_size("m", m)
        other = object.__new__(type(self))  # the rest was checked, which would cost the host 5 us
        vars(other).update(vars(self), m=m)
        return other

    def m_of(self, a_rows: int, rank: int) -> int | None:
        """Return the m of a call, all ranks' rows; None if that cannot be told from one rank's.

        Args:
            a_rows: rows of the A that the rank is given.
            rank: the rank.
        """
        return a_rows

    def operand_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes on a rank of all operands but A and B, by name: scales, what epilogue and norm read.

        This is for the rank's rows of C and its columns of B; what the norm reads is called "norm_weight". An A that is
        quantised is given without a scale.
        """
        if not (self.scales or self.epilogue or self.norm):
            return {}
        shapes = scale_shapes(self.scales, self.a_shape(rank), self.b_shape(rank))
        if self.is_quantised:
            del shapes["a_scale"]
        ops = [op for op in epilogue_ops(self.epilogue) if op.operand]
        shapes |= {op.operand: op.operand_shape(self.c_shape(rank)[0], self.b_shape(rank)[1]) for op in ops}
        return {**shapes, "norm_weight": (self.n,)} if self.norm else shapes

    def operand_dtype(self, name: str) -> torch.dtype:
        """Return an operand's dtype; `name` is "A", "B" or one of `operand_shapes`."""
        if name in ("a_scale", "b_scale"):
            return torch.float32
        if name in ("A", "B"):
            return self.a_dtype if name == "A" else self.b_dtype
        return self.out_dtype if is_fp8(self.dtype) else self.dtype

    def normed_shapes(self, rank: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the shapes and dtypes on a rank of what the norm gives, by name: normed rows, of fp8 scales, too."""
        if self.norm is None:
            return {}
        shape = self.c_shape(rank)
        scales = {"norm_scales": ((shape[0], 1), torch.float32)} if self.norm.dtype else {}
        return {"normed": (shape, self.norm.dtype or self.out_dtype), **scales}

    @property
    def flops(self) -> int:
        """Floating-point operations of the rank that has most to do."""
        (m, k), (_, n) = self.a_shape(0), self.b_shape(0)
        return 2 * m * n * k

    @property
    @abstractmethod
    def wire_bytes(self) -> int:
        """The fewest bytes that the busiest rank must send (or receive)."""

    @abstractmethod
    def a_shape(self, rank: int) -> tuple[int, int]:
        """Shape of A on a rank."""

    @abstractmethod
    def b_shape(self, rank: int) -> tuple[int, int]:
        """Shape of B on a rank."""

    @abstractmethod
    def c_bounds(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Which rows and which columns of C, from and without, a rank gets."""

    def c_shape(self, rank: int) -> tuple[int, int]:
        """Shape of what a rank gets of C."""
        (first_row, stop_row), (first_column, stop_column) = self.c_bounds(rank)
        return stop_row - first_row, stop_column - first_column

    @abstractmethod
    def shards(self, rank: int, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a rank's operands, views of the whole ones.

        Args:
            rank: the rank.
            a: the whole A (m, k).
            b: the whole B (k, n).
        """

    @classmethod
    @abstractmethod
    def from_shapes(cls, a_shapes: Shapes, b_shapes: Shapes, dtype: torch.dtype) -> Self:
        """Return the problem whose shards these are; sizes are added up where the family cuts them.

        Args:
            a_shapes, b_shapes: every rank's operands' shapes, by rank.
            dtype: the operands'.

        Raises:
            ValueError: a size or the dtype is not supported. Whether the shards fit is for the caller to check.
        """

    def ideal_us(self, *, gemm_us: float, link_gbps: float) -> float:
        """Return the time of a perfect overlap in µs: whichever is longer, the GEMM alone or the bytes on the link.

        Args:
            gemm_us: the library's GEMM alone on the rank's operands, in µs.
            link_gbps: what one rank can send, in 10⁹ bytes a second.
        """
        return max(gemm_us, self.wire_bytes / link_gbps / 1e3)


def check_size(name: str, size: Any) -> None:
    """Raise ValueError for what is no positive integer, nor stands for one."""
    if not (is_whole(size) or isinstance(size, torch.SymInt)):
        raise ValueError(f"{name} is {size!r}; it takes a positive integer")


def shard_bounds(size: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return where a rank's shard of a dimension starts and stops, as `torch.chunk` and DTensor's Shard cut it.

    All shards have ``ceil(size / world_size)`` elements, but for the last ones, which may have fewer or none.

    >>> [shard_bounds(9, 4, rank) for rank in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 9)]
    """
    # Which decides nothing for a size that stands for others; of 0 and what is left, torch 2.11 knows which is more.
    most = max if isinstance(size, int) else torch.sym_max
    chunk = -(-size // world_size)
    return size - most(size - rank * chunk, 0), size - most(size - (rank + 1) * chunk, 0)


def doublings(most: int) -> list[int]:
    """Return numbers of rows to make room for, so that any number up to `most` has its plan's: the largest first."""
    return sorted({1 << bit for bit in range(most.bit_length())} | {most}, reverse=True)


def plan_rows(m: int, most: int) -> int:
    """Return the number of rows that a call of m rows is planned for: m or a little more, `most` at most.

    So operators that are called with any number of rows make few plans: past 128 rows 16 for each power of two, up to
    128 one each.
    """
    step = 1 << max(0, (m - 1).bit_length() - 5) if m > 128 else 1
    return min(-(-m // step) * step, most)


def tile_rows(m: int, most: int) -> int:
    """Return the rows whose tiles m rows take, `most` at most: tiles have 16, 32, or a multiple of 64 rows."""
    return min(max(16, 1 << (m - 1).bit_length()) if m <= 64 else -(-m // 64) * 64, most)


def all_plan_rows(most: int) -> list[int]:
    """Return all numbers that `plan_rows` gives, of up to `most` rows; some 200 for 4096."""
    found, m = [], 1
    while m <= most:
        found.append(plan_rows(m, most))
        m = found[-1] + 1
    return found


def all_tile_rows(most: int) -> list[int]:
    """Return the `tile_rows` of all numbers that `plan_rows` gives, of up to `most` rows."""
    return sorted({tile_rows(rows, most) for rows in all_plan_rows(most)})


def wide_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return a type wide enough to judge `dtype`; not wider on a GPU, where fp64 may be slow."""
    return torch.float64 if device.type == "cpu" or dtype == torch.float32 else torch.float32


def reference(problem: Problem, rank: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return what a rank gets of A (m, k) @ B (k, n), of the `wide_dtype` of theirs."""
    wide, (rows, columns) = wide_dtype(a.dtype, a.device), problem.c_bounds(rank)
    return a[slice(*rows)].to(wide) @ b[:, slice(*columns)].to(wide)
