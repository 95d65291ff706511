"""A mistake in an interpreted kernel is one message that begins with the line where it is."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from ranks import Ranks, context, raised
from triton.runtime.errors import InterpreterError

import iris_core
from iris_core.checker import check

on_cpu = pytest.mark.parametrize("device", ["cpu"])
SIZE = 8


@triton.jit
def helper(buffer_ptr, offsets):
    tl.store(buffer_ptr + offsets, offsets + tl.arange(0, 16))  # shape


@triton.jit
def faulty_kernel(buffer_ptr, rank, heap_bases, MISTAKE: tl.constexpr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    if MISTAKE == "name":
        tl.store(buffer_ptr + offsets, no_such_name)  # noqa: F821  # name
    elif MISTAKE == "pointer":
        iris_core.store(buffer_ptr + offsets + (1 << 40), offsets, rank, 1 - rank, heap_bases)  # pointer
    else:
        helper(buffer_ptr, offsets)


MISTAKES = {
    "name": "NameError: name 'no_such_name' is not defined",
    "pointer": "ValueError: a kernel reaches for a peer's copy where it has no memory: far from all that it was given",
    "shape": "ValueError: Cannot make_shape_compatible: incompatible dimensions at index 0: 8 and 16",
}


def place(mistake: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {mistake}")]
    file = Path(__file__)
    return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{number}"


def launch_faulty(ctx: iris_core.Context, mistake: str) -> None:
    buffer = ctx.zeros(SIZE, dtype=torch.int64)
    faulty_kernel[(2,)](buffer, ctx.get_rank(), ctx.get_heap_bases(), mistake, SIZE)


def raise_all(rank: int, world_size: int) -> list[tuple[str, str]]:
    return [raised(launch_faulty, context(), mistake) for mistake in MISTAKES]


@on_cpu
def test_the_message_begins_with_the_kernels_line(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).call(raise_all):
        for mistake, (kind, message) in zip(MISTAKES, found, strict=True):
            assert kind == "InterpreterError"
            assert message.startswith(f"{place(mistake)}: {MISTAKES[mistake]}")
            assert "program (0, 0, 0) of faulty_kernel" in message
            assert (", called from " in message) == (mistake == "shape")


def fails_in_a_kernel(rank: int, world_size: int, mistake: str) -> None:
    ctx = context()
    launch_faulty(ctx, mistake)
    ctx.barrier()


@on_cpu
def test_what_launch_raises_has_one_traceback_and_says_it_once(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(InterpreterError) as caught:
        ranks(2).call(fails_in_a_kernel, "name")
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("Traceback") == 1
    assert text.count(MISTAKES["name"]) == 1
    assert str(caught.value).startswith(place("name"))
    raised_by = str(caught.value.__cause__)
    _, first = inspect.getsourcelines(launch_faulty)
    assert f"line {first + 2}, in launch_faulty" in raised_by
    assert not re.search(r"iris_core/interpreter|runtime/interpreter", raised_by)


def fails_checked(rank: int, world_size: int, mistake: str) -> None:
    launch_faulty(iris_core.iris(1 << 20), mistake)


def test_the_race_checker_says_it_once_whoever_makes_the_mistake() -> None:
    (error,) = check(fails_checked, 2, args=("name",)).errors
    assert error.startswith(f"{place('name')}: rank 0, program 0, of faulty_kernel: {MISTAKES['name']}")
    assert "also rank 1, program 1, of faulty_kernel" in error
