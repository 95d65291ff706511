"""The pipeline between two roles, in the emulator: its states, and how far its sides may be apart."""

from __future__ import annotations

import pytest
from gluon_emulator import Deadlock, Machine, emulated

from iris_kernels.common.hopper import pipeline

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
