"""What Triton leaves out of a kernel's cache key: builtins of ours, and the classes whose instances kernels make.

A compiled kernel is loaded from Triton's cache if its key is there. The key covers the source of the kernel and of all
jit functions that it calls, but of a builtin and of a named tuple only the name. With another `load_acquire`, or with
two fields of a bundle exchanged, the kernel compiled before would be loaded. Interpreted kernels are not cached.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from typing import Any, TypeVar

from triton.runtime.jit import JITFunction

_Thing = TypeVar("_Thing")


def in_cache_key(thing: _Thing) -> _Thing:
    """Put the source of the file that defines this into the key of every kernel that refers to it.

    Args:
        thing: a builtin, or a class, that kernels name. What its code takes from further files is not covered.

    Returns:
        The same. Triton takes it for an aggregate, whose attributes it looks at for the key and for nothing else
        (`DependenciesFinder.record_reference`, Triton 3.6 and 3.7).
    """
    marked: Any = thing
    marked.__triton_aggregate__ = True
    marked.hash_attrs = [_source_of(marked.__module__)]
    return thing


@functools.cache
def _source_of(module: str) -> JITFunction:
    """Return a jit function, never called, whose own key is a digest of a module's source."""
    standing_for_it = JITFunction(_nothing)
    # Given, not made: as a constant's value it would have a place in the key that differs from process to process.
    standing_for_it.hash = hashlib.sha256(inspect.getsource(sys.modules[module]).encode()).hexdigest()
    return standing_for_it


def _nothing() -> None:
    """Do nothing."""
