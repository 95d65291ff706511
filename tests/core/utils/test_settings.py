"""Environment variables and counts that make no sense: the error names which, and what was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks, close_context, context, raised

from iris_core import RankPool, iris, launch
from iris_core.checker import check
from iris_core.rendezvous import rank_info
from iris_kernels.gemm_all_scatter import Problem
from overlap_taxonomy.work import Work

OF_TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
NO_NUMBERS = [(name, given) for name in NUMBERS for given in ("abc", "", "-1", "1.5")]


@pytest.mark.parametrize(("name", "given"), [*NO_NUMBERS, ("RANK", "2"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "65536")])
def test_what_torchrun_sets_is_named_where_it_makes_no_sense(
    monkeypatch: pytest.MonkeyPatch, name: str, given: str
) -> None:
    for variable, value in (OF_TORCHRUN | {name: given}).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"^{name} is '{given}'; "):
        rank_info.find_rank_info()


def open_in_debug_mode(rank: int, world_size: int) -> tuple[dict[str, bool], tuple[str, str]]:
    close_context()
    debug = {}
    with pytest.MonkeyPatch.context() as environment:
        for given in ("", "0", "false", "No", "OFF", "1", "true", "Yes", "ON"):
            environment.setenv("IRIS_DEBUG", given)
            with iris(1 << 20) as ctx:
                debug[given] = ctx.debug_mode
        environment.setenv("IRIS_DEBUG", "perhaps")
        return debug, raised(iris, 1 << 20)


@pytest.mark.parametrize("device", ["cpu"])
def test_debug_mode_is_switched_by_words(ranks: Callable[[int], Ranks]) -> None:
    [(debug, (kind, message))] = ranks(1).call(open_in_debug_mode)
    assert debug == dict.fromkeys(("", "0", "false", "No", "OFF"), False) | dict.fromkeys(
        ("1", "true", "Yes", "ON"), True
    )
    assert kind == "ValueError"
    assert "IRIS_DEBUG is 'perhaps'" in message


@pytest.mark.parametrize(
    ("take", "name"),
    [
        (lambda: launch(print, True, "cpu"), "world_size is True"),
        (lambda: RankPool(True, "cpu"), "world_size is True"),
        (lambda: check(print, True), "world_size is True"),
        (lambda: check(print, 2, schedules=True), "schedules True"),
        (lambda: Problem(16, 16, 16, True, torch.float32), "world_size is True"),
        (lambda: Work("gemm_all_scatter", 16, 16, 16, True), "world_size is True"),
        (lambda: Work("gemm_all_scatter", 16.5, 16, 16, 2), "m is 16.5"),  # type: ignore[arg-type]
        (lambda: iris(heap_size=True, device="cpu"), "heap_size is True"),
    ],
)
def test_a_truth_value_is_no_number_of_ranks(take: Callable[[], Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        take()


def broadcast_from(rank: int, world_size: int) -> list[tuple[str, str]]:
    return [raised(context().broadcast, 1, source) for source in (True, 1.0, "0", -1, 2)]


@pytest.mark.parametrize("device", ["cpu"])
def test_what_is_no_rank_is_named(ranks: Callable[[int], Ranks]) -> None:
    for errors in ranks(2).call(broadcast_from):
        for (kind, message), given in zip(errors, ("True", "1.0", "'0'", "-1", "2"), strict=True):
            assert kind == "ValueError"
            assert f"src {given} is not one of the 2 ranks" in message
