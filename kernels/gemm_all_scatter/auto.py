"""GEMM + all-scatter by whichever variant is fastest for the problem: see ../common/auto.py.

The library candidate is `library_layout`: C is one matrix, whichever is chosen.
"""

from __future__ import annotations

from ..common.auto import auto_variant
from .host import FAMILY

VARIANT = auto_variant(FAMILY, baseline="library_layout")
