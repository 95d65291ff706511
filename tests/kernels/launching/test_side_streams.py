"""What an operator queues beside the current stream comes after what is queued there, and before what follows.

A captured graph must have both: a stream that is not forked from the captured one is not captured, one that is not
joined to it fails the capture.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from compiling import HEAP_SIZE, Case, StubContext, make_problem, recorded_launches

from iris_kernels.common.hopper import host as hopper
from overlap_taxonomy import Agent, Arrangement, Mainloop, Variant, list_families, list_variants

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


def _streams_of_a_call(variant: Variant, target: str) -> list[Any]:
    case = Case(variant.name, target, family=variant.family, size=1024)
    ctx, problem = _Context(case), make_problem(case)
    a, b = (torch.empty(shape, dtype=torch.bfloat16) for shape in (problem.a_shape(0), problem.b_shape(0)))
    with recorded_launches(), mock.patch.object(hopper, "machine_reason", return_value=None):
        operator: Any = variant.build(ctx, problem)
        for stream in ctx.streams:
            stream.reset_mock()
        operator(a, b)
    return ctx.streams


def _ids(value: Variant | str) -> str:
    return value if isinstance(value, str) else f"{value.family}-{value.name}"


RUNS = [
    (variant, target)
    for variant in _variants_with_streams()
    for target in ("sm_90", "gfx942")
    if target == "sm_90" or variant.mainloop is not Mainloop.SM90
]


@pytest.mark.parametrize(("variant", "target"), RUNS, ids=_ids)
def test_side_streams_are_forked_and_joined(variant: Variant, target: str) -> None:
    streams = _streams_of_a_call(variant, target)
    assert streams
    for stream in streams:
        named = [name for name, _, _ in stream.method_calls]
        assert named[0] == FORK
        assert named[-1] == JOIN
        assert named.count(FORK) == named.count(JOIN) == 1


COPYING = [variant for variant, target in RUNS if target == "gfx942" and variant.agent is Agent.COPY_ENGINES]


@pytest.mark.parametrize("variant", COPYING, ids=_ids)
def test_copies_to_each_peer_behind_a_link_of_its_own_have_a_stream(variant: Variant) -> None:
    peers_of: dict[str, list[set[int]]] = {}
    for target in ("sm_90", "gfx942"):
        streams = _streams_of_a_call(variant, target)
        copies = [[one.args[0].data_ptr() for one in stream.copy_2d.call_args_list] for stream in streams]
        least = min(address for addresses in copies for address in addresses)
        peers_of[target] = [{(address - least) // HEAP_SIZE for address in addresses} for addresses in copies]
    assert len(peers_of["sm_90"]) == 1
    assert len(peers_of["sm_90"][0]) == 3
    assert [len(peers) for peers in peers_of["gfx942"]] == [1, 1, 1]
    assert len(set.union(*peers_of["gfx942"])) == 3
