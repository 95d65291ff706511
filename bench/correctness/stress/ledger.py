"""The check of every element of an output, queued on the device after the call; the host asks later what was found.

An element is right if it is within its bound of the reference (correctness.py); NaN is not. Nothing waits for the host:
a kernel counts what is wrong and notes the first examples in memory of the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_NOTES = tl.constexpr(64)  # of the blocks with something wrong in them that come first
_WORDS = tl.constexpr(6)  # of a note: call, element, value, reference, bound, elements wrong in the block


class Note(NamedTuple):
    """The first wrong element of a block of a call's output."""

    call: int
    element: int
    value: float
    reference: float
    bound: float
    wrong: int


class Ledger:
    """Counts wrong elements on one rank.

    Args:
        device: where the outputs are.
    """

    def __init__(self, device: torch.device) -> None:
        self.elements = 0
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # wrong elements, notes
        self._notes = torch.zeros(_NOTES.value, _WORDS.value, dtype=torch.float64, device=device)

    def check(self, call: int, output: torch.Tensor, reference: torch.Tensor, bound: torch.Tensor) -> None:
        """Queue the check of an output on the current stream.

        Args:
            call: a number for notes.
            output: (m, n), rows contiguous.
            reference, bound: (m, n), contiguous, of one wide dtype.
        """
        assert output.shape == reference.shape == bound.shape, f"{output.shape}, expected {reference.shape}"
        assert output.numel() == 0 or output.stride(1) == 1 or output.shape[1] == 1
        size = output.numel()
        if size:
            _check_kernel[(triton.cdiv(size, _BLOCK),)](
                output,
                reference,
                bound,
                self._counts,
                self._notes,
                call,
                size,
                output.shape[1],
                output.stride(0),
                _BLOCK,
            )
        self.elements += size

    def read(self) -> tuple[int, list[Note]]:
        """Wait for the device; return how many elements were wrong since last time, and the first of some blocks."""
        wrong, notes = self._counts.tolist()
        if not wrong:
            return 0, []
        rows = self._notes[: min(notes, _NOTES.value)].tolist()
        self._counts.zero_()
        found = [Note(int(row[0]), int(row[1]), row[2], row[3], row[4], int(row[5])) for row in rows]
        return wrong, sorted(found, key=lambda note: note[:2])


@triton.jit(do_not_specialize=["call", "size", "columns", "stride"])
def _check_kernel(
    out_ptr, reference_ptr, bound_ptr, counts_ptr, notes_ptr, call, size, columns, stride, BLOCK: tl.constexpr
):
    """Compare a block of elements; note the first that is wrong."""
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = elements < size
    places = elements // columns * stride + elements % columns
    reference = tl.load(reference_ptr + elements, mask=inside, other=0.0)
    bound = tl.load(bound_ptr + elements, mask=inside, other=0.0)
    value = tl.load(out_ptr + places, mask=inside, other=0.0).to(tl.float32).to(reference.dtype)  # fp8 to fp32 alone
    wrong = inside & ((tl.abs(value - reference) <= bound) == 0)  # with a NaN, every comparison is false
    count = tl.sum(wrong.to(tl.int64))
    if count > 0:
        # Relaxed: the host reads them when the kernel has ended.
        tl.atomic_add(counts_ptr, count, sem="relaxed", scope="gpu")
        row = tl.atomic_add(counts_ptr + 1, tl.cast(1, tl.int64), sem="relaxed", scope="gpu")
        if row < _NOTES:
            first = tl.min(tl.where(wrong, elements, size))
            is_first = elements == first
            note_ptr = notes_ptr + row * _WORDS
            tl.store(note_ptr, tl.cast(call, tl.float64))
            tl.store(note_ptr + 1, first.to(tl.float64))
            tl.store(note_ptr + 2, tl.sum(tl.where(is_first, value, 0.0)).to(tl.float64))
            tl.store(note_ptr + 3, tl.sum(tl.where(is_first, reference, 0.0)).to(tl.float64))
            tl.store(note_ptr + 4, tl.sum(tl.where(is_first, bound, 0.0)).to(tl.float64))
            tl.store(note_ptr + 5, count.to(tl.float64))
