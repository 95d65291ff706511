"""Whether kernels of this process are interpreted, and the seam to the interpreter, which is loaded only where it is.

The core calls `enable`, names what bounds polls, and calls `hooks` from interpreted kernels. `iris_core.interpreter`
installs its own; until then every hook does nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

import triton


class Hooks:
    """What intrinsics do in an interpreted kernel; here, in one that Triton's interpreter runs by itself, nothing."""

    def clock_read(self) -> None:
        """Note that the running program reads the clock."""

    def pause(self) -> None:
        """Let other programs run: the running one polls."""

    def check_on_heap(self, pointers: Any, from_rank: Any, to_rank: Any, heap_bases: Any, mask: Any) -> None:
        """Raise ValueError unless pointers to be translated to `to_rank`'s heap are on `from_rank`'s."""

    def check_hint(self, pointers: Any, hint: list[int]) -> None:
        """Raise ValueError unless pointers are contiguous and aligned as a hint says, a number for each dimension."""


class PollLimit(Protocol):
    """What bounds loops that poll with no limit of their own: a context's watchdog."""

    def poll_failure(self, address: int, waited_s: float) -> str | None:
        """Return what to raise of a poll of the word at an address for that long, or None while it may go on."""


hooks = Hooks()
poll_limits: list[PollLimit] = []  # of the contexts that are open
_is_enabled_here = False  # by `enable`, for good


def is_enabled() -> bool:
    """Return whether kernels of this process are interpreted."""
    return bool(triton.knobs.runtime.interpret)


def enable() -> None:
    """Interpret every kernel of this process from now on, also those decorated earlier.

    Raises:
        RuntimeError: the installed numpy is too new for the interpreter of this Triton.
    """
    from ..interpreter.patches import patch_triton

    patch_triton()
    set_enabled(True, here=_is_enabled_here or not is_enabled())


def set_enabled(is_interpreted: bool, *, here: bool) -> None:
    """Set whether kernels are interpreted, and whether that was this process's own choice."""
    global _is_enabled_here
    triton.knobs.runtime.interpret = is_interpreted
    _is_enabled_here = here


def is_enabled_here() -> bool:
    """Return whether `enable` made this process interpret its kernels."""
    return _is_enabled_here


def install(new: Hooks) -> None:
    """Call these hooks from now on."""
    global hooks
    hooks = new
