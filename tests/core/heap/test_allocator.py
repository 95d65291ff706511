"""Where allocations go: never over one another, back to where they came from, and alike on ranks that call alike."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iris_core import HeapExhausted
from iris_core.heap import allocator as allocator_module
from iris_core.heap.allocator import ALIGNMENT, OffsetAllocator, first_difference

CAPACITY = 64 * ALIGNMENT


def test_allocations_are_aligned_and_as_large_as_asked() -> None:
    allocator = OffsetAllocator(CAPACITY)
    offsets = [allocator.allocate(size, "") for size in (0, 1, ALIGNMENT, ALIGNMENT + 1, 5)]
    assert offsets == [0, ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT, 5 * ALIGNMENT]
    assert allocator.used_bytes == 6 * ALIGNMENT
    assert allocator.free_bytes == CAPACITY - 6 * ALIGNMENT


def test_freed_neighbours_merge() -> None:
    allocator = OffsetAllocator(3 * ALIGNMENT)
    first, second, third = (allocator.allocate(ALIGNMENT, "") for _ in range(3))
    for offset in (first, third, second):
        allocator.free(offset)
    assert allocator.allocate(3 * ALIGNMENT, "") == 0


def test_the_first_range_that_is_large_enough_is_taken() -> None:
    allocator = OffsetAllocator(CAPACITY)
    small, _, large, _ = (allocator.allocate(size * ALIGNMENT, "") for size in (1, 1, 3, 1))
    allocator.free(small)
    allocator.free(large)
    assert allocator.allocate(2 * ALIGNMENT, "") == large
    assert allocator.allocate(ALIGNMENT, "") == small


def test_exhaustion_says_what_was_asked_and_what_there_is() -> None:
    allocator = OffsetAllocator(8 * ALIGNMENT)
    offsets = [allocator.allocate(2 * ALIGNMENT, "") for _ in range(4)]
    allocator.free(offsets[0])
    allocator.free(offsets[2])
    digest = allocator.digest
    with pytest.raises(HeapExhausted) as caught:
        allocator.allocate(2 * ALIGNMENT + 1, "(7, 9) of torch.float32")
    for part in ("(7, 9) of torch.float32", "3,072", "8,192", "4,096 are in use", "4,096 free", "largest", "2,048"):
        assert part in str(caught.value)
    assert isinstance(caught.value, MemoryError)
    assert allocator.digest == digest  # nothing happened


@pytest.mark.parametrize("offset", [1, ALIGNMENT, 5 * ALIGNMENT])
def test_only_an_allocations_start_can_be_freed(offset: int) -> None:
    allocator = OffsetAllocator(CAPACITY)
    allocator.allocate(2 * ALIGNMENT, "")
    with pytest.raises(ValueError, match=f"no allocation starts at heap offset {offset}"):
        allocator.free(offset)


def test_freeing_twice_is_refused() -> None:
    allocator = OffsetAllocator(CAPACITY)
    allocator.free(allocator.allocate(1, ""))
    with pytest.raises(ValueError, match="freed already"):
        allocator.free(0)


# A call: allocate so many bytes, or free the n-th of the live allocations.
CALLS = st.lists(st.one_of(st.integers(0, 20 * ALIGNMENT), st.integers(-50, -1)), max_size=60)


def play(calls: list[int]) -> tuple[OffsetAllocator, dict[int, int]]:
    """Make the calls that can be made; return the allocator and the live allocations, checked at every step."""
    allocator = OffsetAllocator(CAPACITY)
    live: dict[int, int] = {}
    for call in calls:
        if call >= 0:
            try:
                offset = allocator.allocate(call, str(call))
            except HeapExhausted:
                continue
            assert offset not in live
            live[offset] = max(call, 1)
        elif live:
            offset = sorted(live)[-call % len(live)]
            allocator.free(offset)
            del live[offset]
        check_disjoint(live)
        assert allocator.used_bytes + allocator.free_bytes == CAPACITY
        assert allocator.used_bytes >= sum(live.values())
    return allocator, live


def check_disjoint(live: dict[int, int]) -> None:
    end = 0
    for offset, size in sorted(live.items()):
        assert offset >= end
        assert offset % ALIGNMENT == 0
        end = offset + size
    assert end <= CAPACITY


@settings(deadline=None, print_blob=True)
@given(CALLS)
def test_allocations_never_overlap_and_all_memory_comes_back(calls: list[int]) -> None:
    allocator, live = play(calls)
    for offset in live:
        allocator.free(offset)
    assert allocator.used_bytes == 0
    assert allocator.allocate(CAPACITY, "everything") == 0


@settings(deadline=None, print_blob=True)
@given(CALLS, CALLS)
def test_digests_are_equal_if_and_only_if_the_calls_are(calls: list[int], others: list[int]) -> None:
    first, second, other = play(calls)[0], play(calls)[0], play(others)[0]
    assert (first.digest, first.history) == (second.digest, second.history)
    assert (first.digest == other.digest) == (first.history == other.history)


def test_an_agreed_history_is_forgotten_but_not_its_digest() -> None:
    allocator = OffsetAllocator(CAPACITY)
    allocator.allocate(1, "a")
    digest = allocator.digest
    allocator.agreed()
    assert allocator.history == []
    assert allocator.digest == digest


@pytest.mark.parametrize(
    ("histories", "said"),
    [
        ([["a", "b"], ["a", "b"]], "no difference"),
        ([[], []], "no difference"),
        ([["a", "b"], ["a", "c"], ["a", "b"]], "call 2 differs: rank 0: b; rank 1: c; rank 2: b"),
        ([["a"], ["a", "b"]], "call 2 differs: rank 0: nothing; rank 1: b"),
        ([["x", "b"], ["y", "c"]], "call 1 differs: rank 0: x; rank 1: y"),
    ],
)
def test_the_first_difference_is_named_with_every_ranks_call(histories: list[list[str]], said: str) -> None:
    assert first_difference(histories) == said


def test_what_is_kept_of_a_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator_module, "KEPT_CALLS", 3)
    one, other = OffsetAllocator(CAPACITY), OffsetAllocator(CAPACITY)
    for number in range(5):
        one.allocate(1, f"buffer {number}")
        other.allocate(1, f"buffer {number % 4}")
    assert one.digest != other.digest
    assert len(one.history) == 3
    said = first_difference([one.history, other.history])
    assert said == "only after the first 3 calls, which are kept by name"
    assert "call 2 differs" in first_difference([one.history, other.history[:1]])


def test_what_lies_where_survives_calls_that_are_undone() -> None:
    allocator = OffsetAllocator(8 * ALIGNMENT)
    kept = allocator.allocate(ALIGNMENT, "what is kept")
    before = allocator.snapshot()
    allocator.free(kept)
    allocator.allocate(2 * ALIGNMENT, "what is undone")
    allocator.restore(before)
    assert allocator.describe(kept + 3) == "byte 3 of what is kept"
    assert "free" in allocator.describe(kept + ALIGNMENT)
    allocator.free(kept)
    assert allocator.used_bytes == 0
