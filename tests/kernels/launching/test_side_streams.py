"""What an operator queues beside the current stream comes after what is queued there, and before what follows.

A captured graph must have both: a stream that is not forked from the captured one is not captured, one that is not
joined to it fails the capture.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from compiling import Case, StubContext, make_problem, recorded_launches

from iris_kernels.common.hopper import host as hopper
from overlap_taxonomy import Arrangement, Variant, list_families, list_variants

BESIDE = (Arrangement.CONCURRENT_KERNELS, Arrangement.KERNEL_AND_COPIES)
FORK, JOIN = "wait_for_current", "current_waits"


def _variants_with_streams() -> list[Variant]:
    every = [variant for family in list_families() for variant in list_variants(family)]
    return [variant for variant in every if variant.has_kernels and variant.arrangement in BESIDE]


class _Context(StubContext):
    """A context that keeps the streams it makes."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.streams: list[Any] = []

    def make_stream(self) -> Any:
        self.streams.append(mock.MagicMock())
        return self.streams[-1]


@pytest.mark.parametrize("variant", _variants_with_streams(), ids=lambda variant: f"{variant.family}-{variant.name}")
def test_side_streams_are_forked_and_joined(variant: Variant) -> None:
    case = Case(variant.name, "sm_90", family=variant.family, size=1024)
    ctx, problem = _Context(case), make_problem(case)
    a, b = (torch.empty(shape, dtype=torch.bfloat16) for shape in (problem.a_shape(0), problem.b_shape(0)))
    with recorded_launches(), mock.patch.object(hopper, "machine_reason", return_value=None):
        operator: Any = variant.build(ctx, problem)
        for stream in ctx.streams:
            stream.reset_mock()
        operator(a, b)
    assert ctx.streams
    for stream in ctx.streams:
        named = [name for name, _, _ in stream.method_calls]
        assert named[0] == FORK
        assert named[-1] == JOIN
        assert named.count(FORK) == named.count(JOIN) == 1
