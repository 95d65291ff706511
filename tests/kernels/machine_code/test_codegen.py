"""The machine code of every kernel that every fused variant launches, on four GPUs: fast, and ordered as it must be.

Ranks 0, 1 and 2 stand for all: Triton makes a constant of an integer argument that is 1, and another kernel where it
divides by 16.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from compiled_kernel import Compiled
from compiling import LOADS_OF_A_WAIT, MORE_LATER, NVIDIA_ACQUIRE, TARGETS, Case, compile_case, make_problem
from families import FAMILIES, FUSED
from proxies import follow

from iris_kernels.common.portable.stream_k import NONE
from overlap_taxonomy import Agent, Mainloop, Sync, Variant, get_variant


def cases_of(variant: Variant) -> list[Case]:
    """Every target and, on one of each vendor, what else decides about a kernel.

    The rank and how operands are read decide about different parts of a kernel, so a case has another of both. AMD's
    GPUs take the same tiles, and a 16-bit type is one letter of an instruction: the second GPU has both others.
    """
    case = Case(variant.name, "sm_90", rank=2, family=variant.family)
    return [
        case,
        replace(case, target="gfx942"),
        replace(case, target="sm_100", rank=1),
        replace(case, target="gfx950", rank=1, dtype=torch.float16, size=1024),
        replace(case, rank=0, pointers=True),
        replace(case, dtype=torch.float32),
        replace(case, rank=1, size=1024, layout="kn"),
    ]


CASES = [case for variant in FUSED for case in cases_of(variant)]
CASES.append(
    Case("fused_sequential:portable:stream_k", "sm_90", rank=1, size=6144)
)  # its programs split tiles, which those of the others do not
MATRIX_INSTRUCTION = {
    "sm_90": r"wgmma\.mma_async",
    "sm_100": r"tcgen05\.mma",
    "gfx942": r"v_mfma_f32_",
    "gfx950": r"v_mfma_f32_",
}
# What the ordering edges of iris_core.device.sync and of the handshake look like in assembly.
NVIDIA_EDGES = {
    "release to system": r"atom\.global\.sys\.release\.exch",
    "acquire from system": NVIDIA_ACQUIRE.format("sys"),
    "collect programs for peers": r"atom\.global\.sys\.acq_rel\.add",
    "collect programs": r"atom\.global\.gpu\.acq_rel\.add",
    "release to device": r"atom\.global\.gpu\.release\.exch",
    "acquire from device": NVIDIA_ACQUIRE.format("gpu"),
    "count for stream": r"(?:atom|red)\.global\.sys\.release\.add\.u32",
    "count at peer": r"(?:atom|red)\.global\.sys\.release\.add\.u64",
}
# Between a cache operation and the access it belongs to.
_WAITS = r"\n(?:\s+s_(?:waitcnt|nop)[^\n]*\n)*\s+"
_NOTHING = "atomic_(?:add|or)_x2"  # of zero: to acquire. Before Triton 3.9 LLVM makes a load of it
AMD_EDGES = {
    "release to system": rf"buffer_wbl2 sc0 sc1{_WAITS}global_atomic_swap_x2",
    "acquire from system": rf"global_(?:load_dwordx2[^\n]* sc0|{_NOTHING}[^\n]*) sc1{_WAITS}buffer_inv sc0 sc1",
    "collect programs for peers": rf"buffer_wbl2 sc0 sc1{_WAITS}global_atomic_add_x2[^\n]*{_WAITS}buffer_inv sc0 sc1",
    "collect programs": rf"buffer_wbl2 sc1{_WAITS}global_atomic_add_x2[^\n]*{_WAITS}buffer_inv sc1\b",
    "release to device": rf"buffer_wbl2 sc1{_WAITS}global_atomic_swap_x2",
    "acquire from device": rf"global_(?:load_dwordx2[^\n]* sc1|{_NOTHING}[^\n]*){_WAITS}buffer_inv sc1\b",
    "count for stream": rf"buffer_wbl2 sc0 sc1{_WAITS}global_atomic_add ",
    "count at peer": rf"buffer_wbl2 sc0 sc1{_WAITS}global_atomic_add_x2[^\n]*\n(?!{_WAITS[2:]}buffer_inv)",
}
# Where the stores are that move no tile: words of the handshake and of failed waits.
HANDSHAKE_FILES = {"sync.py", "handshake.py", "rma.py"}

# Bytes of a thread. Exact fp32 keeps its whole tile in registers; the assembler may park a word of the handshake.
FEW_WORDS = 16
ONE_WORD = 8
WAITING_AND_FULL = (
    "all_gather_gemm_producer_consumer",
    "gemm_all_scatter_producer_consumer_push",
    "gemm_reduce_scatter_producer_consumer_push",
    "gemm_reduce_scatter_producer_consumer_sum",
    "gemm_reduce_scatter_copy_engine_sum",
)  # they wait where sixteen warps, or a wide sum, leave few registers

compile_once = functools.cache(compile_case)


def variant_of(case: Case) -> Variant:
    return get_variant(case.family, case.variant)


def every_case(where: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case for case in CASES if where(case)], ids=str)


def every_product(where: Callable[[Case], bool] = lambda case: True) -> pytest.MarkDecorator:
    """Of variants whose kernels multiply, not the library's."""
    return every_case(lambda case: variant_of(case).mainloop is not Mainloop.LIBRARY and where(case))


def stores_to_all_peers(case: Case) -> tuple[str, str] | None:
    """Return an argument that tells the kernels which store to every peer, and what has the rows of one store.

    The programs of the other variants store to one peer at a time, load from it, or leave it to the copy engines.
    """
    agent = variant_of(case).agent
    if case.family == "gemm_all_scatter" and agent is Agent.COMPUTING_PROGRAM:
        return "gemm", "block_m"
    if case.family in ("gemm_all_scatter", "all_gather_gemm") and agent in (
        Agent.ALL_SMS,
        Agent.COMM_KERNEL,
        Agent.COMM_PROGRAMS,
    ):
        return "ROWS", "comm_rows"
    return None


def multiplying(case: Case) -> list[Compiled]:
    """Return the case's kernels that have the main loop in them."""
    found = [kernel for kernel in compile_once(case) if "gemm" in kernel.arguments]
    assert found
    return found


def operand_bytes(kernel: Compiled, dtype: torch.dtype) -> int:
    """Return what one stage of the main loop holds."""
    config = kernel.config
    return (config.block_m + config.block_n) * config.block_k * dtype.itemsize


def tile_stores(kernel: Compiled) -> Counter[int]:
    """Return the widths in bytes of the stores that move tiles, and how many there are of each."""
    widths: Counter[int] = Counter()
    for file, found in kernel.stores_by_file().items():
        if file not in HANDSHAKE_FILES:
            widths += found
    return widths


@every_case()
def test_shared_memory_is_enough(case: Case) -> None:
    for kernel in compile_once(case):
        assert kernel.shared_bytes <= TARGETS[case.target].shared_bytes, kernel.name


@every_product(lambda case: case.dtype != torch.float32)  # exact fp32 products have no matrix instruction
def test_multiplies_on_the_matrix_units(case: Case) -> None:
    for kernel in multiplying(case):
        assert kernel.count(MATRIX_INSTRUCTION[case.target]) >= 4, kernel.name


@every_product(lambda case: TARGETS[case.target].is_nvidia)  # AMD has no tensor descriptors
def test_operands_are_read_by_descriptors_or_sixteen_bytes_at_a_time(case: Case) -> None:
    for kernel in multiplying(case):
        with_descriptors = replace(kernel.config, descriptors=True)
        may_have_them = variant_of(case).unsupported_reason(make_problem(case), with_descriptors) is None
        assert kernel.config.descriptors == (may_have_them and not case.pointers and case.dtype != torch.float32)
        assert (kernel.count(r"cp\.async\.bulk\.tensor") > 0) == kernel.config.descriptors, kernel.name
        assert (kernel.count(r"cp\.async\.cg") > 0) == (not kernel.config.descriptors), kernel.name
        assert kernel.count(r"cp\.async\.ca") == 0, kernel.name  # narrower


@every_product()
def test_main_loop_is_pipelined(case: Case) -> None:
    for kernel in multiplying(case):
        stages = kernel.config.num_stages
        assert stages >= 2
        if TARGETS[case.target].is_nvidia:
            # Each stage has its operands in shared memory; ordinary multiplies have taken the oldest into registers.
            # Without pipelining there would be room for one.
            buffers = stages - 1 if case.dtype == torch.float32 else stages
            assert kernel.shared_bytes >= buffers * operand_bytes(kernel, case.dtype), kernel.name
        else:
            # One stage is on its way in registers, the others in LDS, which the loop hands on from turn to turn: a loop
            # that is not pipelined fills and reads its LDS in the same turn.
            assert kernel.shared_bytes >= (stages - 1) * operand_bytes(kernel, case.dtype), kernel.name
            carried = [line for line in kernel.ttgir.splitlines() if "scf.for" in line and "!ttg.memdesc<" in line]
            assert carried, kernel.name


@every_case()
def test_nothing_spills(case: Case) -> None:
    for kernel in compile_once(case):
        # The widest tile of `one_shot` leaves few registers.
        few = case.dtype == torch.float32 or (
            case.variant == "fused_sequential:portable:stream_k" and kernel.config.block_n == 256
        )
        waits = kernel.name in WAITING_AND_FULL
        most = FEW_WORDS if few else ONE_WORD if waits else 0
        assert kernel.scratch_bytes <= most + (MORE_LATER if most else 0), kernel.name
        assert "__local_depot" not in kernel.code, kernel.name  # arrays that PTX itself keeps in memory


@every_case()
def test_no_store_of_a_tile_is_narrow(case: Case) -> None:
    """To peers and to this rank. Straight from its matrix units, an AMD thread has eight neighbouring bytes."""
    for kernel in compile_once(case):
        if kernel.arguments & {"block", "staging", "shard"}:
            allowed = {16} if TARGETS[case.target].is_nvidia else {8, 16}
            assert set(tile_stores(kernel)) <= allowed, (kernel.name, tile_stores(kernel))


@every_case(lambda case: stores_to_all_peers(case) is not None)
def test_stores_to_peers_are_sixteen_bytes_wide(case: Case) -> None:
    """Counted where the stores to all peers are unrolled: one tile, or one chunk of it, to each."""
    argument, rows = stores_to_all_peers(case) or ("", "")
    storing = [kernel for kernel in compile_once(case) if argument in kernel.arguments]
    assert storing
    for kernel in storing:
        chunk_bytes = getattr(kernel.config, rows) * kernel.config.block_n * case.dtype.itemsize
        expected = (case.world_size - 1) * max(1, chunk_bytes // (16 * kernel.threads))
        assert tile_stores(kernel)[16] >= expected, (kernel.name, tile_stores(kernel))


@every_case()
def test_handshake_is_ordered(case: Case) -> None:
    """Releases to, and acquires from, every peer, over the system; in however many kernels they are."""
    edges = NVIDIA_EDGES if TARGETS[case.target].is_nvidia else AMD_EDGES
    found = {name: sum(kernel.count(edge) for kernel in compile_once(case)) for name, edge in edges.items()}
    if TARGETS[case.target].is_nvidia:
        found["acquire from system"] //= LOADS_OF_A_WAIT
    else:  # what collects acquires, too
        found["acquire from system"] -= found["collect programs for peers"]
        found["acquire from device"] -= found["collect programs"]
    peers = case.world_size - 1
    assert found["acquire from system"] >= 1
    if case.variant == "fused_sequential:portable:stream_k":  # a thread a peer; programs end calls by themselves
        assert found["release to system" if case.family != "all_gather_gemm" else "count at peer"] >= 1
        shares = multiplying(case)[0].constants["SPLITS"] != NONE.value
        assert (found["release to device"] > 0) == shares
        # Not of the GPU's scope: of a block of flags, Triton 3.6 for AMD forgets to acquire it.
        assert found["acquire from system"] >= 1 + (case.family == "gemm_all_scatter") + shares
        return
    assert found["collect programs" if case.announces_itself else "collect programs for peers"] >= 1
    assert found["release to system"] >= peers  # ready; or done, where copies' flags are awaited
    if case.family == "gemm_all_scatter":  # ready and done, unrolled
        assert found["release to system"] >= 2 * peers
        assert found["acquire from system"] >= 2 * peers
    sync = variant_of(case).sync
    if sync is Sync.TILE_FLAG:
        assert found["release to device"] >= 1
        assert found["acquire from device"] >= 1
    if sync is Sync.CHUNK_COUNTER:
        assert found["count for stream"] >= 1
    if sync is Sync.SHARD_COUNTER:
        assert found["count at peer"] >= 1
    if sync is Sync.SHARD_FLAG:  # each peer's end; a tile's shard, and each, of a rank without columns
        assert found["acquire from system"] >= 2 * peers + 1


@every_product(lambda case: TARGETS[case.target].gpu.arch in (90, 100))
def test_a_fence_is_between_an_acquire_and_loads_by_descriptor(case: Case) -> None:
    """Of the heap, on every path; where kernels acquire and load in one, all-gather's do."""
    loads = 0
    for kernel in compile_once(case):
        found = follow(kernel.ttgir, kernel.descriptors_on_heap)
        assert not found.unfenced, kernel.name
        loads += len(found.loads)
    assert (loads > 0) == (case.family == "all_gather_gemm" and multiplying(case)[0].config.descriptors)


@every_case(lambda case: TARGETS[case.target].is_nvidia)
def test_what_others_wrote_in_this_call_is_read_past_the_l1_cache(case: Case) -> None:
    """This SM's may hold an older call's. A rank's own operands, and what earlier kernels wrote, may come from it."""
    may = {"gemm.py"}
    pulls = variant_of(case).pattern == "bulk_synchronous"
    may |= {"bulk_synchronous.py"} if pulls else set()
    may |= {"shards.py", "fused_sequential_stream_k.py"} if case.family == "all_gather_gemm" else set()
    past = set()
    for kernel in compile_once(case):
        assert kernel.files_that_load("global") <= may, kernel.name
        past |= kernel.files_that_load(r"global\.cg")
    if case.variant == "fused_sequential:portable:stream_k" and multiplying(case)[0].constants["SPLITS"] != NONE.value:
        assert "stream_k.py" in past
    if FAMILIES[case.family].sums_partials and not pulls:
        assert past - {"stream_k.py"}
