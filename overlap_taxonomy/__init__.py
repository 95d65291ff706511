"""How GEMM-and-communication kernels differ: the axes, the registry of the variants there are, and what each costs."""

from .axes import Agent, Arrangement, Sync
from .cost import Work
from .machine import MACHINES, Machine, machine_for
from .model import copies_operands, predict_ideal_us, predict_us
from .registry import get_variant, list_families, list_variants, register
from .variant import Variant

__all__ = [
    "MACHINES",
    "Agent",
    "Arrangement",
    "Machine",
    "Sync",
    "Variant",
    "Work",
    "copies_operands",
    "get_variant",
    "list_families",
    "list_variants",
    "machine_for",
    "predict_ideal_us",
    "predict_us",
    "register",
]
