"""How a collective is done."""

from __future__ import annotations

from dataclasses import dataclass

from ..utils.settings import is_whole

AUTO = "auto"
ALL_REDUCE_VARIANTS = (AUTO, "one_shot", "two_shot", "ring")
COPIED_VARIANTS = (AUTO, "direct", "copy_engine")


@dataclass(frozen=True)
class Config:
    """How a collective is done; the same on all ranks of a group.

    Args:
        comm_sms: most programs, of one SM each; None for as many as a group has room for, 128, or 64 with ``async_op``.
        all_reduce_variant: "one_shot", "two_shot", "ring", or "auto", which picks by size.
        all_gather_variant, broadcast_variant: "direct" (kernels, through slots on the heap), "copy_engine" (the output
            is on the heap), or "auto", which picks by size and by where the output lies.

    Raises:
        ValueError: there is no such variant or number of programs.
    """

    comm_sms: int | None = None
    all_reduce_variant: str = AUTO
    all_gather_variant: str = AUTO
    broadcast_variant: str = AUTO

    def __post_init__(self) -> None:
        if self.comm_sms is not None and not is_whole(self.comm_sms):
            raise ValueError(f"comm_sms is {self.comm_sms!r}; it takes a positive number, or None")
        for name, given, known in (
            ("all_reduce_variant", self.all_reduce_variant, ALL_REDUCE_VARIANTS),
            ("all_gather_variant", self.all_gather_variant, COPIED_VARIANTS),
            ("broadcast_variant", self.broadcast_variant, COPIED_VARIANTS),
        ):
            if given not in known:
                raise ValueError(f"{name} is {given!r}; there are {', '.join(map(repr, known))}")
