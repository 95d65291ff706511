"""How a collective is done."""

from __future__ import annotations

from dataclasses import dataclass

from ..utils.settings import is_whole

AUTO = "auto"
_DIRECT_OR_PIPELINED = (AUTO, "direct", "pipelined")
_DIRECT_OR_COPIED = (AUTO, "direct", "copy_engine")
VARIANTS = {  # of the collectives that have more than one
    "all_reduce": (AUTO, "one_shot", "two_shot", "ring", "gathered"),
    "all_gather": _DIRECT_OR_COPIED,
    "reduce_scatter": _DIRECT_OR_PIPELINED,
    "all_to_all": _DIRECT_OR_PIPELINED,
    "broadcast": _DIRECT_OR_COPIED,
}


@dataclass(frozen=True)
class Config:
    """How a collective is done; the same on all ranks of a group.

    Args:
        comm_sms: most programs, of one SM each; None for as many as a group has room for, 128, or 64 with ``async_op``.
        all_reduce_variant: "one_shot", "two_shot", "ring", "gathered" (a "pipelined" reduce-scatter, then an all-gather
            by copy engines; the output is on the heap), or "auto", which picks by size and by where the output lies.
        all_gather_variant, broadcast_variant: "direct" (kernels, through slots on the heap), "copy_engine" (the output
            is on the heap), or "auto", likewise.
        reduce_scatter_variant, all_to_all_variant: "direct", "pipelined" (the same kernel, which combines or copies a
            block while what it stores arrives), or "auto", which picks by size.

    Raises:
        ValueError: there is no such variant or number of programs.
    """

    comm_sms: int | None = None
    all_reduce_variant: str = AUTO
    all_gather_variant: str = AUTO
    reduce_scatter_variant: str = AUTO
    all_to_all_variant: str = AUTO
    broadcast_variant: str = AUTO

    def __post_init__(self) -> None:
        if self.comm_sms is not None and not is_whole(self.comm_sms):
            raise ValueError(f"comm_sms is {self.comm_sms!r}; it takes a positive number, or None")
        for kind, known in VARIANTS.items():
            given = getattr(self, f"{kind}_variant")
            if given not in known:
                raise ValueError(f"{kind}_variant is {given!r}; there are {', '.join(map(repr, known))}")
