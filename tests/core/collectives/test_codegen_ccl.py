"""The machine code of the collectives on whole tensors: 16-byte accesses, edges over the system, no spills."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from compiled_kernel import Compiled
from compiling import TARGETS, Case, StubContext, check_system_edges, compile_kernel

from iris_core.collectives import launches
from iris_core.collectives.all_reduce import ccl_all_reduce_ring, ccl_all_reduce_two_shot
from iris_core.collectives.config import Config
from iris_core.collectives.exchange import ccl_barrier, ccl_exchange
from iris_core.collectives.group import MOST_PROGRAMS, Group
from iris_core.collectives.operands import Call
from iris_core.collectives.send_recv import ccl_recv, ccl_send

pytestmark = pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942", "gfx950"])
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "all_reduce": (ccl_exchange, {"OP": "sum", "SCATTERED": False, "PIPELINED": False}),
    "reduce_scatter": (ccl_exchange, {"OP": "sum", "SCATTERED": True, "PIPELINED": False}),
    "pipelined_reduce_scatter": (ccl_exchange, {"OP": "sum", "SCATTERED": True, "PIPELINED": True}),
    "all_to_all": (ccl_exchange, {"OP": "none", "SCATTERED": True, "PIPELINED": False}),
    "pipelined_all_to_all": (ccl_exchange, {"OP": "none", "SCATTERED": True, "PIPELINED": True}),
    "two_shot": (ccl_all_reduce_two_shot, {"OP": "sum"}),
    "ring": (ccl_all_reduce_ring, {"OP": "sum"}),
    "send": (ccl_send, {}),
    "recv": (ccl_recv, {}),
}


def compiled(name: str, target: str) -> Compiled:
    ctx = StubContext(Case("none", target))
    kernel, own = KERNELS.get(name, (ccl_barrier, {}))
    known: dict[str, Any] = {pointer: ctx.zeros(1 << 20, dtype=torch.int64) for pointer in ("flags_ptr", "words_ptr")}
    known |= {pointer: ctx.zeros(1 << 22, dtype=torch.bfloat16) for pointer in ("out_ptr", "in_ptr", "staging_ptr")}
    known |= {"state_ptr": known["flags_ptr"], "size": 1 << 20, "part": 1 << 18, "rank": 2, "index": 2, "peer": 1}
    known |= {"sender": -1, "receiver": -1, "members_ptr": None, "GROUP_SIZE": 4, "BLOCK": 4096, "SLOT": 16384}
    known |= {"heap_bases": ctx.get_heap_bases(), "watchdog_ptr": ctx.get_watchdog()} | own
    arguments = {argument: value for argument, value in known.items() if argument in kernel.arg_names}
    return compile_kernel(kernel, arguments | {"num_warps": 16 if TARGETS[target].is_nvidia else 8}, target)


@pytest.mark.parametrize("name", KERNELS)
def test_blocks_are_loaded_and_stored_16_bytes_at_a_time(target: str, name: str) -> None:
    kernel = compiled(name, target)
    widths = {width for file in ("exchange.py", "send_recv.py") for width in kernel.stores_by_file().get(file, {})}
    assert 16 in widths
    assert widths <= {8, 16}  # 8: the count of blocks
    is_nvidia = TARGETS[target].is_nvidia
    loads = re.findall(r"\bld\.global\.cg\.(\S+)" if is_nvidia else r"_load_(\S+) .*\bnt\b", kernel.code)
    assert set(loads) == (set() if name == "send" else {"v4.b32" if is_nvidia else "dwordx4"})
    assert kernel.scratch_bytes == 0


@pytest.mark.parametrize("name", [*KERNELS, "barrier"])
def test_edges_are_over_the_system(target: str, name: str) -> None:
    check_system_edges(compiled(name, target), target)


@pytest.mark.parametrize("name", KERNELS)
def test_launched_early_it_waits_before_it_touches_memory(target: str, name: str) -> None:
    """And lets the next kernel start when all is sent."""
    kernel = compiled(name, target)
    if not TARGETS[target].is_nvidia:
        assert "griddepcontrol" not in kernel.code
        return
    touched = re.search(r"\b(?:ld|st|atom|red)\.\S*global|\bbar\.sync", kernel.code)
    assert touched
    assert kernel.code.count("griddepcontrol.wait") == 1
    assert kernel.code.find("griddepcontrol.wait") < touched.start()
    is_exchange = KERNELS[name][0] is ccl_exchange
    assert kernel.count(r"griddepcontrol\.launch_dependents") == is_exchange
    if is_exchange:
        before = kernel.code.split("griddepcontrol.launch_dependents")[0]
        assert len(re.findall(r"\.release\.", before)) == (1 if KERNELS[name][1]["PIPELINED"] else 2)


def two_gpus(target: str) -> Any:
    ctx: Any = StubContext(Case("none", target, world_size=2))
    ctx.is_interpreted, ctx.barrier, ctx.backend.name = lambda: False, lambda: None, "cuda"
    return ctx


def options_of(nbytes: int, target: str) -> dict[str, int]:
    """Return with which options an all-reduce of two ranks is launched."""
    ctx = two_gpus(target)
    group, x = Group(ctx, range(2)), torch.zeros(nbytes, dtype=torch.uint8)
    with mock.patch.object(launches, "compiled_kernel") as compiled, mock.patch.object(launches, "LoadedKernel"):
        launches.Launches(ctx).run(Call("all_reduce", x, x, op="sum"), group, group.channel, Config())
    return compiled.call_args.args[3]


def test_a_short_collective_is_launched_early(target: str) -> None:
    """One of a block per program, where GPUs can do that."""
    in_flight = MOST_PROGRAMS * (16 << 10)
    early = [options_of(nbytes, target).get("launch_pdl", False) for nbytes in (16, in_flight, in_flight + 16)]
    has_launch = TARGETS[target].is_nvidia
    assert early == [has_launch, has_launch, False]
