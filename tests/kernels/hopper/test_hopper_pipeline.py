"""The pipeline between two roles, in the emulator: its states, and how far its sides may be apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_memory import Descriptor, Shared
from gluon_emulator import Deadlock, Machine, emulated
from triton.tools.tensor_descriptor import TensorDescriptor

from iris_kernels.common.hopper import pipeline
from iris_kernels.common.hopper.plan import BLOCK_M
from overlap_taxonomy.gemm_cost import PIECE_LINES

ITEMS = 20
each_size = pytest.mark.parametrize("stages", [1, 2, 3, 5])


@each_size
def test_a_state_counted_on_is_the_items(stages: int) -> None:
    with emulated(Machine(0), [pipeline]):
        barriers = pipeline.make_pipeline(stages)
        state = pipeline.pipeline_state(barriers, 0)
        for item in range(ITEMS):
            assert state == pipeline.pipeline_state(barriers, item) == (item % stages, item // stages % 2)
            state = pipeline.next_state(barriers, state)
            assert pipeline.previous_index(barriers, state) == item % stages


def pass_items(stages: int, seed: int, *, releases: bool = True) -> list[tuple[int, int]]:
    """Pass items from a producer to a consumer; return, after each step, how many were put in and taken out."""
    machine = Machine(seed)
    counts = [(0, 0)]

    def produce() -> None:
        state = pipeline.pipeline_state(barriers, 0)
        for _ in range(ITEMS):
            pipeline.producer_acquire(barriers, state)
            counts.append((counts[-1][0] + 1, counts[-1][1]))
            pipeline.producer_commit(barriers, state.index)
            state = pipeline.next_state(barriers, state)

    def consume() -> None:
        for item in range(ITEMS):
            state = pipeline.pipeline_state(barriers, item)
            pipeline.consumer_wait(barriers, state)
            counts.append((counts[-1][0], counts[-1][1] + 1))
            pipeline.consumer_release(barriers, state.index, pred=releases)

    with emulated(machine, [pipeline]):
        barriers = pipeline.make_pipeline(stages)
        machine.spawn("produce", produce, rank=0)
        machine.spawn("consume", consume, rank=0)
        machine.run()
    return counts


@each_size
def test_the_producer_is_as_many_items_ahead_as_there_are_stages_at_most(stages: int) -> None:
    ahead = [put - taken for seed in range(20) for put, taken in pass_items(stages, seed)]
    assert min(ahead) == 0
    assert max(ahead) == stages


def test_no_stage_is_acquired_that_was_not_released() -> None:
    with pytest.raises(Deadlock):
        pass_items(2, 0, releases=False)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 127, 128, 129, 160, 641, 767])
def test_few_lines_are_loaded_past_the_end(rows: int) -> None:
    matrix = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).bfloat16()
    pieces = Descriptor(TensorDescriptor.from_tensor(matrix, [PIECE_LINES, 64]))
    loaded: list[tuple[int, int]] = []

    def load(source: Descriptor, start: list[int], full: Any, into: Shared) -> None:
        loaded.append((start[0], len(into.memory)))
        source.read(start, into.memory)

    with emulated(Machine(0), [pipeline], tma_load=load):
        for first in range(0, rows, BLOCK_M):
            loaded.clear()
            memory = torch.full((BLOCK_M, 64), float("nan"), dtype=matrix.dtype)
            pipeline.load_lines(pieces, first, 0, None, Shared(memory))
            inside = matrix[first : first + BLOCK_M]
            assert memory[: len(inside)].equal(inside)
            assert not memory.isnan().any()  # all bytes that the barrier expects have come
            past_the_end = sum(max(0, line + lines - rows) for line, lines in loaded)
            assert past_the_end < PIECE_LINES or rows < PIECE_LINES
