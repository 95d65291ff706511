"""The registry: what is there is found by name, what is not is answered with what is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from unittest import mock

import pytest

import iris_kernels
from overlap_taxonomy import get_variant, list_families, list_variants, register, registry

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
    new = register(replace(first, name="new"))
    assert get_variant(first.family, "new") is new


@pytest.mark.usefixtures("own_registry")
def test_a_family_from_elsewhere_is_listed() -> None:
    register(replace(list_variants()[0], family="gemm_elsewhere"))
    assert "gemm_elsewhere" in list_families()
    assert [variant.family for variant in list_variants("gemm_elsewhere")] == ["gemm_elsewhere"]


def test_a_variant_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        list_variants()[0].name = "other"  # type: ignore[misc]


def test_every_variant_of_all_gather_can_be_asked_for_the_gathered_a() -> None:
    """`all_gather_gemm` asks each, also those that then refuse."""
    for variant in list_variants("all_gather_gemm"):
        if not variant.delegates:
            assert "keep_gathered" in inspect.signature(variant.build).parameters, variant.name
