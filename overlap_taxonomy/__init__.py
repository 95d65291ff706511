"""The axes along which GEMM-and-communication kernels differ, and the registry of the variants that exist."""

from .axes import Agent, Arrangement, Sync
from .registry import get_variant, list_families, list_variants, register
from .variant import Variant

__all__ = [
    "Agent",
    "Arrangement",
    "Sync",
    "Variant",
    "get_variant",
    "list_families",
    "list_variants",
    "register",
]
