"""Settings, from callers and environment variables, and their checks."""

from __future__ import annotations

import os
from typing import Any

DEFAULT_TIMEOUT_S = 30.0
LONGEST_TIMEOUT_S = 1e6  # eleven days; far below what nanoseconds or a socket's timeout can hold
DEVICES = ("auto", "cpu", "cuda")

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


def timeout_s(asked: float | None = None) -> float:
    """Return the limit of every wait in seconds: `asked`, or where that is None ``IRIS_TIMEOUT_S``; 0 means none.

    Raises:
        ValueError: it is not a number of seconds.
    """
    name = "IRIS_TIMEOUT_S" if asked is None else "timeout_s"
    given = os.environ.get("IRIS_TIMEOUT_S", str(DEFAULT_TIMEOUT_S)) if asked is None else asked
    try:
        value = float(given)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value <= LONGEST_TIMEOUT_S:
        raise ValueError(
            f"{name} is {given!r}; it takes a number of seconds up to {LONGEST_TIMEOUT_S:.0f}, 0 for no limit"
        )
    return value


def advice_to_share(ranks: int) -> str:
    """Return what to do to start more ranks than there are GPUs, for an error message: so many on one."""
    return f"use device='cpu', or set IRIS_RANKS_PER_GPU={ranks}, which lets ranks take turns on a GPU, slowly"


def ranks_per_gpu() -> int:
    """Return how many ranks may take turns on one GPU: ``IRIS_RANKS_PER_GPU``, or 1.

    Raises:
        ValueError: it is not a positive number.
    """
    return number_in("IRIS_RANKS_PER_GPU", 1) if "IRIS_RANKS_PER_GPU" in os.environ else 1


def asked_device(device: str) -> str:
    """Return the device to use: `device`, or what ``IRIS_DEVICE`` says where that is "auto".

    Raises:
        ValueError: it is not a device we know.
    """
    asked = os.environ.get("IRIS_DEVICE", "auto") if device == "auto" else device
    if asked not in DEVICES:
        where = "" if device == asked else " (from IRIS_DEVICE)"
        raise ValueError(f"unknown device {asked!r}{where}; known devices: {', '.join(DEVICES)}")
    return asked
