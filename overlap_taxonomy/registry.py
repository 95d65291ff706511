"""The registry of variants. Families register through the entry points ``iris_overlap.families``."""

from __future__ import annotations

import functools
import warnings
from importlib import metadata
from types import ModuleType
from typing import NamedTuple

from .axes import Mainloop, Schedule
from .choice import choice_of
from .variant import Variant

ENTRY_POINT_GROUP = "iris_overlap.families"

_OWN_DISTRIBUTION = "iris-overlap"

_variants: dict[tuple[str, str], Variant] = {}
_partitions: dict[str, Partition] = {}  # of families
_modules: dict[str, ModuleType] = {}  # of families, by their entry points


class Partition(NamedTuple):
    """How a family's product C = A @ B is partitioned over the ranks, as far as its time depends on that.

    Args:
        sums: whether A and B are cut along k, and C is the sum of the ranks' products; else B is cut by columns.
        gathers: whether A is cut by rows, and gathered.
    """

    sums: bool = False
    gathers: bool = False


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


def register_partition(family: str, partition: Partition) -> None:
    """Say how a family cuts its product; else every rank has all of A, and B is cut by columns.

    Args:
        family: the kernel family, e.g. ``"gemm_all_scatter"``.
        partition: how; it takes the place of an earlier one.
    """
    _partitions[family] = partition


def partition_of(family: str) -> Partition:
    """Return how a family partitions its product."""
    _discover()
    return _partitions.get(family, Partition())


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
            _modules[entry_point.name] = entry_point.load()
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


def module_of(family: str) -> ModuleType | None:
    """Return the module that the entry point of a family's name names, which has its `Problem`; None for none."""
    _discover()
    return _modules.get(family)


def list_variants(family: str | None = None) -> list[Variant]:
    """Return the variants of one family, or of all, in the order of registration.

    Raises:
        ValueError: the family is not known.
    """
    families = list_families()
    if family is not None and family not in families:
        raise ValueError(f"unknown family {family!r}; known families: {', '.join(families)}")
    return [variant for variant in _variants.values() if family in (None, variant.family)]


def find_variant(family: str, name: str) -> Variant | None:
    """Return a variant, or None where there is none.

    Args:
        family: the kernel family.
        name: the full name; no pattern, and no former name.

    >>> find_variant("gemm_all_scatter", "copy_engine:portable").pattern
    'copy_engine'
    """
    _discover()
    return _variants.get((family, name))


def variants_named(family: str, name: str) -> list[Variant]:
    """Return the variants that a name stands for; none for an unknown one.

    Args:
        family: the kernel family.
        name: a full name, for one variant; a pattern, for all of it; or a former name, for one variant, which gives a
            FutureWarning, once in a process.

    Raises:
        ValueError: the family is not known.
    """
    known = list_variants(family)
    if found := [one for one in known if one.name == name] or [one for one in known if one.pattern == name]:
        return found
    found = [one for one in known if name and one.former_name == name]
    for one in found:
        _warn_of_former_name(family, name, one.name)
    return found


def get_variant(family: str, name: str) -> Variant:
    """Return one variant.

    Args:
        family: the family.
        name: a full name, ``"copy_engine:sm90"``; a pattern, ``"copy_engine"``, which takes the main loop that the GPU
            has (`choice_of`); or a former name, which gives a FutureWarning, once in a process.

    Raises:
        ValueError: family or name is not known, or the name is that of a variant that is no more; the message lists
            the known ones, or names what to take.
    """
    if found := find_variant(family, name):
        return found
    if named := variants_named(family, name):
        return choice_of(named)
    for one in list_variants(family):
        if name in (*one.retired, *one.retired.values()):
            said = f"variant {name!r} of family {family!r} is no more; take {one.name!r}"
            raise ValueError(f"{said}, which was faster where both were measured")
    raise ValueError(f"unknown variant {name!r} of family {family!r}; known variants: {known_names(family)}")


def is_retired(family: str, name: str) -> bool:
    """Return whether a name is that of a variant that was removed; results of it may be left.

    Args:
        family: the kernel family.
        name: its full name.

    Raises:
        ValueError: the family is not known.
    """
    return any(name in one.retired for one in list_variants(family))


def known_names(*families: str) -> str:
    """Return the names that the variants of these families have, for a message."""
    variants = [variant for family in families for variant in list_variants(family)]
    names = dict.fromkeys(variant.name for variant in variants)
    patterns = dict.fromkeys(variant.pattern for variant in variants if variant.name != variant.pattern)
    return f"{', '.join(names)}; by their patterns: {', '.join(patterns)}"


def current_name(family: str, name: str) -> str:
    """Return the full name of a variant that was written down under a name of any version.

    Args:
        family: the kernel family.
        name: full or former. A pattern by itself stood for one implementation: of a tile per program, and the portable
            one where there is one. An unknown name, or one of an unknown family, stays as it is.

    >>> current_name("gemm_all_scatter", "copy_engine")
    'copy_engine:portable'
    """
    _discover()
    if (family, name) in _variants:
        return name
    known = [one for one in _variants.values() if one.family == family]
    gone = {former: full for one in known for full, former in one.retired.items()}
    of_tiles = [one for one in known if one.pattern == name and one.schedule is Schedule.DATA_PARALLEL]
    portable = [one for one in of_tiles if one.mainloop is Mainloop.PORTABLE]
    found = [one for one in known if one.former_name == name] or portable or of_tiles
    return found[0].name if name and found else gone.get(name, name)


@functools.cache
def _warn_of_former_name(family: str, name: str, present: str) -> None:
    warnings.warn(f"variant {name!r} of {family} is called {present!r} now", FutureWarning, stacklevel=4)
