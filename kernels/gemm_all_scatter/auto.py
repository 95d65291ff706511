"""GEMM + all-scatter by whichever variant is fastest for the problem: see ../common/choice/auto.py.

The library candidate is `library_layout`: C is one matrix, whichever is chosen.
"""

from __future__ import annotations

from ..common.choice.auto import auto_variant
from .host import FAMILY

VARIANT = auto_variant(FAMILY, baseline="library_layout")
