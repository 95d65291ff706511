"""Operands that descriptors cannot name are copied to where they can, ahead of the call's kernels."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from checking import fault, make_data, poison
from compiling import Case, StubContext, compile_kernel
from families import VARIANTS, make_problem, name
from ranks import Ranks, context

from iris_kernels.common.config import GemmConfig
from iris_kernels.common.operators.operand_checks import overlap
from iris_kernels.common.portable.operands import (
    COPY_WARPS,
    OperandCopies,
    copied_to,
    copy_operands_kernel,
    describable,
    padded,
)
from overlap_taxonomy import Variant, get_variant, list_variants

NAN = float("nan")


def room_for(matrix: torch.Tensor) -> torch.Tensor:
    """Return room as an operator's copies have it: rows that a descriptor can name."""
    rows, columns = matrix.shape
    return matrix.new_empty(rows, padded(columns, matrix.dtype))[:, :columns]


def laid_out(rows: int, columns: int, how: str) -> torch.Tensor:
    """Return a random matrix whose elements lie as said."""
    if how == "by columns":
        return torch.randn(columns, rows).t().half()
    if how == "apart":
        return torch.randn(rows, 2 * columns).half()[:, ::2]
    if how == "off":  # where a row of two bytes less begins
        return torch.randn(rows * columns + 1).half()[1:].view(rows, columns)
    if how == "reversed":
        return torch.randn(columns, rows + 3).half()[:, 3:].t()
    return torch.randn(rows, columns).half()


def copy(rank: int, world_size: int, cases: list[tuple[int, int, str]], seed: int) -> list[str]:
    """Copy pairs of matrices, one of them perhaps not; return what is wrong."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    with context().get_device():
        return [wrong for case in cases for wrong in copy_pair(*case, left_out=chance.choice([None, 0, 1]))]


def copy_pair(rows: int, columns: int, how: str, *, left_out: int | None) -> list[str]:
    """Copy two matrices, but the one that is left out; return what is wrong."""
    matrices = [laid_out(rows, columns, how), laid_out(columns, rows, how)]
    rooms = [room_for(matrix) for matrix in matrices]
    whole = [torch.as_strided(room, (len(room), room.stride(0)), (room.stride(0), 1)).fill_(NAN) for room in rooms]
    parts = [copied_to(matrix, room) for matrix, room in zip(matrices, rooms, strict=True)]
    a, b = (part._replace(tiles=0) if left_out == index else part for index, part in enumerate(parts))
    copy_operands_kernel[(a.tiles + b.tiles,)](a, b, ROWS=16, COLUMNS=256)
    faults = []
    for index, (matrix, room) in enumerate(zip(matrices, whole, strict=True)):
        expected = torch.nn.functional.pad(matrix, (0, room.shape[1] - matrix.shape[1]))
        if left_out == index:
            expected = torch.full_like(room, NAN)
        if not torch.equal(room.nan_to_num(9), expected.nan_to_num(9)):
            faults.append(f"{rows} x {columns} {how}, operand {index}, left out: {left_out}")
    return faults


def test_every_element_is_copied_with_zeroes_behind_the_rows(ranks: Callable[[int], Ranks]) -> None:
    ways = ("by rows", "by columns", "apart", "off", "reversed")
    sizes = [(1, 1), (1, 300), (300, 1), (16, 256), (17, 257), (40, 7)]
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    cases = [(rows, columns, how) for rows, columns in sizes for how in ways]
    assert ranks(1).call(copy, cases, seed) == [[]]


@pytest.mark.parametrize(
    ("columns", "dtype", "distance"),
    [
        (8, torch.bfloat16, 8),
        (1032, torch.bfloat16, 1032),
        (1031, torch.bfloat16, 1088),
        (1, torch.float16, 64),
        (0, torch.bfloat16, 64),
        (4, torch.float32, 4),
        (33, torch.float32, 64),
    ],
)
def test_rows_are_end_to_end_or_whole_lines(columns: int, dtype: torch.dtype, distance: int) -> None:
    assert padded(columns, dtype) == distance


class Runs:
    """Keeps what was queued."""

    def __init__(self) -> None:
        self.queued: list[Any] = []

    def __call__(self, kernel: Any, num_programs: int, **arguments: Any) -> None:
        self.queued.append((kernel, num_programs, arguments))


def by_columns(k: int, n: int) -> torch.Tensor:
    return torch.empty(n, k, dtype=torch.bfloat16).t()


@pytest.mark.parametrize(
    ("a", "b", "copied", "contiguous"),
    [
        ((64, 64), by_columns(64, 40), "", None),
        ((64, 64), torch.empty(64, 40, dtype=torch.bfloat16), "", None),
        ((64, 41), by_columns(41, 40), "AB", 0),
        ((64, 41), torch.empty(41, 40, dtype=torch.bfloat16), "A", None),
        ((64, 64), torch.empty(64, 41, dtype=torch.bfloat16), "B", 1),
        ((64, 64), torch.empty(64, 80, dtype=torch.bfloat16)[:, ::2], "B", 0),
        ((0, 41), by_columns(41, 40), "B", 0),
        ((64, 64), by_columns(64, 0), "", None),
        ((1, 64), torch.empty(64, dtype=torch.bfloat16).expand(40, 64).t(), "B", 0),  # rows that overlap
    ],
)
def test_only_what_descriptors_cannot_name_is_copied(
    a: tuple[int, int], b: torch.Tensor, copied: str, contiguous: int | None
) -> None:
    runs = Runs()
    copies = OperandCopies("all_gather_gemm/copy_engine:portable", describable)
    given = {"A": torch.empty(a, dtype=torch.bfloat16), "B": b}
    for _ in range(2):
        *found, made = copies.readable(runs, given["A"], given["B"], None)
        readable = dict(zip("AB", found, strict=True))
        assert "".join(made) == copied
        for operand, matrix in given.items():
            assert (readable[operand] is not matrix) == (operand in copied)
            if matrix.numel():
                assert not copies.are_needed(operand, readable[operand])
    assert len(runs.queued) == (2 if copied else 0)
    if contiguous is not None:
        assert readable["B"].stride(contiguous) == 1
    if copied:
        (_, num_programs, first), (_, _, second) = runs.queued
        assert num_programs == first["a"].tiles + first["b"].tiles
        rooms = [{argument.dst_ptr.data_ptr() for argument in (one["a"], one["b"])} for one in (first, second)]
        assert rooms[0] == rooms[1], "the room is kept"
        assert len(rooms[0]) == len(copied)


def test_where_there_is_no_memory_for_a_copy_the_error_says_of_what() -> None:
    copies = OperandCopies("all_gather_gemm/copy_engine:portable", describable)
    no_memory = mock.patch.object(torch.Tensor, "new_empty", side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    said = r"all_gather_gemm/copy_engine:portable: no memory for a copy of B, \(41, 40\) with .*CUDA out of memory"
    with no_memory, pytest.raises(torch.OutOfMemoryError, match=said):
        copies.readable(Runs(), torch.empty(8, 48, dtype=torch.bfloat16), by_columns(41, 40), None)


def test_a_copy_waits_before_it_touches_memory_and_stores_whole_words() -> None:
    a = torch.empty(8191, 1031, dtype=torch.bfloat16)
    part = copied_to(a, room_for(a))
    arguments = {"a": part, "b": part, "ROWS": 16, "COLUMNS": 256, "num_warps": COPY_WARPS, "launch_pdl": True}
    code = compile_kernel(copy_operands_kernel, arguments, "sm_90").code
    touched = re.search(r"\b(?:ld|st)\.\S*global", code)
    assert touched
    assert 0 < code.find("griddepcontrol.wait") < touched.start()
    stores = re.findall(r"st\.global\S*", code)
    assert stores
    assert set(stores) == {"st.global.v4.b32"}


def test_a_is_copied_to_the_room_that_is_given() -> None:
    runs = Runs()
    a, b = torch.empty(8, 41, dtype=torch.bfloat16), by_columns(41, 40)
    room = room_for(a)
    readable, *_ = OperandCopies("all_gather_gemm/copy_engine:portable", describable).readable(runs, a, b, room)
    assert readable is room
    assert runs.queued[0][2]["a"].dst_ptr is room


PADS = [
    variant
    for variant in list_variants()
    if variant.family in ("gemm_reduce_scatter", "gemm_all_reduce") and variant.has_kernels
    if variant.name != "warp_specialized:sm90"  # which has descriptors only
]


@pytest.mark.parametrize("descriptors", [True, False])
@pytest.mark.parametrize("variant", PADS, ids=name)
def test_rows_of_products_are_longer_where_descriptors_read_zeroes(variant: Variant, descriptors: bool) -> None:
    case = Case(variant.name, "sm_90", family=variant.family, rank=1)
    problem = make_problem(variant.family, 301, 317, 1088, case.world_size, torch.bfloat16)
    config = replace(variant.build(StubContext(case), problem).config, descriptors=descriptors)
    operator: Any = variant.build(StubContext(case), problem, config)
    assert operator.output.shape == problem.c_shape(1)
    assert operator.output.stride() == (320 if descriptors else 317, 1)
    assert operator.last_call.memory["staging"].shape[-1] == operator.output.stride(0)


def call_with_descriptors(rank: int, world_size: int, family: str, variant: str, seed: int) -> list[str]:
    """Call an operator of narrow tiles, with descriptors, on sizes that divide nothing; return what was wrong."""
    ctx = context()
    build = get_variant(family, variant).build
    faults = []
    for m, n, k, *layouts in ((37, 71, 41, "nk", "kn"), (2, 3, 2, "kn", "strided"), (5, 2, 7, "strided", "nk")):
        problem = make_problem(family, m, n, k, world_size, torch.float16)
        config = GemmConfig(16, 32, 16, num_stages=1, num_sms=4, comm_sms=1, comm_rows=8, row_chunks=2, splits=2)
        if get_variant(family, variant).unsupported_reason(problem, config):
            continue
        operator = build(ctx, problem, config)
        guard = ctx.zeros(64, dtype=torch.int64)  # behind the operator's buffers
        for call, layout in enumerate(layouts):
            data = make_data(family, problem, rank, seed + call, ctx.get_device(), layout=layout)
            poison(operator)
            ctx.barrier()
            if wrong := fault(operator(data.a, data.b), data, torch.float16):
                faults.append(f"{m} x {n} x {k} {layout}, rank {rank}, call {call}: {wrong}")
        ctx.barrier()
        if guard.any():
            faults.append(f"{m} x {n} x {k}: {int((guard != 0).sum())} words behind the buffers were written")
        ctx.free(guard)
        operator.close()
    return faults


@pytest.mark.parametrize("variant", [one for one in VARIANTS if one.has_kernels], ids=name)
def test_with_descriptors_every_size_is_right_and_nothing_else_written(
    ranks: Callable[[int], Ranks], variant: Variant
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    assert ranks(3).call(call_with_descriptors, variant.family, variant.name, seed) == [[]] * 3


def test_no_overlap_is_missed() -> None:
    """Of a matrix of any strides, and a tensor of which all from the first element to the last counts."""
    draw, memory, found = random.Random(0), torch.zeros(400), [0, 0]
    for _ in range(3000):
        strides = draw.choice((0, 1, 2, 7, 20)), draw.choice((0, 1, 2, 9, 30))
        matrix = memory.as_strided((draw.randint(1, 5), draw.randint(1, 6)), strides, draw.randint(0, 60))
        other = memory.as_strided((draw.randint(1, 4), draw.randint(1, 5)), (5, 1), draw.randint(0, 120))
        first, end = other.data_ptr(), other[-1, -1:].data_ptr() + 4
        touches = any(first <= one.data_ptr() < end for row in matrix for one in row)
        assert overlap(matrix, other) or not touches, (matrix.shape, matrix.stride(), other.shape)
        found[touches] += 1
    assert min(found) > 100
    far_apart = memory.as_strided((3, 4), (100, 1))
    assert overlap(far_apart, memory[101:102])
    assert not overlap(far_apart, memory[4:100])
    assert not overlap(far_apart[:0], memory)
    assert overlap(memory[10:20], memory[19:30])
    assert not overlap(memory[10:20], memory[20:30])
