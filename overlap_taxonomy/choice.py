"""A pattern by itself, where it has several implementations: the one that can do the problem is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .axes import Mainloop, Schedule
from .variant import Choice, Variant


def choice_of(implementations: Sequence[Variant]) -> Variant:
    """Return what a pattern's name stands for by itself.

    That is the first implementation that can do the problem with the configuration, if one is given: a GPU's own main
    loop before the portable one. Other schedules than data-parallel are taken only by their full names, as `auto` takes
    them where they are faster: they are for few rows.

    Args:
        implementations: of one pattern of one family.

    Returns:
        The only one that can be meant; else a variant that makes the operator of the first that can do the problem, the
        same on all ranks, which have one kind of GPU.
    """
    of_tiles = [one for one in implementations if one.schedule is Schedule.DATA_PARALLEL] or list(implementations)
    candidates = sorted(of_tiles, key=lambda one: one.mainloop is Mainloop.PORTABLE)
    last = candidates[-1]
    if len(candidates) == 1:
        return last

    def chosen(problem: Any, config: Any) -> Variant:
        return next((one for one in candidates if not one.unsupported_reason(problem, config)), last)

    def choose(ctx: Any, problem: Any, config: Any) -> Choice:
        return Choice(chosen(problem, config).name, config, "by its pattern")

    def build(ctx: Any, problem: Any, config: Any = None, **options: Any) -> Any:
        return chosen(problem, config).build(ctx, problem, config, **options)

    def unsupported_reason(problem: Any, config: Any) -> str | None:
        return chosen(problem, config).unsupported_reason(problem, config)

    return replace(
        last,
        build=build,
        unsupported_reason=unsupported_reason,
        mainloop=Mainloop.CHOSEN,
        choose=choose,
        can_trace=False,
    )
