"""All-gather + GEMM by whichever variant is fastest for the problem: see ../common/choice/auto.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..common.choice.auto import auto_variant
from .host import FAMILY


def _gather_nothing(options: Mapping[str, Any]) -> Collection[str]:
    """Variants that leave no gathered A, where it is asked for."""
    return ("fused_sequential:portable",) if options.get("keep_gathered") else ()


VARIANT = auto_variant(FAMILY, left_out=_gather_nothing)
