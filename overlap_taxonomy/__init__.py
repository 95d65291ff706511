"""How GEMM-and-communication kernels differ: the axes, the registry of the variants there are, and what each costs."""

from .axes import Agent, Arrangement, Mainloop, Schedule, Sync
from .hosts import HOST_LINKS, HostLink, Step, as_warm_as, over_hosts, schedule_us
from .machine import Machine
from .machines import MACHINES, assumed_machine, machine_for
from .model import GEMM_ALONE, Parts, copies_operands, explain_us, predict_ideal_us, predict_us
from .registry import (
    Partition,
    current_name,
    find_variant,
    get_variant,
    is_retired,
    known_names,
    list_families,
    list_variants,
    module_of,
    register,
    register_partition,
    variants_named,
)
from .variant import Choice, Variant, full_name
from .work import Work

__all__ = [
    "GEMM_ALONE",
    "HOST_LINKS",
    "MACHINES",
    "Agent",
    "Arrangement",
    "Choice",
    "HostLink",
    "Machine",
    "Mainloop",
    "Partition",
    "Parts",
    "Schedule",
    "Step",
    "Sync",
    "Variant",
    "Work",
    "as_warm_as",
    "assumed_machine",
    "copies_operands",
    "current_name",
    "explain_us",
    "find_variant",
    "full_name",
    "get_variant",
    "is_retired",
    "known_names",
    "list_families",
    "list_variants",
    "machine_for",
    "module_of",
    "over_hosts",
    "predict_ideal_us",
    "predict_us",
    "register",
    "register_partition",
    "schedule_us",
    "variants_named",
]
