"""What callers and environment variables say in numbers and switches, and what is none."""

from __future__ import annotations

import os
from typing import Any

_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def is_whole(value: Any, least: int = 1) -> bool:
    """Return whether a value is an integer that is at least `least`; a truth value is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def number_in(name: str, least: int, most: int | None = None) -> int:
    """Return the whole number that an environment variable, which is set, holds.

    Raises:
        ValueError: it holds none, or one below `least` or above `most`; names it and what it holds.
    """
    given = os.environ[name]
    if given.isascii() and given.isdecimal() and least <= int(given) and (most is None or int(given) <= most):
        return int(given)
    bounds = f"from {least} on" if most is None else f"from {least} to {most}"
    raise ValueError(f"{name} is {given!r}; it takes a whole number {bounds}")


def switch_in(name: str) -> bool:
    """Return whether an environment variable is switched on: 1, true, yes, on; off are 0, false, no, off and nothing.

    Raises:
        ValueError: it holds none of these; names it and what it holds.
    """
    given = os.environ.get(name) or "0"
    if given.lower() not in _SWITCHES:
        raise ValueError(f"{name} is {given!r}; it takes 1, true, yes or on, or 0, false, no or off")
    return _SWITCHES[given.lower()]
