"""The registry of variants. Families announce themselves through the entry points ``iris_overlap.families``."""

from __future__ import annotations

import functools
from importlib import metadata

from .variant import Variant

ENTRY_POINT_GROUP = "iris_overlap.families"

_variants: dict[tuple[str, str], Variant] = {}


def register(variant: Variant) -> Variant:
    """Add a variant.

    Raises:
        ValueError: another variant already has this family and name.
    """
    known = _variants.setdefault((variant.family, variant.name), variant)
    if known is not variant:
        raise ValueError(f"variant {variant.name!r} of family {variant.family!r} is registered already")
    return variant


@functools.cache
def _discover() -> None:
    for entry_point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        entry_point.load()


def list_families() -> list[str]:
    """Return the names of all families, in alphabetical order."""
    _discover()
    return sorted({family for family, _ in _variants})


def list_variants(family: str | None = None) -> list[Variant]:
    """Return the variants of one family, or of all, in the order of registration.

    Raises:
        ValueError: the family is not known.
    """
    families = list_families()
    if family is not None and family not in families:
        raise ValueError(f"unknown family {family!r}; known families: {', '.join(families)}")
    return [variant for variant in _variants.values() if family in (None, variant.family)]


def get_variant(family: str, name: str) -> Variant:
    """Return one variant.

    Raises:
        ValueError: family or name is not known; the message lists the known ones.
    """
    names = [variant.name for variant in list_variants(family)]
    if name not in names:
        raise ValueError(f"unknown variant {name!r} of family {family!r}; known variants: {', '.join(names)}")
    return _variants[family, name]
