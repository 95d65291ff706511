"""GEMM + all-scatter by whichever variant is fastest for the problem: see ../common/auto.py.

The vendor's candidate is `library_layout`: C is one matrix, whichever is chosen.
"""

from __future__ import annotations

from ..common.auto import auto_variant
from .operator import FAMILY

VARIANT = auto_variant(FAMILY, vendor="library_layout")
