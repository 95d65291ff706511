"""The registry of variants. Families register through the entry points ``iris_overlap.families``."""

from __future__ import annotations

import functools
import warnings
from importlib import metadata

from .variant import Variant

ENTRY_POINT_GROUP = "iris_overlap.families"

_OWN_DISTRIBUTION = "iris-overlap"

_variants: dict[tuple[str, str], Variant] = {}


class _NameClash(ValueError):
    """Two variants have one family and name."""


def register(variant: Variant) -> Variant:
    """Add a variant.

    Raises:
        ValueError: another variant already has this family and name.
    """
    known = _variants.setdefault((variant.family, variant.name), variant)
    if known is not variant:
        raise _NameClash(f"variant {variant.name!r} of family {variant.family!r} is registered already")
    return variant


@functools.cache
def _discover() -> None:
    """Load the families. One of another distribution that cannot be loaded is left out, with a warning.

    Raises:
        ValueError: one registers what another has registered.
        ImportError: one of this distribution cannot be loaded.
    """
    for entry_point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        before = dict(_variants)
        distribution = entry_point.dist.name if entry_point.dist else "an unknown distribution"
        what = f"the entry point {entry_point.name!r} = {entry_point.value!r} of {distribution}"
        try:
            entry_point.load()
        except Exception as error:  # whatever a module raises that is imported
            _variants.clear()  # nothing is left of a half
            _variants.update(before)
            if isinstance(error, _NameClash):
                raise ValueError(f"{what}: {error}; of the two distributions that have it, uninstall one") from error
            said = f"{what} cannot be loaded: {type(error).__name__}: {error}"
            if distribution == _OWN_DISTRIBUTION:
                raise ImportError(f"{said}; install {distribution} again") from error
            warnings.warn(f"{said}; its family is left out", RuntimeWarning, stacklevel=3)


def list_families() -> list[str]:
    """Return the names of all families, in alphabetical order.

    Raises:
        ValueError, ImportError: the first time, a family that is installed clashes with another, or cannot be loaded.
    """
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
