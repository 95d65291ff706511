"""The registry: what is there is found by name, what is not is answered with what is."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, replace
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import iris_kernels
from iris_bench import cli
from iris_bench.baselines import async_tp, kraken_functions, quack
from overlap_taxonomy import (
    Agent,
    Arrangement,
    Sync,
    Work,
    current_name,
    get_variant,
    list_families,
    list_variants,
    module_of,
    register,
    registry,
)

FAMILY_FOLDERS = [
    path.parent.name for path in Path(iris_kernels.__file__).parent.glob("*/problem.py") if path.parent.name != "common"
]


@pytest.fixture
def own_registry() -> Iterator[None]:
    """Registrations of the test are undone."""
    list_families()
    with mock.patch.dict(registry._variants):
        yield


def test_every_family_folder_is_found() -> None:
    assert list_families() == sorted(FAMILY_FOLDERS)


def test_every_family_has_its_baseline_and_patterns() -> None:
    for family in list_families():
        variants = list_variants(family)
        assert variants[0].name == "library"
        assert variants[0].is_baseline
        assert any(not variant.is_baseline for variant in variants)
        assert {variant.family for variant in variants} == {family}
        assert all(variant.summary for variant in variants)


@pytest.mark.parametrize("family", list_families())
def test_a_family_is_partitioned_as_its_problem_is(family: str) -> None:
    """The cost model does not know problems."""
    module: Any = module_of(family)
    work, problem = Work(family, 96, 160, 224, 4), module.Problem(96, 160, 224, 4, torch.bfloat16)
    (rows, k), (_, n) = problem.a_shape(0), problem.b_shape(0)
    assert work.product == (96, n, k)
    assert work.partition.gathers == (rows < 96)


def test_what_others_have_fused_is_no_sequence_of_library_calls() -> None:
    for variant in list_variants():
        axes = (variant.arrangement, variant.agent, variant.sync)
        others = (Arrangement.OTHERS, Agent.OTHERS, Sync.OTHERS)
        assert (axes == others) == (variant.name in ("async_tp", "kraken", "quack")), variant
        assert variant.is_baseline or not {*others, Arrangement.LIBRARY, Agent.LIBRARY} & {*axes}, variant
    assert "before or after the GEMM" in get_variant("all_gather_gemm", "bulk_synchronous:portable").agent.value


def test_other_projects_functions_are_no_part_of_the_kernels() -> None:
    """They come through an entry point, as a variant of another distribution would."""
    root = Path(iris_kernels.__file__).parent.parent
    sources = [*root.glob("kernels/**/*.*"), *root.glob("overlap_taxonomy/**/*.py")]
    named = [path for path in sources if path.suffix != ".pyc" and re.search("kraken|quack|async_tp", path.read_text())]
    assert named == []
    others = {(one.family, one.name) for one in list_variants() if one.arrangement is Arrangement.OTHERS}
    registered = [*async_tp.VARIANTS, *kraken_functions.VARIANTS, *quack.VARIANTS]
    assert others == {(one.family, one.name) for one in registered}


def test_variants_are_found_by_name() -> None:
    for variant in list_variants():
        assert get_variant(variant.family, variant.name) is variant
    assert sum(len(list_variants(family)) for family in list_families()) == len(list_variants())


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    family = list_families()[0]
    with pytest.raises(ValueError, match=f"unknown family 'gemm_all_thumbs'; known families: .*{family}"):
        list_variants("gemm_all_thumbs")
    with pytest.raises(ValueError, match="unknown family 'gemm_all_thumbs'"):
        get_variant("gemm_all_thumbs", "library")
    with pytest.raises(ValueError, match=f"unknown variant 'magic' of family '{family}'; known variants: library, "):
        get_variant(family, "magic")


@pytest.mark.usefixtures("own_registry")
def test_a_name_is_registered_once() -> None:
    first = list_variants()[0]
    assert register(first) is first  # again: nothing changes
    with pytest.raises(ValueError, match=f"'{first.name}' of family '{first.family}' is registered already"):
        register(replace(first, summary="another"))
    new = register(replace(first, pattern="new"))
    assert get_variant(first.family, "new") is new


@pytest.mark.usefixtures("own_registry")
def test_a_family_from_elsewhere_is_listed() -> None:
    register(replace(list_variants()[0], family="gemm_elsewhere"))
    assert "gemm_elsewhere" in list_families()
    assert [variant.family for variant in list_variants("gemm_elsewhere")] == ["gemm_elsewhere"]


class Distribution:
    """A distribution that announces a family, whose module is a file here."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture
def announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_registry: None) -> Iterator[Callable[..., None]]:
    """Announce ``elsewhere = a_family`` with this source, or none."""
    monkeypatch.syspath_prepend(tmp_path)

    def announce(source: str | None, distribution: str = "their-kernels") -> None:
        if source is not None:
            (tmp_path / "a_family.py").write_text(source)
        entry_point = metadata.EntryPoint("elsewhere", "a_family", registry.ENTRY_POINT_GROUP)
        vars(entry_point)["dist"] = Distribution(distribution)
        monkeypatch.setattr(metadata, "entry_points", lambda group: [entry_point])
        registry._discover.cache_clear()

    yield announce
    sys.modules.pop("a_family", None)
    monkeypatch.undo()
    registry._discover.cache_clear()


REGISTER = """
from dataclasses import replace
from overlap_taxonomy import registry
first = next(iter(registry._variants.values()))
registry.register(replace(first, pattern="half", former_name="a former name"))
"""
CLASH = REGISTER + 'registry.register(replace(first, summary="another"))'
NAMED = "the entry point 'elsewhere' = 'a_family' of their-kernels"


@pytest.mark.parametrize(
    ("source", "why"),
    [(None, "ModuleNotFoundError"), (REGISTER + "raise RuntimeError('no luck')", "RuntimeError: no luck")],
)
def test_a_family_from_elsewhere_that_cannot_be_loaded_is_left_out(
    announced: Callable[..., None], source: str | None, why: str
) -> None:
    known = list_variants()
    announced(source)
    with pytest.warns(RuntimeWarning, match=f"{NAMED} cannot be loaded: {why}.*; its family is left out"):
        assert list_variants() == known
    assert current_name(known[0].family, "a former name") == "a former name"


def test_one_of_ours_that_cannot_be_loaded_is_an_error(announced: Callable[..., None]) -> None:
    announced(None, "iris-overlap")
    with pytest.raises(ImportError, match=r"'elsewhere' = 'a_family' of iris-overlap .* install iris-overlap again"):
        list_families()


def test_a_family_that_takes_the_name_of_another_is_an_error(
    announced: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = list_variants()[0]
    announced(CLASH)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{NAMED}: variant '{first.name}' of family .* is registered already"):
            list_families()
    with pytest.raises(SystemExit, match=f"iris-bench: {NAMED}"):
        cli.main()


def test_a_variant_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        list_variants()[0].name = "other"  # type: ignore[misc]
