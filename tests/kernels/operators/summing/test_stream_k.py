"""The variants with stream-K: the tiling of an output, tiles that programs split, ranks without rows, workspaces."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from checking import fault, make_data, poison
from compiled_kernel import Compiled
from compiling import LOADS_OF_A_WAIT, NVIDIA_ACQUIRE, Case, StubContext, compile_kernel, recorded_launches
from families import FUSED, make_problem, name
from ranks import Ranks, context

from iris_bench.correctness.check import cases
from iris_bench.correctness.check.cases import Case as CheckedCase
from iris_bench.correctness.check.cases import run_case
from iris_bench.correctness.check.planted import always_the_first
from iris_bench.measure.shapes import Shape
from iris_core.checker.replacing import replaced
from iris_kernels.common.config import MOST_SPLITS, GemmConfig
from iris_kernels.common.portable import stream_k
from iris_kernels.common.portable.stream_k import UNEVEN
from iris_kernels.common.portable.stream_k_host import (
    GROUP_M,
    StreamKGemm,
    StreamKTiling,
    default_stream_k_config,
    fastest_tiling,
    plan_stream_k,
    tiling_us,
)
from overlap_taxonomy import Variant, get_variant

STREAM_K = [variant for variant in FUSED if variant.name == "fused_sequential:portable:stream_k"]
NUM_SMS = 132
TILES = ("fused_sequential_stream_k.py", "stream_k.py", "gemm.py")  # whose stores move tiles
SHARED_BYTES = 227 << 10
SMALL_M = [(1, 1024, 14336), (64, 2048, 8192), (128, 4096, 2048), (512, 7168, 8192), (1, 4096, 3584)]


def tiling_of(m: int, n: int, k: int) -> StreamKTiling:
    return fastest_tiling(StreamKGemm(m, n, k, NUM_SMS, 64, 2), low_block_k=128)


@pytest.mark.parametrize(("m", "n", "k"), SMALL_M)
def test_the_weights_are_read_by_most_sms(m: int, n: int, k: int) -> None:
    """Half of an H200's SMs read as fast as its memory: measured, splits that only occupy more of them gain nothing."""
    tiling = tiling_of(m, n, k)
    rows = -(-m // tiling.block_m)
    tiles, steps = rows * -(-n // tiling.block_n), -(-k // 64)
    plan = plan_stream_k(tiles, rows, steps, num_sms=NUM_SMS, group_m=GROUP_M, splits=tiling.splits)
    assert plan.programs / NUM_SMS > 0.45


@pytest.mark.parametrize(("rows", "height"), [(1, 1), (5, 5), (8, 8), (10, 2), (11, 1), (12, 4), (16, 8)])
def test_programs_of_a_column_split_tiles_of_as_many_rows_as_groups_have(rows: int, height: int) -> None:
    plan = plan_stream_k(15 * rows, rows, 64, num_sms=NUM_SMS, group_m=GROUP_M, splits=2)
    assert plan.height == height
    assert plan.programs % height == plan.whole % height == 0


def test_tiles_are_as_low_as_the_output() -> None:
    assert [tiling_of(m, 4096, 4096).block_m for m in (1, 16, 17, 33, 64)] == [16, 16, 32, 64, 64]
    assert tiling_of(8192, 8192, 8192).splits == 1


def test_no_split_is_empty() -> None:
    for k in (1, 64, 65, 640):
        assert tiling_of(1, 64, k).splits <= -(-k // 64)
    assert tiling_of(1, 64, 1 << 20).splits <= MOST_SPLITS


def test_a_cut_is_the_best_of_its_neighbours() -> None:
    best = tiling_of(1, 1024, 14336)
    gemm = StreamKGemm(1, 1024, 14336, NUM_SMS, 128, 2)
    times = [tiling_us(StreamKTiling(16, best.block_n, splits), gemm) for splits in range(1, 33)]
    assert min(times) == times[best.splits - 1]


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "gfx942", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_stages_fit_shared_memory(arch: str, dtype: torch.dtype) -> None:
    for m, n, k in [*SMALL_M, (8192, 2048, 8192)]:
        config = default_stream_k_config(arch, NUM_SMS, m=m, n=n, k=k, dtype=dtype)
        stage_bytes = (config.block_m + config.block_n) * config.block_k * dtype.itemsize
        limit = 64 << 10 if arch.startswith("gfx") else SHARED_BYTES
        assert stage_bytes * config.num_stages <= limit, config


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("variant", STREAM_K, ids=name)
def test_one_row_is_compiled_as_it_should_be(variant: Variant, target: str) -> None:
    """Several splits, on the matrix units, as many stages as there should be, wide stores."""
    compiled, arguments, operator = compile_one(variant, target, 1, 1024, 14336)
    assert arguments["SPLITS"] > 1
    assert not arguments["HAS_WHOLE"]
    assert compiled.count(r"mma\.sync|v_mfma_f32_") >= 4
    assert compiled.scratch_bytes <= 16  # a word or two, of the divergent program that leads
    stages, stage_bytes = operator.config.num_stages, (operator.config.block_n * operator.config.block_k * 2)
    assert compiled.shared_bytes >= (stages - 1) * stage_bytes
    assert arguments.get("launch_pdl", False) == (target == "sm_90")
    if target == "sm_90":
        check_early_launch(variant, compiled.code, "mma.sync")
        assert stages * stage_bytes >= 40 << 10
        assert set().union(*(widths for file, widths in compiled.stores_by_file().items() if file in TILES)) == {16}


@pytest.mark.parametrize("variant", STREAM_K, ids=name)
def test_a_call_is_counted_when_every_thread_has_its_number(variant: Variant) -> None:
    """The count is the kernel's last store, right behind a barrier."""
    ttgir = compile_one(variant, "sm_90", 1, 1024, 14336)[0].ttgir_alone()
    ahead = re.split(r"(?:gpu|ttg)\.barrier", ttgir[: ttgir.rindex("tt.store")])  # the latter from Triton 3.7 on
    assert len(ahead) > 1
    assert not re.search(r"tt\.(load|store|atomic|call)", ahead[-1])


@pytest.mark.parametrize("variant", STREAM_K, ids=name)
def test_with_large_tiles_nothing_is_touched_before_the_wait_either(variant: Variant) -> None:
    compiled, _, _ = compile_one(variant, "sm_90", 512, 8192, 8192)
    check_early_launch(variant, compiled.code, "wgmma.mma_async")


@pytest.mark.parametrize("variant", STREAM_K, ids=name)
def test_shared_large_tiles_are_compiled_as_they_should_be(variant: Variant) -> None:
    """Parts are released and acquired; few registers are wanting, most of them where halves are sent and added."""
    gathers = variant.family in ("gemm_all_scatter", "all_gather_gemm")
    compiled, arguments, _ = compile_one(variant, "sm_90", 512, *((18432, 9216) if gathers else (4608, 36864)))
    assert arguments["SPLITS"] == UNEVEN.value
    assert arguments["TILE"].BLOCK_N == 256
    assert compiled.count(r"atom\.global\.gpu\.release\.exch") == 1
    of_peers = {"gemm_all_scatter": 2, "gemm_all_reduce": 1, "gemm_reduce_scatter": 1, "all_gather_gemm": 1}
    waits = of_peers[variant.family] + 1
    assert compiled.count(NVIDIA_ACQUIRE.format("sys")) == LOADS_OF_A_WAIT * waits
    assert compiled.scratch_bytes <= (176 if variant.family == "gemm_reduce_scatter" else 48)
    check_early_launch(variant, compiled.code, "wgmma.mma_async")


@pytest.mark.parametrize("variant", STREAM_K, ids=name)
def test_a_long_kernel_is_not_launched_early(variant: Variant) -> None:
    """Each call streams a quarter of the weights: 34 MB take an H200 about 12 µs, 440 MB 110."""
    calls = [launch_of(variant, "sm_90", *sizes) for sizes in ((128, 4096, 16384), (128, 53248, 16384))]
    assert [arguments.get("launch_pdl", False) for _, arguments, _ in calls] == [True, False]


def compile_one(variant: Variant, target: str, m: int, n: int, k: int) -> tuple[Compiled, dict[str, Any], Any]:
    """Return the kernel of a call, compiled, with its arguments, and the operator."""
    kernel, arguments, operator = launch_of(variant, target, m, n, k)
    return compile_kernel(kernel, arguments, target, config=operator.ran_config), arguments, operator


def launch_of(variant: Variant, target: str, m: int, n: int, k: int) -> tuple[Any, dict[str, Any], Any]:
    """Return the kernel of a call, with its arguments, and the operator."""
    case = Case("fused_sequential:portable:stream_k", target, rank=2, family=variant.family)
    problem = make_problem(variant.family, m, n, k, case.world_size, torch.bfloat16)
    with recorded_launches() as launches:
        operator = variant.build(StubContext(case), problem)
        k, n = problem.b_shape(case.rank)
        operator(torch.empty(problem.a_shape(case.rank), dtype=case.dtype), torch.empty(n, k, dtype=case.dtype).t())
    ((kernel, arguments),) = launches
    return kernel, arguments, operator


def check_early_launch(variant: Variant, code: str, multiplication: str) -> None:
    """Launched early, it touches no memory before it has waited, and lets the next kernel in when it has multiplied.

    All-gather may read where the heaps lie, which no kernel writes: a word a rank.
    """
    waits, lets = (code.find(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents"))
    touches = r"\b(?:ld|st|atom|red)\.\S*global\S*|cp\.async\.bulk\.tensor|prefetch"
    bases = Case.world_size if variant.family == "all_gather_gemm" else 0
    assert re.findall(touches, code[:waits]) == bases * ["ld.global.b64"]
    touched = re.search(touches, code[waits:])
    assert touched is not None
    assert 0 < waits < waits + touched.start() < code.find(multiplication) < lets


@triton.jit
def note_work_kernel(
    steps_ptr,
    stored_ptr,
    loaded_ptr,
    faults_ptr,
    tiles,
    steps,
    stream,
    HAS_WHOLE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Count how often each step of each tile is computed; note the tile whose partial a program stores, and that for
    which it is loaded; count what is wrong.
    """
    before = tl.full((), -1, tl.int32)
    for wave in range(stream_k._num_waves(tiles, steps, stream, HAS_WHOLE, SPLITS)):
        work = stream_k._tile_split(wave, tiles, steps, stream, HAS_WHOLE, SPLITS)
        is_wrong = (work.index <= before) | (work.start >= work.stop) | (work.split < 0) | (work.split >= work.splits)
        is_later = wave > stream_k._whole_waves(tiles, HAS_WHOLE)
        is_wrong |= ((work.split == 0) != (work.start == 0)) | ((work.split > 0) & is_later)
        tl.atomic_add(faults_ptr, is_wrong.to(tl.int32))
        before = work.index
        for step in range(work.start, work.stop):
            tl.atomic_add(steps_ptr + work.index * steps + step, 1)
        tl.atomic_add(faults_ptr, ((work.stop == steps) != (work.split == work.splits - 1)).to(tl.int32))
        if work.split > 0:
            tl.atomic_add(stored_ptr + tl.program_id(0), work.index + 1)
        for split in range(1, tl.where(work.split == 0, work.splits, 1)):
            tl.atomic_add(loaded_ptr + tl.program_id(0) + split * stream.height, work.index + 1)


def note_work(rank: int, world_size: int, seed: int) -> list[str]:
    """Draw plans at random; return what was wrong."""
    context()
    draw = random.Random(seed)
    faults = []
    for _ in range(60):
        num_sms, rows, columns, steps, splits = (draw.randint(1, most) for most in (9, 9, 9, 9, 9))
        tiles = rows * columns
        beside = {"store_steps": draw.randint(0, 9), "switch_steps": draw.randint(0, 9)}
        plan = plan_stream_k(
            tiles,
            rows,
            steps,
            num_sms=num_sms,
            group_m=4,
            splits=splits,
            **beside,
        )
        counted = UNEVEN.value if plan.split_programs and draw.random() < 0.5 else plan.splits
        noted = torch.zeros(tiles * steps, dtype=torch.int32)
        stored, loaded = torch.zeros(2, plan.programs, dtype=torch.int32)
        wrong = torch.zeros(1, dtype=torch.int32)
        stream = stream_k.StreamK(noted, noted, plan.split_programs, plan.height, plan.head)
        note_work_kernel[(plan.programs,)](noted, stored, loaded, wrong, tiles, steps, stream, plan.whole > 0, counted)
        is_right = (noted == 1).all() and (stored <= tiles).all() and stored.equal(loaded) and not wrong.item()
        if not is_right:
            faults.append(
                f"{rows} x {columns} tiles of {steps} steps, {num_sms} programs, {splits} splits: {plan}, {noted}"
            )
    return faults


@pytest.mark.parametrize("device", ["cpu"])
def test_every_step_is_computed_once(ranks: Callable[[int], Ranks]) -> None:
    """By one program, in ascending order of tiles; partials are stored where no other is, and loaded from there."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    assert ranks(1).call(note_work, seed) == [[]]


def call_with_splits(rank: int, world_size: int, family: str, size: tuple[int, int, int], splits: int) -> list[str]:
    """Call one operator often, on fresh data, with a rank that is late now and then; return what was wrong."""
    ctx = context()
    problem = make_problem(family, *size, world_size, torch.bfloat16)
    config = GemmConfig(16, 16, 16, num_warps=4, num_sms=3, comm_sms=1, comm_rows=1, splits=splits, descriptors=False)
    operator = get_variant(family, "fused_sequential:portable:stream_k").build(ctx, problem, config)
    late = random.Random(1)  # the same on every rank
    faults = []
    for call in range(8):
        data = make_data(family, problem, rank, call, ctx.get_device())
        poison(operator)
        if late.randrange(world_size) == rank:
            time.sleep(2e-3)
        if wrong := fault(operator(data.a, data.b).clone(), data, problem.dtype):
            faults.append(f"call {call}, rank {rank}: {wrong}")
    operator.close()
    return faults


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(
    ("world_size", "size", "splits"),
    [(2, (1, 20, 70), 3), (4, (1, 40, 128), 2), (2, (35, 20, 50), 5), (2, (20, 50, 90), 2)],
    ids=["one row", "ranks without rows", "more splits than steps", "whole tiles first"],
)
@pytest.mark.parametrize("variant", STREAM_K, ids=name)
def test_splits_and_waves(
    ranks: Callable[[int], Ranks], variant: Variant, world_size: int, size: tuple[int, int, int], splits: int
) -> None:
    assert ranks(world_size).call(call_with_splits, variant.family, size, splits) == [[]] * world_size


@pytest.mark.parametrize("family", ["gemm_reduce_scatter", "gemm_all_reduce"])
def test_halves_of_the_workspace_must_alternate(family: str) -> None:
    """With one row of tiles; with more, waits for later tiles happen to order what a single workspace would need."""
    case = CheckedCase(get_variant(family, "fused_sequential:portable:stream_k"), Shape(5, 12, 20), 2, "bfloat16")
    with replaced(stream_k.buffer_of_call, always_the_first):
        assert run_case(case, schedules=4, seed=0).found_ordering_fault
    assert run_case(case, schedules=2, seed=0).ok


@triton.jit
def sum_nothing(acc, stream, work, peers, epoch, TILE: tl.constexpr):
    """`fix_up` that takes the first split's partial for the sum."""
    return acc


@pytest.mark.parametrize(
    ("family", "subtiles", "large"),
    [
        ("gemm_all_scatter", 1, 1 << 14),
        ("gemm_reduce_scatter", 1, 16 * 16),
        ("gemm_all_scatter", 1, 2 * 16 * 16),
        ("gemm_reduce_scatter", 2, 16 * 16),
    ],
)
def test_the_splits_of_a_tile_are_added(family: str, subtiles: int, large: int) -> None:
    """Of this tile of 16 x 16 four at once, one, or two; or in halves."""
    case = CheckedCase(get_variant(family, "fused_sequential:portable:stream_k"), Shape(45, 42, 34), 2, "bfloat16")
    with (
        mock.patch.object(cases, "_CONFIG", replace(cases._CONFIG, epilogue_subtiles=subtiles)),
        mock.patch.object(stream_k, "LARGE", tl.constexpr(large)),
    ):
        assert run_case(case, schedules=1, seed=0).ok
        with replaced(stream_k.fix_up, sum_nothing):
            assert not run_case(case, schedules=1, seed=0, calls=1).ok
