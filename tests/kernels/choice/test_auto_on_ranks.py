"""`auto` on all ranks: rank 0 decides, and each makes the operator of the same variant."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from checking import fault, make_data
from choosing import CONFIG, FAMILY, GPU, problem
from families import make_problem
from ranks import Ranks, close_context, context, raised

from iris_core import Context
from iris_kernels.common.choice import auto, corrections
from iris_kernels.common.choice.choices import Choices
from iris_kernels.common.choice.measured import Measured, key_of
from iris_kernels.gemm_all_scatter import gemm_all_scatter
from overlap_taxonomy import Choice, Work, get_variant, list_families


def make_and_call(rank: int, world_size: int, family: str) -> list[str]:
    """Make `auto`, call it, and say what it is."""
    ctx = context()
    asked = make_problem(family, 40, 70, 33, world_size, torch.float16)
    operator = get_variant(family, "auto").build(ctx, asked)
    data = make_data(family, asked, rank, 0, ctx.get_device())
    wrong = fault(operator.as_matrix(operator(data.a, data.b)), data, asked.dtype)
    said = [str(operator), operator.describe_config(), wrong or "right"]
    operator.close()
    return said


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("family", list_families())
def test_it_makes_the_operator_of_another(ranks: Callable[[int], Ranks], family: str) -> None:
    for name, config, right in ranks(2).call(make_and_call, family):
        assert name == f"{family}/workgroup_specialized:portable (chosen by auto)"
        assert config.startswith("auto: workgroup_specialized:portable 32x32x32 ")
        assert right == "right"


def patched(rank: int) -> contextlib.ExitStack:
    """On a GPU that is not there; all that a rank knows, and what its model says, is of its own."""
    asked = problem(m=8, world_size=2)
    ours = ["copy_engine:portable", "fused_sequential:portable"][rank]
    times = {"library_layout": 100.0, ours: 10.0}

    def us(machine: Any, name: str, work: Work) -> float:
        return 100.0 if name == "library_layout" else 10.0 if name == ours else 1000.0

    changed = contextlib.ExitStack()
    for patch in (
        mock.patch.object(auto, "device_name", return_value=GPU),
        mock.patch.object(auto, "read_cache", return_value={key_of(FAMILY, asked): Measured(times)}),
        mock.patch.object(
            auto, "shipped_tables", return_value={GPU: {key_of(FAMILY, asked.with_rows(64)): Measured(times)}}
        ),
        mock.patch.object(corrections, "predict_us", us),
        mock.patch.object(Context, "is_interpreted", return_value=False),
    ):
        changed.enter_context(patch)
    return changed


def disagree(rank: int, world_size: int, sizes: Sequence[int]) -> list[Choice]:
    """Ask for a product whose tables and predicted times are others on each rank, with several numbers of rows."""
    with patched(rank):
        found = [auto.decide(context(), FAMILY, problem(m=m, world_size=2), baseline="library_layout") for m in sizes]
    close_context()  # which knows these times
    return found


@pytest.mark.parametrize("device", ["cpu"])
def test_rank_0_decides_for_all(ranks: Callable[[int], Ranks]) -> None:
    """By its user's times, those that come with the library, and its model; also for more rows than were asked for."""
    first, second = ranks(2).call(disagree, [8, 64, 300, 20000, 16384])
    assert first == second
    assert {choice.variant for choice in first} == {"copy_engine:portable"}
    assert [choice.why.split()[0] for choice in first] == [
        "measured",
        "measured",
        "predicted",
        "predicted",
        "predicted",
    ]


def rank_others(rank: int, world_size: int) -> tuple[Choice, Choice]:
    """Ask alone, as where a graph is compiled: nobody is asked, and what comes out is not kept for the operator."""
    asked = problem(m=300, world_size=2)
    with patched(rank):
        auto.known_of(context())
        alone = None
        if rank == 1:
            alone = auto.decide(context(), FAMILY, asked, baseline="library_layout", alone=True)
        found = auto.decide(context(), FAMILY, asked, baseline="library_layout")
        alone = alone or auto.decide(context(), FAMILY, asked, baseline="library_layout", alone=True)
    close_context()
    return alone, found


@pytest.mark.parametrize("device", ["cpu"])
def test_a_rank_that_asks_alone_waits_for_no_other(ranks: Callable[[int], Ranks]) -> None:
    (first, found), (second, agreed) = ranks(2).call(rank_others)
    assert first == found == agreed
    assert second.variant == "fused_sequential:portable"


def ask_for_others(rank: int, world_size: int) -> tuple[str, str]:
    asked = problem(m=8, n=[8192, 4096][rank], world_size=2)
    with patched(rank):
        error = raised(auto.decide, context(), FAMILY, asked, baseline="library_layout")
    close_context()
    return error


@pytest.mark.parametrize("device", ["cpu"])
def test_ranks_that_ask_for_different_products_are_told(ranks: Callable[[int], Ranks]) -> None:
    for kind, said in ranks(2).call(ask_for_others):
        assert kind == "ValueError"
        assert "8192x8192" in said
        assert "4096x8192" in said


def test_a_table_is_the_same_as_data() -> None:
    measured = {8: Choice("copy_engine:portable", CONFIG, "measured here")}
    table = Choices([16, 64], [Choice("library", None, "predicted"), Choice("x", None, "predicted")], measured)
    assert Choices.from_json(json.loads(json.dumps(table.to_json()))) == table
    assert [table.of(m).variant for m in (8, 9, 16, 17, 64)] == ["copy_engine:portable", *["library"] * 2, "x", "x"]


def fail_to_decide(rank: int, world_size: int) -> tuple[str, str]:
    asked = make_problem(FAMILY, 8, 8, 8, world_size, torch.float32)
    with (
        mock.patch.object(auto, "read_cache", side_effect=OSError("no disk")),
        mock.patch.object(Context, "is_interpreted", return_value=False),
    ):
        error = raised(get_variant(FAMILY, "auto").build, context(), asked)
    context().barrier()
    return error


@pytest.mark.parametrize("device", ["cpu"])
def test_a_decision_that_fails_fails_on_all_ranks(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).call(fail_to_decide)
    assert first == ("OSError", "no disk")
    assert second[0] == "PeerError"
    assert "no disk" in second[1]


def choose_the_library(rank: int, world_size: int) -> tuple[tuple[int, ...], str | None, str]:
    """C is one matrix also where the library are chosen, for columns that ranks share unevenly."""
    ctx = context()
    asked = make_problem(FAMILY, 6, 7, 5, world_size, torch.float32)
    data = make_data(FAMILY, asked, rank, 0, ctx.get_device())
    library = Choice("library_layout", None, "nothing else is there")
    with mock.patch.object(auto, "decide", return_value=library):
        output = gemm_all_scatter(ctx, data.a, data.b, variant="auto")
    operator = list(ctx.operators.values())[-1]
    return tuple(output.shape), fault(output, data, asked.dtype), operator.variant


@pytest.mark.parametrize("device", ["cpu"])
def test_the_librarys_choice_has_the_same_output(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(choose_the_library) == [((6, 7), None, "library_layout")] * 2
