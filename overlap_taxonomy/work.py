"""A problem as the cost model sees it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from .registry import Partition, partition_of

FP8_SUMS = ("promoted", "fast", "block")
WIDE_BYTES = 16  # of a row or more: what is read and stored at once, and what tensor descriptors need


class WorkKind(NamedTuple):
    """What of a problem the costs of its tiles depend on, beside their sizes; see `Work`."""

    element_bytes: int
    out_bytes: int
    sums: str
    reads_narrow_rows: bool
    has_narrow_output: bool
    is_summed: bool


@dataclass(frozen=True)
class Work:
    """A problem as the model sees it. Operands of one byte an element are fp8.

    Args:
        family: the kernel family, e.g. ``"gemm_all_scatter"``.
        m, n, k: sizes of the whole product, over all ranks.
        world_size: number of ranks.
        element_bytes: of an element of A and B.
        out_bytes: of an element of C and of partial sums; 0 for those of the operands'.
        normed_share: of C's rows, those that the rank with the most norms.
        sums: of fp8 products, "promoted" to fp32 every 128 of k, "fast" in the tensor cores' own accumulators, or of
            "block" scales; "" of other dtypes.

    Raises:
        ValueError: a size below one, or sums that there are not, or not of that dtype.
    """

    family: str
    m: int
    n: int
    k: int
    world_size: int
    element_bytes: int = 2
    out_bytes: int = 0
    normed_share: float = 0.0
    sums: str = ""

    def __post_init__(self) -> None:
        if not self.out_bytes:
            object.__setattr__(self, "out_bytes", self.element_bytes)
        for name in ("m", "n", "k", "world_size", "element_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it takes a positive integer")
        known = FP8_SUMS if self.element_bytes == 1 else ("",)
        if self.sums not in known:
            raise ValueError(
                f"sums are {self.sums!r}; with elements of {self.element_bytes} bytes they are one of {known}"
            )

    def __hash__(self) -> int:
        return hash((self.m, self.n, self.k))

    def with_rows(self, m: int) -> Work:
        """Return the same problem of another m, with what is known of it for any number of rows."""
        other = object.__new__(Work)  # the rest was checked
        vars(other).update(vars(self), m=m, kind=self.kind, product=(m, *self.product[1:]))
        return other

    @functools.cached_property
    def partition(self) -> Partition:
        """How the family partitions the product."""
        return partition_of(self.family)

    @property
    def peers(self) -> int:
        """All ranks but one."""
        return self.world_size - 1

    def share(self, size: int) -> int:
        """Return the largest rank's shard of a size."""
        return -(-size // self.world_size)

    @property
    def normed_bytes(self) -> float:
        """Bytes of the rows that a rank norms."""
        return self.normed_share * self.m * self.n * self.element_bytes

    @functools.cached_property
    def product(self) -> tuple[int, int, int]:
        """M, N and K of the GEMM of the rank that has most to do."""
        n, k = (self.n, self.share(self.k)) if self.partition.sums else (self.share(self.n), self.k)
        return self.m, n, k

    def is_narrow(self, elements: int) -> bool:
        """Whether rows of so many elements are not on 16 bytes."""
        return elements * self.element_bytes % WIDE_BYTES != 0

    @functools.cached_property
    def kind(self) -> WorkKind:
        """What the costs of tiles depend on."""
        narrow = self.reads_narrow_rows, self.has_narrow_output
        return WorkKind(self.element_bytes, self.out_bytes, self.sums, *narrow, self.partition.sums)

    @functools.cached_property
    def has_narrow_output(self) -> bool:
        """Whether rows of C, and of partial sums, are not on 16 bytes."""
        return self.n * self.out_bytes % WIDE_BYTES != 0

    @functools.cached_property
    def reads_narrow_rows(self) -> bool:
        """Whether rows of A, and columns of B, are not on 16 bytes, on any rank."""
        if not self.partition.sums:
            return self.is_narrow(self.k)
        share = self.share(self.k)
        return any(self.is_narrow(max(0, min(share, self.k - rank * share))) for rank in range(self.world_size))
