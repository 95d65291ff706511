"""The machine code of the tile-level collectives: peers are reached by wide accesses, edges are over the system."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from compiling import NVIDIA_ACQUIRE, TARGETS, Case, Compiled, StubContext, compile_kernel
from test_tile_collectives import all_gather_kernel, all_reduce_kernel

from iris_core import x

pytestmark = pytest.mark.parametrize("target", ["sm_90", "gfx942"])
KERNELS = {
    "one_shot": (all_reduce_kernel, {"ALGORITHM": x.all_reduce_one_shot}),
    "all_gather": (all_gather_kernel, {"DIM": 0}),
}
STORING = ("access.py", "moves.py")  # files whose stores are of tiles


def compiled(name: str, target: str, rank: int = 2) -> Compiled:
    kernel, own = KERNELS[name]
    ctx = StubContext(Case("none", target, rank))
    known: dict[str, Any] = {
        "src_ptr": ctx.zeros(1 << 20, dtype=torch.bfloat16),
        "dst_ptr": ctx.zeros(1 << 22, dtype=torch.bfloat16),
        "flags_ptr": ctx.zeros(1 << 12, dtype=torch.int64),
        "M": 1024,
        "N": 1024,
        "stride_src": 1024,
        "stride_dst": 1024,
        "rank": rank,
        "epoch": 1,
        "heap_bases": ctx.get_heap_bases(),
        "watchdog_ptr": ctx.get_watchdog(),
        "WORLD_SIZE": 4,
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "COUNTED": True,
    }
    arguments = {name: value for name, value in known.items() if name in kernel.arg_names}
    return compile_kernel(kernel, arguments | own, target)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", KERNELS)
def test_tiles_are_loaded_and_stored_16_bytes_at_a_time(target: str, name: str, rank: int) -> None:
    kernel = compiled(name, target, rank)
    is_nvidia = TARGETS[target].is_nvidia
    # Loads of tiles alone have a cache modifier.
    loads = re.findall(r"\bld\.global\.cg\.(\S+)" if is_nvidia else r"_load_(\S+) .*\bnt\b", kernel.code)
    assert set(loads) == {"v4.b32" if is_nvidia else "dwordx4"}
    stores = [kernel.stores_by_file().get(file, {}) for file in STORING]
    assert {width for found in stores for width in found} == {16}
    assert kernel.scratch_bytes == 0


@pytest.mark.parametrize("name", KERNELS)
def test_edges_are_over_the_system(target: str, name: str) -> None:
    kernel = compiled(name, target)
    if TARGETS[target].is_nvidia:
        assert kernel.count(r"\batom\.global\.sys\.release\.exch") >= 2
        assert kernel.count(NVIDIA_ACQUIRE.format("sys")) >= 2
        assert not kernel.count(r"\b(?:gpu|cta)\.(?:release|acquire)|(?:release|acquire)\.(?:gpu|cta)\b")
    else:
        assert kernel.count(r"buffer_wbl2 sc0 sc1\n") >= 2
        assert kernel.count(r"buffer_inv sc0 sc1\n") >= 2
        assert not kernel.count(r"buffer_(?:wbl2|inv) sc[01]\n")
