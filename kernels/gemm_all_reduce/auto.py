"""GEMM + all-reduce by whichever variant is fastest for the problem: see ../common/auto.py."""

from __future__ import annotations

from ..common.auto import auto_variant
from .host import FAMILY

VARIANT = auto_variant(FAMILY)
