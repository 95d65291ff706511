"""The warp-specialised kernels' own source, run on the CPU by all ranks: every element, any tiles per program.

Roles, programs and ranks go on in a random order (see gluon_emulator.py), so a barrier that is waited for in the wrong
phase, a stage that is freed early or a tile that is signalled before it has arrived shows as a wrong sum or a deadlock.
"""

from __future__ import annotations

import epilogues
import pytest
import torch
from emulated_operators import COPIES, KERNELS, Case, run_case
from families import FAMILIES

from iris_kernels.all_gather_gemm import gather_plan

CASES = [
    Case(301, 318, 160, "divides nothing, an uneven number of tiles per program"),
    Case(301, 304, 1040, "many steps per tile, so that subtiles are sent between them", world_size=2),
    Case(512, 512, 256, "divides everything", block_n=128, layout="kn"),
    Case(260, 512, 256, "the widest tile", block_n=256, world_size=2, layout="kn"),
    Case(5, 64, 64, "fewer tiles than programs, some without any", programs=5),
    Case(1600, 128, 64, "several row chunks a shard", row_chunks=3, world_size=2),
    Case(2, 5, 64, "fewer rows and columns than ranks, and one column of B"),
    Case(
        300,
        216,
        336,
        "many tiles per program, more row chunks than rows of tiles",
        row_chunks=2,
        world_size=3,
        programs=2,
    ),
    Case(200, 100, 136, "alone", world_size=1, programs=2),
    Case(
        700,
        1024,
        200,
        "two split a tile, and one program is in no group",
        row_chunks=2,
        programs=5,
        block_n=128,
        splits=2,
    ),
    Case(640, 512, 1040, "four split a tile, and one is left out", programs=9, block_n=256, world_size=2, splits=4),
    Case(300, 144, 203, "rows that are not on 16 bytes, so that operands are copied first", programs=3, world_size=2),
    Case(100, 64, 1040, "one tile, and more programs than it has subtiles", programs=7, splits=2),
    Case(300, 512, 400, "many small subtiles", programs=5, world_size=2, block_n=128, splits=4, comm_rows=8),
    Case(300, 512, 400, "subtiles as high as the tile", programs=5, world_size=2, block_n=128, splits=2, comm_rows=128),
    Case(640, 128, 136, "a last wave with more programs than steps", programs=5, splits=2),
    Case(512, 128, 64, "fewer tiles a shard than programs, and the last of one is a peer's"),
    Case(384, 512, 576, "split tiles only, some of them at the edge", programs=8, block_n=256, world_size=3, splits=2),
]
IN_TURNS = [  # two warp groups, a tile each
    Case(301, 318, 160, "divides nothing, an uneven number of tiles per program", pingpong=True),
    Case(301, 304, 1040, "many steps per tile", world_size=2, pingpong=True),
    Case(512, 512, 256, "the widest tile", block_n=128, layout="kn", pingpong=True),
    Case(5, 64, 64, "fewer tiles than programs, a step a tile", programs=5, pingpong=True),
    Case(1600, 256, 64, "many tiles of a step", programs=2, world_size=2, pingpong=True),
    Case(300, 216, 336, "many tiles per program", row_chunks=2, world_size=3, programs=2, pingpong=True),
    Case(1000, 512, 336, "two tiles wide", block_n=128, programs=3, world_size=2, pingpong=True),
    Case(200, 100, 136, "alone", world_size=1, programs=2, pingpong=True),
]
BY_COLUMNS = [  # cut so in all-reduce, as that makes fewer tiles
    Case(130, 260, 160, "a rank has few columns, the last none"),
    Case(130, 260, 160, "the same, groups in turns", pingpong=True),
    Case(130, 600, 160, "shards that are not on 16 bytes", world_size=3),
    Case(257, 1300, 640, "many ranks", world_size=8, programs=9),
]
CHUNKED = [  # the last shard of all-gather's copies
    Case(301, 304, 1040, "chunks that steps do not fill", world_size=2, k_chunks=3),
    Case(
        1152, 216, 336, "other shards come whole, the last in row and k chunks", world_size=3, row_chunks=2, k_chunks=2
    ),
    Case(700, 1024, 456, "splits begin within a chunk", programs=5, block_n=128, splits=2, k_chunks=3),
    Case(640, 512, 1040, "more splits than chunks", programs=9, block_n=256, world_size=2, splits=4, k_chunks=2),
    Case(1024, 128, 1024, "a later wave needs another chunk", programs=5, world_size=2, splits=2, k_chunks=2),
    Case(300, 3, 200, "a rank without columns", k_chunks=4),
    Case(5, 64, 64, "more chunks than steps, ranks without rows", programs=5, k_chunks=3),
    Case(1000, 512, 1040, "groups in turns", block_n=128, programs=2, row_chunks=2, k_chunks=2, pingpong=True),
    Case(200, 100, 136, "alone", world_size=1, programs=2, k_chunks=2),
]
FINISHED = [
    CASES[0],  # divides nothing
    CASES[3],  # the widest tile
    CASES[6],  # ranks without rows and columns
    CASES[9],  # split tiles
    CASES[13],  # many small subtiles
    *IN_TURNS[:1],
    *BY_COLUMNS[:2],  # of all-reduce
]
LATE_STORES = Case(600, 64, 520, "many tiles a chunk, signalled one after the other", row_chunks=3, world_size=2)
WITHOUT_COLUMNS = Case(300, 3, 200, "a rank without columns")


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.m}x{case.n}x{case.k}-w{case.world_size}")
@pytest.mark.parametrize(("family", "name"), KERNELS)
def test_output_is_right(family: str, name: str, case: Case, seed: int) -> None:
    run_case(family, name, case, seed)


@pytest.mark.parametrize("case", [CASES[5], CASES[9]], ids=["row chunks", "row chunks and splits"])
def test_output_is_right_where_what_was_gathered_is_kept(case: Case) -> None:
    run_case("all_gather_gemm", COPIES, case, 0, keep_gathered=True)


@pytest.mark.parametrize("case", IN_TURNS, ids=lambda case: case.why)
@pytest.mark.parametrize(("family", "name"), KERNELS)
def test_output_is_right_where_warp_groups_multiply_in_turns(family: str, name: str, case: Case) -> None:
    run_case(family, name, case, 0)


@pytest.mark.parametrize("case", [IN_TURNS[0], IN_TURNS[4], IN_TURNS[7]], ids=lambda case: case.why)
@pytest.mark.parametrize(
    ("family", "name", "late"),
    [
        (*kernel, late)
        for kernel in KERNELS
        for late in ("_tiles", "_second", *["_collect"] * FAMILIES[kernel[0]].sums_partials)
    ],
)
def test_output_is_right_where_a_role_is_late_beside_groups_in_turns(
    family: str, name: str, case: Case, late: str
) -> None:
    """With what lets the others run furthest ahead: tiles of several steps, tiles of one, and no peers."""
    run_case(family, name, case, 0, late=late)


@pytest.mark.parametrize("case", BY_COLUMNS, ids=lambda case: f"{case.why}-w{case.world_size}")
def test_output_is_right_where_columns_are_cut(case: Case) -> None:
    run_case("gemm_all_reduce", "warp_specialized:sm90", case, 0)


@pytest.mark.parametrize("family", ["gemm_reduce_scatter", "gemm_all_reduce"])
def test_output_is_right_where_partials_are_collected_late(family: str) -> None:
    """Also alone, where nothing holds the other warps back."""
    for case in (CASES[0], CASES[8]):
        run_case(family, "warp_specialized:sm90", case, 0, late="_collect")


@pytest.mark.parametrize("late", [" 0", " 2"], ids=["rank 0", "rank 2"])
@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=lambda case: case.why)
@pytest.mark.parametrize(("family", "name"), KERNELS)
def test_output_is_right_where_a_rank_is_late(family: str, name: str, case: Case, late: str) -> None:
    run_case(family, name, case, 0, late=late)


@pytest.mark.parametrize(("family", "name"), KERNELS)
def test_output_is_right_where_what_is_stored_arrives_late(family: str, name: str) -> None:
    run_case(family, name, LATE_STORES, 0, late="tma_store")


def test_a_rank_without_columns_keeps_all_that_was_gathered() -> None:
    run_case("all_gather_gemm", "workgroup_specialized:sm90", WITHOUT_COLUMNS, 0, late="tma_store", keep_gathered=True)


@pytest.mark.parametrize(
    ("keep_gathered", "late"),
    [(False, ""), (True, "copies"), (False, "copies 0")],
)
@pytest.mark.parametrize("case", CHUNKED, ids=lambda case: case.why)
def test_output_is_right_where_the_last_shard_comes_in_chunks(
    case: Case, keep_gathered: bool, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather_plan, "_STEPS_OF_A_K_CHUNK", 1)
    run_case("all_gather_gemm", COPIES, case, 0, late=late, keep_gathered=keep_gathered)


SCALED = [
    Case(301, 318, 160, "divides nothing, an uneven number of tiles per program", world_size=3),
    Case(301, 304, 1040, "many steps per tile, several blocks of k and of columns", block_n=128, world_size=2),
    Case(300, 216, 784, "many tiles per program", row_chunks=2, world_size=3, programs=2),
    Case(2, 5, 64, "fewer rows and columns than ranks"),
    Case(200, 100, 144, "alone", world_size=1, programs=2),
]
SCALED_WIDE = [
    Case(301, 608, 1040, "the widest tile, whose last half has no columns", block_n=256, world_size=2),
    Case(300, 1040, 100, "the widest tile, of one step", block_n=256, world_size=2, programs=2),
]
FAST = [
    Case(301, 304, 1040, "many steps per tile", block_n=128, world_size=2),
    Case(301, 304, 1040, "in turns", block_n=128, world_size=2, pingpong=True),
    Case(700, 1024, 400, "two split a tile", row_chunks=2, programs=5, block_n=128, splits=2),
    Case(640, 512, 1040, "four split the widest tile", programs=9, block_n=256, world_size=2, splits=4),
]
BLOCKS = ("block", "block")


# A scale of a tensor is one of rows or columns with a stride of 0.
@pytest.mark.parametrize(
    ("scales", "case"),
    [(scales, case) for scales in (("row", "column"), BLOCKS) for case in SCALED] + [(("tensor", "tensor"), SCALED[0])],
    ids=lambda value: f"{value.why}-w{value.world_size}" if isinstance(value, Case) else "-".join(value),
)
@pytest.mark.parametrize(("family", "name"), KERNELS)
def test_fp8_operands_are_scaled(family: str, name: str, case: Case, scales: tuple[str, ...]) -> None:
    run_case(family, name, case, 0, scales=scales)


@pytest.mark.parametrize("case", [SCALED[0], SCALED[2]], ids=lambda case: case.why)
@pytest.mark.parametrize(("family", "name"), [one for one in KERNELS if one[0] == "all_gather_gemm"])
def test_a_shard_is_quantised_to_where_it_is_sent_from(family: str, name: str, case: Case) -> None:
    run_case(family, name, case, 0, scales=("row", "column"), given=torch.float32)


@pytest.mark.parametrize("case", SCALED_WIDE, ids=lambda case: case.why)
@pytest.mark.parametrize(("family", "name"), KERNELS)
def test_blocks_are_scaled_in_the_widest_tiles(family: str, name: str, case: Case) -> None:
    run_case(family, name, case, 0, scales=BLOCKS)


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.why)
@pytest.mark.parametrize(("family", "name"), KERNELS)
def test_sums_of_fp8_stay_in_the_accumulators_with_fast_accum(family: str, name: str, case: Case) -> None:
    run_case(family, name, case, 0, scales=("row", "column"), use_fast_accum=True)


@pytest.mark.parametrize("case", [CASES[0], CASES[9], CASES[12], IN_TURNS[0]], ids=lambda case: case.why)
@pytest.mark.parametrize(("family", "name"), KERNELS)
def test_c_may_be_fp32(family: str, name: str, case: Case) -> None:
    run_case(family, name, case, 0, out_dtype=torch.float32, epilogue=("bias",))


GATED = [  # of two or three columns of tiles a rank
    Case(301, 1160, 160, "divides nothing, an uneven number of tiles per program", block_n=128),
    Case(260, 1024, 256, "the widest tile", block_n=256, world_size=2, layout="kn"),
    Case(300, 624, 336, "in turns", block_n=128, world_size=3, programs=2, pingpong=True),
]


@pytest.mark.parametrize("case", FINISHED, ids=lambda case: f"{case.why}-w{case.world_size}")
@pytest.mark.parametrize(("family", "name"), KERNELS)
def test_an_epilogue_is_applied_to_each_element_once(family: str, name: str, case: Case) -> None:
    epilogues.register_ops()
    run_case(family, name, case, 0, epilogue=("scale", "row_factors", "bias", "residual", "relu", "marks"))


@pytest.mark.parametrize("case", GATED, ids=lambda case: f"{case.why}-w{case.world_size}")
@pytest.mark.parametrize("name", [name for family, name in KERNELS if family == "all_gather_gemm"])
def test_ups_are_multiplied_by_their_gates(name: str, case: Case) -> None:
    run_case("all_gather_gemm", name, case, 0, epilogue=("bias", "swiglu"))
