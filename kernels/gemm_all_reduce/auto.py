"""GEMM + all-reduce by whichever variant is fastest for the problem: see ../common/choice/auto.py."""

from __future__ import annotations

from ..common.choice.auto import auto_variant
from .host import FAMILY

VARIANT = auto_variant(FAMILY)
