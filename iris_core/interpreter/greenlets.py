"""greenlet, by which interpreted programs take turns: an optional part, which a machine with GPUs can do without."""

from __future__ import annotations

from typing import Any


def import_greenlet() -> Any:
    """Return the module.

    Raises:
        ImportError: it is not installed; says how to install it.
    """
    try:
        import greenlet
    except ImportError as error:
        raise ImportError(
            "kernels are interpreted, and checked for races, by programs that take turns as greenlets, and greenlet is "
            "not installed: pip install 'greenlet>=3'"
        ) from error
    return greenlet
