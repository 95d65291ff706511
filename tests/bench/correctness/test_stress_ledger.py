"""The stress run's check of every element: what it counts, what it names, and that it compiles for every GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compiled_kernel import Compiled
from compiling import MORE_LATER, TARGETS, compile_kernel
from ranks import Pools, context

from iris_bench.correctness.stress import ledger
from iris_kernels.common.config import fp8_formats


def look_for_faults(rank: int, world_size: int) -> list[Any]:
    """Check one output that is right and one with three faults in two blocks, as a view with gaps between its rows."""
    book = ledger.Ledger(context().get_device())
    reference = torch.randn(40, 70, dtype=torch.float64)
    bound = torch.full_like(reference, 0.01)
    room = torch.full((40, 75), math.nan, dtype=torch.float16)
    output = room[:, :70]
    output.copy_(reference)
    book.check(7, output, reference, bound)
    clean = book.read()
    output[1, 3], output[1, 5], output[39, 69] = math.inf, reference[1, 5] + 0.02, math.nan
    book.check(8, output, reference, bound)
    wrong, notes = book.read()
    return [clean, wrong, [(note.call, note.element, str(note.value), note.wrong) for note in notes], book.read()]


def test_the_ledger_counts_every_element_and_names_the_first(pools: Pools) -> None:
    clean, wrong, notes, after = pools.ranks(2, "cpu").call(look_for_faults)[0]
    assert clean == after == (0, [])
    assert wrong == 3
    assert notes == [(8, 1 * 70 + 3, "inf", 2), (8, 39 * 70 + 69, "nan", 1)]


@pytest.mark.parametrize("target", TARGETS)
def test_the_check_compiles(target: str) -> None:
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float64)):
        assert compiled_check(dtype, wide, target).scratch_bytes <= MORE_LATER
    for dtype in fp8_formats(target):  # a gathered A
        compiled_check(dtype, torch.float32, target)


def compiled_check(dtype: torch.dtype, wide: torch.dtype, target: str) -> Compiled:
    arguments = {
        "out_ptr": torch.zeros(64, dtype=dtype),
        "reference_ptr": torch.zeros(64, dtype=wide),
        "bound_ptr": torch.zeros(64, dtype=wide),
        "counts_ptr": torch.zeros(2, dtype=torch.int64),
        "notes_ptr": torch.zeros(64, dtype=torch.float64),
    }
    numbers = {"call": 1, "size": 64, "columns": 9, "stride": 17, "BLOCK": ledger._BLOCK}
    return compile_kernel(ledger._check_kernel, {**arguments, **numbers}, target)
