"""The machine code of the tile-level collectives: peers are reached by wide accesses, edges are over the system."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from compiled_kernel import Compiled
from compiling import TARGETS, Case, StubContext, check_system_edges, compile_kernel
from test_values import line_kernel
from tile_collectives import COLLECTIVES, collective_kernel

each_target = pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942", "gfx950"])
each_vendor = pytest.mark.parametrize("target", ["sm_90", "gfx942"])  # for what is decided before a target is known
# Files whose stores are of tiles, whose atomics are on tiles.
STORING = ("access.py", "moves.py", "tiles.py", "values.py")
FLAGGED = ("all_reduce_ring", "messages")  # these are nothing without
VALUES = {"all_reduce_value": False, "reduce_scatter_value": True}


@functools.cache
def compiled(name: str, target: str, *, flagged: bool = True) -> Compiled:
    ctx = StubContext(Case("none", target))
    known: dict[str, Any] = {
        "flags_ptr": ctx.zeros(1 << 12, dtype=torch.int64) if flagged else None,
        "rank": 2,
        "heap_bases": ctx.get_heap_bases(),
        "watchdog_ptr": ctx.get_watchdog(),
        "WORLD_SIZE": 4,
    }
    pointers = ("src_ptr", "dst_ptr", "input_ptr", "output_ptr", "workspace_ptr")
    known |= {name: ctx.zeros(1 << 22, dtype=torch.bfloat16) for name in pointers}
    if name in VALUES:
        own = {"SIZE": 1 << 14, "SCATTER": VALUES[name]}
        kernel = line_kernel
    else:
        one = COLLECTIVES[name]
        parameter = 256 if one.parameter == "columns" else one.parameter
        known |= dict.fromkeys(("src_m", "src_n", "dst_m", "dst_n", "stride_src", "stride_dst"), 1024)
        own = {"words_ptr": ctx.zeros(1 << 12, dtype=torch.int64), "epoch": 1, "BLOCK_M": 64, "BLOCK_N": 64}
        own |= {"CALL": one.call, "PARAMETER": parameter, "OF_DST": one.of_dst, "COUNTED": True}
        kernel = collective_kernel
    arguments = {name: value for name, value in known.items() if name in kernel.arg_names}
    return compile_kernel(kernel, arguments | own, target)


@each_target
@pytest.mark.parametrize("name", [*COLLECTIVES, *VALUES])
def test_tiles_are_loaded_and_stored_16_bytes_at_a_time(target: str, name: str) -> None:
    kernel = compiled(name, target)
    is_nvidia = TARGETS[target].is_nvidia
    # Loads of tiles alone have a cache modifier.
    loads = re.findall(r"\bld\.global\.cg\.(\S+)" if is_nvidia else r"_load_(\S+) .*\bnt\b", kernel.code)
    assert set(loads) == {"v4.b32" if is_nvidia else "dwordx4"}
    stores = [kernel.stores_by_file().get(file, {}) for file in STORING]
    widths = {width for found in stores for width in found}
    assert widths == (set() if name == "all_reduce_atomic" else {16})
    assert kernel.scratch_bytes == 0


@each_target
@pytest.mark.parametrize("name", [*COLLECTIVES, *VALUES])
def test_edges_are_over_the_system(target: str, name: str) -> None:
    check_system_edges(compiled(name, target), target)


@each_vendor
@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name not in FLAGGED])
def test_without_flags_only_locks_signal(target: str, name: str) -> None:
    signal = r"\batom\.global\.sys\.release\.exch" if TARGETS[target].is_nvidia else r"buffer_wbl2 sc0 sc1\n"
    signals = compiled(name, target, flagged=False).count(signal)
    if name == "all_reduce_spinlock":
        assert 0 < signals < compiled(name, target).count(signal)
    else:
        assert not signals


@each_target
def test_additions_to_peers_are_atomic_over_the_system(target: str) -> None:
    code = compiled("all_reduce_atomic", target)
    if TARGETS[target].is_nvidia:
        assert code.count(r"\b(?:red|atom)\.(?:relaxed\.)?global\.(?:relaxed\.)?sys\.(?:relaxed\.)?add")
        assert not code.count(r"\b(?:red|atom)\.\S*(?:gpu|cta)\S*add")
    else:
        # Of bf16, compare-and-swap loops; sc1 is the scope of the system.
        assert code.count(r"global_atomic_cmpswap .* sc1\n")
        assert not code.count(r"global_atomic_cmpswap .*(?<! sc1)\n")
