"""The machine code of the warp-specialised kernels: roles on the right instructions, and ordered as they must be."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import pytest
import torch
from compiled_kernel import Compiled
from compiling import LOADS_OF_A_WAIT, NVIDIA_ACQUIRE, PAST_L1, Case, compile_case
from families import FAMILIES, stem
from proxies import follow

from iris_kernels.common.hopper.host import SHARED_BYTES
from iris_kernels.common.hopper.roles import LOADER_REGISTERS, MULTIPLY_REGISTERS
from overlap_taxonomy import Mainloop, Variant, list_variants

WORKER_WARPS = 4  # those that load and communicate, rounded up to a warp group
REGISTERS = 65536  # of an SM


def cases_of(variant: Variant) -> list[Case]:
    """Ranks 0, 1 and 2 stand for all: Triton makes a constant of a 1, and another kernel of a multiple of 16.

    The rank, how B lies and the type of the elements decide about different parts of a kernel: a case has another of
    several.
    """
    case = Case(variant.name, "sm_90", rank=2, family=variant.family)
    return [
        case,
        replace(case, rank=0, dtype=torch.float16, size=4096),
        replace(case, rank=1, size=1024, layout="kn"),
        replace(case, world_size=1, rank=0),
        replace(case, world_size=2, rank=1),
        replace(case, world_size=8),
        replace(case, pingpong=True, rank=1, layout="kn"),
        replace(case, pingpong=True, world_size=8),
        *(replace(case, k_chunks=3, splits=splits) for splits in (1, 2) if variant.name == "copy_engine:sm90"),
        *(replace(case, splits=splits) for splits in (2, 4) if variant.family == "gemm_all_scatter"),
    ]


VARIANTS = [variant for variant in list_variants() if variant.mainloop is Mainloop.SM90]
each_case = pytest.mark.parametrize(
    "case", [case for variant in VARIANTS for case in cases_of(variant)], ids=lambda case: f"{case}-w{case.world_size}"
)
IN_ONE_KERNEL = ("warp_specialized:sm90", "workgroup_specialized:sm90")
ALONE = [case for variant in VARIANTS if variant.name in IN_ONE_KERNEL for case in cases_of(variant)]
TOUCHES = r"tt\.(?:load|store|atomic|descriptor)|ttng\.async_tma"  # memory beyond shared memory
compile_once = functools.cache(compile_case)


def specialized(case: Case) -> Compiled:
    """Return the case's warp-specialised kernel."""
    (kernel,) = [kernel for kernel in compile_once(case) if kernel.name.endswith(f"_{stem(case.variant)}")]
    return kernel


def receives(case: Case) -> bool:
    """Whether partial tiles come from peers."""
    return FAMILIES[case.family].sums_partials and case.world_size > 1


def test_all_families_have_it() -> None:
    families = sorted(variant.family for variant in VARIANTS if variant.name in IN_ONE_KERNEL)
    assert families == ["all_gather_gemm", "gemm_all_reduce", "gemm_all_scatter", "gemm_reduce_scatter"]


@each_case
def test_multiplies_with_warp_groups_and_moves_tiles_by_tma(case: Case) -> None:
    kernel = specialized(case)
    assert kernel.count(r"wgmma\.mma_async") >= 4
    assert kernel.count(r"cp\.async\.bulk\.tensor\.2d\.shared::(?:cluster|cta)\.global") >= 2  # A and B
    assert kernel.count(r"cp\.async\.bulk\.tensor\.3d\.global\.shared") >= 1
    assert kernel.count(r"stmatrix\.\S*x4") >= 1
    if receives(case):
        assert kernel.count(r"cp\.async\.bulk\.tensor\.3d\.shared::(?:cluster|cta)\.global") >= 1
        assert kernel.count(r"ldmatrix\.\S*x4") >= 1


@each_case
def test_no_tile_is_stored_or_loaded_by_threads(case: Case) -> None:
    kernel = specialized(case)
    stores = kernel.stores_by_file()
    exchanged = stores.pop("fixup.py", {})  # partial sums of split tiles
    assert set(stores) <= {"sync.py", "handshake.py", "rma.py"}
    assert set(exchanged) <= {8}  # two columns; four neighbouring threads fill a sector
    assert bool(exchanged) == (kernel.config.splits > 1)
    # Other programs' partials are in the L2 cache; this SM's own may hold an older call's.
    loads = re.findall(r"tt\.load .*tensor<\w+x!tt\.ptr<[bf]\w+>.*", kernel.ttgir)
    assert bool(loads) == (kernel.config.splits > 1)
    assert all(re.search(PAST_L1, load) for load in loads)
    # Splitting an accumulator into subtiles renames registers; through shared memory it would take 32 stores or more.
    assert kernel.count(r"st\.shared\.\S*") < 32


def may_spill(case: Case) -> int:
    """Return how many bytes per thread may spill.

    Where partials are added, a few words that say which tile comes next do not fit beside it: once a turn, not in the
    main loop. With pingpong some loaders lack registers: once a tile.
    """
    if case.pingpong:
        gathers = (case.variant, case.world_size) == ("workgroup_specialized:sm90", 8)
        bytes_of = {
            "gemm_all_scatter": 16,
            "all_gather_gemm": 32 if gathers else 0,
            "gemm_reduce_scatter": 8,
            "gemm_all_reduce": 40,
        }
        return bytes_of.get(case.family, 0)
    if FAMILIES[case.family].sums_partials:
        return 32
    return 0


@pytest.mark.parametrize("size", [1, 8])  # of 8: each of 8 ranks has a row and a column
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant.family}-{variant.name}")
def test_kernels_compile_where_sizes_are_one(variant: Variant, size: int) -> None:
    """Triton makes constants of such arguments, also within a bundle of a bundle, up to its GPU dialect."""
    case = Case(variant.name, "sm_90", family=variant.family, world_size=size, size=size, epilogue=("bias",))
    if variant.family == "gemm_all_scatter":
        case = replace(case, world_size=1)  # columns of C begin on 16 bytes
    for kernel in compile_case(case):
        assert kernel.ttgir_alone(), kernel.name


@each_case
def test_nothing_spills_and_every_register_is_used(case: Case) -> None:
    for kernel in compile_once(case):
        assert kernel.scratch_bytes <= may_spill(case), kernel.name
        assert "__local_depot" not in kernel.code, kernel.name
    kernel = specialized(case)
    asked = [int(count) for count in re.findall(r"setmaxnreg\.inc\S+\s+(\d+);", kernel.code)]
    if case.pingpong:  # 12 warps: two groups that multiply, and one that has loaders
        (first,) = {int(count) for count in re.findall(r"setmaxnreg\.dec\S+\s+(2\d+);", kernel.code)}
        assert re.search(r"\.reqntid\s+384\b", kernel.code)
        assert kernel.threads == 128
        assert MULTIPLY_REGISTERS.value in asked
        assert first >= MULTIPLY_REGISTERS.value >= 200  # 128 of them hold a tile of 128x128
        assert 128 * (first + MULTIPLY_REGISTERS.value + LOADER_REGISTERS.value) <= REGISTERS
    else:
        assert max(asked) >= 208  # those that multiply: 128 of them hold a tile of 128x256
        assert kernel.threads * max(asked) <= REGISTERS


@each_case
def test_a_stage_is_freed_that_the_loop_reckons(case: Case) -> None:
    """Not one that Triton takes for the same in all steps (`previous_index`)."""
    lines = [line for line in specialized(case).ttgir.splitlines() if line.strip()]
    depth = [len(line) - len(line.lstrip()) for line in lines]
    multiplications = [number for number, line in enumerate(lines) if "ttng.warp_group_dot " in line]
    assert multiplications
    for number in multiplications:
        begin = max(i for i in range(number) if depth[i] < depth[number])
        end = next(i for i in range(number, len(lines)) if depth[i] < depth[number])
        body = "\n".join(lines[begin + 1 : end])
        (freed,) = re.findall(r"ttng\.arrive_barrier (%\w+)", body)
        (index,) = re.findall(rf"{freed} = ttg\.memdesc_index %\w+\[(%\w+)\]", body)
        assert re.search(rf"^\s*{index} = arith\.", body, re.MULTILINE), index


@each_case
def test_stages_and_a_finished_tile_fit_shared_memory(case: Case) -> None:
    kernel = specialized(case)
    config = kernel.config
    stages = config.num_stages * (config.block_m + config.block_n) * config.block_k * case.dtype.itemsize
    tile = config.block_m * config.block_n * case.dtype.itemsize
    assert stages + tile <= kernel.shared_bytes <= SHARED_BYTES


@each_case
def test_handshake_is_ordered(case: Case) -> None:
    code = "".join(kernel.code for kernel in compile_once(case))
    peers = case.world_size - 1
    told = min(peers, 1)  # places where all peers are told, or awaited, at once
    waits = len(re.findall(NVIDIA_ACQUIRE.format("sys"), code)) // LOADS_OF_A_WAIT
    scope = "gpu" if case.announces_itself else "sys"  # of the count by which programs are collected
    # Alone, all-reduce stores to new memory, which takes no handshake.
    collected = told if case.family == "gemm_all_reduce" else 1
    assert len(re.findall(rf"atom\.global\.{scope}\.acq_rel\.add", code)) >= collected
    assert len(re.findall(r"atom\.global\.sys\.release\.exch", code)) >= told  # ready, or done
    if case.variant == "copy_engine:sm90":
        # The peers' end; each flag, of a rank without columns; a tile's flag.
        constants = specialized(case).constants
        chunks = constants["K_CHUNKS"]
        assert case.k_chunks in (1, chunks)  # the default may have some
        flags = constants["ROW_CHUNKS"] * chunks + (peers - 1) * (constants["ROW_CHUNKS"] if chunks == 1 else 1)
        assert waits >= told + min(peers, 1) * (1 + flags)
    elif case.family == "all_gather_gemm":  # peers one after the other, in loops: ready, and each chunk
        assert waits >= 2 * min(peers, 1)
        assert len(re.findall(r"(?:red|atom)\.global\.sys\.relaxed\.add", code)) >= min(peers, 1)  # counted, behind
        assert code.count("fence.acq_rel.sys") >= min(peers, 1)
    else:
        assert waits >= peers
    if case.family in ("gemm_all_scatter", "gemm_all_reduce"):  # done, too; and a tile's flag
        tiles = told if case.family == "gemm_all_reduce" else 0
        assert len(re.findall(r"atom\.global\.sys\.release\.exch", code)) >= 2 * told + tiles
        assert waits >= peers + told + tiles


@each_case
def test_what_is_announced_has_arrived(case: Case) -> None:
    """Between the last subtile stored and the release behind it: the full wait, then the proxy fence."""
    code = specialized(case).code
    announcement = r"atom\.global\.(?:sys\.release\.exch|(?:sys|gpu)\.acq_rel\.add)"
    last = max(found.start() for found in re.finditer(announcement, code))
    stores = [found.end() for found in re.finditer(r"cp\.async\.bulk\.tensor\.3d\.global\.shared", code)]
    between = code[max(store for store in stores if store < last) :]
    before = re.search(announcement, between)
    assert before
    waited = re.search(r"cp\.async\.bulk\.wait_group\s+0;\s*fence\.proxy\.async;", between[: before.start()])
    assert waited, "no full wait before the announcement"
    sites = 2 if receives(case) else 1  # tiles are announced one by one, and the last behind the loop
    assert len(re.findall(r"cp\.async\.bulk\.wait_group\s+0;\s*fence\.proxy\.async;", code)) >= sites


@each_case
def test_fences_are_on_every_path(case: Case) -> None:
    """Of the heap, and between what must precede a release or an arrival and this, in every role and on every path."""
    kernel = specialized(case)
    found = follow(kernel.ttgir, kernel.descriptors_on_heap)
    assert not found.unfenced
    if case.world_size > 1:
        assert bool(found.loads) == (case.family != "gemm_all_scatter")


@each_case
def test_a_kernel_is_launched_early_where_it_is_alone(case: Case) -> None:
    """Beside kernels on other streams, the next call's programs could take the SM that these need."""
    is_alone = case.variant in IN_ONE_KERNEL
    for kernel in compile_once(case):
        assert ("launch_pdl" in kernel.arguments) == is_alone, kernel.name
        assert ("griddepcontrol" in kernel.code) == is_alone, kernel.name


@pytest.mark.parametrize("case", ALONE, ids=lambda case: f"{case}-w{case.world_size}")
def test_launched_early_it_waits_with_its_barriers_made(case: Case) -> None:
    """Before the roles begin: barriers, the wait, and only then memory."""
    kernel = specialized(case)
    assert kernel.ttgir.count("griddepcontrol.wait") == 1
    prologue, _ = kernel.ttgir.split("ttg.warp_specialize(")
    ahead, behind = prologue.split("griddepcontrol.wait")
    assert "ttng.init_barrier" in ahead
    assert "ttng.init_barrier" not in behind
    assert not re.search(TOUCHES, ahead)
    assert re.search(TOUCHES, behind)  # the call's number
    # The first threads' code comes first.
    touched = re.search(r"\b(?:ld|st|atom|red)\.\S*global|cp\.async\.bulk\.tensor|prefetch|barrier\.sync", kernel.code)
    assert touched
    assert kernel.code.count("griddepcontrol.wait") == 1
    assert kernel.code.find("mbarrier.init") < kernel.code.find("griddepcontrol.wait") < touched.start()


@pytest.mark.parametrize("case", ALONE, ids=lambda case: f"{case}-w{case.world_size}")
def test_the_next_kernel_may_start_when_the_last_operands_are_asked_for(case: Case) -> None:
    """By the loader, whether it has tiles or not, before it sends the last one and ends its part in the call."""
    ttgir = specialized(case).ttgir
    assert ttgir.count("griddepcontrol.launch_dependents") == 1
    _, *roles = re.split(r"^ {4}(?:default|partition\d+)\b", ttgir, flags=re.MULTILINE)
    (loader,) = [role for role in roles if "griddepcontrol.launch_dependents" in role]
    # By its indentation it is in no loop and under no condition.
    assert re.search(r'^ {6}%\S+ = tt\.elementwise_inline_asm "griddepcontrol\.launch_dependents', loader, re.MULTILINE)
    loading, ending = loader.split("griddepcontrol.launch_dependents")
    assert loading.count("ttng.async_tma_copy_global_to_local") >= 2  # A and B
    assert "ttng.async_tma_copy_global_to_local" not in ending
    assert "ttng.async_tma_copy_local_to_global" in ending
    assert re.search("atomic_rmw add, acq_rel, (?:sys|gpu)", ending)
